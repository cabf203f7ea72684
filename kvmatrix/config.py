"""``matrix.toml``: what is qualified, read into frozen, validated models. Unknown keys are refused."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from kvmatrix import layers as letters
from kvmatrix.errors import DeviceError, UsageError

DeviceKind = Literal["host", "cuda", "rocm"]
Mode = Literal["eager", "compiled"]
DType = Literal["float32", "bfloat16"]
Level = Literal["quick", "default", "full"]
LEVELS = get_args(Level)
"""From the smallest selection to the one that has all."""


def is_within(level: Level, selection: Level) -> bool:
    """Whether what is of ``level`` belongs to the selection."""
    return LEVELS.index(level) <= LEVELS.index(selection)


ProbeName = Literal[
    "cold",
    "device-hit",
    "corrupted-load",
    "pure-cpu-hit",
    "mixed-aligned",
    "mixed-misaligned",
    "follow-up",
    "mixed-head-gone",
    "batch",
    "abort-loading",
    "preempted-loading",
]
OffloadMode = Literal["eager", "lazy", "disk"]
"""``lazy``: a block is stored only shortly before the device evicts it. ``disk``: at once, to the connector's disk tier."""
Residency = Literal["all", "tail-gone", "head-gone", "one-hole", "random", "every-subset", "evicted-pinned"]
WorkloadName = Literal["cold", "device-hit", "pure-cpu-hit", "mixed-aligned", "mixed-misaligned", "multi-turn", "no-offload"]


STATEFUL_BLOCK = 4
"""Tokens of a block in the stateful tests."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mixed(Strict):
    """A build that nobody ships: a release's Python files over the extensions of another release (see ``kvmatrix.mixed``)."""

    distribution: str
    """Distribution whose wheel of the pin's version gives the Python files."""
    wheel_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of that wheel's file."""
    base: str
    """Version of the pin, of the same device, whose environment runs it and whose extensions it uses."""


class Pin(Strict):
    """One vLLM release on one device kind."""

    version: str
    device: DeviceKind
    distribution: str
    """Name of the distribution that installs ``vllm`` for this device; of a mixed build, its base's."""
    lock: str
    """Requirements lock, relative to the project's root."""
    torch: str
    backends: tuple[str, ...]
    min_new_tokens: PositiveInt = 1
    """Tokens that a request must generate before its blocks are stored."""
    without_offload: dict[OffloadMode, str] = {}
    """Offload modes that this release cannot be run in, and why: their cells are UNSUPPORTED."""
    extended: bool = False
    """Run only when it is named: its environment has a torch of its own, of 8 GB or so where that is a CUDA build."""
    mixed: Mixed | None = None
    """Set where the release has no build for this device: what it is put together from. Lock and torch are its base's."""

    @property
    def base(self) -> Pin:
        """The pin whose environment runs this one: itself, or of a mixed build its base, as far as an environment goes."""
        return self.model_copy(update={"version": self.mixed.base, "mixed": None}) if self.mixed else self


class Geometry(Strict):
    """What one LLM cell is asked; all figures in tokens."""

    backends: tuple[str, ...]
    block: PositiveInt
    chunk: PositiveInt
    prompt: PositiveInt
    prefix: PositiveInt
    layers: str = Field(default="", pattern=f"^{letters.PATTERN}?$")
    """Letters of :mod:`kvmatrix.layers`, ``chunk`` is their size (a window's where they are ``s``); empty: ``llm.layers``."""
    new_tokens: int = Field(default=0, ge=0)
    """Tokens to generate, where more than ``llm.new_tokens``."""
    modes: tuple[Mode, ...] = ()
    """Only these of ``axes.mode``; empty: all."""
    dtypes: tuple[DType, ...] = ()
    """In place of ``axes.dtype``; empty: those."""
    offloads: tuple[OffloadMode, ...] = ()
    """In place of ``axes.offload``; empty: those."""
    several: bool = False
    """The device has room for several requests at once, and the probes that need that are run, too."""
    level: Level = "default"
    """The smallest selection that has it: ``quick`` is part of ``default``, and that of ``full``."""

    @model_validator(mode="after")
    def _consistent(self) -> Geometry:
        # A chunk may be no multiple of the block: it is for vLLM to refuse that.
        if self.prefix % self.block:
            raise ValueError(f"prefix {self.prefix} must be a multiple of block {self.block}")
        sizes = letters.chunk_sizes(self.layers or "c", self.chunk)
        if any(size > self.block for size in sizes) and not any(self.prefix % size for size in sizes):
            raise ValueError(f"prefix {self.prefix} ends on a boundary of chunk {max(sizes)}: it is not misaligned")
        if self.prompt <= self.prefix + self.block:
            raise ValueError(f"prompt {self.prompt} leaves nothing for the CPU tier behind prefix {self.prefix}")
        return self


