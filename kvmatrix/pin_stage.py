"""A copy of the project's small files to change and to run, and how its changes get back: all of them, or none."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvmatrix.config import Project
from kvmatrix.errors import UsageError

COPIED = ("matrix.toml", "pyproject.toml", "conformance", "envs", "patches")
CHANGED = ("matrix.toml", "conformance/expectations/*.toml", "envs/*.lock", "patches/*/patch.toml", "patches/*/*.patch")
"""What may come back from the copy."""


class Stage(Project):
    """The copy. Environments, checkpoints and runs are the project's own."""

    origin: Project
    before: dict[str, bytes]
    """What the copied files held: path relative to the root, and content."""

    @property
    def home(self) -> Path:
        return self.origin.home

    def reread(self) -> Stage:
        """The same folder with its matrix read again."""
        return Stage(root=self.root, origin=self.origin, before=self.before)

    def restore(self, folder: str) -> None:
        """Take back what was changed in a folder of the copy, given relative to the root."""
        for name in self.changes():
            if name.startswith(f"{folder}/"):
                if name in self.before:
                    (self.root / name).write_bytes(self.before[name])
                else:
                    (self.root / name).unlink()

    def changes(self) -> dict[str, bytes]:
        """What was changed in the copy: path relative to the root, and its new content."""
        return {name: data for name, data in _contents(self.root).items() if self.before.get(name) != data}


@contextmanager
def staged(project: Project) -> Iterator[Stage]:
    """A copy in the project's home, gone afterwards. One at a time: what an earlier one left when it was killed is removed.

    Raises:
        UsageError: another process has one.
    """
    folder = project.home / "pin-add"
    project.home.mkdir(parents=True, exist_ok=True)
    with (project.home / "pin-add.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError("another `kvmatrix pin add` is running: wait for its end") from None
        try:
            if folder.exists():
                shutil.rmtree(folder)
            yield _copy(project, folder / "root")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _copy(project: Project, root: Path) -> Stage:
    root.mkdir(parents=True)
    for name in COPIED:
        source = project.root / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copyfile(source, root / name)
    # Environments and their processes import this checkout's code through the root that they are given.
    (root / "kvmatrix").symlink_to(project.root / "kvmatrix")
    return Stage(root=root, origin=project, before=_contents(root))


def _contents(root: Path) -> dict[str, bytes]:
    files = [path for pattern in CHANGED for path in sorted(root.glob(pattern))]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@contextmanager
def bring_back(stage: Stage) -> Iterator[list[str]]:
    """Write the stage's changes to the project; yields their paths. An exception in the body takes all of them back.

    New contents and copies of the old ones are written first: what follows needs no space on the disk.

    Raises:
        UsageError: one of the files was changed in the project since the copy was made.
    """
    root, changes, before = stage.origin.root, stage.changes(), stage.before
    with ExitStack() as scratch, ExitStack() as undo:
        for name, data in changes.items():
            if _read(root / name) != before.get(name):
                raise UsageError(f"{name} was changed meanwhile: nothing was written, run again")
            for suffix, content in ((".new", data), (".old", before.get(name))):
                if content is not None:
                    scratch.callback(_beside(root / name, suffix).unlink, missing_ok=True)
                    _beside(root / name, suffix).parent.mkdir(parents=True, exist_ok=True)
                    _beside(root / name, suffix).write_bytes(content)
        for name in changes:
            undo.callback(_put_back, root / name, existed=name in before)
            os.replace(_beside(root / name, ".new"), root / name)
        yield list(changes)
        undo.pop_all()


def _put_back(path: Path, existed: bool) -> None:
    if existed:
        os.replace(_beside(path, ".old"), path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{suffix}")


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
