"""Cells -> processes -> rows: preloaded parents, one child a cell, timeouts, statuses, attempts.

A cell that never came to an answer still reports: every planned probe ends as a row.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvmatrix import facts, judge, public_cases, reuse, tools
from kvmatrix import layers as letters
from kvmatrix.agreement import ColdAnswers
from kvmatrix.arms import Arm
from kvmatrix.cells import Cell
from kvmatrix.checkpoint import CheckpointSpec
from kvmatrix.config import Matrix, Residency
from kvmatrix.envs import PinEnv
from kvmatrix.errors import InfraError
from kvmatrix.expectations import Expectations, expected_status
from kvmatrix.oracle import HitClass
from kvmatrix.probes import REQUESTS, SEVERAL, plan
from kvmatrix.processes import Job, JobTimeout, ParentPool, parent_env
from kvmatrix.protocol import CHECKS as PROTOCOL
from kvmatrix.records import CellRow, ProbeRow, RowWriter, Status
from kvmatrix.reuse import VARIANTS

INFRA_ATTEMPTS = 2
"""A cell whose preloaded parent died is tried once more; each try is a row. Nothing is retried until it is green."""

CPU_TIERS = 8
"""Device tiers that the CPU tier holds at least: fillers are stored too, and must not push out what a probe needs."""
COMPILING_SECONDS = 20.0
"""What a cell takes longer, roughly, that compiles its model first."""

WITH_PARENT = "with its parent"
"""How a child ended that says nothing of itself."""
ENOUGH = "enough: the arm had failed, and this run looks no further"
INTERRUPTED = "interrupted: the run was ended before this cell was"


@dataclass
class Context:
    """What all cells of a run share."""

    matrix: Matrix
    run: str
    folder: Path
    home: Path
    envs: dict[str, PinEnv]
    """By pin version."""
    arms: dict[tuple[str, str], Arm]
    """By pin version and arm name."""
    expectations: Expectations
    writer: RowWriter
    pool: ParentPool
    compiler_reason: str | None
    """Why torch.compile cannot work here; None where it can."""
    root: Path
    """The project's root."""
    cold_answers: ColdAnswers = field(default_factory=ColdAnswers)
    until_failure: frozenset[str] = frozenset()
    """Arms whose cells end at their first failed probe."""

    def parent_variables(self, pin: str, device: str, backend: str) -> dict[str, str]:
        """Variables of the preloaded parent for ``backend`` in the environment of ``pin``."""
        env = self.envs[pin].variables
        # This checkout's kvmatrix, whichever one the environment is linked to; a mixed build's vLLM stays in front.
        path = [p for p in (env.get("PYTHONPATH"), str(self.root)) if p]
        return parent_env(device, backend) | env | {"PYTHONPATH": os.pathsep.join(path)}


@dataclass
class Outcome:
    """One attempt at one cell."""

    status: Literal["OK", "CRASH", "TIMEOUT", "INFRA", "UNSUPPORTED", "NOT_RUN"] = "OK"
    reason: str = ""
    probes: list[ProbeRow] = field(default_factory=list)
    engine: dict[str, Any] | None = None
    filler_requests: int | None = None
    max_rss_kib: int | None = None
    parent_died: bool = False


def probe_names(cell: Cell, matrix: Matrix) -> list[str]:
    """Names of the probes (LLM) or of the cases, sweeps, stateful tests and public reports (scheduler) of a cell, in order."""
    if cell.tier == "llm":
        return [name for name in matrix.llm.probes if _can_be_established(name, cell)]
    before, after = (*scheduler_cases(matrix), *scheduler_protocol(matrix)), stateful_tests(matrix)
    asked = (*before, *class_sweeps(matrix), *scheduler_sweeps(matrix), *after)
    return [*(entry["name"] for entry in asked), *public_cases.cases()]


