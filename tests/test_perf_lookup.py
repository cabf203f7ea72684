"""The lookup measured in blocks. The children here answer as they are told; everything else is the real measurement."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import refused

from kvmatrix import instructions, perf_lookup
from kvmatrix.arms import Arm
from kvmatrix.config import LookupPerf, Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import InfraError, UsageError
from kvmatrix.expectations import Expectations
from kvmatrix.live import AGAIN
from kvmatrix.oracle import mixed_hit_class
from kvmatrix.perf_lookup import ROUNDS, lookup_geometries, measure_lookup, name_of, workload_of
from kvmatrix.processes import JobTimeout
from kvmatrix.records import PerfRow, RowWriter, RunRow
from kvmatrix.runner import Context

MODULE = "vllm.v1.simple_kv_offload.manager"
FILES = {"stock": "b" * 64, "fix": "c" * 64}
GEOMETRY = {"block": 16, "chunks": [None, 64], "prompt": 257, "prefix": 32, "hit": True}
TOLD = {"stock": 224, "fix": 0}
ARMS = ["stock", AGAIN, "fix"]
CALLS = round(perf_lookup.ROUND_SECONDS / 0.001)
"""Of a round, where a call takes a millisecond."""


# --- what is measured -------------------------------------------------------------------------------------------------


def test_a_level_has_what_the_smaller_ones_have(project: Project) -> None:
    quick, default, full = ([name_of(g) for g in lookup_geometries(project.matrix, x)] for x in ("quick", "default", "full"))
    assert quick == ["c8192-b16-p8193-d0-g2", "c8192-b16-p8193-d4096-g2"]
    assert set(quick) < set(default) < set(full)
    assert "c8192-b16-p1048577-d4096-g2" in set(full) - set(default)


def test_the_geometries_answer_what_is_asked_of_them(project: Project) -> None:
    found = lookup_geometries(project.matrix, "full")
    default = lookup_geometries(project.matrix, "default")
    assert len({g["prompt"] for g in default if g["prefix"] == 0}) >= 3, "too few for the exponent of the growth"
    assert {g["prefix"] % 8192 for g in default} > {0}
    assert any(g["prefix"] and g["prefix"] % 8192 == 0 for g in default)

    def prompts_of(kind: Callable[[dict[str, Any]], bool]) -> set[int]:
        return {g["prompt"] for g in found if kind(g) and len(g["chunks"]) == 2 and g["hit"]}

    assert len(prompts_of(lambda g: g["prefix"] == 0)) >= 3
    assert len(prompts_of(lambda g: g["prefix"] % 8192 != 0)) >= 3
    assert prompts_of(lambda g: g["prefix"] and g["prefix"] % 8192 == 0)
    assert {len(g["chunks"]) for g in found if (g["prompt"], g["prefix"]) == (8193, 4096)} == {1, 2, 3, 4}
    assert {g["hit"] for g in found if g["prompt"] == 131073} == {True, False}
    corrupt = [
        g for g in found if g["prefix"] and mixed_hit_class(8192, g["prefix"], g["prompt"] - 1 - g["prefix"]) == "corrupt"
    ]
    assert [g["prompt"] for g in corrupt] == [12289]


def test_groups_are_one_of_full_attention_and_chunked_ones(project: Project) -> None:
    found = {name_of(g): g for g in lookup_geometries(project.matrix, "full")}
    assert found["c8192-b16-p8193-d4096-g4"]["chunks"] == [None, 8192, 8192, 8192]
    assert found["full-b16-p8193-d4096-g1"]["chunks"] == [None]
    assert workload_of(found["c8192-b16-p131073-d4096-g2-miss"]) == "p131073-d4096-g2-miss"


def test_a_geometry_that_is_named_twice(project: Project) -> None:
    one = LookupPerf(block=16, chunk=64, groups=2, prompt=257, prefixes=(32, 0, 32))
    perf = project.matrix.perf.model_copy(update={"lookups": (one,)})
    matrix = project.matrix.model_copy(update={"perf": perf})
    assert refused(lambda: lookup_geometries(matrix, "default"), UsageError) == (
        "matrix.toml: perf.lookups has c64-b16-p257-d32-g2 twice"
    )


# --- the measurement --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Script:
    """What the children do."""

    events: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    call: Callable[[str], float] = lambda arm: 0.001
    """Seconds of the next call of an arm."""
    ready: Callable[[str], dict[str, Any]] = lambda arm: {}
    """What an arm's ready message has otherwise."""
    timing: Callable[[str, int], dict[str, Any] | BaseException | None] = lambda arm, request: {}
    """What the answer to an arm's so many-th request has otherwise; None: the process has ended."""


