"""Measurements of the perf suite: arms interleaved round by round in one run, each row with every round that was taken."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvmatrix import judge
from kvmatrix.cells import Cell
from kvmatrix.config import Perf
from kvmatrix.errors import InfraError
from kvmatrix.processes import Job, JobTimeout, Parent
from kvmatrix.records import PerfRow
from kvmatrix.runner import Context, cell_job, llm_geometry
from kvmatrix.stats import interleaved_order

ROUND_SECONDS = 0.05
"""A lookup round repeats the call until it takes about this long, so that the clock's step does not count."""

Tell = Callable[[str], None]


class Live:
    """Children of one measurement, one an arm, that answer a request at a time."""

    def __init__(self, ctx: Context, pin: str, backend: str) -> None:
        self.ctx = ctx
        self.pin = pin
        self.parent = ctx.pool.get(ctx.envs[pin].python, ctx.parent_variables(pin, "host", backend))
        self.timeout = ctx.matrix.budgets.cell_timeout_s
        self._jobs: list[Job] = []

    def start(self, job: dict[str, Any], name: str) -> tuple[Job, dict[str, Any]]:
        """Start a child and wait until it is ready; its ``ready`` message comes back.

        Raises:
            InfraError: it ended, failed or took too long.
        """
        child = self.parent.start(job, self.ctx.folder / "logs" / f"{name}.log")
        self._jobs.append(child)
        while True:
            message = self._next(child)
            if message["type"] == "engine":
                verdict = judge.judge_engine(Cell.model_validate(job["cell"]), message)
                if verdict.status != "PASS":
                    raise InfraError(f"the engine to be measured is not the one that was asked for: {verdict.reason}")
            if message["type"] == "ready":
                self._check_arm(message["imported"], job["arm"])
                return child, message

    def _check_arm(self, imported: dict[str, str], arm: str) -> None:
        if imported != self.ctx.arms[self.pin, arm].expected:
            raise InfraError(f"the measuring process of {arm} imported other files than the arm's")

    def ask(self, child: Job, request: dict[str, Any]) -> dict[str, Any]:
        try:
            child.send(request)
        except OSError as e:
            raise InfraError(f"a measuring process ended: {e}") from e
        return self._next(child)

    def _next(self, child: Job) -> dict[str, Any]:
        try:
            message = child.receive(self.timeout)
        except JobTimeout:
            raise InfraError(f"a measuring process did not answer within {self.timeout:g} s") from None
        if message is None:
            raise InfraError(f"a measuring process ended by itself: see {self.ctx.folder / 'logs'}")
        if message["type"] == "error":
            raise InfraError(f"a measuring process failed: {message['error']}: {message['message']}")
        return message

    def close(self) -> None:
        for job in self._jobs:
            job.finish()


@contextlib.contextmanager
def live(ctx: Context, pin: str, backend: str) -> Iterator[Live]:
    group = Live(ctx, pin, backend)
    try:
        yield group
    finally:
        group.close()


def _overlay_job(ctx: Context, pin: str, arm: str, **fields: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "cwd": str(ctx.folder / "work"),
        "env": {"KVMATRIX_OVERLAY": str(ctx.arms[pin, arm].manifest)},
        **fields,
    }


