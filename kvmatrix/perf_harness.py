"""The harness itself: a cell from the preloaded parent against one in a process of its own, and where the time goes."""

from __future__ import annotations

import time
from pathlib import Path

from kvmatrix.cells import Cell
from kvmatrix.errors import InfraError
from kvmatrix.live import Tell
from kvmatrix.processes import JobTimeout, Parent
from kvmatrix.records import PerfRow
from kvmatrix.runner import Context, cell_job
from kvmatrix.stats import interleaved_order

ISOLATIONS = ("fork", "process")
BEFORE = "process and imports"
"""What precedes a cell's first stage."""
PROBES = "probes"


def measure_harness(ctx: Context, cell: Cell, repeats: int, tell: Tell) -> PerfRow:
    """The same cell from the preloaded parent and in a process of its own, alternating; seconds from start to end.

    The row's answers have the stages of each: isolation -> stage -> seconds, one a repeat.
    """
    env = ctx.parent_variables(cell.pin, cell.device, cell.backend)
    python = ctx.envs[cell.pin].python
    forked = ctx.pool.get(python, env)
    seconds: dict[str, list[list[float]]] = {i: [] for i in ISOLATIONS}
    stages: dict[str, dict[str, list[float]]] = {i: {} for i in ISOLATIONS}
    order = interleaved_order(ISOLATIONS, repeats)
    tell(f"one {cell.backend} cell: warm-up, not counted")
    _run_to_end(forked, ctx, cell, ctx.folder / "logs" / "harness-warm-up.log", time.monotonic())
    for index, isolation in enumerate(order):
        tell(f"one {cell.backend} cell: {isolation}")
        log = ctx.folder / "logs" / f"harness-{index}-{isolation}.log"
        started = time.monotonic()
        if isolation == "fork":
            took = _run_to_end(forked, ctx, cell, log, started)
        else:
            alone = Parent(python, env, log.with_suffix(".parent.log"), preload=False)
            try:
                alone.wait_ready(ctx.matrix.budgets.preload_timeout_s)
                took = _run_to_end(alone, ctx, cell, log, started)
            finally:
                alone.close()
        seconds[isolation].append([time.monotonic() - started])
        for stage, value in took.items():
            stages[isolation].setdefault(stage, []).append(value)
    return PerfRow(
        run=ctx.run,
        id=f"{cell.id}-isolation",
        group="harness",
        workload="isolation",
        geometry={"backend": cell.backend, "mode": cell.mode, "chunk": cell.chunk, "block": cell.block},
        status="PASS",
        order=[order[i : i + 2] for i in range(0, len(order), 2)],
        seconds=seconds,
        answers=stages,
    )


def _run_to_end(parent: Parent, ctx: Context, cell: Cell, log: Path, started: float) -> dict[str, float]:
    """Seconds of each stage of the cell, from ``started`` (monotonic) on.

    Raises:
        InfraError: the cell did not come to its end.
    """
    job = parent.start(cell_job(cell, ctx), log)
    stages: dict[str, float] = {}
    stage, since, kind = BEFORE, started, ""
    known = {"checkpoint", "reference", "engine start"}
    try:
        for message in job.messages(ctx.matrix.budgets.cell_timeout_s):
            kind = message["type"]
            if kind == "stage" and (new := message["stage"] if message["stage"] in known else PROBES) != stage:
                now = time.monotonic()
                stages[stage] = stages.get(stage, 0.0) + now - since
                stage, since = new, now
    except JobTimeout:
        job.kill()
    job.finish()
    if kind != "done":
        raise InfraError(f"the timed cell did not come to its end: see {log}")
    stages[stage] = stages.get(stage, 0.0) + time.monotonic() - since
    return stages
