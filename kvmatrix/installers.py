"""pip and uv behind one face: how an environment is made and filled."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Protocol

from kvmatrix import locks
from kvmatrix.errors import EnvironmentBuildError, UsageError

# Settings of the caller's interpreter and of pip's target that must not reach an environment's installer.
_NOT_INHERITED = (
    "KVMATRIX_OVERLAY",
    "PIP_PREFIX",
    "PIP_PYTHON",
    "PIP_REQUIRE_HASHES",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)
_INDEX_SETTINGS = (
    "UV_TORCH_BACKEND",
    "UV_FIND_LINKS",
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
)


def base_python() -> str:
    """The interpreter behind this one's virtual environment: an environment must not depend on another one."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


class Installer(Protocol):
    name: str
    cpu_torch_first: bool
    """Whether a host pin's torch is first asked for with ``UV_TORCH_BACKEND=cpu``."""

    def environ(self) -> dict[str, str]: ...

    def venv(self, path: Path) -> list[str]: ...

    def install(self, python: Path) -> list[str]: ...


class Pip:
    name = "pip"
    cpu_torch_first = False

    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONNOUSERSITE": "1"}

    def venv(self, path: Path) -> list[str]:
        return [base_python(), "-m", "venv", str(path)]

    def install(self, python: Path) -> list[str]:
        return [str(python), "-m", "pip", "install", "--progress-bar=off", "--no-compile"]


class Uv:
    name = "uv"

    def __init__(self, executable: str) -> None:
        self.executable = executable
        # uv does not read pip's PIP_NO_INDEX and has no variable of its own for it.
        self.no_index = os.environ.get("PIP_NO_INDEX", "").lower() in ("1", "true", "yes", "on")
        environ = self.environ()
        self.cpu_torch_first = not self.no_index and not any(environ.get(k) for k in _INDEX_SETTINGS)

    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # Hard links into uv's cache would let an edited file come back in the next environment.
        return {"UV_LINK_MODE": "copy"} | locks.uv_environ(kept) | {"NO_COLOR": "1", "UV_NO_PROGRESS": "1"}

    def venv(self, path: Path) -> list[str]:
        return [self.executable, "venv", "--no-project", "--python", base_python(), str(path)]

    def install(self, python: Path) -> list[str]:
        no_index = ["--no-index"] if self.no_index else []
        return [self.executable, "pip", "install", "--python", str(python), *no_index]


def choose() -> Installer:
    """uv where it is on PATH, else pip; ``KVMATRIX_INSTALLER`` decides otherwise."""
    wanted = os.environ.get("KVMATRIX_INSTALLER", "")
    if wanted not in ("", "pip", "uv"):
        raise UsageError(f"KVMATRIX_INSTALLER={wanted!r} is unknown: set it to pip or uv, or unset it")
    uv = shutil.which("uv") if wanted != "pip" else None
    if wanted == "uv" and uv is None:
        raise EnvironmentBuildError("KVMATRIX_INSTALLER=uv, but uv is not on PATH: install uv, or set it to pip")
    return Uv(uv) if uv else Pip()
