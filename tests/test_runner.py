"""From a child's messages to rows. The children here are scripts of messages; everything else is the real runner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from conftest import kv_group

from kvmatrix import probes, public_cases, runner
from kvmatrix.arms import Arm
from kvmatrix.cells import Cell
from kvmatrix.config import LEVELS, Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import DiskError, InfraError
from kvmatrix.expectations import Expectation, Expectations, is_problem
from kvmatrix.processes import JobTimeout
from kvmatrix.records import CellRow, ProbeRow, RowWriter, RunRow, last_attempts, read_rows
from kvmatrix.runner import CellRun, Context, Progress, cell_job, classify_error, run_cells, running_order

EXPECTED_RED = ["mixed-misaligned", "follow-up", "mixed-head-gone"]
PROBES = [p for p in probes.PROBES if p not in probes.SEVERAL]
MODULE = "vllm.v1.simple_kv_offload.manager"
STOCK = Arm(name="stock", pin="0.32.0", manifest=Path("stock.json"), patch_sha256=None, expected={MODULE: "b" * 64})
FIX = Arm(name="fix", pin="0.32.0", manifest=Path("fix.json"), patch_sha256="a" * 64, expected={MODULE: "c" * 64})
DONE = {"type": "done"}
Message = dict[str, Any] | BaseException


class FakeJob:
    """Gives its messages, then ends as told; an exception among them is raised in its place."""

    pid = -1
    max_rss_kib = 1024

    def __init__(self, messages: Sequence[Message], exit_code: int | None) -> None:
        self._messages = messages
        self.exit_code = exit_code
        self.killed = self.finished = False

    def messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        for message in self._messages:
            if isinstance(message, BaseException):
                raise message
            yield message

    def kill(self) -> None:
        self.killed = True

    def finish(self, timeout: float = 30) -> None:
        self.finished = True


class FakePool:
    """A pool whose one parent starts the scripted jobs in turn; a script that is an exception is raised instead."""

    def __init__(self, scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts)
        self.jobs: list[FakeJob] = []
        self.sent: list[dict[str, Any]] = []
        self.closing = False

    def launch(self, python: Path, env: dict[str, str]) -> FakePool:
        return self

    get = launch

    def start(self, job: dict[str, Any], log: Path, timeout: float = 30) -> FakeJob:
        self.sent.append(job)
        script = self.scripts.pop(0)
        if isinstance(script, BaseException):
            raise script
        self.jobs.append(FakeJob(*script))
        return self.jobs[-1]

    def close(self) -> None:
        self.closing = True


@pytest.fixture
def make_context(project: Project, run_row: RunRow, tmp_path: Path) -> Iterator[Callable[..., Context]]:
    writers: list[RowWriter] = []

    def make(*scripts: Any, compiler_reason: str | None = None) -> Context:
        writers.append(RowWriter(tmp_path / f"run-{len(writers)}" / "rows.jsonl"))
        writers[-1].write(run_row)
        pin = project.matrix.pin("0.32.0", "host")
        env = PinEnv(pin, tmp_path / "env", tmp_path / "env" / "bin" / "python", tmp_path / "env" / "lib", "d" * 64, {})
        return Context(
            matrix=project.matrix,
            run=run_row.run,
            folder=writers[-1].path.parent,
            home=tmp_path,
            envs={"0.32.0": env},
            arms={("0.32.0", "stock"): STOCK, ("0.32.0", "fix"): FIX},
            expectations=Expectations.load(project.root / "conformance" / "expectations"),
            writer=writers[-1],
            pool=FakePool(scripts),  # type: ignore[arg-type]
            compiler_reason=compiler_reason,
            root=project.root,
        )

    yield make
    for writer in writers:
        writer.close()


@pytest.fixture
def run(make_context: Callable[..., Context], make_cell: Callable[..., Cell]) -> Callable[..., tuple[list[ProbeRow], Context]]:
    """Runs one cell on the scripts of its attempts: its rows and the context."""

    def go(*scripts: Any, cell: Cell | None = None, **options: Any) -> tuple[list[ProbeRow], Context]:
        ctx = make_context(*scripts, **options)
        return CellRun(cell or make_cell(), ctx, lambda stage: None).run(), ctx

    return go


@pytest.fixture
def went_well(
    observe: Callable[..., dict[str, Any]], engine_facts: Callable[..., dict[str, Any]]
) -> Callable[..., list[Message]]:
    """The messages of a cell without a fault; ``probe={...}`` by name changes one probe's observation."""

    def make(names: Sequence[str] = PROBES, engine: dict[str, Any] | None = None, **by_probe: dict[str, Any]) -> list[Message]:
        probes = [
            {"type": "probe"} | observe(n, **{"imported": STOCK.expected} | by_probe.get(n.replace("-", "_"), {}))
            for n in names
        ]
        stages = [{"type": "stage", "stage": "engine start"}, {"type": "engine"} | (engine or engine_facts())]
        return [*stages, *probes, {"type": "summary", "filler_requests": 6}]

    return make


