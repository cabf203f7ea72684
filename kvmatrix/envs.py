"""Environments of pins: one virtual environment for each lock, torch and Python version, built once and then reused.

An environment counts only with its marker file, which is written last: whatever lacks it was cut off and is built
again. What is installed is read-only for this project; :func:`verify_install` proves that it still is what was shipped.

A mixed pin has no environment of its own: a tree of files (:mod:`kvmatrix.mixed`), built and reused by the same rules, is put
in front of its base's.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvmatrix import env_link, installers, locks, mixed, system_libs
from kvmatrix.config import Pin, Project
from kvmatrix.errors import DiskError, EnvironmentBuildError, InstallChangedError, UsageError

MARKER = "kvmatrix-env.json"
LOCK_COPY = "kvmatrix-env.lock"
CONSTRAINTS = "kvmatrix-env.constraints"
SCHEMA = 1

Progress = Callable[[str], None]

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_DISK_MESSAGES = ("No space left on device", "Disk quota exceeded")


@dataclass(frozen=True)
class PinEnv:
    """A complete environment of one pin."""

    pin: Pin
    path: Path
    python: Path
    site_packages: Path
    """Where vLLM's files are; of a mixed build the tree, which is ``path`` itself."""
    lock_sha256: str
    facts: Mapping[str, Any]
    """From the marker: ``torch``, ``python``, ``installer``, ``seconds``, ``steps``, ``record_sha256``."""
    base: PinEnv | None = None
    """Of a mixed build, the environment that runs it and has its extensions."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def variables(self) -> dict[str, str]:
        """What its processes must have set, over the caller's own variables."""
        if self.base is not None:
            return self.base.variables | {"PYTHONPATH": str(self.site_packages)}
        return system_libs.variables(self.path)


@dataclass(frozen=True)
class EnvEntry:
    """What lies in the folder of environments under one name."""

    name: str
    path: Path
    complete: bool
    facts: Mapping[str, Any]

    @property
    def note(self) -> str:
        """What a list of environments says behind the name."""
        base = self.facts.get("base")
        if self.complete:
            return f"mixed build over {base}" if base else ""
        return f"mixed build without its base {base}: that will be built again" if base else "cut off: will be built again"


def env_name(pin: Pin, root: Path) -> str:
    """The environment's name: another lock, torch or Python gives another one.

    Raises:
        EnvironmentBuildError: the pin's lock is missing.
    """
    if pin.mixed:
        return mixed.tree_name(pin, env_name(pin.base, root))
    digest = hashlib.sha256(_read_lock(pin, root))
    digest.update(f"{pin.torch} {sys.version_info[0]}.{sys.version_info[1]}".encode())
    return f"vllm-{pin.version}-{pin.device}-{digest.hexdigest()[:12]}"


def ensure(project: Project, pin: Pin, progress: Progress = lambda _: None) -> PinEnv:
    """The environment of ``pin``, built now where it is not there or was cut off. One process builds, others wait.

    Raises:
        UsageError: ``KVMATRIX_INSTALLER`` is not ``pip`` or ``uv``.
        EnvironmentBuildError: a step of the build failed or ran out of time.
        DiskError: the disk is full or the folder cannot be written.
    """
    return _ensure(project, pin, progress, framework="torch")


def _ensure(project: Project, pin: Pin, progress: Progress, framework: str) -> PinEnv:
    if pin.mixed:
        return _ensure_mixed(project, pin, progress, _ensure(project, pin.base, progress, framework))
    path = project.home / "envs" / env_name(pin, project.root)
    budget = project.matrix.budgets.install_timeout_s
    with _disk_errors(), _exclusive(path, budget, progress) as lock_fd:
        env = _load(path, pin, project.root)
        if env is None:
            _Build(project, pin, path, framework, progress, lock_fd, time.monotonic() + budget).run()
            env = _load(path, pin, project.root)
            if env is None:
                raise EnvironmentBuildError(f"environment {path.name} is not usable right after its build: run again")
        if pin.device == "host":
            system_libs.provide(path, progress)
        env_link.link(env.site_packages, project.root)
    return env


def _ensure_mixed(project: Project, pin: Pin, progress: Progress, base: PinEnv) -> PinEnv:
    """The tree of a mixed pin over its ``base``, which also tells at every use that the build is a mixed one."""
    path = project.home / "mixed" / mixed.tree_name(pin, base.name)
    budget = project.matrix.budgets.install_timeout_s
    with _disk_errors(), _exclusive(path, budget, progress) as lock_fd:
        env = _load_mixed(path, pin, base)
        if env is None:
            _MixedBuild(project, pin, path, "", progress, lock_fd, time.monotonic() + budget, base=base).run()
            env = _load_mixed(path, pin, base)
            if env is None:
                raise EnvironmentBuildError(f"environment {path.name} is not usable right after its build: run again")
    progress(mixed_sentence(env))
    return env


