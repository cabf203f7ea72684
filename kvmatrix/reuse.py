"""How much reuse a lookup keeps, and whether any hit is unsound, over every small geometry and several kinds of residency.

A geometry is a prompt, a block-aligned device prefix (none, too) behind which at least one block could be served, and what the
CPU tier holds. For each shape all of them, up to a number of its largest chunk, are asked of vLLM's real scheduler and judged
by :mod:`kvmatrix.oracle`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kvmatrix import oracle
from kvmatrix.config import Residency
from kvmatrix.oracle import FULL, Attention, HitClass, Served, chunked, sliding
from kvmatrix.scheduler_harness import Loads, SchedulerUnderTest, Unsupported, contract_fault

VARIANTS = 6
"""Contents of the CPU tier per number of blocks, for each kind of residency that is a sample."""
GONE = 0.2
"""Share of blocks that are gone with ``random``."""

Resident = list[list[bool]]
"""``[group][block of the prompt]``: does the CPU tier hold it."""
Contents = Callable[[int, int, int], Iterator[Resident]]
"""Contents of the CPU tier for so many groups (full attention first), whole blocks, and a seed."""
NOT_PINNED = "refused: this release pins nothing between the lookup and the load: what is evicted meanwhile is lost to it"


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
    """Prompts, each with one content of the CPU tier, after whose lookups a block of either tier stayed pinned."""
    misplanned: int = 0
    """Geometries after whose lookup something else is pinned, or would be loaded, than the answered blocks, once each."""
    first_misplanned: str = ""
    contract: int = 0
    """Lookups, those with nothing left to serve among them, with an answer that no caller may get."""
    first_contract: str = ""
    copies: int = 0
    """Blocks that would be copied, one copy each."""
    null_copies: int = 0
    """Of ``copies``, with the device's null block for a target: attention does not look there, the transfer is wasted."""
    null_needed: int = 0
    """Of ``null_copies``, blocks that attention needs: their KV is lost, and the hit is unsound."""
    residency: str = ""
    pressed: int = 0
    """Hits between whose lookup and load the CPU tier was filled by others."""
    started: float = 0.0
    """Seconds since the epoch."""
    seconds: float = 0.0


def residencies(kind: Residency, groups: int, blocks: int, seed: int) -> Iterator[Resident]:
    """Contents of the CPU tier for a prompt of ``blocks`` whole blocks; group 0 is full attention, the others are local.

    Blocks are gone from all groups, from the local ones only, and from the full one only: once one block (or one hole), once
    half of them (or another hole). ``every-subset`` is each subset of each group's blocks. ``evicted-pinned`` has three with
    hits to be pinned: the eviction is what the sweep then does.
    """
    full = [[True] * blocks for _ in range(groups)]
    if kind == "all":
        yield full
        return
    if kind == "every-subset":
        for flags in itertools.product([True, False], repeat=groups * blocks):
            yield [list(flags[g * blocks : (g + 1) * blocks]) for g in range(groups)]
        return
    if kind == "evicted-pinned":
        yield full
        yield from itertools.islice(residencies("tail-gone", groups, blocks, seed), 1, 2)
        yield from itertools.islice(residencies("one-hole", groups, blocks, seed), 2, 3)
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


def sweep(shapes: Sequence[dict[str, Any]], kind: Residency, hit_class: HitClass | None = None) -> dict[str, Any]:
    """All geometries of all ``shapes`` with one kind of residency, as the fields of :class:`Totals`.

    A shape has ``block``, ``hash_block``, ``chunks`` (attention chunk of each chunked group), ``windows`` (of each
    sliding-window group, behind those), ``full_at`` (where among them the full-attention group stands), ``periods`` (how many
    times the largest of them the longest prompt is), ``lazy`` (stored only before eviction) and ``edges`` (only prompts that
    end about a block's boundary); sizes in tokens. With ``hit_class`` only the geometries of that class are asked.

    Raises:
        Unsupported: this release cannot have one of the shapes, or be asked so.
    """
    totals = Totals(residency=kind, started=round(time.time(), 3))
    started = time.perf_counter()
    for shape in shapes:
        _sweep_shape(totals, kind, hit_class, **shape)
    totals.seconds = round(time.perf_counter() - started, 3)
    return asdict(totals)


