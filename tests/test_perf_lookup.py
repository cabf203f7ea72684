"""Lookups to time, and how a measurement is laid out; the processes are scripts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_live import FakeLive

from kvmatrix import perf_lookup
from kvmatrix.config import LookupPerf, Project
from kvmatrix.perf_lookup import ROUND_SECONDS, ROUNDS, lookup_geometries, measure_lookup, workload_name

ARMS = ["stock", "stock-again", "fix"]
COST = {"stock": 0.001, "stock-again": 0.001, "fix": 0.0005}
GEOMETRY = {"block": 16, "chunks": [None, 512, 512], "prompt": 1025, "prefix": 256, "hit": True}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLive:
    def answer(arm: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"type": "timing", "seconds": COST[arm] * request["calls"]}

    fake = FakeLive(answer, {"answer": {"external_tokens": 768, "sound": True}, "imported": {"m": "h"}})
    monkeypatch.setattr(perf_lookup, "live", fake.live)
    monkeypatch.setattr(perf_lookup, "overlay_job", lambda ctx, pin, arm, **fields: {"arm": arm, **fields})
    return fake


def measure(blocks: int = 3) -> Any:
    ctx: Any = SimpleNamespace(run="20260101T000000Z-abcd")
    return measure_lookup(ctx, "0.32.0", ARMS, GEOMETRY, blocks, 0.01, lambda text: None)


def test_every_block_has_new_processes_of_all_arms(fake: FakeLive) -> None:
    measure()
    assert [sorted(jobs) for jobs in fake.started] == [sorted(ARMS)] * 3


def test_rounds_are_interleaved_and_the_first_arm_changes(fake: FakeLive) -> None:
    order = measure().order
    assert [o[:6] for o in order[:2]] == [[*ARMS, *ARMS[::-1]], [*ARMS[::-1], *ARMS]]
    assert all(o.count(arm) == ROUNDS for o in order for arm in ARMS)


def test_a_row_has_seconds_of_one_call_and_drops_only_the_warm_up(fake: FakeLive) -> None:
    row = measure()
    assert {arm: [len(b) for b in blocks] for arm, blocks in row.seconds.items()} == {arm: [ROUNDS] * 3 for arm in ARMS}
    assert row.seconds["fix"][1][4] == pytest.approx(0.0005)
    calls = [request["calls"] for arm, request in fake.asked if arm == "fix"]
    assert calls[:3] == [3, 3, ROUND_SECONDS / 0.0005]
    assert len(calls) == 3 * (3 + ROUNDS)
    assert (row.workload, row.geometry["groups"], row.geometry["chunk"]) == ("p1025-d256-g3", 3, 512)
    assert row.answers["fix"] == {"external_tokens": 768, "sound": True}


def test_a_level_has_the_lookups_below_it(project: Project) -> None:
    counts = [len(lookup_geometries(project.matrix.perf.lookups, level)) for level in ("quick", "default", "full")]
    assert counts == sorted(set(counts))
    full = lookup_geometries(project.matrix.perf.lookups, "full")
    assert {len(g["chunks"]) for g in full} == {1, 2, 3, 4}
    assert {g["hit"] for g in full} == {True, False}
    assert (min(g["prompt"] for g in full), max(g["prompt"] for g in full)) == (1025, 1048577)


def test_names_tell_geometries_apart(project: Project) -> None:
    full = lookup_geometries(project.matrix.perf.lookups, "full")
    ids = [(workload_name(g), g["chunks"][-1]) for g in full]
    assert len(set(ids)) == len(ids)
    assert workload_name(GEOMETRY | {"hit": False}) == "p1025-d256-g3-miss"


@pytest.mark.parametrize("prefix", [8, 1024, 1040])
def test_a_prefix_that_leaves_nothing_to_look_up(prefix: int) -> None:
    with pytest.raises(ValueError, match=f"prefix {prefix} must be whole blocks"):
        LookupPerf(block=16, chunk=512, groups=2, prompt=1025, prefixes=(prefix,))