def list_envs(project: Project) -> tuple[EnvEntry, ...]:
    """All environments that lie in the project's home, by name, those that were cut off included; mixed builds as well."""
    folders = [f for f in (project.home / "envs", project.home / "mixed") if f.is_dir()]
    markers = {path: _read_marker(path) for folder in folders for path in folder.iterdir() if path.is_dir()}
    whole = {path.name for path, marker in markers.items() if marker}
    entries = []
    for path, marker in sorted(markers.items(), key=lambda item: item[0].name):
        facts = marker["facts"] if marker else {}
        complete = path.name in whole and facts.get("base", path.name) in whole
        entries.append(EnvEntry(path.name, path, complete, facts))
    return tuple(entries)


def is_built(project: Project, pin: Pin) -> bool:
    """Whether the environment of ``pin`` is there and complete.

    Raises:
        EnvironmentBuildError: the pin's lock is missing.
    """
    return env_name(pin, project.root) in {e.name for e in list_envs(project) if e.complete}


def remove(project: Project, name: str) -> None:
    """Delete one environment. A mixed build over it stays, and counts again once its base is there again.

    Raises:
        UsageError: there is none of that name.
        DiskError: it cannot be deleted.
    """
    known = {entry.name: entry.path for entry in list_envs(project)}
    if name not in known:
        raise UsageError(f"unknown environment {name!r}: there are {', '.join(known) or 'none'}")
    with _disk_errors(), _exclusive(known[name], project.matrix.budgets.install_timeout_s, lambda _: None):
        _discard(known[name])


def wheel_sha256(env: PinEnv) -> str:
    """sha256 of the vLLM wheel that the lock pins for this machine (see :func:`kvmatrix.locks.wheel_sha256`).

    Of a mixed build, those of both wheels, each with what was taken from it.
    """
    if env.base is not None and env.pin.mixed:
        own, lent = env.pin.mixed, env.base
        python = f"{own.wheel_sha256} (Python files, {own.distribution} {env.pin.version})"
        return f"{python}, {wheel_sha256(lent)} (extensions, {lent.pin.distribution} {lent.pin.version})"
    return locks.wheel_sha256((env.path / LOCK_COPY).read_text(encoding="utf-8"), env.pin.distribution)


def mixed_sentence(env: PinEnv) -> str:
    """What a mixed build is made of, in one sentence; empty for any other environment."""
    return mixed.sentence(env.pin, wheel_sha256(env.base)) if env.base is not None else ""


def verify_install(env: PinEnv) -> None:
    """Check every file of the pin's distribution against the sha256 that its wheel recorded; of a mixed build, its base's too.

    Raises:
        InstallChangedError: a file was changed or is missing.
    """
    if env.base is not None:
        verify_install(env.base)
    distribution = env.pin.mixed.distribution if env.pin.mixed else env.pin.distribution
    record = _distribution(env.path, env.site_packages, distribution).read_text("RECORD") or ""
    known = env.facts.get("record_sha256")
    now = hashlib.sha256(record.encode()).hexdigest()
    if known not in (None, now):
        raise _changed(env, f"{distribution}'s RECORD", f"has sha256 {now[:16]}, was {str(known)[:16]}")
    rows = list(mixed.parse_record(record).items())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = list(pool.map(lambda row: _record_digest(env.site_packages / row[0]), rows))
    bad = [(name, was, digest) for (name, was), digest in zip(rows, digests, strict=True) if digest != was]
    if bad or not rows:
        name, was, digest = bad[0] if bad else ("RECORD", "", None)
        state = f"has sha256 {_hex16(digest)}" if digest else "is missing"
        more = f"; {len(bad) - 1} more changed" if len(bad) > 1 else ""
        raise _changed(env, name, f"{state}, the wheel's has {_hex16(was)}{more}")


def _changed(env: PinEnv, name: str, how: str) -> InstallChangedError:
    return InstallChangedError(f"installed file {name} {how}: delete the folder {env.path}, then run again")