def groups_of(chunks: Sequence[int], full_at: int, windows: Sequence[int] = ()) -> list[Attention]:
    """The groups of a shape: the chunked-local ones, then those with a window, and full attention at index ``full_at``."""
    local = [*map(chunked, chunks), *map(sliding, windows)]
    return [*local[:full_at], FULL, *local[full_at:]]


def longest_prompt(block: int, chunks: Sequence[int], periods: int, windows: Sequence[int] = ()) -> int:
    """Tokens of a shape's longest prompt."""
    return periods * -(-max([*chunks, *windows], default=block) // block) * block


def prompts(block: int, longest: int, edges: bool = False) -> range | list[int]:
    """Every prompt of up to ``longest`` tokens behind whose first block something is left, or those about a boundary."""
    every = range(block + 1, longest + 1)
    return [p for p in every if p % block in (block - 1, 0, 1)] if edges else every


def in_group_order(resident: Resident, full_at: int) -> Resident:
    """Put the full-attention group, the first of ``resident``, where it stands among the groups."""
    full, *local = resident
    return [*local[:full_at], full, *local[full_at:]]


def filled_tiers(
    contents: Contents,
    block: int,
    hash_block: int,
    chunks: list[int],
    periods: int,
    full_at: int = 0,
    lazy: bool = False,
    windows: Sequence[int] = (),
    edges: bool = False,
) -> Iterator[tuple[SchedulerUnderTest, dict[int, Any], Resident]]:
    """A shape's one scheduler, requests by their prompts, and what the CPU tier now holds of these: all ``contents``.

    Prompts of as many whole blocks share their contents: the block hashes of the shorter are those of the longer.

    Raises:
        Unsupported: this release cannot have the shape.
    """
    groups, longest = groups_of(chunks, full_at, windows), longest_prompt(block, chunks, periods, windows)
    sut = SchedulerUnderTest(block, groups, longest, lazy_offload=lazy, hash_block=hash_block)
    for blocks, asked in itertools.groupby(prompts(block, longest, edges), key=lambda prompt: prompt // block):
        requests = {prompt: sut.request(prompt) for prompt in asked}
        *_, last = requests.values()
        for content in contents(len(groups), blocks, blocks):
            resident = in_group_order(content, full_at)
            sut.refill_cpu(last, resident)
            yield sut, requests, resident


def _sweep_shape(totals: Totals, kind: Residency, hit_class: HitClass | None, **shape: Any) -> None:
    asker: _Asker | None = None
    for sut, requests, resident in filled_tiers(partial(residencies, kind), **shape):
        asker = asker or (_Presser if kind == "evicted-pinned" else _Asker)(totals, sut, hit_class)
        asker.resident, asker.served = resident, Served(sut.needs, resident)
        for prompt, request in requests.items():
            asker.ask_all(request, prompt)


class _Asker:
    """Asks one scheduler and counts."""

    resident: Resident
    """What the CPU tier holds now."""
    served: Served

    def __init__(self, totals: Totals, sut: SchedulerUnderTest, hit_class: HitClass | None) -> None:
        self.totals, self.sut, self.hit_class, self.place = totals, sut, hit_class, place(sut)
        chunks = [g.chunk for g in sut.groups if g.chunk]
        self.chunk = chunks[0] if chunks else 0
        """Of a shape whose hits have a class, the one chunk size."""
        self.aligned = [all(block * sut.block % c == 0 for c in chunks) for block in range(len(sut.needs.boundaries))]

    def ask_all(self, request: Any, prompt: int) -> None:
        """Every device prefix of a prompt.

        The longest first: what a lookup leaves in the tier is then met by those that need it. Each lookup finds the hit of the
        one before, as a retried request does, and must give it back. The first one has nothing left to be served.
        """
        limit = (prompt - 1) // self.sut.block
        ends = self.served.ends(limit)
        for first in range(limit, -1, -1):
            if self.hit_class is None or self._is_of_class(first, ends[first]):
                self._ask(request, prompt, first, ends[first])
        self.sut.drop_hit(request)
        if self.sut.left_behind():
            self.totals.leaked += 1
            self.sut.let_go()

    def _is_of_class(self, first: int, end: int) -> bool:
        block = self.sut.block
        return end > first and oracle.mixed_hit_class(self.chunk, first * block, (end - first) * block) == self.hit_class

    def _ask(self, request: Any, prompt: int, first: int, ideal: int) -> None:
        """One lookup, counted; where nothing is left to be served it is no geometry, and only its answer and pins count.

        ``first`` is the block behind the device prefix, ``ideal`` the one before which the longest sound hit ends.
        """
        block, totals = self.sut.block, self.totals
        left = prompt - 1 - first * block
        answer, is_async = self.sut.ask(request, first * block)
        fault = contract_fault(answer, is_async, left, block)
        external = 0 if fault else int(answer)
        if fault:
            totals.contract += 1
            totals.first_contract = totals.first_contract or f"{self._where(prompt, first)}: {fault}"
        loads = self._loads(request, first * block, external)
        if loads.fault:
            totals.misplanned += 1
            totals.first_misplanned = totals.first_misplanned or f"{loads.fault}, {self._where(prompt, first)}"
            self.sut.let_go()
        if left >= block:
            self._count(prompt, first, external, ideal, loads)

    def _loads(self, request: Any, prefix: int, external: int) -> Loads:
        return self.sut.planned(request, prefix, external)

    def _count(self, prompt: int, first: int, external: int, ideal: int, loads: Loads) -> None:
        """One geometry's hit, held against the longest sound one."""
        totals, block = self.totals, self.sut.block
        end, ideal_tokens = first + external // block, (ideal - first) * block
        sound = end == first or (not loads.null_needed and self.sut.needs.met(first, end, loads.loaded))
        kept = external if sound else 0
        at_boundary = self.served.at_boundary[first]
        totals.geometries += 1
        totals.ideal += ideal_tokens
        totals.kept += kept
        totals.copies += loads.copies
        totals.null_copies += loads.null_copies
        totals.null_needed += loads.null_needed
        if at_boundary:
            totals.ideal_resident += ideal_tokens
            totals.kept_resident += kept
        if kept == external == ideal_tokens:
            return
        where = f"{self._where(prompt, first)}: {external} of {ideal_tokens} tokens"
        if not sound:
            totals.unsound += 1
            totals.first_unsound = totals.first_unsound or where
        if external != ideal_tokens:
            _count_lost(totals, where, at_boundary, self.aligned[first])

    def _where(self, prompt: int, first: int) -> str:
        return f"{self.place}, prompt {prompt}, prefix {first * self.sut.block}"


class _Presser(_Asker):
    """Lets other requests' stores take the whole CPU tier between a lookup and its load, as far as nothing is pinned."""

    def __init__(self, totals: Totals, sut: SchedulerUnderTest, hit_class: HitClass | None) -> None:
        if not sut.pins:
            raise Unsupported(NOT_PINNED)
        super().__init__(totals, sut, hit_class)

    def _loads(self, request: Any, prefix: int, external: int) -> Loads:
        planned = self.sut.planned(request, prefix, external)
        if planned.fault or not external:
            return planned
        taken = self.sut.press()
        done = self.sut.load(request, prefix, external)
        lost = self.sut.relieve(taken)
        self.totals.pressed += 1
        if not done.fault and done.loaded != planned.loaded:
            done.fault = "misplaced: another set of blocks is loaded than was pinned"
        done.fault = done.fault or lost or self.sut.left_behind()
        if done.fault:
            self.sut.let_go()
        self.sut.refill_cpu(request, self.resident)
        return done


def place(sut: SchedulerUnderTest) -> str:
    """A shape in a reason: its block and the sizes of its local groups."""
    windows = [g.size for g in sut.groups if g.kind == "sliding"]
    return f"block {sut.block}, chunks {[g.chunk for g in sut.groups if g.chunk]}" + (f", windows {windows}" if windows else "")


def _count_lost(totals: Totals, where: str, at_boundary: bool, aligned: bool) -> None:
    totals.lost += 1
    totals.first_lost = totals.first_lost or where
    if at_boundary:
        totals.lost_resident += 1
        totals.first_lost_resident = totals.first_lost_resident or where
    if aligned:
        totals.lost_aligned += 1
        totals.first_lost_aligned = totals.first_lost_aligned or where