class Child:
    """One arm's process."""

    pid = -1

    def __init__(self, job: dict[str, Any], script: Script) -> None:
        self.arm, self.script, self.requests = job["arm"], script, 0
        files = "stock" if self.arm == AGAIN else self.arm
        assert job["env"]["KVMATRIX_OVERLAY"] == f"{files}.json"
        answer = {"external_tokens": TOLD[files], "sound": files != "stock", "fault": ""}
        message = {"type": "ready", "answer": answer, "kv_groups": len(job["geometry"]["chunks"])}
        self.messages: list[Any] = [message | {"imported": {MODULE: FILES[files]}} | script.ready(self.arm)]
        self.told = answer["external_tokens"]

    def send(self, request: dict[str, Any]) -> None:
        self.requests += 1
        calls = request["calls"]
        self.script.events.append(("ask", self.arm, str(calls)))
        other = self.script.timing(self.arm, self.requests)
        timing = {"type": "timing", "seconds": calls * self.script.call(self.arm), "external_tokens": self.told}
        self.messages.append(timing | other if isinstance(other, dict) else other)

    def receive(self, timeout: float) -> dict[str, Any] | None:
        message = self.messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message

    def finish(self, timeout: float = 30) -> None:
        self.script.events.append(("end", self.arm))


class Pool:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.logs: list[str] = []

    def get(self, python: Path, env: dict[str, str]) -> Pool:
        return self

    def start(self, job: dict[str, Any], log: Path, timeout: float = 30) -> Child:
        self.logs.append(log.name)
        self.script.events.append(("start", job["arm"]))
        return Child(job, self.script)


def arm_of(name: str) -> Arm:
    return Arm(name=name, pin="0.32.0", manifest=Path(f"{name}.json"), patch_sha256=None, expected={MODULE: FILES[name]})


@pytest.fixture
def context(project: Project, run_row: RunRow, tmp_path: Path) -> Iterator[Callable[[Script], Context]]:
    writer = RowWriter(tmp_path / "run" / "rows.jsonl")
    pin = project.matrix.pin("0.32.0", "host")
    env = PinEnv(pin, tmp_path / "env", tmp_path / "env" / "bin" / "python", tmp_path / "env" / "lib", "d" * 64, {})

    def make(script: Script) -> Context:
        return Context(
            matrix=project.matrix,
            run=run_row.run,
            folder=tmp_path,
            home=tmp_path,
            envs={"0.32.0": env},
            arms={("0.32.0", name): arm_of(name) for name in FILES},
            expectations=Expectations.load(project.root / "conformance" / "expectations"),
            writer=writer,
            pool=Pool(script),  # type: ignore[arg-type]
            compiler_reason=None,
            root=project.root,
        )

    yield make
    writer.close()


Measure = Callable[..., PerfRow]


@pytest.fixture
def measure(context: Callable[[Script], Context]) -> Measure:
    def go(script: Script, blocks: int = 3, geometry: dict[str, Any] | None = None, **options: Any) -> PerfRow:
        return measure_lookup(context(script), "0.32.0", ARMS, geometry or GEOMETRY, blocks, 0.01, lambda text: None, **options)

    return go


def test_a_row_says_what_was_measured(measure: Measure) -> None:
    row = measure(Script())
    assert (row.id, row.group, row.workload, row.status) == (
        "0.32.0-host-lookup-c64-b16-p257-d32-g2",
        "lookup",
        "p257-d32-g2",
        "PASS",
    )
    assert row.geometry == GEOMETRY | {
        "chunk": 64,
        "groups": 2,
        "resolution": 0.01,
        "calls_per_round": dict.fromkeys(ARMS, CALLS),
    }
    assert row.answers == {
        "stock": {"external_tokens": 224, "sound": False},
        AGAIN: {"external_tokens": 224, "sound": False},
        "fix": {"external_tokens": 0, "sound": True},
    }
    assert row.imported == {"stock": {MODULE: "b" * 64}, AGAIN: {MODULE: "b" * 64}, "fix": {MODULE: "c" * 64}}
    assert (row.instructions, row.instructions_by, row.left_out) == ({}, "", {})


