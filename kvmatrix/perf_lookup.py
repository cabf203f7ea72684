"""The lookup call by itself, with no model: seconds of a call per arm, and where they can be counted its machine instructions.

A measurement is made of blocks. In each every arm gets a process of its own that is new, for a process keeps its layout in
memory as long as it lives, and one that happens to be fast would be taken for a fast arm. Inside a block the arms are
interleaved round by round. The first round of each process is a warm-up and left out, with the calls before it that tell how
many make a round; nothing else is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvmatrix import instructions
from kvmatrix.config import Level, LookupPerf, Matrix, is_within
from kvmatrix.errors import InfraError, UsageError
from kvmatrix.live import Live, Tell, live, measured_arm, overlay_job
from kvmatrix.processes import Job
from kvmatrix.records import PerfRow, Status
from kvmatrix.runner import Context
from kvmatrix.stats import shuffled_order

ROUND_SECONDS = 0.01
"""A round repeats the call until it takes about this long, so that the clock's step does not count."""
ROUNDS = 5
"""Of each arm in a block, the warm-up not among them."""
PROBE_SHARE = 0.25
"""Calls that take this share of a round tell how many make a whole one."""
MOST_CALLS = 1 << 20
BACKEND = "CPU_ATTN"
"""Whose preloaded parent forks the processes: the lookup has no attention backend, and this parent is there for others."""


def lookup_geometries(matrix: Matrix, level: Level) -> list[dict[str, Any]]:
    """What the selection ``level`` measures: ``block``, ``chunks`` (of each group, None: full attention), ``prompt``,
    ``prefix`` (in tokens) and ``hit`` (the CPU tier holds the prompt, or is empty).

    Raises:
        UsageError: two are the same.
    """
    found: dict[str, dict[str, Any]] = {}
    for lookups in matrix.perf.lookups:
        if not is_within(lookups.level, level):
            continue
        for geometry in _geometries(lookups):
            if (name := name_of(geometry)) in found:
                raise UsageError(f"matrix.toml: perf.lookups has {name} twice")
            found[name] = geometry
    return list(found.values())


def _geometries(lookups: LookupPerf) -> list[dict[str, Any]]:
    chunks = [None, *[lookups.chunk] * (lookups.groups - 1)]
    common = {"block": lookups.block, "chunks": chunks, "prompt": lookups.prompt}
    return [common | {"prefix": prefix, "hit": lookups.hit} for prefix in lookups.prefixes]


def workload_of(geometry: dict[str, Any]) -> str:
    """``p<prompt>-d<tokens on the device>-g<KV groups>``, and ``-miss`` where the CPU tier is empty."""
    miss = "" if geometry["hit"] else "-miss"
    return f"p{geometry['prompt']}-d{geometry['prefix']}-g{len(geometry['chunks'])}{miss}"


def name_of(geometry: dict[str, Any]) -> str:
    """What tells a geometry from all others; an id's last part."""
    chunk = f"c{geometry['chunks'][1]}" if geometry["chunks"][1:] else "full"
    return f"{chunk}-b{geometry['block']}-{workload_of(geometry)}"


def measure_lookup(
    ctx: Context,
    pin: str,
    arms: Sequence[str],
    geometry: dict[str, Any],
    blocks: int,
    resolution: float,
    tell: Tell,
    count: bool = False,
) -> PerfRow:
    """Measure one geometry (of :func:`lookup_geometries`) on all ``arms``.

    Args:
        resolution: what the intervals are to reach; only noted in the row.
        count: count instructions, too.

    An arm whose answer no caller may get is left out, and fails the row. Where this release cannot have the groups, the row is
    UNSUPPORTED. Instructions never fail it: where they cannot be counted, ``instructions_by`` says why.

    Raises:
        InfraError: a process died, took too long, imported another arm's files, has other groups than were asked for, or
            changed its answer between two calls.
    """
    tell(f"lookup {workload_of(geometry)}")
    taken = _Lookup(ctx, pin, arms, geometry)
    with live(ctx, pin, BACKEND) as group:
        for index in range(blocks):
            taken.block(group, index)
            if not taken.arms:
                break
    if count and taken.arms:
        tell(f"lookup {workload_of(geometry)}: instructions")
        taken.count()
    status, reason = taken.verdict()
    return PerfRow(
        run=ctx.run,
        id=f"{pin}-host-lookup-{name_of(geometry)}",
        group="lookup",
        workload=workload_of(geometry),
        geometry=geometry
        | {"chunk": (geometry["chunks"][1:] or [None])[0], "groups": len(geometry["chunks"])}
        | {"resolution": resolution, "calls_per_round": taken.calls},
        status=status,
        reason=reason,
        order=taken.order,
        seconds=taken.seconds,
        answers=taken.answers,
        instructions=taken.instructions,
        instructions_by=taken.instructions_by,
        left_out=taken.left_out,
        imported=taken.imported,
    )


