"""Libraries of the system: found, taken from Debian's package, or asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmatrix import system_libs
from kvmatrix.errors import EnvironmentBuildError

MISSING = {"libkvmatrix-none.so.1": "libkvmatrix-none1"}

APT = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *update*) touch "$LISTS" ;;
  *download*) [ -e "$LISTS" ] || exit 100; : > libkvmatrix-none1_1_all.deb ;;
esac
"""
DPKG = """#!/bin/sh
mkdir -p "$3/usr/lib"
printf library > "$3/usr/lib/libkvmatrix-none.so.1.0"
ln -s libkvmatrix-none.so.1.0 "$3/usr/lib/$NAME"
"""


@pytest.fixture
def fake_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    monkeypatch.setattr(system_libs, "NEEDED", MISSING)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("LISTS", str(tmp_path / "lists"))
    monkeypatch.setenv("NAME", "libkvmatrix-none.so.1")
    return tmp_path


def test_present_library_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_libs, "NEEDED", {"libc.so.6": "libc6"})
    said: list[str] = []
    system_libs.provide(tmp_path, said.append)
    assert said == []
    assert system_libs.variables(tmp_path) == {}


def test_missing_library_is_unpacked_into_the_environment(fake_apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = fake_apt / "env"
    said: list[str] = []
    system_libs.provide(env, said.append)
    assert (env / "lib/system/libkvmatrix-none.so.1").read_text(encoding="utf-8") == "library"
    assert "libkvmatrix-none1" in said[0]
    # The system's lists were missing: private ones were fetched, and the second download worked.
    calls = (fake_apt / "calls").read_text(encoding="utf-8").splitlines()
    assert len(calls) == 3
    assert "Dir::State::Lists" in calls[1]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    assert system_libs.variables(env) == {"LD_LIBRARY_PATH": f"{env / 'lib/system'}:/elsewhere"}
    system_libs.provide(env, said.append)
    assert len(said) == 1


def test_without_apt_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_libs, "NEEDED", MISSING)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentBuildError, match="libkvmatrix-none1"):
        system_libs.provide(tmp_path / "env", lambda _: None)


def test_package_without_the_library_is_an_error(fake_apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "another.so")
    with pytest.raises(EnvironmentBuildError, match="does not hold it"):
        system_libs.provide(fake_apt / "env", lambda _: None)