def test_arms_take_turns_and_none_follows_itself(measure: Measure) -> None:
    order = measure(Script()).order
    assert all(sorted(o[i : i + len(ARMS)]) == sorted(ARMS) for o in order for i in range(0, len(o), len(ARMS)))
    assert all(a != b for o in order for a, b in itertools.pairwise(o))
    assert order[0] != order[1]


def test_each_block_has_processes_of_its_own(measure: Measure) -> None:
    """All are started before the first is asked, and ended before the next block's; another arm's is the first in each."""
    script = Script()
    measure(script)
    kinds = [(kind, arm) for kind, arm, *_ in script.events if kind != "ask"]
    orders = [ARMS, [AGAIN, "fix", "stock"], ["fix", "stock", AGAIN]]
    assert kinds == [(kind, arm) for order in orders for kind in ("start", "end") for arm in order]
    first = [kind for kind, *_ in script.events[: len(ARMS) + 1]]
    assert first == ["start"] * len(ARMS) + ["ask"]


def test_only_the_first_round_of_a_process_is_left_out(measure: Measure) -> None:
    """Each call takes another time, so that a round can be told by it."""
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def call(arm: str) -> float:
        taken[arm].append(0.001 + len(taken[arm]) * 1e-6)
        return taken[arm][-1]

    row = measure(Script(call=call))
    for arm in ARMS:
        calibrating = len(taken[arm]) - 3 * (1 + ROUNDS)
        rounds = taken[arm][calibrating:]
        kept = [rounds[i * (1 + ROUNDS) + 1 : (i + 1) * (1 + ROUNDS)] for i in range(3)]
        assert row.seconds[arm] == [pytest.approx(block, rel=1e-9) for block in kept]
    assert [len(taken[AGAIN]), len(taken["fix"])] == [3 * (1 + ROUNDS), 3 * (1 + ROUNDS) + 2]


def test_the_same_files_are_called_as_often(measure: Measure) -> None:
    """However fast the A/A arm is: its rounds are those of stock."""
    script = Script(call=lambda arm: {"stock": 0.001, AGAIN: 0.003, "fix": 1e-6}[arm])
    row = measure(script)
    assert row.geometry["calls_per_round"] == {"stock": CALLS, AGAIN: CALLS, "fix": 1000 * CALLS}
    last = {arm: calls for kind, arm, *calls in script.events if kind == "ask"}
    assert last == {"stock": [f"{CALLS}"], AGAIN: [f"{CALLS}"], "fix": [f"{1000 * CALLS}"]}


def test_a_call_longer_than_a_round_is_made_once(measure: Measure) -> None:
    assert measure(Script(call=lambda arm: 0.08)).geometry["calls_per_round"] == dict.fromkeys(ARMS, 1)


def test_another_arms_files(measure: Measure) -> None:
    script = Script(ready=lambda arm: {"imported": {MODULE: "b" * 64}})
    assert refused(lambda: measure(script), InfraError) == "the measuring process of fix imported other files than the arm's"
    assert [arm for kind, arm, *_ in script.events if kind == "end"] == ARMS


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "ended by itself"),
        (JobTimeout(), "did not answer within 300 s"),
        ({"type": "error", "error": "KeyError", "message": "'r1'"}, "failed: KeyError: 'r1'"),
    ],
)
def test_a_process_that_ends(measure: Measure, answer: Any, told: str) -> None:
    script = Script(timing=lambda arm, request: answer if (arm, request) == ("fix", 6) else {})
    assert refused(lambda: measure(script), InfraError).startswith(f"the measuring process of fix {told}")
    assert [arm for kind, arm, *_ in script.events if kind == "end"] == ARMS


def test_other_groups_than_were_asked_for(measure: Measure) -> None:
    script = Script(ready=lambda arm: {"kv_groups": 1})
    assert refused(lambda: measure(script), InfraError) == "stock has 1 KV groups where 2 were asked for"