def _record_digest(path: Path) -> str | None:
    """The file's sha256 as RECORD files write it: urlsafe base64 without padding. None where it cannot be read."""
    try:
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").digest()
    except OSError:
        return None
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _hex16(digest: str) -> str:
    with suppress(ValueError):
        return base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()[:16]
    return digest[:16]


# --- reading what is there --------------------------------------------------------------------------------------------


def _read_lock(pin: Pin, root: Path) -> bytes:
    try:
        return (root / pin.lock).read_bytes()
    except OSError as e:
        raise EnvironmentBuildError(f"{pin.lock} cannot be read ({e.strerror}): make it with `kvmatrix lock`") from e


def _read_marker(path: Path) -> dict[str, Any] | None:
    """The marker of a complete environment; None where it is missing, damaged or of another layout."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or marker.get("schema") != SCHEMA or marker.get("name") != path.name:
        return None
    return marker if isinstance(marker.get("facts"), dict) else None


def _load(path: Path, pin: Pin, root: Path) -> PinEnv | None:
    marker = _read_marker(path)
    lock_sha256 = hashlib.sha256(_read_lock(pin, root)).hexdigest()
    python, site_packages = path / "bin" / "python", _site_packages(path)
    if marker is None or marker.get("lock_sha256") != lock_sha256:
        return None
    # The base interpreter may be gone: `exists` follows the link to it.
    if not python.exists() or not site_packages.is_dir() or not (path / LOCK_COPY).is_file():
        return None
    return PinEnv(pin, path, python, site_packages, lock_sha256, marker["facts"])


def _load_mixed(path: Path, pin: Pin, base: PinEnv) -> PinEnv | None:
    marker = _read_marker(path)
    if marker is None:
        return None
    facts = marker["facts"]
    same_base = facts.get("base_record_sha256") == base.facts.get("record_sha256")
    if not same_base or not all((path / name).is_file() for name in facts.get("extensions", ())):
        return None
    return PinEnv(pin, path, base.python, path, base.lock_sha256, facts, base)


def _site_packages(path: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(path), "platbase": str(path)}))


def _distribution(env: Path, site_packages: Path, name: str) -> Distribution:
    found = next(iter(Distribution.discover(name=name, path=[str(site_packages)])), None)
    if found is None:
        raise InstallChangedError(f"{name} is not installed in environment {env.name}: delete the folder {env}, then run again")
    return found


def _needed(distribution: Distribution) -> set[str]:
    """Names of the distributions that ``distribution`` requires in this environment, without any extra."""
    needed = set()
    for line in distribution.requires or ():
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed.add(str(canonicalize_name(requirement.name)))
    return needed


# --- locks, disks and processes ---------------------------------------------------------------------------------------


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno not in _DISK_ERRNOS:
            raise
        raise DiskError(f"{e.strerror}: {e.filename}: free some space, or set KVMATRIX_HOME to another folder") from e


@contextmanager
def _exclusive(path: Path, timeout_s: float, progress: Progress) -> Iterator[int]:
    """Hold the environment's lock file; yields its descriptor.

    The lock files stay: deleting one while another process waits on it would let two in.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.with_name(path.name + ".lock").open("ab") as f:
        told = False
        while not _try_lock(f.fileno()):
            if not told:
                progress(f"environment {path.name}: waiting for the process that is building it")
                told = True
            if time.monotonic() > deadline:
                raise EnvironmentBuildError(f"environment {path.name}: another process held it for {timeout_s:g} s")
            time.sleep(0.1)
        try:
            yield f.fileno()
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _discard(path: Path) -> None:
    """Delete an environment's folder, its marker first: what is left of a deletion that was cut off must not count."""
    (path / MARKER).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def _run(command: list[str], environ: Mapping[str, str], log: Path, deadline: float, lock_fd: int) -> int:
    """Run a command in a process group of its own, its output appended to ``log``, and return its exit status.

    Raises:
        subprocess.TimeoutExpired: the deadline passed; like any other exception it ends the whole group first.
    """
    with log.open("ab") as out:
        out.write(f"$ {' '.join(command)}\n".encode())
        out.flush()
        # The child shares the lock: if this process is killed, the next one waits until the orphan has finished.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            pass_fds=(lock_fd,),
        )
    try:
        return process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except BaseException:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    for signum, grace_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)


# --- building ---------------------------------------------------------------------------------------------------------