AxisValue = str | int | bool


class LeftOut(Strict):
    """Pairs of axis values that the default selection need not have: each value of one axis with each of the other's."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, tuple[AxisValue, ...]]

    why: str

    @model_validator(mode="after")
    def _two_axes(self) -> LeftOut:
        if len(self.axes) != 2:
            raise ValueError(f"a pair has two axes, not {len(self.axes)}")
        return self

    @property
    def axes(self) -> dict[str, tuple[AxisValue, ...]]:
        return self.__pydantic_extra__


class Pairs(Strict):
    """What the default selection of LLM cells covers: every pair of these axis values, but for those that are left out."""

    values: dict[str, tuple[AxisValue, ...]]
    without: tuple[LeftOut, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> Pairs:
        for entry in self.without:
            for axis, values in entry.axes.items():
                odd = [v for v in values if v not in self.values.get(axis, ())]
                if odd:
                    raise ValueError(f"pairs.without names {axis} {odd[0]!r}, which pairs.values has not")
        return self


class Axes(Strict):
    mode: tuple[Mode, ...]
    dtype: tuple[DType, ...]
    offload: tuple[OffloadMode, ...]


class Llm(Strict):
    layers: str = Field(pattern="^[cf]+$")
    vocab_size: PositiveInt
    new_tokens: PositiveInt
    seed: int
    cpu_bytes: PositiveInt
    probes: tuple[ProbeName, ...]


class LookupCases(Strict):
    """Lookups of one prompt; figures in tokens."""

    prompt: PositiveInt
    prefixes: tuple[int, ...]


class Shape(Strict):
    """Groups of a sweep: one full-attention group and one for each of ``chunks`` and ``windows``; sizes in tokens."""

    block: PositiveInt
    hash_block: PositiveInt
    """Tokens that a block hash covers, a divisor of ``block``."""
    chunks: tuple[PositiveInt, ...] = ()
    """Without ``windows``, empty: a model with full attention alone."""
    windows: tuple[int, ...] = ()
    """Tokens that a token of a sliding-window group sees, itself included."""
    periods: PositiveInt
    """The longest prompt, in largest chunks or windows (these in whole blocks); in blocks where there is neither."""
    full_at: int = Field(default=0, ge=0)
    """Index of the full-attention group among the groups; the others keep their order around it, chunked ones first."""
    lazy: bool = False
    """Blocks are stored only shortly before the device evicts them (``lazy_offload``)."""
    edges: bool = False
    """Only prompts that end one token before a block's boundary, on it, or one behind it; otherwise every length."""

    @model_validator(mode="after")
    def _consistent(self) -> Shape:
        if self.block % self.hash_block or any(c % self.block for c in self.chunks):
            raise ValueError(f"hash_block {self.hash_block} must divide block {self.block}, and block each of {self.chunks}")
        if self.full_at > (others := len(self.chunks) + len(self.windows)):
            raise ValueError(f"full_at {self.full_at} is past the last of {others + 1} groups")
        if any(w < 2 for w in self.windows):
            raise ValueError(f"each of windows {self.windows} must reach past the token itself, to two tokens at least")
        return self


