"""How much reuse a lookup keeps, and whether any hit is unsound, over every small geometry and several kinds of residency.

A geometry is a prompt and a block-aligned device prefix (none, too) behind which at least one block could be served. For each
shape all of them, up to a number of its largest chunk, are asked of vLLM's real scheduler and judged by :mod:`kvmatrix.oracle`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

from kvmatrix import oracle
from kvmatrix.scheduler_harness import Loads, SchedulerUnderTest, contract_fault

Residency = Literal["all", "tail-gone", "head-gone", "one-hole", "random"]
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)
VARIANTS = 6
"""Contents of the CPU tier per prompt, for each kind of residency but ``all``, which has one."""
GONE = 0.2
"""Share of blocks that are gone with ``random``."""

Resident = list[list[bool]]
"""``[group][block of the prompt]``: does the CPU tier hold it."""
Contents = Callable[[int, int, int], Iterator[Resident]]
"""Contents of the CPU tier for so many groups (full attention first), whole blocks, and a seed."""


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
    lost_resident: int = 0
    """Geometries in which the CPU tier holds the blocks from the boundary on, and that got another hit than the ideal."""
    first_lost_resident: str = ""
    lost: int = 0
    """Geometries that got another hit than the ideal."""
    first_lost: str = ""
    leaked: int = 0
    """Contents of the CPU tier after whose lookups a block of either tier stayed pinned."""
    misplanned: int = 0
    """Geometries after whose lookup something else is pinned, or would be loaded, than the answered blocks, once each."""
    first_misplanned: str = ""
    contract: int = 0
    """Lookups, those with nothing left to serve among them, with an answer that no caller may get."""
    first_contract: str = ""
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

    A shape has ``block``, ``hash_block``, ``chunks`` (attention chunk of each chunked group), ``full_at`` (where among them
    the full-attention group stands), ``periods`` (how many times the largest chunk the longest prompt is) and ``lazy`` (stored
    only before eviction); sizes in tokens.

    Raises:
        Unsupported: this release cannot have one of the shapes.
    """
    totals = Totals()
    started = time.perf_counter()
    for shape in shapes:
        _sweep_shape(totals, kind, shape)
    totals.seconds = round(time.perf_counter() - started, 3)
    return asdict(totals)


def groups_of(chunks: Sequence[int], full_at: int) -> list[int | None]:
    """Each group's chunk, None for the full-attention group at index ``full_at``."""
    return [*chunks[:full_at], None, *chunks[full_at:]]


def longest_prompt(block: int, chunks: Sequence[int], periods: int) -> int:
    """Tokens of a shape's longest prompt."""
    return periods * max(chunks, default=block)


def filled_tiers(
    contents: Contents,
    block: int,
    hash_block: int,
    chunks: list[int],
    periods: int,
    full_at: int = 0,
    lazy: bool = False,
) -> Iterator[tuple[SchedulerUnderTest, Any, int, Resident]]:
    """A shape's one scheduler, a request, its prompt and what the CPU tier now holds of it: every prompt with all ``contents``.

    Raises:
        Unsupported: this release cannot have the shape.
    """
    groups, longest = groups_of(chunks, full_at), longest_prompt(block, chunks, periods)
    sut = SchedulerUnderTest(block, groups, longest, lazy_offload=lazy, hash_block=hash_block)
    for prompt in range(block + 1, longest + 1):
        request = sut.request(prompt)
        for full, *chunked in contents(len(groups), prompt // block, prompt):
            resident = [*chunked[:full_at], full, *chunked[full_at:]]
            sut.refill_cpu(request, resident)
            yield sut, request, prompt, resident


def _sweep_shape(totals: Totals, kind: Residency, shape: dict[str, Any]) -> None:
    for sut, request, prompt, resident in filled_tiers(partial(residencies, kind), **shape):
        # The longest prefix first: what a lookup leaves in the tier is then met by those that need these blocks. Each
        # lookup finds the hit of the one before, as a retried request does, and must give it back. The first one has
        # nothing left to be served.
        for prefix in range((prompt - 1) // sut.block * sut.block, -1, -sut.block):
            _ask(totals, sut, request, prompt, prefix, resident)
        sut.drop_hit(request)
        if sut.left_behind():
            totals.leaked += 1
            sut.let_go()


def _ask(totals: Totals, sut: SchedulerUnderTest, request: Any, prompt: int, prefix: int, resident: Resident) -> None:
    """One lookup, counted; where nothing is left to be served it is no geometry, and only its answer and pins count."""
    left = prompt - 1 - prefix
    answer, is_async = sut.ask(request, prefix)
    fault = contract_fault(answer, is_async, left, sut.block)
    external = 0 if fault else int(answer)
    if fault:
        totals.contract += 1
        totals.first_contract = totals.first_contract or f"{_where(sut, prompt, prefix)}: {fault}"
    planned = sut.planned(request, prefix, external)
    if planned.fault:
        totals.misplanned += 1
        totals.first_misplanned = totals.first_misplanned or f"{planned.fault}, {_where(sut, prompt, prefix)}"
        sut.let_go()
    if left >= sut.block:
        _count(totals, sut, prompt, prefix, resident, external, planned)


def _count(
    totals: Totals, sut: SchedulerUnderTest, prompt: int, prefix: int, resident: Resident, external: int, planned: Loads
) -> None:
    """One geometry's hit, held against the longest sound one."""
    block, groups = sut.block, sut.chunks
    ideal = oracle.longest_sound_hit(prefix, prompt, block, list(zip(groups, resident, strict=True)))
    sound = external == 0 or not any(
        oracle.missing_blocks(prefix, external, block, c, f) for c, f in zip(groups, planned.loaded, strict=True)
    )
    kept = external if sound else 0
    at_boundary = oracle.boundary_resident(prefix, block, groups, resident)
    totals.geometries += 1
    totals.ideal += ideal
    totals.kept += kept
    if at_boundary:
        totals.ideal_resident += ideal
        totals.kept_resident += kept
    if kept == external == ideal:
        return
    where = f"{_where(sut, prompt, prefix)}: {external} of {ideal} tokens"
    if not sound:
        totals.unsound += 1
        totals.first_unsound = totals.first_unsound or where
    if external != ideal:
        _count_lost(totals, where, at_boundary, all(prefix % c == 0 for c in groups if c))


def _count_lost(totals: Totals, where: str, at_boundary: bool, aligned: bool) -> None:
    totals.lost += 1
    totals.first_lost = totals.first_lost or where
    if at_boundary:
        totals.lost_resident += 1
        totals.first_lost_resident = totals.first_lost_resident or where
    if aligned:
        totals.lost_aligned += 1
        totals.first_lost_aligned = totals.first_lost_aligned or where


def _where(sut: SchedulerUnderTest, prompt: int, prefix: int) -> str:
    return f"block {sut.block}, chunks {[c for c in sut.chunks if c]}, prompt {prompt}, prefix {prefix}"
