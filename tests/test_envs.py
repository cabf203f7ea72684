"""Environments: built once, reused, built again when cut off; what is installed is what was shipped.

The builds are real ones with pip, of hand-made wheels: ``tinytorch`` stands in for torch, ``tinyvllm`` for vLLM.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmatrix import env_link, envs, installers
from kvmatrix.config import Pin, Project
from kvmatrix.envs import EnvEntry, PinEnv
from kvmatrix.errors import DiskError, EnvironmentBuildError, InstallChangedError, UsageError

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = """
[project.entry-points."vllm.platform_plugins"]
kvmatrix = "kvmatrix.plugin:platform"
[project.entry-points."vllm.general_plugins"]
kvmatrix = "kvmatrix.plugin:general"
"""
OVERLAY = "def install():\n    print('overlay installed')\n"
FORKSERVER = "def preload():\n    import tinyvllm\n"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def make_wheel(folder: Path, name: str, version: str, *requires: str) -> str:
    """Write a wheel with one module and return its sha256."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files = {
        f"{name}/__init__.py": f"__version__ = '{version}'\n",
        f"{name}/kernels.txt": f"kernels of {name}\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={b64(text.encode())},{len(text)}\n" for path, text in files.items())
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in (files | {f"{info}/RECORD": record + f"{info}/RECORD,,\n"}).items():
            archive.writestr(member, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_root(root: Path, version: str = "0.1.0") -> Project:
    """A clone of a project: just what an environment needs of it."""
    (root / "kvmatrix").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "matrix.toml", root)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "kvmatrix" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (root / "kvmatrix" / "overlay.py").write_text(OVERLAY)
    (root / "kvmatrix" / "forkserver.py").write_text(FORKSERVER)
    return Project(root=root)


