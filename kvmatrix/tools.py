"""Packages that a cell's process needs and no pin's environment has: links to those beside kvmatrix, in a folder of their own.

An environment is only read, and the whole of kvmatrix's own site-packages must not be on the path of what is under test.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

PACKAGES = ("hypothesis", "sortedcontainers")
"""Hypothesis and what it needs; pure Python, so that another interpreter can import them."""
_BESIDE = ("_hypothesis_globals.py", "_hypothesis_ftz_detector.py")
"""Hypothesis's modules beside its package."""


def provide(home: Path) -> Path:
    """The folder with the links; made where it is not there, and the same for all runs with these releases."""
    versions = "-".join(f"{name}-{importlib.metadata.version(name)}" for name in PACKAGES)
    folder = home / "tools" / versions
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        for source in (package, *(package.parent / beside for beside in _BESIDE)):
            if source.exists():
                _link(folder / source.name, source)
    return folder


def _link(link: Path, target: Path) -> None:
    """Make ``link`` point to ``target``; another process may do the same at once."""
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    with contextlib.suppress(FileExistsError):
        link.symlink_to(target)