def error(name: str, message: str, *causes: str) -> dict[str, Any]:
    return {"type": "error", "error": name, "message": message, "causes": list(causes)}


def cell_rows(ctx: Context) -> list[CellRow]:
    return [r for r in read_rows(ctx.writer.path) if isinstance(r, CellRow)]


def statuses(rows: Sequence[ProbeRow]) -> dict[str, str]:
    return {r.probe: r.status for r in rows}


# --- cells that come to an answer -------------------------------------------------------------------------------------


def test_every_probe_is_a_row(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    fault = {"tokens": [9], "max_logprob_error": 20.0}
    rows, ctx = run(([*went_well(mixed_misaligned=fault, follow_up=fault, mixed_head_gone=fault), DONE], 0))
    assert statuses(rows) == dict.fromkeys(PROBES, "PASS") | dict.fromkeys(EXPECTED_RED, "FAIL")
    assert not any(map(is_problem, rows))
    last = rows[-1]
    assert last.expected == "FAIL"
    assert last.expectation
    assert (last.tokens, last.cold_tokens, last.external_hit_tokens) == ([9], [7], 128)
    assert last.requested["backend"] == last.resolved["backend"] == "CPU_ATTN"
    (cell,) = cell_rows(ctx)
    assert (cell.status, cell.filler_requests, cell.max_rss_kib, cell.engine_start_s) == ("OK", 6, 1024, 1.0)
    assert [r for r in read_rows(ctx.writer.path) if isinstance(r, ProbeRow)] == rows
    assert ctx.pool.jobs[0].finished


def test_a_patch_that_declines_the_hit_of_a_control(
    run: Callable[..., Any],
    went_well: Callable[..., list[Message]],
    make_cell: Callable[..., Cell],
    engine_facts: Callable[..., dict[str, Any]],
) -> None:
    engine = engine_facts(groups=[kv_group("SlidingWindowSpec", sliding_window=128), kv_group("FullAttentionSpec")])
    declined = {"cached_tokens": 32, "counters__external_hit_tokens": 0, "counters__loaded_blocks": 0}
    asked = [p for p in PROBES if p != "mixed-aligned"]
    by_arm = {}
    for declines in ({}, {"mixed_misaligned": declined}):
        rows, _ = run(([*went_well(asked, engine, **declines), DONE], 0), cell=make_cell(layers="sf"))
        by_arm[bool(declines)] = statuses(rows)
    assert by_arm[False] == dict.fromkeys(asked, "PASS")
    assert by_arm[True] == by_arm[False] | {"mixed-misaligned": "FAIL"}


def test_an_unexpected_pass_is_a_problem(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    rows, _ = run(([*went_well(), DONE], 0))
    assert [r.probe for r in rows if is_problem(r)] == EXPECTED_RED
    assert rows[-1].status == "PASS"


def test_another_failure_than_the_expected_one(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    rows, _ = run(([*went_well(mixed_head_gone={"pending_hits": 1}), DONE], 0))
    assert (rows[-1].status, rows[-1].expected, rows[-1].expectation != "") == ("FAIL", "PASS", True)


def test_a_bad_cold_answer_makes_the_others_void(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    wrong = {"reference": {"tokens": [8], "max_logprob_error": 3.0}}
    rows, _ = run(([*went_well(cold=wrong), DONE], 0))
    told_first = {"cold": "FAIL", "corrupted-load": "PASS"}
    assert statuses(rows) == dict.fromkeys(PROBES, "INFRA") | told_first


def test_a_cell_that_would_not_notice_a_lost_block(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    """It comes first, and what looks right after it says nothing."""
    damage = [{"group": 1, "block": 0, "lost": 1, "tokens": [7], "max_logprob_error": 0.001}]
    messages = went_well(
        ["corrupted-load", *(p for p in PROBES if p != "corrupted-load")], corrupted_load={"detail": {"damage": damage}}
    )
    rows, _ = run(([*messages, DONE], 0))
    assert set(statuses(rows).values()) == {"INFRA"}
    assert all(r.reason.startswith("blind: the loss of block 0 of group 1") for r in rows)
    assert all(map(is_problem, rows))


def test_cold_answers_are_held_against_those_of_other_cells(
    make_context: Callable[..., Context], make_cell: Callable[..., Cell], went_well: Callable[..., list[Message]]
) -> None:
    answers = {"A": -1.0, "B": -1.004, "C": -1.1}
    ctx = make_context(*(([*went_well(["cold"], cold={"logprobs": [[x, -2.0]]}), DONE], 0) for x in answers.values()))
    rows = [CellRun(make_cell(prefix=p), ctx, lambda _: None).run()[0] for p in (32, 64, 96)]
    assert [r.status for r in rows] == ["PASS", "PASS", "FAIL"]
    assert [r.detail["agreement"]["cells"] for r in rows] == [0, 1, 2]
    assert rows[2].reason == f"disagreement: the cold answer differs from that of {make_cell(prefix=32).id} by 0.1 nats"


def test_another_arms_files(
    run: Callable[..., Any], went_well: Callable[..., list[Message]], make_cell: Callable[..., Cell]
) -> None:
    rows, _ = run(([*went_well(), DONE], 0), cell=make_cell(arm="fix"))
    assert set(statuses(rows).values()) == {"INFRA"}
    assert all(r.reason.startswith("wrong-arm: ") for r in rows)
    assert all(r.patch_sha256 == FIX.patch_sha256 for r in rows)


def test_an_engine_that_is_not_as_asked(
    run: Callable[..., Any], went_well: Callable[..., list[Message]], engine_facts: Callable[..., dict[str, Any]]
) -> None:
    """Its probes are not even waited for."""
    engine = engine_facts({"backends": {"0": "TORCH_SDPA"}})
    rows, ctx = run(([*went_well(engine=engine), DONE], 0))
    assert set(statuses(rows).values()) == {"UNSUPPORTED"}
    assert len(rows) == len(PROBES)
    assert rows[0].reason == "not-honoured: backend CPU_ATTN was asked for, vLLM runs TORCH_SDPA"
    assert ctx.pool.jobs[0].killed
    assert cell_rows(ctx)[0].status == "UNSUPPORTED"


def test_an_engine_without_what_the_probes_are_about(
    run: Callable[..., Any], went_well: Callable[..., list[Message]], engine_facts: Callable[..., dict[str, Any]]
) -> None:
    groups = engine_facts()["state"]["groups"][:1]
    rows, _ = run(([*went_well(engine=engine_facts(groups=groups)), DONE], 0))
    assert set(statuses(rows).values()) == {"INFRA"}
    assert all(r.reason.startswith("vacuous: ") for r in rows)


# --- cells that do not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exit_code", "how"), [(-11, "by signal 11"), (-9, "by signal 9"), (1, "with exit status 1")])
def test_a_crash(run: Callable[..., Any], went_well: Callable[..., list[Message]], exit_code: int, how: str) -> None:
    """What was reported before stays; the rest are rows all the same."""
    rows, ctx = run((went_well(PROBES[:2])[:-1], exit_code))
    assert statuses(rows) == {"cold": "PASS", "device-hit": "PASS"} | dict.fromkeys(PROBES[2:], "CRASH")
    assert how in rows[-1].reason
    assert is_problem(rows[-1])
    assert [(c.status, c.attempt) for c in cell_rows(ctx)] == [("CRASH", 1)], "a crash is not tried again"


def test_an_exception_in_the_child(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    rows, _ = run(([*went_well(PROBES[:1])[:-1], error("ZeroDivisionError", "division by zero")], 1))
    assert statuses(rows) == {"cold": "PASS"} | dict.fromkeys(PROBES[1:], "CRASH")
    assert rows[-1].reason == "crash: ZeroDivisionError: division by zero"


def test_a_timeout(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    rows, ctx = run(([*went_well(PROBES[:1])[:-1], JobTimeout()], -9))
    assert statuses(rows) == {"cold": "PASS"} | dict.fromkeys(PROBES[1:], "TIMEOUT")
    assert f"{ctx.matrix.budgets.cell_timeout_s:g} s" in rows[-1].reason
    assert ctx.pool.jobs[0].killed
    assert [(c.status, c.attempt) for c in cell_rows(ctx)] == [("TIMEOUT", 1)]


def test_a_cell_that_ends_without_all_its_probes(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    rows, _ = run(([*went_well(PROBES[:3]), DONE], 0))
    assert statuses(rows) == dict.fromkeys(PROBES[:3], "PASS") | dict.fromkeys(PROBES[3:], "NOT_RUN")
    assert all(r.reason for r in rows[3:])


def test_what_vllm_refuses(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    refusal = error("RuntimeError", "Engine core initialization failed", "NotImplementedError: FP8 is not supported here")
    rows, ctx = run(([went_well()[0], refusal], 1))
    assert set(statuses(rows).values()) == {"UNSUPPORTED"}
    assert rows[0].reason == "refused: NotImplementedError: FP8 is not supported here"
    assert not any(map(is_problem, rows))
    assert len(cell_rows(ctx)) == 1


def test_what_sounds_like_a_refusal_after_an_answer_is_a_crash(
    run: Callable[..., Any], went_well: Callable[..., list[Message]]
) -> None:
    """The engine runs; a patch that raises this in its lookup must not end as a cell that cannot run here."""
    late = error("NotImplementedError", "a prefix inside of a chunk is not supported")
    rows, _ = run(([*went_well(PROBES[:3])[:-1], late], 1))
    assert statuses(rows) == dict.fromkeys(PROBES[:3], "PASS") | dict.fromkeys(PROBES[3:], "CRASH")


@pytest.mark.parametrize(
    ("message", "status", "reason"),
    [
        (error("ValueError", "No valid attention backend found for cpu"), "UNSUPPORTED", "refused: "),
        (error("ValueError", "No common block size for 8"), "UNSUPPORTED", "refused: "),
        (error("NotImplementedError", ""), "UNSUPPORTED", "refused: "),
        (
            error("ValidationError", "1 validation error", "ValueError: mode FULL does not support it"),
            "UNSUPPORTED",
            "refused: ",
        ),
        (error("ValueError", "a bad shape"), "CRASH", "crash: "),
        (error("AssertionError", "not supported"), "CRASH", "crash: "),
        (error("KeyError", "'nosuch'"), "CRASH", "crash: "),
        (error("EngineStateError", "transfers still pending"), "INFRA", "not-established: "),
        (error("OverlayError", "x.py has sha256 00"), "INFRA", "wrong-arm: "),
    ],
)
def test_errors_as_statuses(message: dict[str, Any], status: str, reason: str) -> None:
    found = classify_error(message, started=False)
    assert found[0] == status
    assert found[1].startswith(reason)
    assert "\n" not in found[1]
    assert classify_error(message, started=True)[0] == status.replace("UNSUPPORTED", "CRASH")


def test_a_declared_refusal_is_one_whenever_it_comes() -> None:
    """An assertion is a crash, unless it is the very one that the expectations name."""
    bare = error("AssertionError", "assert 0 <= index < len(groups)")
    for started in (False, True):
        assert classify_error(bare, started)[0] == "CRASH"
        assert classify_error(bare, started, r"assert 0 <= size")[0] == "CRASH"
        found = classify_error(bare, started, r"AssertionError: assert 0 <= index")
        assert found == ("UNSUPPORTED", "refused: AssertionError: assert 0 <= index < len(groups)")


def test_a_declared_refusal_of_a_cell(
    run: Callable[..., Any],
    went_well: Callable[..., list[Message]],
    make_cell: Callable[..., Cell],
    engine_facts: Callable[..., dict[str, Any]],
) -> None:
    """vLLM says it with the first request, after the engine has come up."""
    late = error("AssertionError", "attn_chunk_size 80 is not divisible by block_size 32")
    engine = engine_facts(
        groups=[kv_group("ChunkedLocalAttentionSpec", attention_chunk_size=80), kv_group("FullAttentionSpec")]
    )
    rows, ctx = run(([*went_well([], engine)[:-1], late], 1), cell=make_cell(chunk=80, arm="fix"))
    assert set(statuses(rows).values()) == {"UNSUPPORTED"}
    assert {r.expected for r in rows} == {"UNSUPPORTED"}
    assert cell_rows(ctx)[0].status == "UNSUPPORTED"
    rows, _ = run(([*went_well([])[:-1], late], 1), cell=make_cell(arm="fix"))
    assert set(statuses(rows).values()) == {"CRASH"}


def test_a_compiled_cell_without_a_compiler(run: Callable[..., Any], make_cell: Callable[..., Cell]) -> None:
    rows, ctx = run(cell=make_cell(mode="compiled"), compiler_reason="no C++ compiler (g++) is installed")
    assert set(statuses(rows).values()) == {"UNSUPPORTED"}
    assert rows[0].reason == "no-compiler: no C++ compiler (g++) is installed"
    assert ctx.pool.sent == []
    assert cell_rows(ctx)[0].status == "UNSUPPORTED"


def test_an_offload_mode_that_a_release_cannot_be_run_in(
    make_context: Callable[..., Context], make_cell: Callable[..., Cell], went_well: Callable[..., list[Message]]
) -> None:
    ctx = make_context(([*went_well(["cold"]), DONE], 0))
    env = ctx.envs["0.32.0"]
    ctx.envs["0.32.0"] = dataclasses.replace(
        env, pin=env.pin.model_copy(update={"without_offload": {"lazy": "it never rests"}})
    )
    rows = CellRun(make_cell(offload="lazy"), ctx, lambda _: None).run()
    assert {(r.status, r.reason) for r in rows} == {("UNSUPPORTED", "known-fault: it never rests")}
    assert len(rows) == len(PROBES)
    assert not any(map(is_problem, rows))
    assert ctx.pool.sent == []  # type: ignore[attr-defined]
    assert CellRun(make_cell(), ctx, lambda _: None).run()[0].status == "PASS", "other modes run"


def test_the_release_whose_lazy_stores_are_lost(project: Project) -> None:
    assert set(project.matrix.pin("0.29.0", "host").without_offload) == {"lazy"}
    assert project.matrix.pin("0.32.0", "host").without_offload == {}


def test_an_eager_cell_needs_no_compiler(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    rows, _ = run(([*went_well(), DONE], 0), compiler_reason="no C++ compiler")
    assert "UNSUPPORTED" not in statuses(rows).values()


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_a_cell_whose_parent_died_is_tried_once_more(run: Callable[..., Any], went_well: Callable[..., list[Message]]) -> None:
    """And its first try stays in the file."""
    rows, ctx = run((went_well(PROBES[:1])[:-1], None), ([*went_well(), DONE], 0))
    assert {r.attempt for r in rows} == {2}
    assert statuses(rows)["cold"] == "PASS"
    assert [(c.status, c.attempt) for c in cell_rows(ctx)] == [("CRASH", 1), ("OK", 2)]
    written = [r for r in read_rows(ctx.writer.path) if isinstance(r, ProbeRow)]
    assert len(written) == 2 * len(PROBES)
    assert last_attempts(written) == rows
    assert rows[0].log != written[0].log


def test_a_parent_that_cannot_be_had_is_tried_once_more(
    run: Callable[..., Any], went_well: Callable[..., list[Message]]
) -> None:
    rows, ctx = run(InfraError("the preloaded parent ended"), ([*went_well(), DONE], 0))
    assert [(c.status, c.attempt) for c in cell_rows(ctx)] == [("INFRA", 1), ("OK", 2)]
    assert statuses(rows)["cold"] == "PASS"


def test_there_is_no_third_try(run: Callable[..., Any]) -> None:
    rows, ctx = run(*[InfraError("the preloaded parent ended")] * 3)
    assert [(c.status, c.attempt) for c in cell_rows(ctx)] == [("INFRA", 1), ("INFRA", 2)]
    assert set(statuses(rows).values()) == {"INFRA"}
    assert rows[0].reason == "parent: the preloaded parent ended"
    assert len(ctx.pool.scripts) == 1


def test_a_run_that_is_being_ended_tries_nothing_again(
    make_context: Callable[..., Context], make_cell: Callable[..., Cell]
) -> None:
    ctx = make_context(InfraError("the run is being ended"), ([DONE], 0))
    ctx.pool.closing = True
    rows = CellRun(make_cell(), ctx, lambda stage: None).run()
    assert {r.attempt for r in rows} == {1}
    assert "PASS" not in statuses(rows).values()


# --- the scheduler tier -----------------------------------------------------------------------------------------------


def test_scheduler_cases(run: Callable[..., Any], make_cell: Callable[..., Cell], project: Project) -> None:
    cases = runner.scheduler_cases(project.matrix)
    assert [c["absent"] for c in cases[:2]] == [[], [[1, 4]]], "the tail is the chunked group's last whole block"
    messages = [
        {
            "type": "case",
            **case,
            "external_tokens": 64 if case["prefix"] in (16, 144) else 16,
            "ideal_tokens": 64 if case["prefix"] in (16, 144) else 16,
            "is_async": True,
            "loaded_blocks": 5,
            "null_copies": 1,
            "null_needed": 0,
            "missing": [[], [4]] if case["prefix"] in (16, 144) else [[], []],
            "faults": [],
            "boundary_resident": True,
            "leaked_cpu_pins": 0,
            "leaked_device_refs": 0,
            "pending_hits": 0,
            "imported": STOCK.expected,
        }
        for case in cases
    ]
    sweeps = [*runner.class_sweeps(project.matrix), *runner.scheduler_sweeps(project.matrix)]
    sums = {"residency": "all", "geometries": 9, "ideal": 64, "kept": 32, "seconds": 0.5, "first_unsound": "here"}
    sums |= dict.fromkeys(("contract", "misplanned", "leaked", "lost_aligned"), 0)
    wrong = {s["name"]: {"class-corrupt": 9}.get(s["name"], 2 * s["name"].startswith("reuse-")) for s in sweeps}
    assert list(wrong)[:4] == ["class-aligned", "class-corrupt", "class-safe-short", "class-safe-crossing"]
    sent = {"type": "sweep", "imported": STOCK.expected}
    checks = runner.scheduler_protocol(project.matrix)
    tried = {"type": "protocol", "imported": STOCK.expected}
    messages += [tried | {"name": checks[0]["name"], "refused": "refused: not there yet"}]
    messages += [tried | {"name": c["name"], "tried": {"asked": 3, "faults": 0, "first_fault": ""}} for c in checks[1:]]
    messages += [sent | {"name": sweeps[0]["name"], "refused": "refused: no such shape"}]
    messages += [sent | {"name": s["name"], "totals": sums | {"unsound": wrong[s["name"]]}} for s in sweeps[1:]]
    searches = runner.stateful_tests(project.matrix)
    broken = {"violation": "unsound: token 20", "program": "add(0)", "seconds": 0.5}
    sent = {"type": "stateful", "imported": STOCK.expected}
    messages += [sent | {"name": searches[0]["name"], "refused": "refused: no such scheduler"}]
    messages += [sent | {"name": s["name"], "totals": broken} for s in searches[1:]]
    reports = list(public_cases.cases())
    told = {"type": "public", "imported": STOCK.expected}
    messages += [told | {"name": reports[0], "refused": "refused: in its own words"}]
    fine = {"asked": 2, "faults": [], "lookups": []}
    messages += [told | {"name": name, "found": fine} for name in reports[1:]]
    all_rows, ctx = run(([*messages, DONE], 0), cell=make_cell(tier="scheduler", chunk=64, block=16, prompt=81))
    assert [r.probe for r in all_rows] == [*(c["name"] for c in (*cases, *checks, *sweeps, *searches)), *reports]
    rows, public = all_rows[: -len(reports)], all_rows[-len(reports) :]
    assert (public[0].status, public[0].reason) == ("UNSUPPORTED", "refused: in its own words")
    own = [r for r in public if r.expected == "FAIL"]
    assert {r.status for r in public[1:]} == {"PASS"}
    assert [r.probe for r in own if is_problem(r)] == [r.probe for r in own if r is not public[0]], "an unexpected pass"
    assert ctx.pool.sent[0]["public"] == reports
    assert {r.probe for r in rows[: len(cases)] if r.status == "FAIL"} == {
        f"{place}-tail-{tail}" for place in ("prompt81-prefix16", "prompt213-prefix144") for tail in ("present", "absent")
    }
    around = rows[len(cases) : len(cases) + len(checks)]
    assert [r.status for r in around] == ["UNSUPPORTED"] + ["PASS"] * (len(checks) - 1)
    assert around[0].reason == "refused: not there yet"
    refused, *searched = rows[-len(searches) :]
    assert (refused.status, refused.reason) == ("UNSUPPORTED", "refused: no such scheduler")
    assert {(r.status, r.reason) for r in searched} == {("FAIL", "unsound: token 20; smallest program: add(0)")}
    assert all(r.sweep == broken for r in searched)
    refused, *swept = rows[len(cases) + len(checks) : -len(searches)]
    assert (refused.status, refused.reason) == ("UNSUPPORTED", "refused: no such shape")
    assert {(r.status, r.reason) for r in swept} == {
        ("FAIL", "unsound: 2 of 9 geometries, first here"),
        ("FAIL", "unsound: 9 of 9 geometries, first here"),
        ("PASS", ""),
    }
    assert {(r.reuse_tokens, r.external_hit_tokens) for r in swept} == {(64, 32)}
    assert all(r.sweep == sums | {"unsound": wrong[r.probe]} for r in swept)
    assert not any(map(is_problem, rows))
    assert ctx.pool.sent[0]["kind"] == "scheduler"
    assert [s["name"] for s in ctx.pool.sent[0]["sweeps"]] == [s["name"] for s in sweeps]
    assert [s["name"] for s in ctx.pool.sent[0]["stateful"]] == [s["name"] for s in searches]
    assert ctx.pool.sent[0]["env"]["KVMATRIX_OVERLAY"] == "stock.json"


def test_a_public_case_with_lookups(run: Callable[..., Any], make_cell: Callable[..., Cell]) -> None:
    """Its row has what was served and what could be, and an arm is held to its own promise."""
    name = "public-44599-at-the-boundaries"
    served = {"external_tokens": 48, "ideal_tokens": 48, "is_async": True, "prefix": 0, "prompt": 64, "block": 16}
    clean = {"missing": [[]], "faults": [], "null_needed": 0, "leaked_cpu_pins": 0, "leaked_device_refs": 0, "pending_hits": 0}
    lookup = served | clean | {"chunks": [None], "boundary_resident": True, "must_serve": False}
    for changes, status, tokens in (({}, "PASS", 96), ({"external_tokens": 32}, "FAIL", 80)):
        found = {"asked": 0, "faults": [], "lookups": [lookup, lookup | changes]}
        message = {"type": "public", "imported": STOCK.expected, "name": name, "found": found}
        rows, _ = run(([message, DONE], 0), cell=make_cell(tier="scheduler", chunk=64, block=16, prompt=81))
        (row,) = [r for r in rows if r.probe == name]
        assert (row.status, row.external_hit_tokens, row.reuse_tokens) == (status, tokens, 96)
        assert row.reason.startswith("lost-reuse: answers (32, True), 48 tokens" if status == "FAIL" else "")


def test_a_fault_of_the_release_is_no_first_failure(
    run: Callable[..., Any], make_context: Callable[..., Context], make_cell: Callable[..., Cell], project: Project
) -> None:
    names = [c["name"] for c in runner.scheduler_protocol(project.matrix)][:2]
    bad = {"asked": 3, "faults": 1, "first_fault": "leaked: x"}
    messages = [{"type": "protocol", "imported": FIX.expected, "name": n, "tried": bad} for n in names]
    cell = make_cell(tier="scheduler", chunk=64, block=16, prompt=81, arm="fix")
    ctx = make_context(([*messages, DONE], 0))
    ctx.until_failure = frozenset({"fix"})
    known = {"status": "FAIL", "message": "^leaked: ", "why": "w", "link": "l", "expires": date(2099, 1, 1)}
    ctx.expectations = Expectations([Expectation(**known, arm=["*"], probe=[names[0]])])
    rows = {r.probe: r for r in CellRun(cell, ctx, lambda stage: None).run()}
    assert [(rows[n].status, rows[n].is_releases_own) for n in names] == [("FAIL", True), ("FAIL", False)]
    assert (rows[names[0]].expectation, is_problem(rows[names[0]])) == ("w", False)


def test_an_arm_that_is_followed_to_its_first_failure(
    run: Callable[..., Any], make_context: Callable[..., Context], make_cell: Callable[..., Cell], project: Project
) -> None:
    """Its child is ended there, what it was not asked is said not to have run, and the small sweeps come first."""
    names = [c["name"] for c in runner.scheduler_protocol(project.matrix)]
    tried = {"type": "protocol", "imported": FIX.expected}
    good, bad = ({"asked": 3, "faults": n, "first_fault": "leaked: x"} for n in (0, 1))
    messages = [tried | {"name": n, "tried": t} for n, t in zip(names, (good, bad, bad), strict=False)]
    cell = make_cell(tier="scheduler", chunk=64, block=16, prompt=81, arm="fix")
    ctx = make_context(([*messages, DONE], 0))
    ctx.until_failure = frozenset({"fix"})
    rows = {r.probe: r for r in CellRun(cell, ctx, lambda stage: None).run()}
    assert [rows[n].status for n in names[:3]] == ["PASS", "FAIL", "NOT_RUN"]
    assert rows[names[2]].reason == runner.ENOUGH
    assert ctx.pool.jobs[0].killed
    sizes = [runner._lookups(s) for s in ctx.pool.sent[0]["sweeps"]]
    assert sizes == sorted(sizes)
    assert len(sizes) == len(runner.class_sweeps(project.matrix)) + len(runner.scheduler_sweeps(project.matrix))


@pytest.mark.parametrize(("name", "unsound"), [("corrupt", 8), ("safe-short", 1), ("safe-crossing", 1), ("aligned", 1)])
def test_stock_must_be_wrong_in_all_of_the_class_corrupt_and_in_no_other(
    run: Callable[..., Any], make_cell: Callable[..., Cell], name: str, unsound: int
) -> None:
    sums = {
        "residency": "all",
        "geometries": 9,
        "ideal": 64,
        "kept": 32,
        "seconds": 0.5,
        "first_unsound": "here",
        "contract": 0,
    }
    totals = {"unsound": unsound, **sums}
    message = {"type": "sweep", "name": f"class-{name}", "imported": STOCK.expected, "totals": totals}
    rows, _ = run(([message, DONE], 0), cell=make_cell(tier="scheduler", chunk=64, block=16, prompt=81))
    assert [is_problem(r) for r in rows if r.probe == f"class-{name}"] == [True]


def test_a_selections_level(project: Project, make_cell: Callable[..., Cell]) -> None:
    """What a selection's matrix has, its planned rows have, and no more."""
    cell = make_cell(tier="scheduler", chunk=64, block=16, prompt=81)
    quick, default, full = (runner.probe_names(cell, project.matrix.at_level(level)) for level in LEVELS)
    assert set(quick) < set(default) < set(full) == set(runner.probe_names(cell, project.matrix))
    programs = {runner.stateful_tests(project.matrix.at_level(level))[0]["programs"] for level in LEVELS}
    assert len(programs) == 2
    names = [s["name"] for s in runner.scheduler_sweeps(project.matrix)]
    assert {"control-sliding-all", "control-full-all", "reuse-windows-all", "reuse-pressed-evicted-pinned"} <= set(names)
    assert len(names) == len(set(names))


def test_what_a_child_is_sent(make_context: Callable[..., Context], make_cell: Callable[..., Cell]) -> None:
    ctx = make_context()
    job = cell_job(make_cell(arm="fix"), ctx)
    assert job["env"]["KVMATRIX_OVERLAY"] == "fix.json"
    assert job["probes"] == PROBES
    geometry = job["geometry"]
    assert geometry["max_model_len"] % geometry["block"] == 0
    assert geometry["max_model_len"] > geometry["prompt"] + geometry["new_tokens"]
    assert geometry["num_gpu_blocks"] >= 2 * geometry["max_model_len"] // geometry["block"]


# --- several cells ----------------------------------------------------------------------------------------------------


class Told(Progress):
    def __init__(self) -> None:
        self.done: list[str] = []

    def cell_done(self, cell: Cell, rows: Sequence[ProbeRow], seconds: float) -> None:
        self.done.append(cell.id)


def test_rows_come_in_the_cells_order(
    make_context: Callable[..., Context], make_cell: Callable[..., Cell], went_well: Callable[..., list[Message]]
) -> None:
    cells = [make_cell(), make_cell(backend="TRITON_ATTN", chunk=64, block=16), make_cell(mode="compiled")]
    told = Told()
    ctx = make_context(*[([*went_well(), DONE], 0)] * 3)
    rows = run_cells(cells, ctx, 1, told)
    assert list(dict.fromkeys(r.cell["backend"] + r.cell["mode"] for r in rows)) == [c.backend + c.mode for c in cells]
    assert told.done == [c.id for c in (cells[2], cells[1], cells[0])], "the longest first"


def test_a_full_disk_ends_the_run(
    make_context: Callable[..., Context],
    make_cell: Callable[..., Cell],
    went_well: Callable[..., list[Message]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = make_context(*[([*went_well(), DONE], 0)] * 2)

    def full(row: object) -> None:
        raise DiskError("no space")

    monkeypatch.setattr(ctx.writer, "write", full)
    with pytest.raises(DiskError):
        run_cells([make_cell(), make_cell(mode="compiled")], ctx, 1, Progress())
    assert ctx.pool.closing


def test_ctrl_c_ends_the_children_and_keeps_the_rows(
    make_context: Callable[..., Context],
    make_cell: Callable[..., Cell],
    went_well: Callable[..., list[Message]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = make_context(([*went_well(), DONE], 0))

    def interrupted(futures: set[Any]) -> None:
        for future in futures:
            future.result(timeout=20)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_wait_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cells([make_cell()], ctx, 1, Progress())
    assert ctx.pool.closing
    assert len([r for r in read_rows(ctx.writer.path) if isinstance(r, ProbeRow)]) == len(PROBES)


def test_a_cell_is_asked_only_what_its_geometry_can_establish(make_cell: Callable[..., Cell], project: Project) -> None:
    assert runner.probe_names(make_cell(several=True), project.matrix) == list(project.matrix.llm.probes)
    every = [p for p in project.matrix.llm.probes if p not in probes.SEVERAL]
    assert runner.probe_names(make_cell(), project.matrix) == every
    short, control = make_cell(prompt=129), make_cell(layers="ff")
    assert runner.probe_names(short, project.matrix) == [p for p in every if p != "mixed-aligned"]
    assert runner.probe_names(control, project.matrix) == [p for p in every if p != "mixed-aligned"]
    one_block = make_cell(block=64, chunk=64, prompt=193, prefix=64)
    assert (
        runner.probe_names(one_block, project.matrix)
        == every[:5]
        == [
            "cold",
            "device-hit",
            "corrupted-load",
            "pure-cpu-hit",
            "mixed-aligned",
        ]
    )


def test_what_a_longer_cell_is_sent(make_context: Callable[..., Context], make_cell: Callable[..., Cell]) -> None:
    ctx = make_context()
    job = cell_job(make_cell(prompt=577, prefix=320, block=64, chunk=256, new_tokens=40), ctx)
    assert job["geometry"]["new_tokens"] == 40
    assert job["checkpoint"]["max_position_embeddings"] >= job["geometry"]["max_model_len"] >= 577 + 40
    assert "max_position_embeddings" not in cell_job(make_cell(), ctx)["checkpoint"], "small ones stay what they were"


def test_the_cpu_tier_outgrows_a_large_device_tier(
    make_context: Callable[..., Context], make_cell: Callable[..., Cell]
) -> None:
    ctx = make_context()
    least = ctx.matrix.llm.cpu_bytes
    assert cell_job(make_cell(), ctx)["geometry"]["cpu_bytes"] == least
    large = cell_job(make_cell(layers="cccfcccf", chunk=8192, block=128, prompt=8321, prefix=128), ctx)["geometry"]
    of_block = 128 * 2 * 512  # tokens, layers of a group, bytes of a token's keys and values: 2 x 2 heads x 32 x float32
    assert large["cpu_bytes"] == 8 * large["num_gpu_blocks"] * of_block > least


def test_one_arm_of_a_compiled_model_goes_ahead_of_the_others() -> None:
    def cells(mode: str, prompt: int) -> list[Cell]:
        sizes = {"chunk": 128, "block": 32, "prompt": prompt, "prefix": 32}
        common = {"tier": "llm", "pin": "0.32.0", "device": "host", "backend": "CPU_ATTN", "mode": mode, **sizes}
        return [Cell(arm=arm, **common) for arm in ("stock", "fix", "other")]

    order = running_order([*cells("eager", 161), *cells("compiled", 161), *cells("compiled", 255)])
    assert [(c.mode, c.prompt, c.arm) for c in order[:2]] == [("compiled", 161, "stock"), ("compiled", 255, "stock")]
    assert [c.mode for c in order] == ["compiled"] * 6 + ["eager"] * 3
