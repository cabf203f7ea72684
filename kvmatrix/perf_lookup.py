"""Time of the lookup call per arm, real scheduler, no model: blocks of new processes, the arms interleaved inside each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvmatrix.config import LEVELS, Level, LookupPerf
from kvmatrix.live import Live, Tell, live, overlay_job
from kvmatrix.processes import Job
from kvmatrix.records import PerfRow
from kvmatrix.runner import Context
from kvmatrix.stats import interleaved_order

ROUND_SECONDS = 0.01
"""A round repeats the call until it takes about this long, so that the clock's step does not count."""
ROUNDS = 5
"""Of an arm in a block, behind one that warms the process up and is not kept."""


def lookup_geometries(lookups: Sequence[LookupPerf], level: Level) -> list[dict[str, Any]]:
    """What the lookups of ``level`` ask, one geometry a device prefix: see :class:`kvmatrix.scheduler_harness.LookupBench`."""
    return [
        {
            "block": lookup.block,
            "chunks": [None, *[lookup.chunk] * (lookup.groups - 1)],
            "prompt": lookup.prompt,
            "prefix": prefix,
            "hit": lookup.hit,
        }
        for lookup in lookups
        if LEVELS.index(lookup.level) <= LEVELS.index(level)
        for prefix in lookup.prefixes
    ]


def workload_name(geometry: dict[str, Any]) -> str:
    """``p<prompt>-d<prefix>-g<groups>``, and ``-miss`` where the CPU tier is empty."""
    name = f"p{geometry['prompt']}-d{geometry['prefix']}-g{len(geometry['chunks'])}"
    return name if geometry["hit"] else f"{name}-miss"


def measure_lookup(
    ctx: Context, pin: str, arms: Sequence[str], geometry: dict[str, Any], blocks: int, resolution: float, tell: Tell
) -> PerfRow:
    """Seconds of one lookup call, per arm, block and round.

    Raises:
        InfraError: a process ended, or imported another arm's files.
    """
    workload = workload_name(geometry)
    tell(f"lookup {workload}")
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    order, answers, imported = [], {}, {}
    for block in range(blocks):
        with live(ctx, pin, "CPU_ATTN") as group:
            jobs = {arm: overlay_job(ctx, pin, arm, kind="lookup", geometry=geometry) for arm in arms}
            children, ready = group.start_all(jobs, f"lookup-{workload}-{block}")
            calls = {arm: _calls(group, child) for arm, child in children.items()}
            order.append(interleaved_order(list(arms if block % 2 == 0 else arms[::-1]), ROUNDS))
            for arm in arms:
                seconds[arm].append([])
                answers[arm], imported[arm] = ready[arm]["answer"], ready[arm]["imported"]
            for arm in order[-1]:
                told = group.ask(children[arm], {"calls": calls[arm]})
                seconds[arm][-1].append(told["seconds"] / calls[arm])
    return PerfRow(
        run=ctx.run,
        id=f"{pin}-host-lookup-c{geometry['chunks'][-1]}-b{geometry['block']}-{workload}",
        group="lookup",
        workload=workload,
        geometry=geometry
        | {"groups": len(geometry["chunks"]), "chunk": geometry["chunks"][-1]}
        | {"resolution": resolution, "round_seconds": ROUND_SECONDS},
        status="PASS",
        order=order,
        seconds=seconds,
        answers=answers,
        instructions_by="not counted",
        imported=imported,
    )


def _calls(group: Live, child: Job) -> int:
    """Calls of a round, from two short ones and a whole one, which are the child's warm-up and are not kept."""
    once: float = min(group.ask(child, {"calls": 3})["seconds"] / 3 for _ in range(2))
    calls = max(1, math.ceil(ROUND_SECONDS / once))
    group.ask(child, {"calls": calls})
    return calls
