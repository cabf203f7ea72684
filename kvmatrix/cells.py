"""Axes -> validated, frozen cells -> one id for pytest, file names and table rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from kvmatrix import layers as letters
from kvmatrix import oracle
from kvmatrix.config import DType, Geometry, Level, Matrix, OffloadMode, Pin, is_within
from kvmatrix.errors import UsageError

STOCK = "stock"
ALL = "all"
"""In place of a pin's version: every pin of the device that is not extended."""
DEFAULTS = {"layers": "cf", "dtype": "float32", "offload": "eager"}
"""Axis values that an id leaves out."""
HIT_CLASSES = ("aligned", "safe-short", "safe-crossing", "corrupt")
"""From the best to the worst."""


class Cell(BaseModel):
    """pin x arm x backend x mode x chunk x block x dtype x offload, with the prompt geometry of its probes in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tier: Literal["llm", "scheduler"]
    pin: str
    device: str
    arm: str
    backend: str = ""
    mode: str = ""
    chunk: int
    block: int
    dtype: DType = "float32"
    offload: OffloadMode = "eager"
    prompt: int
    prefix: int = 0
    layers: str = "cf"
    new_tokens: int = 0
    """Tokens to generate, where more than ``llm.new_tokens``."""
    several: bool = False
    """Whether the device has room for several requests at once."""

    @property
    def id(self) -> str:
        """``<pin>-<device>-<tier or backend-mode>-c<chunk>-b<block>[-p<prompt>-d<prefix>][-non-defaults]-<arm>``.

        Prompt and device prefix are an LLM cell's.
        """
        llm = self.tier == "llm"
        kind = [self.backend, self.mode] if llm else ["scheduler"]
        sizes = [f"c{self.chunk}", f"b{self.block}", *([f"p{self.prompt}", f"d{self.prefix}"] if llm else [])]
        extra = [str(getattr(self, name)) for name, default in DEFAULTS.items() if getattr(self, name) != default]
        extra += [f"n{self.new_tokens}"] if self.new_tokens else []
        extra += ["several"] if self.several else []
        return "-".join([self.pin, self.device, *kind, *sizes, *extra, self.arm])

    @property
    def hit_class(self) -> str:
        """Class of the misaligned mixed hit, of :func:`kvmatrix.oracle.mixed_hit_class`; ``control`` without chunked layers.

        With two chunk sizes the worse one's: an answer is wrong as soon as one group lacks a block.
        """
        hit = (self.prompt - 1) // self.block * self.block - self.prefix
        classes = [oracle.mixed_hit_class(size, self.prefix, hit) for size in letters.chunk_sizes(self.layers, self.chunk)]
        return max(classes, key=HIT_CLASSES.index, default="control")

    @property
    def kv_groups(self) -> int:
        """KV groups that vLLM makes of ``layers``."""
        return letters.kv_groups(self.layers)


class Selection(BaseModel):
    """What the command line keeps of the matrix; an empty axis keeps all of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pins: tuple[str, ...] = ()
    device: str = ""
    arms: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    level: Level = "default"
    size: str = ""
    """Of the model that perf measures, where another than the level's."""

    @field_validator("pins", "arms", "patches", "backends", "modes", "chunks", "blocks", "dtypes", "offloads", "tiers")
    @classmethod
    def _once(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(dict.fromkeys(values))

    @property
    def narrows_llm(self) -> bool:
        """Whether an axis that only LLM cells have was given: the scheduler tier is then left out."""
        return bool(self.backends or self.modes or self.dtypes or self.offloads)


def check_selection(matrix: Matrix, selection: Selection) -> None:
    """Refuse values that no cell has.

    Raises:
        UsageError: names the first unknown value and what is known.
    """
    pins = selected_pins(matrix, selection)
    known: dict[str, tuple[Sequence[object], Sequence[object]]] = {
        "backend": (selection.backends, sorted({b for p in pins for b in p.backends})),
        "mode": (selection.modes, sorted(matrix.axes.mode)),
        "dtype": (selection.dtypes, sorted({*matrix.axes.dtype, *(d for g in matrix.geometries for d in g.dtypes)})),
        "offload": (selection.offloads, sorted({*matrix.axes.offload, *(o for g in matrix.geometries for o in g.offloads)})),
        "chunk": (selection.chunks, sorted({g.chunk for g in matrix.geometries} | {matrix.scheduler.chunk})),
        "block": (selection.blocks, sorted({g.block for g in matrix.geometries} | {matrix.scheduler.block})),
        "tier": (selection.tiers, ["llm", "scheduler"]),
    }
    for axis, (asked, values) in known.items():
        for value in asked:
            if value not in values:
                raise UsageError(f"unknown {axis} {value!r}: known are {', '.join(map(str, values))}")


def selected_pins(matrix: Matrix, selection: Selection) -> list[Pin]:
    """The pins of a selection: the default one, the named ones, or with ``all`` every one that is not extended.

    Raises:
        UsageError, DeviceError: see :meth:`kvmatrix.config.Matrix.pin`.
    """
    device = selection.device or matrix.defaults.device
    versions = selection.pins or (matrix.defaults.pin,)
    if ALL in versions:
        every = tuple(p.version for p in matrix.pins if p.device == device and not p.extended)
        versions = tuple(dict.fromkeys([*every, *(v for v in versions if v != ALL)]))
    return [matrix.pin(v, device) for v in versions]


def plan_cells(matrix: Matrix, selection: Selection, arms: Sequence[str]) -> list[Cell]:
    """The cells of a run, stock first within each geometry.

    Raises:
        UsageError: an unknown axis value, or a selection that leaves no cell.
    """
    check_selection(matrix, selection)
    unknown = [a for a in selection.arms if a not in arms]
    if unknown:
        raise UsageError(f"unknown arm {unknown[0]!r}: this run has {', '.join(arms)}")
    chosen = [a for a in arms if not selection.arms or a in selection.arms]
    cells = []
    for pin in selected_pins(matrix, selection):
        cells += list(_scheduler_cells(matrix, selection, pin, chosen))
        cells += list(_llm_cells(matrix, selection, pin, chosen))
    if not cells:
        more = "" if selection.level == "full" else f" in the {selection.level} selection: --full has all geometries"
        raise UsageError(f"the selection leaves no cell: no geometry of matrix.toml has these values together{more}")
    return cells


def _kept(selection: Selection, tier: str, chunk: int, block: int) -> bool:
    return (
        (not selection.tiers or tier in selection.tiers)
        and (not selection.chunks or chunk in selection.chunks)
        and (not selection.blocks or block in selection.blocks)
    )


def _scheduler_cells(matrix: Matrix, selection: Selection, pin: Pin, arms: Sequence[str]) -> Iterator[Cell]:
    s = matrix.scheduler
    if selection.narrows_llm or not _kept(selection, "scheduler", s.chunk, s.block):
        return
    for arm in arms:
        yield Cell(
            tier="scheduler",
            pin=pin.version,
            device=pin.device,
            arm=arm,
            chunk=s.chunk,
            block=s.block,
            prompt=max(case.prompt for case in s.cases),
        )


def _llm_cells(matrix: Matrix, selection: Selection, pin: Pin, arms: Sequence[str]) -> Iterator[Cell]:
    axes = matrix.axes
    for geometry in matrix.geometries:
        if not _kept(selection, "llm", geometry.chunk, geometry.block):
            continue
        if not is_within(geometry.level, selection.level):
            continue
        modes = [m for m in axes.mode if not geometry.modes or m in geometry.modes]
        for backend, mode, dtype, offload, arm in itertools.product(
            _backends(geometry, selection, pin), modes, geometry.dtypes or axes.dtype, geometry.offloads or axes.offload, arms
        ):
            chosen = ((selection.modes, mode), (selection.dtypes, dtype), (selection.offloads, offload))
            if any(only and value not in only for only, value in chosen):
                continue
            yield Cell(
                tier="llm",
                pin=pin.version,
                device=pin.device,
                arm=arm,
                backend=backend,
                mode=mode,
                chunk=geometry.chunk,
                block=geometry.block,
                dtype=dtype,
                offload=offload,
                prompt=geometry.prompt,
                prefix=geometry.prefix,
                layers=geometry.layers or matrix.llm.layers,
                new_tokens=geometry.new_tokens,
                several=geometry.several,
            )


def _backends(geometry: Geometry, selection: Selection, pin: Pin) -> list[str]:
    return [b for b in geometry.backends if b in pin.backends and (not selection.backends or b in selection.backends)]