@dataclass
class _Build:
    """One build of an environment, under its lock file and against one deadline."""

    project: Project
    pin: Pin
    path: Path
    framework: str
    progress: Progress
    lock_fd: int
    deadline: float
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Build, and write the marker last.

        Raises:
            EnvironmentBuildError, DiskError, UsageError: see :func:`ensure`.
        """
        self._begin()
        lock = _read_lock(self.pin, self.project.root)
        text = lock.decode("utf-8", errors="replace")
        entries = locks.parse(text)
        locks.wheel_sha256(text, self.pin.distribution)
        self._clear()
        self._step("venv", f"creating it with {self.tool.name}", self.tool.venv(self.path), {})
        (self.path / LOCK_COPY).write_bytes(lock)
        (self.path / CONSTRAINTS).write_text(locks.constraints(entries), encoding="utf-8")
        # The installers' scratch space: on the same disk, and gone with the folder when a build is cut off.
        self.scratch = self.path / "tmp"
        self.scratch.mkdir()
        self._install_framework()
        self._install_lock(len(entries))
        self._check_complete()
        self._step_link()
        if self.pin.device == "host":
            system_libs.provide(self.path, self.progress)
        self._warm_up()
        shutil.rmtree(self.scratch)
        self._write_marker(lock)

    def _begin(self) -> None:
        self.tool = installers.choose()
        self.log = self.project.home / "logs" / f"env-{self.path.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")

    def _clear(self) -> None:
        if self.path.exists():
            self.progress(f"environment {self.path.name}: removing what an earlier build left behind")
            _discard(self.path)

    def _install_framework(self) -> None:
        requirement = f"{self.framework}=={self.pin.torch}"
        command = [*self.tool.install(self.python), "-c", str(self.path / CONSTRAINTS), requirement]
        title = f"installing {self.framework} {self.pin.torch}"
        if self.pin.device == "host" and self.tool.cpu_torch_first:
            try:
                return self._step("torch", title + " for CPU", command, {"UV_TORCH_BACKEND": "cpu"})
            except EnvironmentBuildError:
                title += " from the default index"
        return self._step("torch", title, command, {})

    def _install_lock(self, count: int) -> None:
        command = [*self.tool.install(self.python), "--no-deps", "--require-hashes", "-r", str(self.path / LOCK_COPY)]
        title = f"installing {self.pin.distribution} {self.pin.version} and what it needs ({count} locked packages)"
        self._step("packages", title, command, {})

    def _check_complete(self) -> None:
        """The lock is installed without looking at dependencies: one that it lacks would show only in some cell."""
        installed = {canonicalize_name(d.name): d for d in Distribution.discover(path=[str(_site_packages(self.path))])}
        for name, distribution in sorted(installed.items()):
            lacking = _needed(distribution) - installed.keys() - locks.TORCH_FAMILY
            if lacking:
                raise self._failure("packages", f"{self.pin.lock} lacks {min(lacking)}, which {name} needs")

    def _warm_up(self) -> None:
        """Import once what every cell needs, so that its byte-code is there, also where cells must not write any.

        Much less work than to compile all that is installed. It proves nothing: a failure is for a run to report.
        """
        self.progress(f"environment {self.path.name}: importing vLLM for the first time")
        environ = self._environ() | {"PYTHONDONTWRITEBYTECODE": ""} | self.variables
        started = time.monotonic()
        deadline = min(self.deadline, started + self.project.matrix.budgets.preload_timeout_s)
        command = [str(self.python), "-P", "-c", "from kvmatrix.forkserver import preload; preload()"]
        with suppress(subprocess.TimeoutExpired):
            _run(command, environ, self.log, deadline, self.lock_fd)
        self.seconds["import"] = round(time.monotonic() - started, 1)

    def _environ(self) -> dict[str, str]:
        return self.tool.environ() | {"TMPDIR": str(self.scratch)}

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        return system_libs.variables(self.path)

    def _step(self, name: str, title: str, command: list[str], extra: dict[str, str]) -> None:
        self.progress(f"environment {self.path.name}: {title}")
        environ = (self.tool.environ() if name == "venv" else self._environ()) | extra
        offset, started = self.log.stat().st_size, time.monotonic()
        try:
            status = _run(command, environ, self.log, self.deadline, self.lock_fd)
        except subprocess.TimeoutExpired:
            budget = self.project.matrix.budgets.install_timeout_s
            raise self._failure(name, f"not finished after {budget:g} s (install_timeout_s)") from None
        except OSError as e:
            if e.errno in _DISK_ERRNOS and e.filename != command[0]:
                raise
            raise self._failure(name, f"{command[0]} cannot be run: {e.strerror}") from e
        if status:
            self._fail(name, self.log.read_bytes()[offset:].decode("utf-8", errors="replace"))
        self.seconds[name] = round(time.monotonic() - started, 1)

    def _failure(self, step: str, what: str) -> EnvironmentBuildError:
        return EnvironmentBuildError(f"environment {self.path.name}: step {step} failed: {what}; log: {self.log}")

    def _fail(self, step: str, output: str) -> None:
        if any(message in output for message in _DISK_MESSAGES):
            raise DiskError(
                f"no space left on the disk in step {step} of environment {self.path.name}: free some, or set"
                f" KVMATRIX_HOME to a folder on another disk; log: {self.log}"
            )
        if "ensurepip is not" in output:
            raise self._failure(step, f"{installers.base_python()} has no ensurepip: install its venv package, or uv")
        # The first line is the command itself.
        raise self._failure(step, locks.reason(output.partition("\n")[2]))

    def _step_link(self) -> None:
        self.progress(f"environment {self.path.name}: linking kvmatrix")
        started = time.monotonic()
        env_link.link(_site_packages(self.path), self.project.root)
        self.seconds["link"] = round(time.monotonic() - started, 1)

    def _write_marker(self, lock: bytes) -> None:
        site_packages = _site_packages(self.path)
        record = _distribution(self.path, site_packages, self.pin.distribution).read_text("RECORD") or ""
        facts = {
            "torch": _distribution(self.path, site_packages, self.framework).version,
            "python": platform.python_version(),
            "installer": self.tool.name,
            "seconds": round(sum(self.seconds.values()), 1),
            "steps": self.seconds,
            "record_sha256": hashlib.sha256(record.encode()).hexdigest(),
        }
        _mark(self.path, hashlib.sha256(lock).hexdigest(), facts)


def _mark(path: Path, lock_sha256: str, facts: dict[str, Any]) -> None:
    marker = {"schema": SCHEMA, "name": path.name, "lock_sha256": lock_sha256, "facts": facts}
    env_link.write_atomically(path / MARKER, json.dumps(marker, indent=2).encode() + b"\n")


@dataclass
class _MixedBuild(_Build):
    """One build of a mixed pin's tree over its base's environment; the same steps, log, lock file and deadline."""

    base: PinEnv = field(kw_only=True)

    def run(self) -> None:
        self._begin()
        self._clear()
        self.scratch = self.path / "tmp"
        self.scratch.mkdir(parents=True)
        lent = _distribution(self.base.path, self.base.site_packages, self.base.pin.distribution)
        extensions = mixed.extensions_of(mixed.parse_record(lent.read_text("RECORD") or ""))
        self._unpack(self._download(), extensions)
        self._warm_up()
        shutil.rmtree(self.scratch)
        self._write_tree_marker(extensions)

    @property
    def python(self) -> Path:
        return self.base.python

    @property
    def variables(self) -> dict[str, str]:
        return self.base.variables | {"PYTHONPATH": str(self.path)}

    def _download(self) -> Path:
        assert self.pin.mixed is not None
        title = f"downloading {self.pin.mixed.distribution} {self.pin.version} for its Python files"
        # `===`: a build with a local version is another file.
        requirement = f"{self.pin.mixed.distribution}==={self.pin.version}"
        command = locks.download_command(requirement, self.scratch / "wheels", shutil.which("uv"))
        self._step("download", title, command, {})
        return next((self.scratch / "wheels").glob("*.whl"))

    def _unpack(self, wheel: Path, extensions: Mapping[str, str]) -> None:
        self.progress(f"environment {self.path.name}: its Python files over the extensions of {self.base.name}")
        started = time.monotonic()
        try:
            mixed.build(self.path, wheel, self.pin, self.base.site_packages, extensions)
        except EnvironmentBuildError as e:
            raise self._failure("unpack", str(e)) from e
        finally:
            wheel.unlink()
        self.seconds["unpack"] = round(time.monotonic() - started, 1)

    def _write_tree_marker(self, extensions: Mapping[str, str]) -> None:
        assert self.pin.mixed is not None
        record = _distribution(self.path, self.path, self.pin.mixed.distribution).read_text("RECORD") or ""
        facts = {
            **{name: self.base.facts.get(name) for name in ("torch", "python", "installer")},
            "seconds": round(sum(self.seconds.values()), 1),
            "steps": self.seconds,
            "record_sha256": hashlib.sha256(record.encode()).hexdigest(),
            "base": self.base.name,
            "base_record_sha256": self.base.facts.get("record_sha256"),
            "extensions": sorted(extensions),
        }
        _mark(self.path, self.base.lock_sha256, facts)
