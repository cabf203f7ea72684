"""How much reuse a lookup keeps, and whether any hit is unsound, over every small geometry and several kinds of residency.

A geometry is a prompt and a block-aligned device prefix (none, too) behind which at least one block could be served. For each
shape all of them, up to a number of its largest chunk, are asked of vLLM's real scheduler and judged by :mod:`kvmatrix.oracle`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from kvmatrix import oracle
from kvmatrix.scheduler_harness import SchedulerUnderTest

Residency = Literal["all", "tail-gone", "head-gone", "one-hole", "random"]
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)
VARIANTS = 6
"""Contents of the CPU tier per prompt, for each kind of residency but ``all``, which has one."""
GONE = 0.2
"""Share of blocks that are gone with ``random``."""

Resident = list[list[bool]]
"""``[group][block of the prompt]``: does the CPU tier hold it."""


@dataclass
class Totals:
    """Sums over the geometries of a sweep; figures in tokens where nothing else is said."""

    geometries: int = 0
    unsound: int = 0
    """Geometries whose hit leaves attention without KV."""
    first_unsound: str = ""
    ideal: int = 0
    """External tokens that could soundly be served."""
    kept: int = 0
    """External tokens that were soundly served."""
    ideal_resident: int = 0
    """Of ``ideal``, where the CPU tier also holds the blocks from the chunk boundary to the prefix's end."""
    kept_resident: int = 0
    lost_aligned: int = 0
    """Geometries with an aligned prefix that got another hit than the ideal."""
    first_lost_aligned: str = ""
    leaked: int = 0
    """Geometries after which a CPU block stayed pinned."""
    contract: int = 0
    """Geometries whose two answers contradict each other."""
    seconds: float = 0.0


def residencies(kind: Residency, groups: int, blocks: int, seed: int) -> Iterator[Resident]:
    """Contents of the CPU tier for a prompt of ``blocks`` whole blocks; group 0 is full attention, the others chunked-local.

    Blocks are gone from all groups, from the chunked ones only, and from the full one only: once one block (or one hole), once
    half of them (or another hole).
    """
    full = [[True] * blocks for _ in range(groups)]
    if kind == "all":
        yield full
        return
    rng = random.Random(f"{kind}-{groups}-{blocks}-{seed}")
    if kind == "random":
        for _ in range(VARIANTS):
            yield [[rng.random() >= GONE for _ in range(blocks)] for _ in range(groups)]
        return
    for hit in (range(groups), range(1, groups), range(1)):
        for count in (1, blocks // 2):
            gone = _gone(kind, blocks, count, rng)
            yield [[not (g in hit and i in gone) for i in range(blocks)] for g in range(groups)]


def _gone(kind: Residency, blocks: int, count: int, rng: random.Random) -> range:
    if kind == "tail-gone":
        return range(blocks - count, blocks)
    if kind == "head-gone":
        return range(count)
    hole = rng.randrange(blocks) if blocks else 0
    return range(hole, hole + 1)


def sweep(shapes: Sequence[dict[str, Any]], kind: Residency) -> dict[str, Any]:
    """All geometries of all ``shapes`` with one kind of residency, as the fields of :class:`Totals`.

    A shape has ``block``, ``hash_block``, ``chunks`` (attention chunk of each chunked group; a full-attention group is added)
    and ``periods`` (how many times the largest chunk the longest prompt is); sizes in tokens.

    Raises:
        Unsupported: this release cannot have one of the shapes.
    """
    totals = Totals()
    started = time.perf_counter()
    for shape in shapes:
        _sweep_shape(totals, kind, **shape)
    totals.seconds = round(time.perf_counter() - started, 3)
    return asdict(totals)


def _sweep_shape(totals: Totals, kind: Residency, block: int, hash_block: int, chunks: list[int], periods: int) -> None:
    groups: list[int | None] = [None, *chunks]
    longest = periods * max(chunks)
    sut = SchedulerUnderTest(block, groups, longest, hash_block=hash_block)
    for prompt in range(block + 1, longest + 1):
        request = sut.request(prompt)
        for resident in residencies(kind, len(groups), prompt // block, prompt):
            sut.refill_cpu(request, resident)
            for prefix in range(0, (prompt - 1) // block * block, block):
                _ask(totals, sut, request, prompt, prefix, resident)


def _ask(totals: Totals, sut: SchedulerUnderTest, request: Any, prompt: int, prefix: int, resident: Resident) -> None:
    """One lookup, counted."""
    block, groups = sut.block, sut.chunks
    free = sut.cpu_pool.get_num_free_blocks()
    external, is_async = sut.lookup(request, prefix)
    loaded = sut.planned_loads(request, prefix, external)
    if external:
        sut.drop_hit(request)
    ideal = oracle.longest_sound_hit(prefix, prompt, block, list(zip(groups, resident, strict=True)))
    sound = not any(oracle.missing_blocks(prefix, external, block, c, f) for c, f in zip(groups, loaded, strict=True))
    where = f"block {block}, chunks {[c for c in groups if c]}, prompt {prompt}, prefix {prefix}: {external} of {ideal} tokens"
    totals.geometries += 1
    totals.contract += is_async != (external > 0)
    totals.leaked += sut.cpu_pool.get_num_free_blocks() != free
    totals.ideal += ideal
    totals.kept += external if sound else 0
    if not sound:
        totals.unsound += 1
        totals.first_unsound = totals.first_unsound or where
    if boundary_resident(prefix, block, groups, resident):
        totals.ideal_resident += ideal
        totals.kept_resident += external if sound else 0
    if external != ideal and all(prefix % c == 0 for c in groups if c):
        totals.lost_aligned += 1
        totals.first_lost_aligned = totals.first_lost_aligned or where


def boundary_resident(prefix: int, block: int, groups: Sequence[int | None], resident: Resident) -> bool:
    """Whether the CPU tier holds every group's blocks from the last common chunk boundary to the prefix's end."""
    period = math.lcm(block, *(c for c in groups if c))
    start = prefix // period * period
    return all(all(held[start // block : prefix // block]) for held in resident)