def _can_be_established(probe: str, cell: Cell) -> bool:
    if probe in SEVERAL and not cell.several:
        return False
    groups = [letters.attention(letter, cell.chunk) for letter in cell.layers]
    try:
        plan(probe, prompt=cell.prompt, prefix=cell.prefix, block=cell.block, groups=groups)
    except ValueError:
        return False
    return True


def probe_id(cell: Cell, probe: str) -> str:
    return f"{cell.id}-{probe}"


def scheduler_cases(matrix: Matrix) -> list[dict[str, Any]]:
    """The lookup cases; the "tail" is the chunked group's last whole block of the prompt."""
    s = matrix.scheduler
    return [
        {
            "name": f"prompt{case.prompt}-prefix{prefix}-tail-{'present' if present else 'absent'}",
            "block": s.block,
            "chunks": [None, s.chunk],
            "prompt": case.prompt,
            "prefix": prefix,
            "absent": [] if present else [[1, case.prompt // s.block - 1]],
        }
        for case in s.cases
        for prefix in case.prefixes
        for present in (True, False)
    ]


def scheduler_protocol(matrix: Matrix) -> list[dict[str, Any]]:
    """Each check of the calls around a lookup, over the matrix's shapes for them."""
    shapes = [s.model_dump() for s in matrix.scheduler.protocol]
    return [{"name": f"protocol-{check}", "check": check, "shapes": shapes} for check in PROTOCOL] if shapes else []


def class_sweeps(matrix: Matrix) -> list[dict[str, Any]]:
    """Each class of a mixed hit by itself, with everything in the CPU tier."""
    shapes = [s.model_dump() for s in matrix.scheduler.classes]
    common = {"shapes": shapes, "residency": "all"}
    return [{"name": f"class-{name}", "hit_class": name, **common} for name in get_args(HitClass)] if shapes else []


def scheduler_sweeps(matrix: Matrix) -> list[dict[str, Any]]:
    """Each sweep of the matrix with each of its kinds of residency."""
    return [
        {
            "name": f"{'control' if sweep.is_control else 'reuse'}-{sweep.name}-{residency}",
            "shapes": [s.model_dump() for s in sweep.shapes],
            "residency": residency,
        }
        for sweep in matrix.scheduler.sweeps
        for residency in sweep.residencies
    ]


def stateful_tests(matrix: Matrix) -> list[dict[str, Any]]:
    """The stateful tests: both offload modes on each shape."""
    asked = matrix.scheduler.stateful
    if asked is None:
        return []
    common = {"programs": asked.programs, "steps": asked.steps, "seed": asked.seed}
    return [
        {"name": f"stateful-{mode}-{shape.name}", "chunks": list(shape.chunks), "lazy": mode == "lazy", **common}
        for shape in asked.shapes
        for mode in ("eager", "lazy")
    ]


def cell_job(cell: Cell, ctx: Context) -> dict[str, Any]:
    """The JSON object that a cell's child is sent."""
    arm = ctx.arms[cell.pin, cell.arm]
    base = {
        "cell": cell.model_dump(),
        "cwd": str(ctx.folder / "work"),
        "env": {
            "KVMATRIX_OVERLAY": str(arm.manifest),
            "VLLM_CACHE_ROOT": str(ctx.home / "cache" / ctx.envs[cell.pin].path.name / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(ctx.home / "cache" / ctx.envs[cell.pin].path.name / "inductor"),
        },
    }
    if cell.tier == "scheduler":
        return base | {
            "kind": "scheduler",
            "cases": scheduler_cases(ctx.matrix),
            "protocol": scheduler_protocol(ctx.matrix),
            "sweeps": _sweeps_of(cell, ctx),
            "stateful": stateful_tests(ctx.matrix),
            "public": list(public_cases.cases()),
            "tools": str(tools.provide(ctx.home)),
        }
    llm = ctx.matrix.llm
    new_tokens = max(llm.new_tokens, cell.new_tokens, ctx.envs[cell.pin].pin.min_new_tokens)
    requests = REQUESTS if cell.several else 1
    geometry = llm_geometry(cell.prompt, cell.prefix, cell.block, cell.kv_groups, new_tokens, requests)
    checkpoint = {"chunk": cell.chunk, "layers": cell.layers, "vocab_size": llm.vocab_size}
    if geometry["max_model_len"] > CheckpointSpec.max_position_embeddings:
        checkpoint["max_position_embeddings"] = 2 * geometry["max_model_len"]
    return base | {
        "kind": "cell",
        "probes": probe_names(cell, ctx.matrix),
        "checkpoints": str(ctx.home / "checkpoints"),
        "checkpoint": checkpoint,
        "geometry": geometry
        | {"slow": is_slow(cell), "seed": llm.seed}
        | {"cpu_bytes": cpu_bytes(cell, geometry["num_gpu_blocks"], llm.cpu_bytes)},
    }


def is_slow(cell: Cell) -> bool:
    """Whether a forward pass takes seconds: on the host device Triton is its interpreter."""
    return cell.device == "host" and cell.backend == "TRITON_ATTN"


def _sweeps_of(cell: Cell, ctx: Context) -> list[dict[str, Any]]:
    """All sweeps; for an arm that is followed to its first failure only, the small ones first."""
    sweeps = [*class_sweeps(ctx.matrix), *scheduler_sweeps(ctx.matrix)]
    return sorted(sweeps, key=_lookups) if cell.arm in ctx.until_failure else sweeps


def _lookups(sweep: dict[str, Any]) -> int:
    """Rough number of lookups of a sweep."""
    return sum(_lookups_of(shape, sweep["residency"]) for shape in sweep["shapes"])


def _lookups_of(shape: dict[str, Any], residency: Residency) -> int:
    block: int = shape["block"]
    longest = reuse.longest_prompt(block, shape["chunks"], shape["periods"], shape["windows"])
    groups = 1 + len(shape["chunks"]) + len(shape["windows"])
    variants = {"all": 1, "every-subset": 1 << groups * (longest // block - 1)}.get(residency, VARIANTS)
    return variants * len(reuse.prompts(block, longest, shape["edges"])) * (longest // block) // 2


def llm_geometry(prompt: int, prefix: int, block: int, groups: int, new_tokens: int, requests: int = 1) -> dict[str, int]:
    """Engine sizes in tokens and blocks: just room for ``requests`` of the prompt, so that little filler overwrites it all."""
    max_model_len = -(-(prompt + new_tokens + 1) // block) * block
    return {
        "prompt": prompt,
        "prefix": prefix,
        "block": block,
        "new_tokens": new_tokens,
        "requests": requests,
        "max_model_len": max_model_len,
        "num_gpu_blocks": requests * groups * (max_model_len // block) + 4,
    }


def cpu_bytes(cell: Cell, num_gpu_blocks: int, least: int) -> int:
    """Size of the CPU tier: ``least``, or more where that is no ``CPU_TIERS`` times the device tier."""
    of_token = CheckpointSpec.kv_bytes_of_token(-(-len(cell.layers) // cell.kv_groups))
    return max(least, CPU_TIERS * num_gpu_blocks * cell.block * of_token)


class CellRun:
    """One cell through its attempts."""

    def __init__(self, cell: Cell, ctx: Context, stage: Callable[[str], None]) -> None:
        self.cell = cell
        self.ctx = ctx
        self.stage = stage
        self.arm = ctx.arms[cell.pin, cell.arm]
        self.job: Job | None = None
        self._scheduler_rows: dict[str, Callable[[dict[str, Any], int], ProbeRow]] = {
            "case": self._case_row,
            "protocol": self._protocol_row,
            "sweep": self._sweep_row,
            "stateful": self._stateful_row,
            "public": self._public_row,
        }

    def run(self) -> list[ProbeRow]:
        """Run the cell and write its rows; the last attempt's probe rows come back.

        Raises:
            DiskError: a row could not be written.
        """
        if self.cell.mode == "compiled" and self.ctx.compiler_reason:
            return self._write(Outcome("UNSUPPORTED", f"no-compiler: {self.ctx.compiler_reason}"), 1, 0.0)
        without = self.ctx.envs[self.cell.pin].pin.without_offload
        if self.cell.tier == "llm" and (why := without.get(self.cell.offload)):
            return self._write(Outcome("UNSUPPORTED", f"known-fault: {why}"), 1, 0.0)
        for attempt in range(1, INFRA_ATTEMPTS + 1):
            started = time.monotonic()
            outcome = self._attempt(attempt)
            if self.ctx.pool.closing and outcome.status in ("CRASH", "INFRA"):
                outcome.status, outcome.reason = "NOT_RUN", INTERRUPTED
            rows = self._write(outcome, attempt, time.monotonic() - started)
            if not outcome.parent_died or self.ctx.pool.closing:
                break
        return rows

    def skip(self, reason: str) -> list[ProbeRow]:
        """Report every probe as NOT_RUN."""
        return self._write(Outcome("NOT_RUN", reason), 1, 0.0)

    def _log(self, attempt: int) -> Path:
        suffix = f".{attempt}" if attempt > 1 else ""
        return self.ctx.folder / "logs" / f"{self.cell.id}{suffix}.log"

    def _attempt(self, attempt: int) -> Outcome:
        outcome = Outcome()
        env = self.ctx.parent_variables(self.cell.pin, self.cell.device, self.cell.backend)
        try:
            parent = self.ctx.pool.get(self.ctx.envs[self.cell.pin].python, env)
            self.job = parent.start(cell_job(self.cell, self.ctx), self._log(attempt))
        except InfraError as e:
            return Outcome("INFRA", f"parent: {e}", parent_died=True)
        self._follow(outcome, attempt)
        return outcome

    def _follow(self, outcome: Outcome, attempt: int) -> None:
        """Read the child to its end; its probes are judged as they come in."""
        job, timeout = self.job, self.ctx.matrix.budgets.cell_timeout_s
        assert job is not None
        done = False
        try:
            for message in job.messages(timeout):
                done = done or message["type"] == "done"
                self._handle(message, outcome, attempt)
                if outcome.status == "UNSUPPORTED":
                    job.kill()
                    break
                if self._is_enough(outcome):
                    outcome.status, outcome.reason = "NOT_RUN", ENOUGH
                    job.kill()
                    break
        except JobTimeout:
            job.kill()
            outcome.status, outcome.reason = "TIMEOUT", f"timeout: not done after {timeout:g} s"
        job.finish()
        outcome.max_rss_kib = job.max_rss_kib
        if outcome.status == "OK" and not done:
            outcome.status = "CRASH"
            outcome.reason = f"crash: the process ended {ended_how(job.exit_code)} before it was done"
            outcome.parent_died = job.exit_code is None

    def _is_enough(self, outcome: Outcome) -> bool:
        return self.cell.arm in self.ctx.until_failure and any(
            r.status == "FAIL" and not r.is_releases_own for r in outcome.probes[-1:]
        )

    def _handle(self, message: dict[str, Any], outcome: Outcome, attempt: int) -> None:
        kind = message["type"]
        if kind == "stage":
            self.stage(message["stage"])
        elif kind == "engine":
            outcome.engine = message
            verdict = judge.judge_engine(self.cell, message)
            if verdict.status == "UNSUPPORTED":
                outcome.status, outcome.reason = "UNSUPPORTED", verdict.reason
            elif verdict.status == "INFRA":
                outcome.status, outcome.reason = "INFRA", verdict.reason
        elif kind == "probe":
            outcome.probes.append(self._probe_row(message, outcome, attempt))
        elif kind in self._scheduler_rows:
            outcome.probes.append(self._scheduler_row(kind, message, attempt))
        elif kind == "summary":
            outcome.filler_requests = message["filler_requests"]
        elif kind == "error":
            declared = self.ctx.expectations.refusal(self.cell)
            outcome.status, outcome.reason = classify_error(message, outcome.engine is not None, declared)

    def _probe_row(self, observed: dict[str, Any], outcome: Outcome, attempt: int) -> ProbeRow:
        cold = next((judge.Verdict(r.status, r.reason) for r in outcome.probes if r.probe == "cold"), None)
        tolerances, control = self.ctx.matrix.tolerances[self.cell.dtype], self.cell.hit_class == "control"
        verdict = judge.judge_probe(observed, self.arm, tolerances, self.ctx.matrix.llm.vocab_size, cold, control)
        detail = dict(observed["detail"])
        if observed["probe"] == "cold" and verdict.status == "PASS" and outcome.engine is not None:
            # Answers that the reference refutes are not among them: they would make all others look wrong.
            model = (outcome.engine["weights_sha256"], self.cell.layers, self.cell.chunk)
            same = (*model, self.cell.prompt, self.cell.dtype)
            agreement = self.ctx.cold_answers.compare(self.cell.id, same, observed["tokens"], observed["logprobs"])
            verdict, detail["agreement"] = judge.judge_agreement(agreement, tolerances), agreement
        if outcome.status == "INFRA":
            verdict = judge.Verdict("INFRA", outcome.reason)
        elif observed["probe"] == "corrupted-load" and verdict.status != "PASS":
            outcome.status, outcome.reason = "INFRA", verdict.reason  # what such a cell sees as right says nothing
        counters, plan = observed["counters"], observed["plan"]
        return self._row(
            observed["probe"],
            verdict,
            attempt,
            imported=observed["imported"],
            resolved=judge.resolved(outcome.engine) if outcome.engine else {},
            tokens=observed["tokens"],
            cold_tokens=observed["cold_tokens"],
            max_logprob_error=observed["max_logprob_error"],
            reference_error=(observed.get("reference") or {}).get("max_logprob_error"),
            cached_tokens=observed["cached_tokens"],
            device_hit_tokens=counters["device_hit_tokens"],
            external_hit_tokens=counters["external_hit_tokens"],
            loaded_blocks=counters["loaded_blocks"],
            reuse_tokens=plan["reuse_tokens"],
            needed_loads=plan["needed_loads"],
            detail=detail,
            seconds=observed["seconds"],
        )

    def _scheduler_row(self, kind: str, message: dict[str, Any], attempt: int) -> ProbeRow:
        if refused := message.get("refused"):
            return self._row(message["name"], judge.Verdict("UNSUPPORTED", refused), attempt, imported=message["imported"])
        return self._scheduler_rows[kind](message, attempt)

    def _case_row(self, case: dict[str, Any], attempt: int) -> ProbeRow:
        return self._row(
            case["name"],
            judge.judge_case(case, self.arm),
            attempt,
            imported=case["imported"],
            resolved={
                "answer": [case["external_tokens"], case["is_async"]],
                "missing": case["missing"],
                "null_copies": case["null_copies"],
                "null_needed": case["null_needed"],
            },
            device_hit_tokens=case["prefix"],
            external_hit_tokens=case["external_tokens"],
            reuse_tokens=case["ideal_tokens"],
            loaded_blocks=case["loaded_blocks"],
        )

    def _protocol_row(self, message: dict[str, Any], attempt: int) -> ProbeRow:
        verdict = judge.judge_protocol(message["tried"], message["imported"], self.arm)
        return self._row(message["name"], verdict, attempt, imported=message["imported"], resolved=message["tried"])

    def _sweep_row(self, message: dict[str, Any], attempt: int) -> ProbeRow:
        totals = message["totals"]
        return self._row(
            message["name"],
            judge.judge_sweep(totals, message["imported"], self.arm),
            attempt,
            imported=message["imported"],
            external_hit_tokens=totals["kept"],
            reuse_tokens=totals["ideal"],
            sweep=totals,
            seconds=totals["seconds"],
        )

    def _stateful_row(self, message: dict[str, Any], attempt: int) -> ProbeRow:
        totals = message["totals"]
        return self._row(
            message["name"],
            judge.judge_stateful(totals, message["imported"], self.arm),
            attempt,
            imported=message["imported"],
            sweep=totals,
            seconds=totals["seconds"],
        )

    def _public_row(self, message: dict[str, Any], attempt: int) -> ProbeRow:
        found, imported = message["found"], message["imported"]
        sums = {
            "reuse_tokens": sum(lookup["ideal_tokens"] for lookup in found["lookups"]),
            "external_hit_tokens": sum(lookup["external_tokens"] for lookup in found["lookups"]),
        }
        tokens = sums if found["lookups"] else {}
        verdict = judge.judge_public(found, imported, self.arm)
        return self._row(
            message["name"], verdict, attempt, imported=imported, resolved=found, **(tokens if found["lookups"] else {})
        )

    def _row(self, probe: str, verdict: judge.Verdict, attempt: int, **fields: Any) -> ProbeRow:
        entry = self.ctx.expectations.find(self.cell, probe)
        row = ProbeRow(
            run=self.ctx.run,
            id=probe_id(self.cell, probe),
            cell=self.cell.model_dump(),
            probe=probe,
            attempt=attempt,
            status=verdict.status,
            expected=expected_status(entry, verdict.status, verdict.reason),
            reason=facts.without_paths(verdict.reason),
            expectation=entry.why if entry else "",
            of_every_arm=entry is not None and entry.of_every_arm,
            patch_sha256=self.arm.patch_sha256,
            requested=judge.requested(self.cell) if self.cell.tier == "llm" else {},
            log=str(self._log(attempt).relative_to(self.ctx.folder)),
            **fields,
        )
        self.ctx.writer.write(row)
        return row

    def _write(self, outcome: Outcome, attempt: int, seconds: float) -> list[ProbeRow]:
        """The attempt's cell row, and a row for each probe that did not come to one of its own."""
        reported = {r.probe for r in outcome.probes}
        status: Status = "NOT_RUN" if outcome.status == "OK" else outcome.status
        for name in probe_names(self.cell, self.ctx.matrix):
            if name not in reported:
                reason = outcome.reason or "not-run: the cell ended without it"
                outcome.probes.append(self._row(name, judge.Verdict(status, reason), attempt))
        if outcome.status in ("CRASH", "TIMEOUT") and reported >= set(probe_names(self.cell, self.ctx.matrix)):
            # It answered everything and then went wrong: no probe's row would show that.
            outcome.probes.append(self._row("shutdown", judge.Verdict(outcome.status, outcome.reason), attempt))
        self.ctx.writer.write(
            CellRow(
                run=self.ctx.run,
                id=self.cell.id,
                attempt=attempt,
                status=outcome.status,
                reason=facts.without_paths(outcome.reason),
                isolation="fork",
                seconds=round(seconds, 3),
                max_rss_kib=outcome.max_rss_kib,
                engine_start_s=(outcome.engine or {}).get("start_seconds"),
                filler_requests=outcome.filler_requests,
            )
        )
        return outcome.probes


def ended_how(exit_code: int | None) -> str:
    """How a child ended, to stand behind "the process ended"; None: nobody saw its end."""
    if exit_code is None:
        return WITH_PARENT
    return f"by signal {-exit_code}" if exit_code < 0 else f"with exit status {exit_code}"


_REFUSALS = re.compile(
    r"NotImplementedError|not supported|unsupported|does not support|No valid attention backend|No common block size",
    re.IGNORECASE,
)


def classify_error(
    message: dict[str, Any], started: bool = False, declared: str | None = None
) -> tuple[Literal["CRASH", "INFRA", "UNSUPPORTED"], str]:
    """A child's exception as a status: what vLLM refuses to start is UNSUPPORTED, with vLLM's own reason.

    Once the engine has ``started``, the same words are a crash. ``declared`` is the regular expression of a refusal that the
    expectations name: a bare assertion of vLLM's, or one that comes with the first request, is known as a refusal by it alone.
    """
    text = f"{message['error']}: {message['message']}"
    chain = [text, *message["causes"]]
    if declared and (named := next((c for c in chain if re.search(declared, c)), None)):
        return "UNSUPPORTED", f"refused: {named[:400]}"
    refused = next((c for c in chain if _REFUSALS.search(c)), None)
    if message["error"] in ("EngineStateError", "OverlayError"):
        return "INFRA", f"{'not-established' if message['error'] == 'EngineStateError' else 'wrong-arm'}: {text}"
    if refused and not started and message["error"] in ("ValueError", "NotImplementedError", "ValidationError", "RuntimeError"):
        return "UNSUPPORTED", f"refused: {refused[:400]}"
    return "CRASH", f"crash: {text[:400]}"


class Progress:
    """What is told about a run while it goes on; the default tells nothing."""

    def cell_started(self, cell: Cell) -> None: ...

    def cell_stage(self, cell: Cell, stage: str) -> None: ...

    def cell_done(self, cell: Cell, rows: Sequence[ProbeRow], seconds: float) -> None: ...

    def waiting_for_parents(self, count: int) -> None: ...


def run_cells(cells: Sequence[Cell], ctx: Context, jobs: int, progress: Progress) -> list[ProbeRow]:
    """Run all cells, ``jobs`` at a time, and give their rows in the cells' order.

    Raises:
        KeyboardInterrupt: after the children are ended; finished rows are kept.
        DiskError: a row could not be written; the children are ended.
    """
    # Parents are started before the first cell needs them: they import side by side.
    parents = [(ctx.envs[c.pin].python, ctx.parent_variables(c.pin, c.device, c.backend)) for c in cells]
    unique = [p for i, p in enumerate(parents) if p not in parents[:i]]
    progress.waiting_for_parents(len(unique))
    for python, env in unique:
        ctx.pool.launch(python, env)
    stop = threading.Event()

    def work(cell: Cell) -> list[ProbeRow]:
        run = CellRun(cell, ctx, lambda stage: progress.cell_stage(cell, stage))
        if stop.is_set():
            return run.skip(INTERRUPTED)
        started = time.monotonic()
        progress.cell_started(cell)
        rows = run.run()
        progress.cell_done(cell, rows, time.monotonic() - started)
        return rows

    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="kvmatrix-cell") as executor:
        futures: dict[Future[list[ProbeRow]], Cell] = {executor.submit(work, c): c for c in running_order(cells)}
        try:
            _wait_all(set(futures))
        except BaseException:
            stop.set()
            ctx.pool.close()
            raise
    by_cell = {c.id: f.result() for f, c in futures.items()}
    return [row for c in cells for row in by_cell[c.id]]


def _wait_all(futures: set[Future[list[ProbeRow]]]) -> None:
    pending = futures
    while pending:
        done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()


def running_order(cells: Sequence[Cell]) -> list[Cell]:
    """The longest first, so that no long cell is left alone at the end.

    Of the arms that compile the same model one goes ahead: the others find what it compiled, and do not do so beside it.
    """
    compiling = {c.id for c in _first_of_each_model(cells)}
    return sorted(cells, key=lambda c: -expected_seconds(c) - (COMPILING_SECONDS if c.id in compiling else 0.0))


def _first_of_each_model(cells: Sequence[Cell]) -> list[Cell]:
    first: dict[str, Cell] = {}
    for cell in (c for c in cells if c.mode == "compiled"):
        first.setdefault(cell.id.removesuffix(cell.arm), cell)
    return list(first.values())


def expected_seconds(cell: Cell) -> float:
    """Rough duration of a cell, only to order cells and to say how long is left; of a model that was compiled before."""
    if cell.tier == "scheduler":
        return 25
    base = {"CPU_ATTN": 4.0, "FLEX_ATTENTION": 6.0, "TRITON_ATTN": 12.0}.get(cell.backend, 6.0)
    return base + (5.0 if cell.mode == "compiled" else 0.0) + 0.05 * cell.new_tokens
