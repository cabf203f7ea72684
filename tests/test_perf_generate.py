"""How generation is laid out in blocks, what voids a run, and what is kept of one that ends early; the engines are scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_live import FakeLive

from kvmatrix import perf_generate
from kvmatrix.config import Project
from kvmatrix.errors import InfraError
from kvmatrix.perf_generate import GenerateRun, void
from kvmatrix.workloads import HIT_WORKLOADS

ARMS = ["stock", "stock-again", "fix"]
TTFT = {"stock": 0.1, "stock-again": 0.1, "fix": 0.05}
BLOCKS = 2


class Engines:
    """Answers as engines that find every state; ``change`` may alter an answer."""

    def __init__(self, project: Project) -> None:
        self.size = project.matrix.perf.sizes["tiny"]
        self.change: Callable[[str, dict[str, Any], dict[str, Any]], None] = lambda arm, request, told: None

    def answer(self, arm: str, request: dict[str, Any]) -> dict[str, Any]:
        if request["workload"] == "ceilings":
            return {"copy_bytes_per_s": 1e9, "matmul_flop_per_s": 1e11, "threads": 1}
        tokens = request.get("length", self.size.prompt)
        whole = (tokens - 1) // self.size.block * self.size.block
        prefix = request.get("prefix", -1)
        external = 0 if request["workload"] in ("cold", "no-offload") else whole - max(0, prefix)
        told = {
            "prompt_tokens": tokens,
            "output_tokens": self.size.new_tokens,
            "ttft": TTFT[arm],
            "itl": [0.01] * (self.size.new_tokens - 1),
            "e2el": TTFT[arm] + 0.03,
            "prefix": prefix,
            "device_hit_tokens": max(0, prefix),
            "external_hit_tokens": external,
            "declined_tokens": 0,
            "recomputed_tokens": tokens - max(0, prefix) - external,
            "loaded_bytes": 4096 * external,
            "token_ids": [7, 8],
            "right": True,
            "reference_ttft": 0.2,
        }
        self.change(arm, request, told)
        return told


@pytest.fixture
def engines(project: Project) -> Engines:
    return Engines(project)


@pytest.fixture
def fake(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> FakeLive:
    fake = FakeLive(engines.answer, {"imported": {"m": "h"}, "block_bytes": 16384})
    monkeypatch.setattr(perf_generate, "live", fake.live)
    monkeypatch.setattr(perf_generate, "cell_job", lambda cell, ctx: {"cell": cell.model_dump()})
    return fake


@pytest.fixture
def run(project: Project, fake: FakeLive) -> GenerateRun:
    perf = project.matrix.perf.model_copy(update={"blocks": BLOCKS})
    ctx: Any = SimpleNamespace(run="20260101T000000Z-abcd", matrix=project.matrix.model_copy(update={"perf": perf}))
    return GenerateRun(ctx, "0.32.0", ARMS, "tiny", lambda text: None)


def rows_of(run: GenerateRun, reason: str = "") -> dict[str, Any]:
    return {r.workload: r for r in run.rows(reason)}


def test_a_block_has_new_engines_of_all_arms_with_the_connector_and_without(run: GenerateRun, fake: FakeLive) -> None:
    run.measure()
    kinds = [{job["geometry"]["offload"] for job in jobs.values()} for jobs in fake.started]
    assert kinds == [{False}, {True}] * BLOCKS
    assert [list(jobs) for jobs in fake.started[1::2]] == [ARMS, ARMS[::-1]]


def test_every_workload_has_each_request_on_each_arm(run: GenerateRun, engines: Engines) -> None:
    run.measure()
    rows = rows_of(run)
    assert set(rows) == {"cold", *HIT_WORKLOADS, "multi-turn", "no-offload", "ceilings", "break-even"}
    for workload in ("cold", *HIT_WORKLOADS, "multi-turn", "no-offload"):
        expected = engines.size.turns if workload in ("multi-turn", "no-offload") else engines.size.requests
        assert {a: [len(b) for b in blocks] for a, blocks in rows[workload].requests.items()} == {
            a: [expected] * BLOCKS for a in ARMS
        }
        assert rows[workload].status == "PASS"
    assert rows["cold"].seconds["fix"][0] == pytest.approx([0.08] * engines.size.requests)


def test_arms_take_turns_and_none_follows_itself(run: GenerateRun, fake: FakeLive) -> None:
    run.measure()
    for row in (r for r in run.rows() if r.group == "generate"):
        rounds = [order[i : i + len(ARMS)] for order in row.order for i in range(0, len(order), len(ARMS))]
        assert all(sorted(r) == sorted(ARMS) for r in rounds), row.workload
        assert len({tuple(r) for r in rounds}) > 1, row.workload
    hits = [arm for arm, r in fake.asked if r.get("seed", 0) > 0 and "length" not in r and r["workload"] in HIT_WORKLOADS]
    assert all(a != b for a, b in itertools.pairwise(hits[: len(ARMS) * 4]))


def test_prompts_are_unique_and_the_same_on_all_arms(run: GenerateRun, fake: FakeLive, engines: Engines) -> None:
    run.measure()
    cold = [(arm, r["seed"]) for arm, r in fake.asked if r["workload"] == "cold" and "length" not in r and r["seed"] > 0]
    for arm in ARMS:
        seeds = [seed for a, seed in cold if a == arm]
        assert len(set(seeds)) == len(seeds) == BLOCKS * engines.size.requests
    assert len({seed for _, seed in cold}) == BLOCKS * engines.size.requests


def test_misaligned_prefixes_end_inside_the_first_chunk(run: GenerateRun, fake: FakeLive, engines: Engines) -> None:
    run.measure()
    prefixes = {r["prefix"] for _, r in fake.asked if r["workload"] == "mixed-misaligned"}
    assert prefixes <= set(range(engines.size.block, engines.size.chunk, engines.size.block))
    assert len(prefixes) > 1


def test_a_conversation_is_held_against_the_engine_without_the_connector(run: GenerateRun, engines: Engines) -> None:
    def change(arm: str, request: dict[str, Any], told: dict[str, Any]) -> None:
        if request["workload"] == "multi-turn" and arm == "stock":
            told["token_ids"] = [9, 9]

    engines.change = change
    run.measure()
    row = rows_of(run)["multi-turn"]
    assert not any(r.right for b in row.requests["stock"] for r in b)
    assert all(r.right and r.reference_ttft == TTFT["fix"] for b in row.requests["fix"] for r in b)
    assert row.status == "PASS"


def test_a_patch_that_answers_wrongly_is_red(run: GenerateRun, engines: Engines) -> None:
    engines.change = lambda arm, request, told: told.update(right=arm != "fix" or request["workload"] != "mixed-aligned")
    run.measure()
    rows = rows_of(run)
    assert (rows["mixed-aligned"].status, rows["cold"].status) == ("FAIL", "PASS")
    assert rows["mixed-aligned"].reason.startswith("wrong-output: fix")


def test_what_was_measured_before_an_engine_failed_is_kept(run: GenerateRun, engines: Engines) -> None:
    def change(arm: str, request: dict[str, Any], told: dict[str, Any]) -> None:
        if request["workload"] == "device-hit" and request["seed"] > engines.size.requests:
            told["device_hit_tokens"] = 0

    engines.change = change
    with pytest.raises(InfraError, match=r"void: device-hit on .*: the device served 0 tokens, 320 were meant"):
        run.measure()
    row = rows_of(run, "void")["cold"]
    assert (row.status, run.blocks_done, len(row.requests["fix"][0])) == ("INFRA", 1, engines.size.requests)


def test_break_even_is_timed_and_predicted(run: GenerateRun, engines: Engines) -> None:
    run.measure()
    row = rows_of(run)["break-even"]
    assert row.geometry["lengths"] == [32, 64, 128, 256]
    assert row.seconds["load"] == [[TTFT["stock"]] * 4, [TTFT["fix"]] * 4]
    per_token = row.answers["seconds_per_token"]
    step = row.answers["step_seconds"]
    assert step == TTFT["stock"]
    assert row.answers["predicted_tokens"] == pytest.approx(step / (per_token["recompute"] - per_token["load"]))


@pytest.mark.parametrize(
    ("workload", "changes", "said"),
    [
        ("cold", {"external_hit_tokens": 32, "loaded_bytes": 1}, "the CPU tier served 32 tokens, 0 were meant"),
        ("cold", {"device_hit_tokens": 32}, "the device served 32 tokens, 0 were meant"),
        ("pure-cpu-hit", {"external_hit_tokens": 288, "loaded_bytes": 1}, "served 288 tokens, 320 were meant"),
        ("pure-cpu-hit", {"external_hit_tokens": 320}, "no block was copied"),
        ("cold", {"output_tokens": 3}, "3 output tokens, 4 were meant"),
        ("mixed-misaligned", {"external_hit_tokens": 0}, ""),
    ],
)
def test_what_voids_a_request(project: Project, workload: str, changes: dict[str, int], said: str) -> None:
    told = {"device_hit_tokens": 0, "external_hit_tokens": 0, "prefix": 0, "output_tokens": 4, "loaded_bytes": 0}
    found = void(workload, told | changes, project.matrix.perf.sizes["tiny"])
    assert said in found if said else found == ""