class Sweep(Strict):
    """Every mixed hit of some shapes, with some kinds of residency."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    level: Level = "default"
    """The smallest selection that has it."""
    residencies: tuple[Residency, ...] = ("all", "tail-gone", "head-gone", "one-hole", "random")
    shapes: tuple[Shape, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Sweep:
        if len({bool(s.chunks) for s in self.shapes}) > 1:
            raise ValueError(f"sweep {self.name}: shapes with chunks and without, which are controls, must not be summed up")
        return self

    @property
    def is_control(self) -> bool:
        """Whether no group is chunked-local: there stock is right, and no arm may change anything."""
        return not self.shapes[0].chunks


class StatefulShape(Strict):
    """Groups of a stateful test: one full-attention group and one for each of ``chunks``, in tokens; a block has four."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    chunks: tuple[PositiveInt, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> StatefulShape:
        if any(c % STATEFUL_BLOCK for c in self.chunks):
            raise ValueError(f"each of chunks {self.chunks} must be a multiple of block {STATEFUL_BLOCK}")
        return self


class Stateful(Strict):
    """Random programs for vLLM's scheduler, in both offload modes on each shape."""

    programs: PositiveInt
    quick_programs: PositiveInt
    """In place of ``programs`` in the quick selection."""
    steps: PositiveInt
    """Rules of a program, at most."""
    seed: int
    shapes: tuple[StatefulShape, ...] = Field(min_length=1)


class Scheduler(Strict):
    block: PositiveInt
    chunk: PositiveInt
    cases: tuple[LookupCases, ...]
    protocol: tuple[Shape, ...] = ()
    """Shapes on which the calls around a lookup are tried, each over every small geometry."""
    classes: tuple[Shape, ...] = ()
    """Shapes of one chunk size each, over whose geometries each class of a mixed hit is asked by itself."""
    sweeps: tuple[Sweep, ...] = ()
    stateful: Stateful | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Scheduler:
        for case in self.cases:
            if any(p % self.block or p >= case.prompt for p in case.prefixes):
                raise ValueError(f"prefixes must be multiples of block {self.block} below prompt {case.prompt}")
        if self.chunk % self.block:
            raise ValueError(f"chunk {self.chunk} must be a multiple of block {self.block}")
        if any(len(set(shape.chunks)) != 1 or shape.windows for shape in self.classes):
            raise ValueError("classes: the class of a hit is told by one chunk size, each shape must have one and no window")
        if len({s.name for s in self.sweeps}) != len(self.sweeps):
            raise ValueError("two sweeps have the same name")
        if self.stateful and len({s.name for s in self.stateful.shapes}) != len(self.stateful.shapes):
            raise ValueError("two shapes of the stateful tests have the same name")
        return self


class Tolerances(Strict):
    """In nats, over the whole vocabulary."""

    max_logprob_error: float = Field(gt=0)
    max_reference_error: float = Field(gt=0)
    reference_ties: bool = False
    """Whether another arithmetic may choose another token where no logprob differs by more than ``max_reference_error``; what
    follows such a token is not compared."""


class Budgets(Strict):
    cell_timeout_s: float = Field(gt=0)
    preload_timeout_s: float = Field(gt=0)
    install_timeout_s: float = Field(gt=0)
    upstream_test_timeout_s: float = Field(gt=0)
    """One test of vLLM's own."""
    upstream_timeout_s: float = Field(gt=0)
    """All of them with one arm."""
    jobs: PositiveInt


class LookupPerf(Strict):
    """Lookup calls to time, in tokens: one prompt with each of the device prefixes."""

    level: Level = "default"
    block: PositiveInt
    chunk: PositiveInt
    groups: int = Field(ge=1, le=4)
    """KV groups: one of full attention, the others chunked-local."""
    prompt: PositiveInt
    prefixes: tuple[NonNegativeInt, ...] = (0,)
    hit: bool = True
    """Whether the CPU tier holds the prompt; otherwise it is empty."""

    @model_validator(mode="after")
    def _reachable(self) -> LookupPerf:
        for prefix in self.prefixes:
            if prefix % self.block or prefix + self.block >= self.prompt:
                raise ValueError(
                    f"prefix {prefix} must be whole blocks of {self.block}, and leave one before prompt {self.prompt}"
                )
        return self