@dataclass
class Lab:
    """A project, a folder of wheels, and a pin of them."""

    project: Project
    wheels: Path
    pin: Pin

    @property
    def lock(self) -> Path:
        return self.project.root / self.pin.lock

    def write_lock(self, **hashes: str) -> None:
        entries = [f"{name}==1.0 \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items()]
        self.lock.parent.mkdir(exist_ok=True)
        self.lock.write_text("# a lock\n" + "".join(entries))

    def ensure(self, said: list[str] | None = None, project: Project | None = None) -> PinEnv:
        progress = (lambda _: None) if said is None else said.append
        return envs._ensure(project or self.project, self.pin, progress, framework="tinytorch")

    @property
    def path(self) -> Path:
        return self.project.home / "envs" / envs.env_name(self.pin, self.project.root)

    @property
    def log(self) -> Path:
        return self.project.home / "logs" / f"env-{self.path.name}.log"


def make_lab(folder: Path) -> Lab:
    wheels = folder / "wheels"
    wheels.mkdir()
    pin = Pin(version="1.0", device="host", distribution="tinyvllm", lock="envs/tiny.lock", torch="1.0", backends=())
    lab = Lab(make_root(folder / "root"), wheels, pin)
    make_wheel(wheels, "tinytorch", "1.0", "tinydep")
    make_wheel(wheels, "tinydep", "2.0")
    lab.write_lock(
        tinydep=make_wheel(wheels, "tinydep", "1.0"),
        tinyvllm=make_wheel(wheels, "tinyvllm", "1.0", "tinydep>=1", "torch==9", "absent; extra == 'audio'"),
    )
    return lab


def isolate(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("PIP_", "UV_", "KVMATRIX_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVMATRIX_HOME", str(lab.project.root.parent / "home"))
    monkeypatch.setenv("KVMATRIX_INSTALLER", "pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(lab.wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab of its own for a test that builds, or does not get that far."""
    lab = make_lab(tmp_path)
    isolate(lab, monkeypatch)
    return lab


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lab, PinEnv, list[str]]:
    lab, said = make_lab(tmp_path_factory.mktemp("lab")), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        isolate(lab, patch)
        env = lab.ensure(said)
    return lab, env, said


@pytest.fixture
def built(finished: tuple[Lab, PinEnv, list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Lab, PinEnv]]:
    """The one environment that most tests share; each leaves it as it was."""
    lab, env, _ = finished
    isolate(lab, monkeypatch)
    yield lab, env
    envs.verify_install(env)


def python(env: PinEnv, code: str, **environ: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [env.python, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=60, env=inherited | environ
    )
    assert result.stderr == ""
    return result.stdout


# --- building ---------------------------------------------------------------------------------------------------------


def test_build_installs_the_framework_and_the_lock(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    code = "import tinytorch, tinyvllm, tinydep; print(tinytorch.__version__, tinyvllm.__version__, tinydep.__version__)"
    assert python(env, code) == "1.0 1.0 1.0\n", "tinydep 2.0 is there, but the lock's pins are the framework's constraints"
    assert env.path == lab.path
    assert env.lock_sha256 == hashlib.sha256(lab.lock.read_bytes()).hexdigest()


def test_build_is_independent_of_this_interpreters_environment(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    assert python(env, "import sys; print(sys.prefix)").strip() == str(env.path)
    home = (env.path / "pyvenv.cfg").read_text().splitlines()[0].partition(" = ")[2]
    assert Path(home).resolve() == Path(sys.base_prefix, "bin").resolve()


def test_build_reports_its_steps(finished: tuple[Lab, PinEnv, list[str]]) -> None:
    _, env, said = finished
    assert len(said) == 5
    assert all(line.startswith(f"environment {env.name}: ") and "\n" not in line for line in said)
    assert env.facts["installer"] == "pip"
    assert env.facts["torch"] == "1.0"
    assert env.facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(env.facts["steps"]) == ["venv", "torch", "packages", "link", "import"]
    assert env.facts["seconds"] == pytest.approx(sum(env.facts["steps"].values()), abs=0.01)


def test_build_logs_the_installers_output(built: tuple[Lab, PinEnv]) -> None:
    lab, _ = built
    log = lab.log.read_text()
    assert "Successfully installed tinydep-1.0 tinytorch-1.0" in log
    assert "--require-hashes" in log


def test_build_leaves_byte_code_and_no_scratch(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    assert list((env.site_packages / "tinyvllm" / "__pycache__").glob("*.pyc"))
    assert not (env.path / "tmp").exists()


def test_wheel_sha256_is_the_locks(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    wheel = lab.wheels / "tinyvllm-1.0-py3-none-any.whl"
    assert envs.wheel_sha256(env) == hashlib.sha256(wheel.read_bytes()).hexdigest()


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_reuse_installs_nothing(built: tuple[Lab, PinEnv], monkeypatch: pytest.MonkeyPatch) -> None:
    lab, env = built
    monkeypatch.setattr(envs, "_run", lambda *_: pytest.fail("an installer was started"))
    said: list[str] = []
    assert lab.ensure(said) == env
    assert said == []


def test_name_depends_on_lock_torch_and_python(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(**changes: str) -> str:
        return envs.env_name(lab.pin.model_copy(update=changes), lab.project.root)

    first = name()
    assert first.startswith("vllm-1.0-host-")
    assert len(first.rpartition("-")[2]) == 12
    names = {first, name(torch="1.1")}
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    names.add(name())
    monkeypatch.undo()
    with lab.lock.open("a") as f:
        f.write("# changed\n")
    names.add(name())
    assert len(names) == 4


@pytest.mark.parametrize("damage", ["{", "[]", '{"schema": 0}', '{"schema": 1, "name": "other", "facts": {}}'])
def test_a_damaged_marker_does_not_count(built: tuple[Lab, PinEnv], damage: str) -> None:
    lab, env = built
    marker = (env.path / envs.MARKER).read_text()
    (env.path / envs.MARKER).write_text(damage)
    try:
        assert envs._load(env.path, lab.pin, lab.project.root) is None
        assert [e.complete for e in envs.list_envs(lab.project)] == [False]
    finally:
        (env.path / envs.MARKER).write_text(marker)
    assert envs._load(env.path, lab.pin, lab.project.root) == env


def test_a_vanished_base_interpreter_does_not_count(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    target = env.python.readlink()
    env.python.unlink()
    env.python.symlink_to("nowhere")
    try:
        assert envs._load(env.path, lab.pin, lab.project.root) is None
    finally:
        env.python.unlink()
        env.python.symlink_to(target)


def test_a_second_process_waits(built: tuple[Lab, PinEnv], until: Callable[..., None]) -> None:
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
    assert said == [f"environment {env.name}: waiting for the process that is building it"]


def test_waiting_has_an_end(lab: Lab) -> None:
    with (
        envs._exclusive(lab.path, 1, print),
        pytest.raises(EnvironmentBuildError, match=r"another process held it for 0.2 s"),
        envs._exclusive(lab.path, 0.2, lambda _: None),
    ):
        pytest.fail("let in")


# --- the link to this project -----------------------------------------------------------------------------------------


def test_entry_points_are_visible(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    code = "from importlib.metadata import entry_points, version; print(version('kvmatrix'), *("
    code += "e.value for g in ('vllm.platform_plugins', 'vllm.general_plugins') for e in entry_points(group=g)))"
    assert python(env, code) == "0.1.0 kvmatrix.plugin:platform kvmatrix.plugin:general\n"


def test_overlay_is_installed_at_interpreter_start(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    first, second = (env.site_packages / "kvmatrix.pth").read_text().splitlines()
    assert first == str(lab.project.root)
    assert second == (
        'import os; os.environ.get("KVMATRIX_OVERLAY") and __import__("kvmatrix.overlay", fromlist=["install"]).install()'
    )
    assert python(env, "print('started')") == "started\n"
    # Some Pythons run the .pth files of a virtual environment twice; the real `install` is made for that.
    lines = python(env, "print('started')", KVMATRIX_OVERLAY="x.json").splitlines()
    assert set(lines[:-1]) == {"overlay installed"}
    assert lines[-1] == "started"


def test_link_records_what_it_wrote(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    rows = [row.split(",") for row in (env.site_packages / "kvmatrix-0.1.0.dist-info" / "RECORD").read_text().split()]
    hashed = {path: digest.removeprefix("sha256=") for path, digest, _ in rows if digest}
    assert len(hashed) == len(rows) - 1 == 4
    assert {path: b64((env.site_packages / path).read_bytes()) for path in hashed} == hashed


def test_relink_when_another_clone_uses_it(built: tuple[Lab, PinEnv], tmp_path: Path) -> None:
    lab, env = built
    clone = make_root(tmp_path / "clone", version="0.2.0")
    shutil.copytree(lab.lock.parent, clone.root / "envs")
    where = "import kvmatrix, importlib.metadata as m; print(kvmatrix.__file__, m.version('kvmatrix'))"
    lab.ensure(project=clone)
    assert python(env, where) == f"{clone.root}/kvmatrix/__init__.py 0.2.0\n"
    assert [p.name for p in env.site_packages.glob("kvmatrix-*")] == ["kvmatrix-0.2.0.dist-info"]
    lab.ensure()
    assert python(env, where) == f"{lab.project.root}/kvmatrix/__init__.py 0.1.0\n"


def test_relink_when_entry_points_change(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    listed = env.site_packages / "kvmatrix-0.1.0.dist-info" / "entry_points.txt"
    before = listed.read_text()
    (lab.project.root / "pyproject.toml").write_text(PYPROJECT.replace("plugin:general", "plugin:other"))
    lab.ensure()
    assert "plugin:other" in listed.read_text()
    (lab.project.root / "pyproject.toml").write_text(PYPROJECT)
    lab.ensure()
    assert listed.read_text() == before


@pytest.mark.parametrize(("file", "text"), [("pyproject.toml", "["), ("pyproject.toml", ""), ("kvmatrix/__init__.py", "")])
def test_unreadable_project_is_not_linked(tmp_path: Path, file: str, text: str) -> None:
    root = make_root(tmp_path / "root").root
    (root / file).write_text(text)
    with pytest.raises(EnvironmentBuildError, match="cannot be linked"):
        env_link.link(tmp_path, root)


# --- what can go wrong ------------------------------------------------------------------------------------------------


def failure(lab: Lab, error: type[Exception] = EnvironmentBuildError) -> str:
    with pytest.raises(error) as caught:
        lab.ensure()
    assert "\n" not in str(caught.value)
    assert not (lab.path / envs.MARKER).exists()
    return str(caught.value)


def test_missing_wheel(lab: Lab) -> None:
    """The failure names the wheel; with it there, the next build removes what the failed one left behind."""
    wheel, aside = lab.wheels / "tinyvllm-1.0-py3-none-any.whl", lab.wheels.parent / "aside"
    wheel.rename(aside)
    message = failure(lab)
    reason = "No matching distribution found for tinyvllm==1.0"
    assert message.startswith(f"environment {lab.path.name}: step packages failed: {reason}")
    assert message.endswith(f"; log: {lab.log}")
    assert reason in lab.log.read_text()
    assert [(e.name, e.complete) for e in envs.list_envs(lab.project)] == [(lab.path.name, False)]
    aside.rename(wheel)
    stale = lab.path / "stale"
    stale.touch()
    said: list[str] = []
    env = lab.ensure(said)
    assert said[0] == f"environment {env.name}: removing what an earlier build left behind"
    assert not stale.exists()
    envs.verify_install(env)


class StubTool:
    """An installer without an installer: environments without pip, and a script in the place of installs."""

    name = "stub"
    cpu_torch_first = False

    def __init__(self, script: str) -> None:
        self.script = script

    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def venv(self, path: Path) -> list[str]:
        return [sys.executable, "-m", "venv", "--without-pip", str(path)]

    def install(self, python: Path) -> list[str]:
        return [sys.executable, "-c", self.script]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StubTool]:
    def use(script: str) -> StubTool:
        tool = StubTool(script)
        monkeypatch.setattr(installers, "choose", lambda: tool)
        return tool

    return use


def test_full_disk(lab: Lab, stub: Callable[[str], StubTool]) -> None:
    stub("import sys; sys.exit('ERROR: [Errno 28] No space left on device')")
    assert failure(lab, DiskError).startswith("no space left on the disk in step torch of environment vllm-1.0-host-")


def test_folder_that_is_a_file(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "some/folder")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert failure(lab, DiskError) == "Permission denied: some/folder: free some space, or set KVMATRIX_HOME to another folder"


def test_interpreter_without_ensurepip(lab: Lab, stub: Callable[[str], StubTool], monkeypatch: pytest.MonkeyPatch) -> None:
    tool = stub("")
    command = [sys.executable, "-c", "print('created because ensurepip is not\\navailable'); exit(1)"]
    monkeypatch.setattr(tool, "venv", lambda path: command)
    assert "step venv failed" in failure(lab)
    assert "has no ensurepip: install its venv package, or uv" in failure(lab)


def test_installer_that_cannot_be_run(lab: Lab, stub: Callable[[str], StubTool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub(""), "venv", lambda path: [str(path / "nothing"), "venv"])
    assert "nothing cannot be run: No such file or directory" in failure(lab)


def test_time_limit(lab: Lab, stub: Callable[[str], StubTool]) -> None:
    stub("import time; time.sleep(60)")
    matrix = (lab.project.root / "matrix.toml").read_text()
    (lab.project.root / "matrix.toml").write_text(matrix.replace("install_timeout_s = 3600", "install_timeout_s = 2"))
    started = time.monotonic()
    assert "step torch failed: not finished after 2 s (install_timeout_s)" in failure(lab)
    assert time.monotonic() - started < 20


def test_interrupt_leaves_no_marker_and_no_process(lab: Lab, stub: Callable[[str], StubTool]) -> None:
    pids = lab.wheels / "pids"
    script = f"import os, subprocess, pathlib; p = subprocess.Popen(['sleep', '60']); pathlib.Path({str(pids)!r})"
    stub(script + ".write_text(f'{os.getpid()} {p.pid}'); p.wait()")

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        lab.ensure()
    thread.join()
    assert [(e.name, e.complete) for e in envs.list_envs(lab.project)] == [(lab.path.name, False)]
    assert [pid for pid in pids.read_text().split() if _runs(int(pid))] == []
    with envs._exclusive(lab.path, 0, lambda _: pytest.fail("still locked")):
        pass


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_lock_that_lacks_a_dependency(built: tuple[Lab, PinEnv]) -> None:
    lab, env = built
    build = envs._Build(lab.project, lab.pin, env.path, "tinytorch", print, 0, 0.0)
    build.log = lab.log
    build._check_complete()
    hidden = env.path / "tinydep-1.0.dist-info"
    (env.site_packages / hidden.name).rename(hidden)
    try:
        with pytest.raises(EnvironmentBuildError, match=r"envs/tiny.lock lacks tinydep, which tinytorch needs"):
            build._check_complete()
    finally:
        hidden.rename(env.site_packages / hidden.name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read (No such file or directory): make it with `kvmatrix lock`"),
        ("tinyvllm==1.0\n", "only name==version with sha256 hashes is allowed"),
        (f"other==1.0 --hash=sha256:{'0' * 64}\n", "the lock does not have tinyvllm"),
    ],
)
def test_unusable_lock(lab: Lab, text: str | None, reason: str) -> None:
    if text is None:
        lab.lock.unlink()
    else:
        lab.lock.write_text(text)
    with pytest.raises(EnvironmentBuildError) as caught:
        lab.ensure()
    assert reason in str(caught.value)


# --- verify_install ---------------------------------------------------------------------------------------------------


def changed(env: PinEnv) -> str:
    with pytest.raises(InstallChangedError) as caught:
        envs.verify_install(env)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(f"delete the folder {env.path}, then run again")
    return message


@pytest.mark.parametrize("name", ["tinyvllm/__init__.py", "tinyvllm/kernels.txt"])
def test_changed_file(built: tuple[Lab, PinEnv], name: str) -> None:
    _, env = built
    path = env.site_packages / name
    shipped = path.read_bytes()
    path.write_bytes(shipped + b"#")
    try:
        was, now = hashlib.sha256(shipped).hexdigest()[:16], hashlib.sha256(shipped + b"#").hexdigest()[:16]
        assert changed(env).startswith(f"installed file {name} has sha256 {now}, the wheel's has {was}: ")
    finally:
        path.write_bytes(shipped)


def test_missing_files(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    (env.site_packages / "tinyvllm").rename(env.path / "aside")
    try:
        message = changed(env)
    finally:
        (env.path / "aside").rename(env.site_packages / "tinyvllm")
    assert "installed file tinyvllm/__init__.py is missing, the wheel's has" in message
    assert "; 1 more changed: " in message


def test_changed_record(built: tuple[Lab, PinEnv]) -> None:
    """A record that was rewritten to match a changed file."""
    _, env = built
    record = env.site_packages / "tinyvllm-1.0.dist-info" / "RECORD"
    shipped = record.read_text()
    record.write_text(shipped + "more.py,,\n")
    try:
        assert "installed file tinyvllm's RECORD has sha256" in changed(env)
    finally:
        record.write_text(shipped)


def test_empty_record(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    record = env.site_packages / "tinyvllm-1.0.dist-info" / "RECORD"
    shipped = record.read_text()
    record.write_text("")
    try:
        assert "RECORD is missing" in changed(replace(env, facts={}))
    finally:
        record.write_text(shipped)


def test_distribution_that_is_not_installed(built: tuple[Lab, PinEnv]) -> None:
    _, env = built
    with pytest.raises(InstallChangedError, match="absent is not installed"):
        envs.verify_install(replace(env, pin=env.pin.model_copy(update={"distribution": "absent"})))


# --- listing and removing ---------------------------------------------------------------------------------------------


def test_list_and_remove(lab: Lab) -> None:
    assert envs.list_envs(lab.project) == ()
    folder = lab.project.home / "envs"
    for name in ("b", "a"):
        (folder / name).mkdir(parents=True)
    (folder / "a.lock").touch()
    (folder / "a" / envs.MARKER).write_text(json.dumps({"schema": 1, "name": "a", "facts": {"torch": "1.0"}}))
    complete = EnvEntry("a", folder / "a", True, {"torch": "1.0"})
    assert envs.list_envs(lab.project) == (complete, EnvEntry("b", folder / "b", False, {}))
    envs.remove(lab.project, "b")
    assert envs.list_envs(lab.project) == (complete,)


@pytest.mark.parametrize("name", ["nothing", "../home", "", "a.lock"])
def test_remove_refuses_what_is_no_environment(lab: Lab, name: str) -> None:
    (lab.project.home / "envs" / "a").mkdir(parents=True)
    (lab.project.home / "envs" / "a.lock").touch()
    with pytest.raises(UsageError, match="unknown environment"):
        envs.remove(lab.project, name)
    assert (lab.project.home / "envs" / "a").is_dir()


def test_a_removal_that_is_cut_off_leaves_no_marker(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.path.mkdir(parents=True)
    (lab.path / envs.MARKER).touch()

    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        envs.remove(lab.project, lab.path.name)
    assert list(lab.path.iterdir()) == []


# --- installers -------------------------------------------------------------------------------------------------------


def fake_uv(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    uv = lab.wheels / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lab.wheels}{os.pathsep}{os.environ['PATH']}")
    return uv


@pytest.mark.parametrize(("wanted", "chosen"), [("", "uv"), ("uv", "uv"), ("pip", "pip")])
def test_installer_choice(lab: Lab, monkeypatch: pytest.MonkeyPatch, wanted: str, chosen: str) -> None:
    fake_uv(lab, monkeypatch)
    monkeypatch.setenv("KVMATRIX_INSTALLER", wanted)
    assert installers.choose().name == chosen


def test_installer_without_uv(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(lab.wheels))
    monkeypatch.delenv("KVMATRIX_INSTALLER")
    assert installers.choose().name == "pip"
    monkeypatch.setenv("KVMATRIX_INSTALLER", "uv")
    with pytest.raises(EnvironmentBuildError, match="uv is not on PATH"):
        installers.choose()


def test_unknown_installer(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMATRIX_INSTALLER", "conda")
    with pytest.raises(UsageError, match="KVMATRIX_INSTALLER='conda' is unknown: set it to pip or uv"):
        lab.ensure()


def test_installers_do_not_inherit_the_callers_interpreter(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVMATRIX_OVERLAY", "PYTHONPATH", "VIRTUAL_ENV", "PIP_TARGET", "PIP_USER"):
        monkeypatch.setenv(name, "x")
    for tool in (installers.Pip(), installers.Uv("uv")):
        assert "x" not in tool.environ().values()


@pytest.mark.parametrize(
    ("setting", "first"),
    [
        ({}, True),
        ({"PIP_CERT": "c"}, True),
        ({"PIP_FIND_LINKS": "w"}, False),
        ({"PIP_INDEX_URL": "i"}, False),
        ({"PIP_EXTRA_INDEX_URL": "i"}, False),
        ({"PIP_NO_INDEX": "1"}, False),
        ({"UV_EXTRA_INDEX_URL": "i"}, False),
        ({"UV_TORCH_BACKEND": "auto"}, False),
    ],
)
def test_cpu_torch_is_asked_for_where_nothing_is_set(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], first: bool
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    tool = installers.Uv("uv")
    assert tool.cpu_torch_first is first
    assert tool.environ()["UV_LINK_MODE"] == "copy"
    assert ("--no-index" in tool.install(Path("python"))) is ("PIP_NO_INDEX" in setting)


@pytest.mark.parametrize(
    ("device", "fails", "asked"), [("host", "cpu", ["cpu", ""]), ("host", "never", ["cpu"]), ("cuda", "never", [""])]
)
def test_cpu_torch_falls_back(
    lab: Lab, stub: Callable[[str], StubTool], tmp_path: Path, device: str, fails: str, asked: list[str]
) -> None:
    script = "import os, sys; backend = os.environ.get('UV_TORCH_BACKEND', ''); open('asked', 'a').write(backend + ';')\n"
    tool = stub(script.replace("'asked'", repr(str(tmp_path / "asked"))) + f"sys.exit(backend == {fails!r})")
    tool.cpu_torch_first = True
    pin = lab.pin.model_copy(update={"device": device})
    said: list[str] = []
    with (tmp_path / "lock").open("w") as f:
        build = envs._Build(lab.project, pin, tmp_path, "tinytorch", said.append, f.fileno(), time.monotonic() + 60)
        build.tool, build.log, build.scratch = tool, tmp_path / "log", tmp_path
        build.log.touch()
        build._install_framework()
    assert (tmp_path / "asked").read_text().split(";")[:-1] == asked
    assert len(said) == len(asked)


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_build_with_uv(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMATRIX_INSTALLER", "uv")
    monkeypatch.setenv("UV_CACHE_DIR", str(lab.wheels.parent / "cache"))
    env = lab.ensure()
    assert env.facts["installer"] == "uv"
    assert python(env, "import tinyvllm, tinydep, kvmatrix; print(tinydep.__version__)") == "1.0\n"
    envs.verify_install(env)
    (lab.wheels / "tinyvllm-1.0-py3-none-any.whl").unlink()
    envs.remove(lab.project, env.name)
    monkeypatch.setenv("UV_CACHE_DIR", str(lab.wheels.parent / "cache2"))
    assert "step packages failed: No solution found" in failure(lab)