def measure_lookup(ctx: Context, pin: str, arms: Sequence[str], geometry: dict[str, Any], rounds: int, tell: Tell) -> PerfRow:
    """Time of one lookup call per arm. ``geometry``: ``block``, ``chunks``, ``prompt``, ``prefix`` in tokens."""
    workload = f"p{geometry['prompt']}-d{geometry['prefix']}"
    row_id = f"{pin}-host-lookup-c{geometry['chunks'][1]}-b{geometry['block']}-{workload}"
    tell(f"lookup {workload}")
    with live(ctx, pin, "CPU_ATTN") as group:
        children, answers, imported, calls = {}, {}, {}, {}
        for arm in arms:
            job = _overlay_job(ctx, pin, arm, kind="lookup", geometry=geometry)
            child, ready = group.start(job, f"lookup-{workload}-{arm}")
            children[arm], answers[arm], imported[arm] = child, {"external_tokens": ready["answer"]}, ready["imported"]
            once = min(group.ask(child, {"calls": 3})["seconds"] / 3 for _ in range(2))
            calls[arm] = max(1, math.ceil(ROUND_SECONDS / once))
        order = interleaved_order(arms, rounds)
        seconds: dict[str, list[float]] = {a: [] for a in arms}
        for arm in order:
            seconds[arm].append(group.ask(children[arm], {"calls": calls[arm]})["seconds"] / calls[arm])
    return PerfRow(
        run=ctx.run,
        id=row_id,
        group="lookup",
        workload=workload,
        geometry=geometry | {"calls_per_round": calls},
        status="PASS",
        order=order,
        seconds=seconds,
        answers=answers,
        imported=imported,
    )


def perf_cell(perf: Perf, pin: str, device: str, arm: str) -> Cell:
    """The cell whose engine the throughput measurements run."""
    return Cell(
        tier="llm",
        pin=pin,
        device=device,
        arm=arm,
        backend=perf.backend,
        mode=perf.mode,
        chunk=perf.chunk,
        block=perf.block,
        prompt=perf.prompt,
        prefix=perf.block,
        layers=perf.layers,
    )


def generate_job(ctx: Context, cell: Cell) -> dict[str, Any]:
    perf, llm = ctx.matrix.perf, ctx.matrix.llm
    new_tokens = ctx.envs[cell.pin].pin.min_new_tokens
    sizes = llm_geometry(perf.prompt, perf.block, perf.block, cell.kv_groups, new_tokens)
    job = cell_job(cell, ctx)
    return job | {
        "kind": "generate",
        "arm": cell.arm,
        "checkpoint": {
            "chunk": perf.chunk,
            "layers": perf.layers,
            "vocab_size": llm.vocab_size,
            "hidden_size": perf.hidden_size,
            "intermediate_size": 2 * perf.hidden_size,
            "max_position_embeddings": 2 * sizes["max_model_len"],
        },
        "geometry": sizes | {"chunk": perf.chunk, "seed": llm.seed, "cpu_bytes": 4 * llm.cpu_bytes},
    }


class GenerateBench:
    """One live engine an arm; measures workloads on all of them, round by round."""

    def __init__(self, ctx: Context, group: Live, pin: str, arms: Sequence[str], tell: Tell) -> None:
        self.ctx, self.group, self.pin, self.arms, self.tell = ctx, group, pin, list(arms), tell
        self.children: dict[str, Job] = {}
        self.imported: dict[str, dict[str, str]] = {}
        for arm in arms:
            tell(f"starting the engine of {arm}")
            cell = perf_cell(ctx.matrix.perf, pin, "host", arm)
            self.children[arm], ready = group.start(generate_job(ctx, cell), f"generate-{arm}")
            self.imported[arm] = ready["imported"]

    def measure(self, workload: str) -> PerfRow:
        """Interleaved rounds of ``workload``; each pair of rounds has one prompt, the same on all arms."""
        perf = self.ctx.matrix.perf
        self.tell(f"generation {workload}")
        seed = 1000 * (1 + perf.workloads.index(workload))
        for warm in range(perf.warmup_rounds):
            for arm in self.arms:
                self._round(arm, workload, seed - 1 - warm)
        order = interleaved_order(self.arms, perf.rounds)
        rounds: dict[str, list[dict[str, Any]]] = {a: [] for a in self.arms}
        for arm in order:
            rounds[arm].append(self._round(arm, workload, seed + len(rounds[arm])))
        problem = next((p for arm in self.arms for r in rounds[arm] if (p := _void(r))), "")
        wrong = next((f"wrong-output: {a}" for a in self.arms[1:] if not all(r["same_as_cold"] for r in rounds[a])), "")
        keys = ("prefix", "cold_seconds", "external_hit_tokens", "device_hit_tokens", "output_tokens", "same_as_cold")
        return PerfRow(
            run=self.ctx.run,
            id=f"{perf_cell(perf, self.pin, 'host', 'x').id.removesuffix('-x')}-generate-{workload}",
            group="generate",
            workload=workload,
            geometry={"prompt": perf.prompt, "block": perf.block, "chunk": perf.chunk, "backend": perf.backend}
            | {"layers": perf.layers, "hidden_size": perf.hidden_size, "mode": perf.mode},
            status="INFRA" if problem else "FAIL" if wrong else "PASS",
            reason=problem or wrong,
            order=order,
            seconds={a: [r["seconds"] for r in rounds[a]] for a in self.arms},
            answers={a: {k: [r[k] for r in rounds[a]] for k in keys} for a in self.arms},
            imported=self.imported,
        )

    def _round(self, arm: str, workload: str, seed: int) -> dict[str, Any]:
        return self.group.ask(self.children[arm], {"workload": workload, "seed": seed})


