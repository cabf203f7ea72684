"""Making this project importable in a pin's environment, and its vLLM plug-ins visible there."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import tomllib
from pathlib import Path

from kvmatrix.errors import EnvironmentBuildError

_OVERLAY_HOOK = (
    'import os; os.environ.get("KVMATRIX_OVERLAY") and __import__("kvmatrix.overlay", fromlist=["install"]).install()\n'
)


def link(site_packages: Path, root: Path) -> None:
    """Make ``root``'s kvmatrix importable in the environment and visible to ``importlib.metadata``.

    Nothing is written where it is so already.

    Written by hand because an editable install would need the build backend, and so a network.

    Raises:
        EnvironmentBuildError: the project's version or entry points cannot be read.
    """
    files = _link_files(root)
    if all(_same(site_packages / name, data) for name, data in files.items()):
        return
    info = next(name for name in files if name.endswith("/METADATA")).partition("/")[0]
    for stale in site_packages.glob("kvmatrix-*.dist-info"):
        if stale.name != info:
            shutil.rmtree(stale)
    (site_packages / info).mkdir(exist_ok=True)
    for name, data in files.items():
        write_atomically(site_packages / name, data)


def _same(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _link_files(root: Path) -> dict[str, bytes]:
    """Path, relative to site-packages, and content of every file that links the project at ``root``."""
    version, groups = _project_metadata(root)
    info = f"kvmatrix-{version}.dist-info"
    sections = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in sorted(groups[group].items())) for group in groups]
    files = {
        "kvmatrix.pth": f"{root}\n{_OVERLAY_HOOK}".encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: kvmatrix\nVersion: {version}\n".encode(),
        f"{info}/INSTALLER": b"kvmatrix\n",
        f"{info}/entry_points.txt": "\n".join(sections).encode(),
    }
    rows = [f"{name},sha256={_b64_sha256(data)},{len(data)}\n" for name, data in files.items()]
    return files | {f"{info}/RECORD": "".join([*rows, f"{info}/RECORD,,\n"]).encode()}


def _b64_sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _project_metadata(root: Path) -> tuple[str, dict[str, dict[str, str]]]:
    try:
        source = (root / "kvmatrix" / "__init__.py").read_text(encoding="utf-8")
        version = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
        groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as e:
        raise EnvironmentBuildError(f"kvmatrix in {root} cannot be linked: {e}") from e
    if version is None:
        raise EnvironmentBuildError(f"kvmatrix in {root} cannot be linked: kvmatrix/__init__.py has no __version__")
    return version[1], groups


def write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)