class PerfSize(Strict):
    """A model and the requests that it is asked, in tokens."""

    block: PositiveInt
    chunk: PositiveInt
    prompt: PositiveInt
    layers: str = Field(pattern="^[cf]+$")
    hidden_size: PositiveInt
    new_tokens: int = Field(ge=2)
    requests: PositiveInt
    """Prompts of a block and arm, each of them unique."""
    turns: PositiveInt
    """Requests of the conversations of a block and arm."""

    @property
    def servable_tokens(self) -> int:
        """Of the prompt, those that a cache can serve: whole blocks, without the last token, which is always computed."""
        return (self.prompt - 1) // self.block * self.block

    @model_validator(mode="after")
    def _consistent(self) -> PerfSize:
        if self.chunk % self.block or self.chunk <= self.block or self.prompt <= self.chunk + self.block:
            raise ValueError(
                f"chunk {self.chunk} must be several blocks of {self.block}, and prompt {self.prompt} reach past it by one"
            )
        return self


class Perf(Strict):
    blocks: int = Field(ge=2)
    """Of requests. Fewer than 7 give no verdict (:mod:`kvmatrix.stats`)."""
    lookup_blocks: int = Field(ge=2)
    """Of lookups, of which a block is cheap: what differs from process to process is most of the noise."""
    size: str
    backend: str
    mode: Mode
    workloads: tuple[WorkloadName, ...]
    lookup_resolution: float = Field(gt=0, lt=1)
    generate_resolution: float = Field(gt=0, lt=1)
    sizes: dict[str, PerfSize]
    lookups: tuple[LookupPerf, ...]

    @model_validator(mode="after")
    def _known_size(self) -> Perf:
        if self.size not in self.sizes:
            raise ValueError(f"perf.size {self.size!r} is none of perf.sizes: known are {', '.join(self.sizes)}")
        return self


class Defaults(Strict):
    pin: str
    device: DeviceKind
    patches: tuple[str, ...]