def _void(measured: dict[str, Any]) -> str:
    """Why a round does not count; empty when it does."""
    if measured["cold_hit_tokens"]:
        return f"void: the cold request was served {measured['cold_hit_tokens']} cached tokens"
    if measured["device_hit_tokens"] != measured["prefix"]:
        return f"void: the device served {measured['device_hit_tokens']} tokens, {measured['prefix']} were meant"
    if measured["output_tokens"] != measured["meant_output_tokens"]:
        return f"void: {measured['output_tokens']} output tokens, {measured['meant_output_tokens']} were meant"
    if measured["workload"] != "mixed-misaligned" and measured["external_hit_tokens"] != measured["reusable_tokens"]:
        return f"void: {measured['external_hit_tokens']} external tokens, {measured['reusable_tokens']} were meant"
    return ""


def measure_harness(ctx: Context, cell: Cell, repeats: int, tell: Tell) -> PerfRow:
    """The same cell from the preloaded parent and in a process of its own, alternating; seconds from start to end."""
    env = ctx.parent_variables(cell.pin, cell.device, cell.backend)
    python = ctx.envs[cell.pin].python
    forked = ctx.pool.get(python, env)
    seconds: dict[str, list[float]] = {"fork": [], "process": []}
    order = interleaved_order(["fork", "process"], repeats)
    tell(f"one {cell.backend} cell: warm-up, not counted")
    _run_to_end(forked, ctx, cell, ctx.folder / "logs" / "harness-warm-up.log")
    for index, isolation in enumerate(order):
        tell(f"one {cell.backend} cell: {isolation}")
        log = ctx.folder / "logs" / f"harness-{index}-{isolation}.log"
        started = time.monotonic()
        if isolation == "fork":
            _run_to_end(forked, ctx, cell, log)
        else:
            alone = Parent(python, env, log.with_suffix(".parent.log"), preload=False)
            try:
                alone.wait_ready(ctx.matrix.budgets.preload_timeout_s)
                _run_to_end(alone, ctx, cell, log)
            finally:
                alone.close()
        seconds[isolation].append(time.monotonic() - started)
    return PerfRow(
        run=ctx.run,
        id=f"{cell.id}-isolation",
        group="harness",
        workload="isolation",
        geometry={"backend": cell.backend, "mode": cell.mode, "chunk": cell.chunk, "block": cell.block},
        status="PASS",
        order=order,
        seconds=seconds,
    )


def _run_to_end(parent: Parent, ctx: Context, cell: Cell, log: Path) -> None:
    job = parent.start(cell_job(cell, ctx), log)
    kinds = []
    try:
        kinds = [message["type"] for message in job.messages(ctx.matrix.budgets.cell_timeout_s)]
    except JobTimeout:
        job.kill()
    job.finish()
    if kinds[-1:] != ["done"]:
        raise InfraError(f"the timed cell did not come to its end: see {log}")