class _Lookup:
    """One geometry's measurement on its way; the attributes are the row's."""

    def __init__(self, ctx: Context, pin: str, arms: Sequence[str], geometry: dict[str, Any]) -> None:
        self.ctx, self.pin, self.arms, self.geometry = ctx, pin, list(arms), geometry
        self.calls: dict[str, int] = {}
        self.order: list[list[str]] = []
        self.seconds: dict[str, list[list[float]]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self.imported: dict[str, dict[str, str]] = {}
        self.instructions: dict[str, float] = {}
        self.instructions_by = ""
        self._refused = False

    def block(self, group: Live, index: int) -> None:
        """The next block: new processes for all arms, a warm-up round of each, then rounds of all of them interleaved."""
        with group.block():
            children = self._start(group, index)
            if not self.calls:
                self._calibrate(group, children)
            arms = self.arms if index % 2 == 0 else self.arms[::-1]
            for arm in arms:
                self._round(group, children[arm], arm)
            order = shuffled_order(arms, ROUNDS, index)
            rounds: dict[str, list[float]] = {arm: [] for arm in self.arms}
            for arm in order:
                rounds[arm].append(self._round(group, children[arm], arm))
        if self.arms:
            self.order.append(order)
        for arm, seconds in rounds.items():
            self.seconds.setdefault(arm, []).append(seconds)

    def job(self, arm: str) -> dict[str, Any]:
        return overlay_job(self.ctx, self.pin, arm, kind="lookup", geometry=self.geometry)

    def _start(self, group: Live, index: int) -> dict[str, Job]:
        """The processes of block ``index``. Another arm's is the first one in each: which memory a process gets hangs on it."""
        first = index % len(self.arms)
        arms, log = [*self.arms[first:], *self.arms[:first]], f"lookup-{name_of(self.geometry)}-{index}"
        started = group.start_all({arm: self.job(arm) for arm in arms}, log)
        for arm, (_, ready) in started.items():
            self._take(arm, ready)
        return {arm: child for arm, (child, _) in started.items()}

    def _take(self, arm: str, ready: dict[str, Any]) -> None:
        """An arm's answer; one that cannot be measured is left out.

        Raises:
            InfraError: its groups are not those that were asked for, or its answer is not the one it gave before.
        """
        self.imported[arm] = ready["imported"]
        if "refused" in ready:
            self._refused = True
            self._leave_out(arm, ready["refused"])
            return
        answer = {name: ready["answer"][name] for name in ("external_tokens", "sound")}
        if ready["kv_groups"] != len(self.geometry["chunks"]):
            raise InfraError(f"{arm} has {ready['kv_groups']} KV groups where {len(self.geometry['chunks'])} were asked for")
        if ready["answer"]["fault"]:
            self._leave_out(arm, ready["answer"]["fault"])
            return
        if self.answers.setdefault(arm, answer) != answer:
            raise InfraError(f"the lookup of {arm} answered {self.answers[arm]} and then {answer} to the same request")

    def _leave_out(self, arm: str, why: str) -> None:
        self.arms.remove(arm)
        self.left_out[arm] = why
        for measured in (self.answers, self.seconds):
            measured.pop(arm, None)

    def _calibrate(self, group: Live, children: dict[str, Job]) -> None:
        """How many calls make a round; the same for all processes of the same files, those of the A/A arm among them."""
        found: dict[str, int] = {}
        for arm in self.arms:
            files = measured_arm(arm)
            if files not in found:
                found[files] = self._calls_of_round(group, children[arm], arm)
            self.calls[arm] = found[files]

    def _calls_of_round(self, group: Live, child: Job, arm: str) -> int:
        calls = 1
        while (seconds := self._ask(group, child, arm, calls)) < PROBE_SHARE * ROUND_SECONDS and calls < MOST_CALLS:
            calls *= 4
        return max(1, math.ceil(calls * ROUND_SECONDS / seconds)) if seconds > 0 else MOST_CALLS

    def _round(self, group: Live, child: Job, arm: str) -> float:
        """Seconds of a call, over a round."""
        return self._ask(group, child, arm, self.calls[arm]) / self.calls[arm]

    def _ask(self, group: Live, child: Job, arm: str, calls: int) -> float:
        timing = group.ask(child, {"calls": calls})
        told = self.answers[arm]["external_tokens"]
        if timing["external_tokens"] != told:
            raise InfraError(f"the lookup of {arm} answered {told} and then {timing['external_tokens']} to the same request")
        return float(timing["seconds"])

    def count(self) -> None:
        """Instructions of a call of each arm, where something here can count them."""
        calls = {arm: max(1, math.ceil(n * instructions.COUNTED_SECONDS / ROUND_SECONDS)) for arm, n in self.calls.items()}
        jobs = {arm: self.job(arm) for arm in self.arms}
        self.instructions, self.instructions_by = instructions.of_calls(self.ctx, self.pin, BACKEND, jobs, calls)

    def verdict(self) -> tuple[Status, str]:
        if not self.left_out:
            return "PASS", ""
        arm, why = next(iter(self.left_out.items()))
        if self._refused and not self.arms:
            return "UNSUPPORTED", why
        return "FAIL", f"not-measured: {arm}: {why}"
