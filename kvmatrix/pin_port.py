"""The patches of ``patches/`` on a new pin: which carry over, which need a person."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version

from kvmatrix.arms import PinPatch, load_patch, read_patch_text
from kvmatrix.config import Pin, Project
from kvmatrix.errors import PatchError, one_line
from kvmatrix.patch_files import read_all, reverse_applies
from kvmatrix.patch_port import AROUND, PortConflictError, Refreshed, refresh_patch
from kvmatrix.patch_tools import check_patch

PortStatus = Literal["applies as is", "ported", "not certain", "already applied", "does not apply", "there already", "fails"]
CARRIED = ("applies as is", "ported", "there already")
"""Statuses with which the pin has the patch."""


@dataclass(frozen=True)
class Ported:
    """How one patch fared on a new pin."""

    name: str
    status: PortStatus
    lines: tuple[str, ...]
    """Why, or what to look at."""

    @property
    def carried(self) -> bool:
        return self.status in CARRIED


def distance(version: str, other: str) -> tuple[int, ...]:
    """How far apart two releases are, to be compared; of two as near, the newer one comes first."""
    a, b = (([*Version(v).release, 0, 0])[:3] for v in (version, other))
    return (*(abs(x - y) for x, y in zip(a, b, strict=True)), *(-y for y in b))


def port_all(project: Project, pin: Pin, site: Path, site_of: Callable[[Pin], Path]) -> list[Ported]:
    """Port every patch of the project to ``pin``, whose Python files lie in ``site``, from its nearest pins.

    What is certain is written into the patch's folder. ``site_of`` gives another pin's files.

    Raises:
        KvmatrixError: a patch is damaged, or another pin's files cannot be had.
    """
    folders = sorted(p.parent for p in project.patches.glob("*/patch.toml"))
    return [_port(project, folder, pin, site, site_of) for folder in folders]


def _port(project: Project, folder: Path, pin: Pin, site: Path, site_of: Callable[[Pin], Path]) -> Ported:
    patch, name = load_patch(folder), folder.name
    if pin.version in patch.pins:
        (check,) = [c for c in check_patch(project.patches, name, {pin.version: site}) if c.pin == pin.version]
        return Ported(name, "there already" if check.status == "ok" else "does not apply", (check.line,))
    tried = []
    for source in _sources(pin, [p for p in project.matrix.pins if p.version in patch.pins]):
        if _is_in(folder, patch.pins[source.version], site):
            return Ported(name, "already applied", (f"vLLM {pin.version} has the change of {source.version} already",))
        tried.append(_port_from(folder, source, pin, site_of(source), site))
        if tried[-1].carried:
            return tried[-1]
    return tried[0] if tried else Ported(name, "does not apply", ("it has no pin of matrix.toml to be ported from",))


def _sources(pin: Pin, known: Sequence[Pin]) -> list[Pin]:
    """The next older and the next newer of the ``known`` pins, the nearer one first."""
    own = Version(pin.version)
    sides = [[p for p in known if Version(p.version) < own], [p for p in known if Version(p.version) > own]]
    nearest = [min(side, key=lambda p: (distance(pin.version, p.version), p.device != pin.device)) for side in sides if side]
    return sorted(nearest, key=lambda p: distance(pin.version, p.version))


def _port_from(folder: Path, source: Pin, pin: Pin, source_site: Path, site: Path) -> Ported:
    name = folder.name
    with tempfile.TemporaryDirectory(prefix="kvmatrix-port-") as scratch:
        # In a copy: what is not certain must not be written.
        patches = Path(scratch) / "patches"
        shutil.copytree(folder, patches / name)
        try:
            done = refresh_patch(
                patches, name, source.version, pin.version, source_site, site, scratch=Path(scratch) / "conflicts"
            )
        except PortConflictError as e:
            return Ported(name, "does not apply", _conflict_lines(e, name, source.version, pin.version))
        except PatchError as e:
            return Ported(name, "does not apply", (one_line(e),))
        ported = _judged(done, tried=pin.device == "host")
        if ported.carried:
            shutil.copytree(patches / name, folder, dirs_exist_ok=True)
    return ported


def _is_in(folder: Path, pin_patch: PinPatch, site: Path) -> bool:
    paths = [f.path for f in pin_patch.files]
    if not all((site / path).is_file() for path in paths):
        return False
    return reverse_applies(read_patch_text(folder / pin_patch.patch, set(paths)), read_all(site, paths))


def _conflict_lines(error: PortConflictError, name: str, source: str, target: str) -> tuple[str, ...]:
    conflicts = [h.line for h in error.hunks if h.state == "conflict"]
    hint = f"to port it by hand: `kvmatrix patch refresh {name} --from {source} --to {target}`"
    return (*(conflicts or [f"conflicts with vLLM {target}"]), hint)


def _judged(done: Refreshed, tried: bool) -> Ported:
    """A hunk that only moved is no doubt: git's apply and a three-way merge of the whole file put it at the same place.

    That a function around a hunk differs is none where the patch is ``tried`` afterwards: it is left out where it fails.
    """
    moved = {h.line for h in done.hunks if h.state == "moved"}
    doubts = [u for u in done.uncertain if u not in moved]
    if tried and doubts and all(AROUND in doubt for doubt in doubts):
        return Ported(done.name, "ported", (f"from {done.from_pin}; the run decides", *doubts))
    if doubts:
        return Ported(done.name, "not certain", (f"from {done.from_pin}; not written", *doubts))
    how = f"from {done.from_pin}" + (f", {len(moved)} hunks moved" if moved else "")
    return Ported(done.name, "applies as is" if done.method == "apply" else "ported", (how,))