def test_an_answer_that_changes_within_a_process(measure: Measure) -> None:
    script = Script(timing=lambda arm, request: {"external_tokens": 208} if (arm, request) == (AGAIN, 5) else {})
    assert refused(lambda: measure(script), InfraError) == (
        "the lookup of stock-again answered 224 and then 208 to the same request"
    )


def test_an_answer_that_changes_between_blocks(measure: Measure) -> None:
    started: list[str] = []

    def ready(arm: str) -> dict[str, Any]:
        started.append(arm)
        sound = len(started) > len(ARMS)
        return {"answer": {"external_tokens": TOLD["stock"], "sound": sound, "fault": ""}} if arm == "stock" else {}

    assert "answered {'external_tokens': 224, 'sound': False} and then" in refused(
        lambda: measure(Script(ready=ready)), InfraError
    )


def test_an_impossible_answer_is_not_measured(measure: Measure) -> None:
    fault = "contract: answers None"
    bad = {"answer": {"external_tokens": 0, "sound": False, "fault": fault}}
    script = Script(ready=lambda arm: bad if arm == "fix" else {})
    row = measure(script)
    assert (row.status, row.reason) == ("FAIL", f"not-measured: fix: {fault}")
    assert row.left_out == {"fix": fault}
    assert list(row.seconds) == list(row.answers) == ["stock", AGAIN]
    assert ("ask", "fix") not in {event[:2] for event in script.events}
    assert [len(b) for b in row.seconds["stock"]] == [ROUNDS] * 3


def test_groups_that_a_release_refuses(measure: Measure) -> None:
    script = Script(ready=lambda arm: {"refused": "refused: two kinds of groups at most"})
    row = measure(script, count=True)
    assert (row.status, row.reason) == ("UNSUPPORTED", "refused: two kinds of groups at most")
    assert (row.seconds, row.order) == ({}, [])
    assert len([e for e in script.events if e[0] == "start"]) == len(ARMS)


def test_instructions_are_in_the_row(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def of_calls(ctx: Context, pin: str, backend: str, jobs: dict[str, Any], calls: dict[str, int]) -> Any:
        given.append((pin, [j["arm"] for j in jobs.values()], calls))
        return {"stock": 12.5}, "an abacus"

    monkeypatch.setattr(instructions, "of_calls", of_calls)
    row = measure(Script(), count=True)
    assert (row.instructions, row.instructions_by) == ({"stock": 12.5}, "an abacus")
    share = instructions.COUNTED_SECONDS / perf_lookup.ROUND_SECONDS
    assert given == [("0.32.0", ARMS, dict.fromkeys(ARMS, CALLS * share))]


# --- the real lookup --------------------------------------------------------------------------------------------------

REAL = """
import json
from kvmatrix.scheduler_harness import LookupBench

found = {}
for name, chunks, prefix, hit in (
    ("corrupt", [None, 64], 16, True),
    ("aligned", [None, 64], 64, True),
    ("none", [None, 64], 0, True),
    ("miss", [None, 64], 16, False),
    ("one group", [None], 16, True),
    ("four groups", [None, 64, 64, 64], 16, True),
):
    bench = LookupBench(16, chunks, 97, prefix, hit)
    answer = bench.answer()
    seconds, external = bench.time_calls(50)
    bench.sut.drop_hit(bench.request)
    found[name] = [answer, bench.kv_groups, seconds > 0, external, bench.sut.left_behind()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def real(told_in_env: Callable[..., Any]) -> dict[str, Any]:
    answer: dict[str, Any] = told_in_env(REAL)
    return answer


@pytest.mark.parametrize(
    ("name", "external", "sound", "groups"),
    [
        ("corrupt", 80, False, 2),
        ("aligned", 32, True, 2),
        ("none", 96, True, 2),
        ("miss", 0, True, 2),
        ("one group", 80, True, 1),
        ("four groups", 80, False, 4),
    ],
)
def test_stock_lookup(real: dict[str, Any], name: str, external: int, sound: bool, groups: int) -> None:
    """16 to 96 of chunks of 64: stock counts the boundary from 16, and does not find 64 to 80."""
    answer, kv_groups, took_time, timed, left = real[name]
    assert answer == {"external_tokens": external, "sound": sound, "fault": ""}
    assert kv_groups == groups
    assert took_time
    assert timed == external
    assert left == ""