class Matrix(Strict):
    """The whole of ``matrix.toml``."""

    schema_version: Literal[1] = Field(alias="schema")
    defaults: Defaults
    pins: tuple[Pin, ...]
    geometries: tuple[Geometry, ...]
    pairs: Pairs
    axes: Axes
    llm: Llm
    scheduler: Scheduler
    tolerances: dict[DType, Tolerances]
    budgets: Budgets
    perf: Perf

    @model_validator(mode="after")
    def _pins_are_unique(self) -> Matrix:
        keys = [(p.version, p.device) for p in self.pins]
        if len(set(keys)) != len(keys):
            raise ValueError("two pins have the same version and device")
        return self

    @model_validator(mode="after")
    def _every_dtype_has_tolerances(self) -> Matrix:
        used = {*self.axes.dtype, *(d for g in self.geometries for d in g.dtypes)}
        if missing := sorted(used - set(self.tolerances)):
            raise ValueError(f"tolerances have none for dtype {missing[0]}")
        return self

    @model_validator(mode="after")
    def _no_default_is_extended(self) -> Matrix:
        if any(p.extended and (p.version, p.device) == (self.defaults.pin, self.defaults.device) for p in self.pins):
            raise ValueError(f"default pin {self.defaults.pin} is extended: such a pin runs only when it is named")
        return self

    @model_validator(mode="after")
    def _mixed_pins_have_their_base(self) -> Matrix:
        for pin in (p for p in self.pins if p.mixed):
            base = next((p for p in self.pins if (p.version, p.device) == (pin.base.version, pin.device)), None)
            if base is None or base.mixed:
                raise ValueError(f"mixed pin {pin.version}: its base {pin.base.version} is no pin of {pin.device} of its own")
            for name in ("lock", "distribution", "torch"):
                if getattr(pin, name) != getattr(base, name):
                    raise ValueError(f"mixed pin {pin.version}: its {name} must be the one of its base {base.version}")
        return self

    @model_validator(mode="after")
    def _geometries_make_distinct_cells(self) -> Matrix:
        known = {b for p in self.pins for b in p.backends}
        seen = set()
        for geometry in self.geometries:
            for backend in geometry.backends:
                if backend not in known:
                    raise ValueError(f"geometry names backend {backend!r}, no pin has it: known are {', '.join(sorted(known))}")
                what = geometry.model_dump(exclude={"backends", "modes", "dtypes", "offloads", "level"})
                for key in self._cells_of(geometry, backend, tuple(what.values())):
                    if key in seen:
                        told = ", ".join(f"{name} {value}" for name, value in what.items() if value)
                        raise ValueError(f"two geometries have backend {backend}, {told}")
                    seen.add(key)
        unused = known - {str(key[0]) for key in seen}
        if unused:
            raise ValueError(f"backend {min(unused)} of a pin has no geometry: its cells would silently be missing")
        if self.perf.backend not in known:
            raise ValueError(f"perf.backend {self.perf.backend!r} is of no pin: known are {', '.join(sorted(known))}")
        return self

    def _cells_of(self, geometry: Geometry, backend: str, what: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
        """What tells the cells of a geometry apart."""
        axes = self.axes
        modes, dtypes = geometry.modes or axes.mode, geometry.dtypes or axes.dtype
        return ((backend, *own, *what) for own in itertools.product(modes, dtypes, geometry.offloads or axes.offload))

    def at_level(self, level: Level) -> Matrix:
        """This matrix with those sweeps and programs only that the selection ``level`` has."""
        stateful = self.scheduler.stateful
        if stateful and level == "quick":
            stateful = stateful.model_copy(update={"programs": stateful.quick_programs})
        sweeps = tuple(s for s in self.scheduler.sweeps if is_within(s.level, level))
        scheduler = self.scheduler.model_copy(update={"sweeps": sweeps, "stateful": stateful})
        return self.model_copy(update={"scheduler": scheduler})

    def pin(self, version: str, device: str) -> Pin:
        """The pin of ``version`` on ``device``.

        Raises:
            UsageError: there is none, or no such kind of device.
            DeviceError: the kind of device has no pin at all.
        """
        kinds = get_args(DeviceKind)
        if device not in kinds:
            raise UsageError(f"unknown device {device!r}: known are {', '.join(kinds)}")
        if device not in {p.device for p in self.pins}:
            raise DeviceError(f"device {device!r} has no pin in matrix.toml yet: run with --device host")
        for pin in self.pins:
            if (pin.version, pin.device) == (version, device):
                return pin
        known = ", ".join(f"{p.version} ({p.device})" for p in self.pins)
        raise UsageError(f"unknown pin {version!r} on device {device!r}: matrix.toml has {known}")


class Project(BaseModel):
    """The project's root and the folders under it that the machinery uses."""

    model_config = ConfigDict(frozen=True)
    root: Path

    @cached_property
    def matrix(self) -> Matrix:
        return load_matrix(self.root / "matrix.toml")

    @property
    def home(self) -> Path:
        """Where environments, checkpoints, overlays and runs are kept: ``KVMATRIX_HOME`` or ``.kvmatrix`` in the root."""
        override = os.environ.get("KVMATRIX_HOME")
        return Path(override).resolve() if override else self.root / ".kvmatrix"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def results(self) -> Path:
        return self.root / "results"


def load_matrix(path: Path) -> Matrix:
    """Read and validate a matrix file.

    Raises:
        UsageError: it is missing, is not TOML, has an unknown key or a value that does not validate.
    """
    try:
        return Matrix.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UsageError(f"{path.name} not found in {path.parent}: run in the project's root") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path.name} is not valid TOML: {e}") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        more = f" (and {e.error_count() - 1} more)" if e.error_count() > 1 else ""
        raise UsageError(f"{path.name}: {where}: {first['msg']}{more}") from e


def find_project(start: Path | None = None) -> Project:
    """The project around ``start`` (default: the working directory), or ``KVMATRIX_ROOT``.

    Raises:
        UsageError: no folder upward has a ``matrix.toml``.
    """
    override = os.environ.get("KVMATRIX_ROOT")
    origin = Path(override) if override else (start or Path.cwd())
    for folder in (origin.resolve(), *origin.resolve().parents):
        if (folder / "matrix.toml").is_file():
            return Project(root=folder)
    raise UsageError(f"no matrix.toml in {origin} or above: run in the project's root")
