"""Import finder that serves an arm's files instead of the installed ones.

One environment variable, ``KVMATRIX_OVERLAY``, names an overlay manifest. A process that starts with it set (the
environment's ``kvmatrix.pth`` calls :func:`install`), and every process it spawns, imports the listed modules from the
overlay; the installed package is only read. Both sides of every listed file are guarded by sha256, and the digest kept
for a row is of the very bytes that were compiled, so a stale byte-code cache cannot lie about what ran.

Standard library only: this module is imported at interpreter start.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

ENV_VAR = "KVMATRIX_OVERLAY"


class OverlayError(ImportError):
    """A listed file is not the one the overlay was made for."""


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class OverlayLoader(SourceFileLoader):
    """Load one file from source, never from a byte-code cache, and remember its digest."""

    def __init__(self, fullname: str, path: str, expected: str) -> None:
        super().__init__(fullname, path)
        self.expected = expected
        self.digest: str | None = None

    def path_stats(self, path: str) -> dict[str, float]:
        # Without a modification time importlib neither reads nor writes a cached .pyc.
        raise OSError("overlay modules are always compiled from source")

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if path == self.path:
            self.digest = sha256_bytes(data)
            if self.digest != self.expected:
                raise OverlayError(
                    f"{self.path} has sha256 {self.digest[:16]}, its overlay says {self.expected[:16]}:"
                    " delete the overlay folder and run again"
                )
        return data


class OverlayFinder(MetaPathFinder):
    """Find the modules that a manifest lists.

    ``manifest``: ``{"arm": str, "files": [{"module", "path", "source", "pre_sha256", "post_sha256"}]}`` where ``path``
    is relative to site-packages and ``source`` is the absolute path of the file to load.
    """

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.arm = str(manifest["arm"])
        if not isinstance(manifest["files"], list):
            raise TypeError("files must be a list")
        self.files: dict[str, dict[str, str]] = {f["module"]: f for f in manifest["files"]}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        entry = self.files.get(fullname)
        if entry is None:
            return None
        installed = self._check_preimage(entry, path)
        is_package = entry["path"].endswith("/__init__.py")
        loader = OverlayLoader(fullname, entry["source"], entry["post_sha256"])
        spec = spec_from_file_location(
            fullname,
            entry["source"],
            loader=loader,
            submodule_search_locations=[os.path.dirname(installed)] if is_package else None,
        )
        if spec is not None:
            spec.cached = None
        return spec

    @staticmethod
    def _check_preimage(entry: dict[str, str], path: Sequence[str] | None) -> str:
        """Path of the installed file that the overlay stands for."""
        # Relative to the parent package's folder: `x.py`, or `x/__init__.py` for a package.
        name = entry["path"].removesuffix("/__init__.py").rsplit("/", 1)[-1]
        name += "/__init__.py" if entry["path"].endswith("/__init__.py") else ""
        for folder in path or sys.path:
            installed = os.path.join(folder, name)
            if os.path.isfile(installed):
                with open(installed, "rb") as f:
                    digest = sha256_bytes(f.read())
                if digest != entry["pre_sha256"]:
                    raise OverlayError(
                        f"{entry['path']} is installed with sha256 {digest[:16]}, the overlay was made for"
                        f" {entry['pre_sha256'][:16]}: another version is installed, or the file was changed"
                    )
                return installed
        raise OverlayError(f"{entry['path']} is not installed: the overlay belongs to another vLLM version")


def install(manifest_path: str | None = None) -> OverlayFinder | None:
    """Install the finder for ``manifest_path`` (default: the environment variable's); None when there is none.

    Raises:
        OverlayError: the manifest cannot be read, or one of its modules was imported before.
    """
    manifest_path = manifest_path or os.environ.get(ENV_VAR)
    if not manifest_path:
        return None
    try:
        with open(manifest_path, encoding="utf-8") as f:
            finder = OverlayFinder(json.load(f))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise OverlayError(f"{ENV_VAR}={manifest_path} is not a readable overlay manifest: {e}") from e
    current = active()
    if current is not None:
        if current.files == finder.files:
            return current
        raise OverlayError(f"an overlay for arm {current.arm!r} is active in this process already")
    early = [m for m in finder.files if m in sys.modules]
    if early:
        raise OverlayError(f"{', '.join(early)} was imported before the overlay of arm {finder.arm!r}")
    sys.meta_path.insert(0, finder)
    return finder


def active() -> OverlayFinder | None:
    """The finder installed in this process, if any."""
    return next((f for f in sys.meta_path if isinstance(f, OverlayFinder)), None)


def imported_digests() -> dict[str, str]:
    """sha256 of the source of every overlay module that this process really imported: ``{module: hex}``."""
    finder = active()
    digests = {}
    for name in finder.files if finder else ():
        loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
        if isinstance(loader, OverlayLoader) and loader.digest:
            digests[name] = loader.digest
    return digests
