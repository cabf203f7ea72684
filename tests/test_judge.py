"""Verdicts: every reason is produced by itself from an observation that would otherwise pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import kv_group

from kvmatrix.arms import Arm, Keeps
from kvmatrix.cells import Cell
from kvmatrix.config import Tolerances
from kvmatrix.judge import (
    Verdict,
    judge_agreement,
    judge_case,
    judge_engine,
    judge_probe,
    judge_protocol,
    judge_stateful,
    judge_sweep,
)
from kvmatrix.probes import PROBES

TOLERANCES = Tolerances(max_logprob_error=0.005, max_reference_error=0.005)
PASSED = Verdict("PASS")
NAN = float("nan")
Observe = Callable[..., dict[str, Any]]


@pytest.fixture
def judged(observe: Observe, arm: Arm) -> Callable[..., Verdict]:
    def judge(probe: str = "mixed-misaligned", cold: Verdict | None = PASSED, **changes: Any) -> Verdict:
        return judge_probe(observe(probe, **changes), arm, TOLERANCES, 512, None if probe == "cold" else cold)

    return judge


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_that_went_well(judged: Callable[..., Verdict], probe: str) -> None:
    assert judged(probe) == PASSED


@pytest.mark.parametrize("probe", ["mixed-misaligned", "mixed-head-gone"])
def test_every_arm_must_keep_the_hit_of_a_control(observe: Observe, arm: Arm, probe: str) -> None:
    """The same declined lookup is the patch's price where there are chunks."""
    declined = observe(probe, cached_tokens=32, counters__external_hit_tokens=0, counters__loaded_blocks=0)
    assert judge_probe(declined, arm, TOLERANCES, 512, PASSED) == PASSED
    verdict = judge_probe(declined, arm, TOLERANCES, 512, PASSED, control=True)
    assert verdict.status == "FAIL"
    assert verdict.reason.startswith("lost-reuse: 0 of 128 ")
    assert judge_probe(observe(probe), arm, TOLERANCES, 512, PASSED, control=True) == PASSED


def test_a_declined_misaligned_hit_passes(judged: Callable[..., Verdict]) -> None:
    """A price, not a fault."""
    assert judged(cached_tokens=32, counters__external_hit_tokens=0, counters__loaded_blocks=0) == PASSED


NOT_ESTABLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "wrong-arm": ("mixed-misaligned", {"imported": {}}),
    "logprobs": ("mixed-misaligned", {"vocab_compared": 511}),
    "preempted": ("mixed-misaligned", {"counters__preemptions": 1}),
    "not-established: the device": ("mixed-misaligned", {"counters__device_hit_tokens": 64, "cached_tokens": 192}),
    "not-established: the CPU tier": ("pure-cpu-hit", {"cpu_resident_tokens": 128}),
    "counters": ("mixed-misaligned", {"cached_tokens": 159}),
    "not-established: the first 1 blocks alone": ("mixed-head-gone", {"cpu_blocks": [[True] * 5, [False] * 5]}),
    "not-established: the first 1 blocks": ("mixed-head-gone", {"cpu_blocks": [[False] * 5, [False] * 5]}),
    "not-established: 32 external": ("device-hit", {"counters__external_hit_tokens": 32, "cached_tokens": 192}),
    "not-established: it is not so": ("preempted-loading", {"detail__states": {"a load was on its way": False}}),
    "preempted: 0": ("preempted-loading", {"counters__preemptions": 0}),
    "no-reference": ("mixed-misaligned", {"cold": Verdict("FAIL", "reference: …")}),
}


@pytest.mark.parametrize("reason", NOT_ESTABLISHED)
def test_a_state_that_was_not_established(judged: Callable[..., Verdict], reason: str) -> None:
    probe, change = NOT_ESTABLISHED[reason]
    verdict = judged(probe, **change)
    assert verdict.status == "INFRA"
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize("reason", NOT_ESTABLISHED)
def test_without_its_state_even_a_wrong_output_says_nothing(judged: Callable[..., Verdict], reason: str) -> None:
    probe, change = NOT_ESTABLISHED[reason]
    assert judged(probe, **change | {"tokens": [9], "max_logprob_error": 20.0, "pending_hits": 1}).status == "INFRA"


@pytest.mark.parametrize("digests", [{}, {"m": "0" * 64}, None], ids=["nothing", "another-file", "one-too-many"])
def test_another_arms_files(observe: Observe, arm: Arm, digests: dict[str, str] | None) -> None:
    imported = digests if digests is not None else arm.expected | {"vllm.other": "c" * 64}
    verdict = judge_probe(observe(imported=imported), arm, TOLERANCES, 512, PASSED)
    assert (verdict.status, verdict.reason.partition(":")[0]) == ("INFRA", "wrong-arm")


@pytest.mark.parametrize("probe", ["cold", "device-hit"])
def test_a_probe_that_must_not_load_but_did(judged: Callable[..., Verdict], probe: str) -> None:
    served = 0 if probe == "cold" else 160
    assert judged(probe, counters__external_hit_tokens=16, cached_tokens=served + 16).status == "INFRA"


@pytest.mark.parametrize("status", ["FAIL", "INFRA"])
def test_there_is_nothing_to_compare_with_a_bad_cold_answer(judged: Callable[..., Verdict], status: Any) -> None:
    verdict = judged(cold=Verdict(status, "x"))
    assert verdict.status == "INFRA"
    assert status in verdict.reason


REFERENCE = {"tokens": [7], "max_logprob_error": 1e-5}
FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("reference", "cold", {"reference": REFERENCE | {"tokens": [8]}}),
    ("reference", "cold", {"reference": REFERENCE | {"max_logprob_error": 0.006}}),
    ("reference", "cold", {"reference": REFERENCE | {"max_logprob_error": NAN}}),
    ("wrong-output", "mixed-misaligned", {"tokens": [8]}),
    ("wrong-output", "mixed-misaligned", {"max_logprob_error": 0.006}),
    ("wrong-output", "mixed-misaligned", {"max_logprob_error": NAN}),
    ("wrong-output", "device-hit", {"tokens": [8]}),
    ("lost-reuse", "pure-cpu-hit", {"counters__external_hit_tokens": 128, "cached_tokens": 128}),
    ("lost-reuse", "mixed-aligned", {"counters__external_hit_tokens": 0, "cached_tokens": 128}),
    ("unsound-load", "mixed-misaligned", {"counters__loaded_blocks": 4}),
    ("unsound-load", "pure-cpu-hit", {"counters__loaded_blocks": 5}),
    ("leaked-pin", "mixed-misaligned", {"pending_hits": 1}),
    ("leaked-block", "abort-loading", {"used_device_blocks": 2}),
    ("wrong-output", "follow-up", {"max_logprob_error": 9.0}),
]


@pytest.mark.parametrize(("reason", "probe", "change"), FAULTS, ids=[f"{r}-{p}-{i}" for i, (r, p, _) in enumerate(FAULTS)])
def test_a_fault(judged: Callable[..., Verdict], reason: str, probe: str, change: dict[str, Any]) -> None:
    verdict = judged(probe, **change)
    assert verdict.status == "FAIL"
    assert verdict.reason.startswith(f"{reason}: ")


def test_ties_with_the_reference(observe: Observe, arm: Arm) -> None:
    """In a low precision another token is no fault where both are as likely; a large error is one all the same."""
    ties = TOLERANCES.model_copy(update={"reference_ties": True})

    def reason(error: float, tolerances: Tolerances = ties) -> str:
        seen = observe("cold", reference={"tokens": [8], "max_logprob_error": error})
        return judge_probe(seen, arm, tolerances, 512, None).reason.partition(":")[0]

    assert [reason(0.004), reason(0.006), reason(NAN), reason(0.004, TOLERANCES)] == ["", "reference", "reference", "reference"]
    assert judge_agreement(AGREED | {"same_tokens": False}, ties) == PASSED
    assert judge_agreement(AGREED | {"same_tokens": False, "max_logprob_error": 1.0}, ties).status == "FAIL"


def test_errors_at_the_tolerance_pass(judged: Callable[..., Verdict]) -> None:
    assert judged(max_logprob_error=0.005) == PASSED
    assert judged("cold", reference=REFERENCE | {"max_logprob_error": 0.005}) == PASSED


# --- several requests, and damage on purpose --------------------------------------------------------------------------


def requests(observe: Observe, probe: str, number: int, **changes: Any) -> dict[str, Any]:
    """The ``detail`` of a probe whose request ``number`` is changed."""
    detail: dict[str, Any] = observe(probe)["detail"]
    return detail | {"requests": [r | (changes if i == number else {}) for i, r in enumerate(detail["requests"])]}


@pytest.mark.parametrize("number", range(4))
def test_one_wrong_answer_of_a_batch(judged: Callable[..., Verdict], observe: Observe, number: int) -> None:
    for change in ({"tokens": [8]}, {"max_logprob_error": 1.0}, {"max_logprob_error": NAN}):
        verdict = judged("batch", detail=requests(observe, "batch", number, **change))
        assert verdict.status == "FAIL"
        assert verdict.reason.startswith(f"wrong-output: request {number}: ")


def test_a_batch_keeps_what_each_request_was_promised(judged: Callable[..., Verdict], observe: Observe, arm: Arm) -> None:
    declined = requests(observe, "batch", 0, cached_tokens=32)
    fewer = {"cached_tokens": 352, "counters__external_hit_tokens": 192, "counters__loaded_blocks": 8}
    assert judged("batch", detail=declined, **fewer) == PASSED  # misaligned, and nothing was promised
    promising = arm.model_copy(update={"keeps": "resident"})
    told = judge_probe(observe("batch", detail=declined, **fewer), promising, TOLERANCES, 512, PASSED)
    assert (told.status, told.reason) == (
        "FAIL",
        "lost-reuse: request 0 is served 0 of 128 external tokens, which can soundly be served",
    )
    aligned = judged("batch", detail=requests(observe, "batch", 2, cached_tokens=128), **fewer)
    assert aligned.reason.startswith("lost-reuse: request 2 is served 0 of 32")


@pytest.mark.parametrize("group", [0, 1])
def test_a_cell_that_would_not_notice_a_lost_block(judged: Callable[..., Verdict], observe: Observe, group: int) -> None:
    def damaged(**changes: Any) -> Verdict:
        damage = [d | (changes if d["group"] == group else {}) for d in observe("corrupted-load")["detail"]["damage"]]
        return judged("corrupted-load", detail={"damage": damage})

    assert damaged() == PASSED
    assert damaged(tokens=[7]) == PASSED  # the logprobs show it
    blind = damaged(tokens=[7], max_logprob_error=0.004)
    assert (blind.status, blind.reason) == (
        "INFRA",
        f"blind: the loss of block 0 of group {group} moves logprobs by 0.004 nats and changes no token",
    )
    assert damaged(lost=0).reason.startswith("not-established: block 0 of group")


def test_a_cell_in_which_nothing_can_be_lost(judged: Callable[..., Verdict]) -> None:
    verdict = judged("corrupted-load", detail={"damage": []})
    assert (verdict.status, verdict.reason.partition(":")[0]) == ("INFRA", "blind")


def test_the_damage_is_done_to_the_arms_own_files(judged: Callable[..., Verdict]) -> None:
    assert judged("corrupted-load", imported={}).reason.startswith("wrong-arm: ")


AGREED = {"cells": 3, "same_tokens": True, "max_logprob_error": 0.004, "with": "other-cell"}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "PASS"),
        ({"cells": 0, "max_logprob_error": 0.0, "with": ""}, "PASS"),
        ({"max_logprob_error": 0.006}, "FAIL"),
        ({"max_logprob_error": NAN}, "FAIL"),
        ({"same_tokens": False}, "FAIL"),
    ],
)
def test_cold_answers_of_different_cells(change: dict[str, Any], status: str) -> None:
    verdict = judge_agreement(AGREED | change, TOLERANCES)
    assert verdict.status == status
    assert status == "PASS" or "other-cell" in verdict.reason


# --- the engine -------------------------------------------------------------------------------------------------------


def test_an_engine_as_asked(make_cell: Callable[..., Cell], engine_facts: Callable[..., dict[str, Any]]) -> None:
    assert judge_engine(make_cell(), engine_facts()) == PASSED
    compiled = engine_facts({"compiled": 3}, enforce_eager=False, compilation_mode="VLLM_COMPILE")
    assert judge_engine(make_cell(mode="compiled"), compiled) == PASSED


@pytest.mark.parametrize(
    ("axis", "worker", "state"),
    [
        ("backend", {"backends": {"0": "CPU_ATTN", "1": "TRITON_ATTN"}}, {}),
        ("backend", {"backends": {"0": "FLASH_ATTN"}}, {}),
        ("mode", {}, {"enforce_eager": False}),
        ("mode", {"compiled": 1}, {}),
        ("mode", {}, {"compilation_mode": "VLLM_COMPILE"}),
        ("block_size", {}, {"block_size": 16}),
        ("dtype", {}, {"dtype": "bfloat16"}),
        ("offload", {}, {"offload": {"mode": "lazy"}}),
        ("offload", {}, {"offload": None}),
    ],
)
def test_an_engine_that_is_not_as_asked(
    make_cell: Callable[..., Cell], engine_facts: Callable[..., dict[str, Any]], axis: str, worker: Any, state: Any
) -> None:
    verdict = judge_engine(make_cell(), engine_facts(worker, **state))
    assert verdict.status == "UNSUPPORTED"
    assert verdict.reason.startswith(f"not-honoured: {axis} ")


def test_a_compiled_cell_that_compiled_nothing(
    make_cell: Callable[..., Cell], engine_facts: Callable[..., dict[str, Any]]
) -> None:
    facts = engine_facts({"compiled": 0}, enforce_eager=False, compilation_mode="VLLM_COMPILE")
    assert judge_engine(make_cell(mode="compiled"), facts).status == "UNSUPPORTED"


def test_an_engine_with_another_chunk(make_cell: Callable[..., Cell], engine_facts: Callable[..., dict[str, Any]]) -> None:
    verdict = judge_engine(make_cell(chunk=64), engine_facts())
    assert verdict.reason.startswith("not-honoured: attention_chunk_size 64 ")


def test_an_engine_without_full_attention(make_cell: Callable[..., Cell], engine_facts: Callable[..., dict[str, Any]]) -> None:
    groups = [g for g in engine_facts()["state"]["groups"] if g["attention_chunk_size"]]
    verdict = judge_engine(make_cell(), engine_facts(groups=groups))
    assert (verdict.status, verdict.reason.partition(":")[0]) == ("INFRA", "vacuous")


def test_an_engine_whose_chunked_layers_are_in_no_chunked_group(
    make_cell: Callable[..., Cell], engine_facts: Callable[..., dict[str, Any]]
) -> None:
    groups = [g for g in engine_facts()["state"]["groups"] if not g["attention_chunk_size"]]
    assert judge_engine(make_cell(), engine_facts(groups=groups)).status != "PASS"


CHUNKED, SLIDING, FULL = "ChunkedLocalAttentionSpec", "SlidingWindowSpec", "FullAttentionSpec"


@pytest.mark.parametrize(
    ("layers", "groups", "status", "reason"),
    [
        ("sf", [kv_group(SLIDING, sliding_window=128), kv_group(FULL)], "PASS", ""),
        ("sf", [kv_group(SLIDING, sliding_window=96), kv_group(FULL)], "UNSUPPORTED", "not-honoured: sliding_window 128 "),
        ("sf", [kv_group(FULL), kv_group(FULL)], "UNSUPPORTED", "not-honoured: sliding_window 128 "),
        # What the hybrid KV-cache manager leaves when it is off.
        ("sf", [kv_group(FULL, sliding_window=128)], "INFRA", "vacuous: the KV groups are ['FullAttentionSpec'], layers 'sf' "),
        ("sf", [kv_group(SLIDING, sliding_window=128)], "INFRA", "vacuous: "),
        ("cdf", [*(kv_group(CHUNKED, attention_chunk_size=c) for c in (128, 256)), kv_group(FULL)], "PASS", ""),
        (
            "cdf",
            [kv_group(CHUNKED, attention_chunk_size=128), kv_group(FULL)],
            "UNSUPPORTED",
            "not-honoured: attention_chunk_size [128, 256] was asked for, vLLM runs 128",
        ),
        ("ff", [kv_group(SLIDING, sliding_window=128), kv_group(FULL)], "UNSUPPORTED", "not-honoured: sliding_window None "),
    ],
)
def test_the_kinds_of_groups_that_layers_need(
    make_cell: Callable[..., Cell],
    engine_facts: Callable[..., dict[str, Any]],
    layers: str,
    groups: list[dict[str, Any]],
    status: str,
    reason: str,
) -> None:
    verdict = judge_engine(make_cell(layers=layers), engine_facts(groups=groups))
    assert verdict.status == status
    assert verdict.reason.startswith(reason)


# --- the scheduler's cases --------------------------------------------------------------------------------------------


@pytest.fixture
def case(arm: Arm) -> Callable[..., dict[str, Any]]:
    def make(**changes: Any) -> dict[str, Any]:
        facts = {
            "chunks": [None, 64],
            "prefix": 64,
            "imported": arm.expected,
            "external_tokens": 16,
            "ideal_tokens": 16,
            "is_async": True,
            "missing": [[], []],
            "null_copies": 1,
            "null_needed": 0,
            "faults": [],
            "boundary_resident": True,
            "leaked_cpu_pins": 0,
            "leaked_device_refs": 0,
            "pending_hits": 0,
        }
        return facts | changes

    return make


def test_a_case_that_is_right(case: Callable[..., dict[str, Any]], arm: Arm) -> None:
    assert judge_case(case(), arm) == PASSED


def test_a_misaligned_case_may_decline(case: Callable[..., dict[str, Any]], arm: Arm) -> None:
    assert judge_case(case(prefix=16, external_tokens=0, is_async=False, ideal_tokens=64), arm) == PASSED


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"imported": {}}, "INFRA", "wrong-arm: "),
        ({"missing": [[], [4]]}, "FAIL", "unsound: answers (16, True)"),
        ({"null_needed": 2}, "FAIL", "unsound: answers (16, True), 2 needed blocks are copied to the null block"),
        ({"leaked_cpu_pins": 1}, "FAIL", "leaked: "),
        ({"leaked_device_refs": 1}, "FAIL", "leaked: "),
        ({"pending_hits": 1}, "FAIL", "leaked: "),
        ({"external_tokens": 0, "is_async": False}, "FAIL", "lost-reuse: "),
        ({"prefix": 0, "external_tokens": 0, "is_async": False, "ideal_tokens": 80}, "FAIL", "lost-reuse: "),
        ({"external_tokens": 0}, "FAIL", "contract: "),
        ({"is_async": False}, "FAIL", "contract: "),
        ({"faults": ["mispinned: 3 for 2", "misplaced: x"]}, "FAIL", "mispinned: 3 for 2"),
    ],
)
def test_a_case_that_is_not(
    case: Callable[..., dict[str, Any]], arm: Arm, change: dict[str, Any], status: str, reason: str
) -> None:
    verdict = judge_case(case(**change), arm)
    assert verdict.status == status
    assert verdict.reason.startswith(reason)


DECLINED = {"prefix": 16, "external_tokens": 0, "is_async": False, "ideal_tokens": 64}


@pytest.mark.parametrize(
    ("keeps", "resident", "status"),
    [
        ("aligned", True, "PASS"),
        ("resident", True, "FAIL"),
        ("resident", False, "PASS"),
        ("all", True, "FAIL"),
        ("all", False, "FAIL"),
    ],
)
def test_a_patch_keeps_what_it_promises(
    case: Callable[..., dict[str, Any]], arm: Arm, keeps: Keeps, resident: bool, status: str
) -> None:
    promising = arm.model_copy(update={"keeps": keeps})
    assert judge_case(case(**DECLINED, boundary_resident=resident), promising).status == status


@pytest.mark.parametrize(
    ("keeps", "failing"),
    [("aligned", set()), ("resident", {"mixed-misaligned"}), ("all", {"mixed-misaligned", "mixed-head-gone"})],
)
def test_a_patch_keeps_what_it_promises_in_the_engine(observe: Observe, arm: Arm, keeps: Keeps, failing: set[str]) -> None:
    lost = {"cached_tokens": 32, "counters__external_hit_tokens": 0, "counters__loaded_blocks": 0}
    promising = arm.model_copy(update={"keeps": keeps})
    verdicts = {
        p: judge_probe(observe(p, **lost), promising, TOLERANCES, 512, PASSED) for p in ("mixed-misaligned", "mixed-head-gone")
    }
    assert {p for p, v in verdicts.items() if v.reason.startswith("lost-reuse: ")} == failing


# --- the scheduler's sweeps -------------------------------------------------------------------------------------------

SWEPT = {
    "residency": "all",
    "pressed": 0,
    "geometries": 9,
    "ideal": 64,
    "kept": 0,
    "contract": 0,
    "unsound": 0,
    "first_unsound": "here",
    "leaked": 0,
}
SWEPT |= {"lost_aligned": 0, "first_lost_aligned": "there", "lost_resident": 0, "lost": 0, "misplanned": 0}
SWEPT |= {"first_lost_resident": "nearby", "first_lost": "far", "first_misplanned": "mispinned: x", "first_contract": "None"}


def test_a_sweep_that_declines_what_is_misaligned_passes(arm: Arm) -> None:
    assert judge_sweep(SWEPT, arm.expected, arm) == PASSED


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"ideal": 0}, "INFRA", "vacuous: "),
        ({"residency": "evicted-pinned"}, "INFRA", "vacuous: no hit of 9 geometries was held while the CPU tier was filled"),
        ({"contract": 1}, "FAIL", "contract: 1 lookups in 9 geometries, first None"),
        ({"misplanned": 5}, "FAIL", "mispinned: x, the first of 5 in 9 geometries"),
        ({"unsound": 2}, "FAIL", "unsound: 2 of 9 geometries, first here"),
        ({"leaked": 3}, "FAIL", "leaked: blocks stay pinned after 3 rounds of lookups, in 9 geometries"),
        ({"lost_aligned": 4}, "FAIL", "lost-reuse: 4 of 9 geometries, all aligned, first there"),
    ],
)
def test_a_sweep_that_does_not(arm: Arm, change: dict[str, int], status: str, reason: str) -> None:
    verdict = judge_sweep(SWEPT | change, arm.expected, arm)
    assert verdict.status == status
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("keeps", "lost", "reason"),
    [
        ("aligned", "lost_resident", ""),
        ("aligned", "lost", ""),
        ("resident", "lost", ""),
        ("resident", "lost_resident", "lost-reuse: 4 of 9 geometries, whose reuse the patch promises, first nearby"),
        ("all", "lost", "lost-reuse: 4 of 9 geometries, whose reuse the patch promises, first far"),
        ("all", "lost_aligned", "lost-reuse: 4 of 9 geometries, all aligned, first there"),
    ],
)
def test_a_sweep_of_a_patch_that_promises_reuse(arm: Arm, keeps: Keeps, lost: str, reason: str) -> None:
    verdict = judge_sweep(SWEPT | {lost: 4}, arm.expected, arm.model_copy(update={"keeps": keeps}))
    assert (verdict.status, verdict.reason) == ("FAIL" if reason else "PASS", reason)


TRIED = {"asked": 9, "faults": 0, "first_fault": ""}


def test_the_calls_around_a_lookup(arm: Arm) -> None:
    assert judge_protocol(TRIED, arm.expected, arm) == PASSED
    wrong = judge_protocol(TRIED | {"faults": 2, "first_fault": "leaked: x, there"}, arm.expected, arm)
    assert (wrong.status, wrong.reason) == ("FAIL", "leaked: x, there, the first of 2 in 9 tries")
    assert judge_protocol(TRIED, {}, arm).status == "INFRA"


def test_a_sweep_of_another_arm_says_nothing(arm: Arm) -> None:
    assert judge_sweep(SWEPT, {}, arm).reason.startswith("wrong-arm: ")


# --- the scheduler's stateful tests -----------------------------------------------------------------------------------

SEARCHED = {"programs": 60, "lookups": 900, "misaligned": 90, "loads": 300, "violation": "", "program": ""}


def test_programs_that_break_nothing_pass(arm: Arm) -> None:
    assert judge_stateful(SEARCHED, arm.expected, arm) == PASSED


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"misaligned": 19}, "INFRA", "vacuous: 19 misaligned mixed hits in 900 lookups and 300 loads of 60 programs"),
        ({"loads": 0}, "INFRA", "vacuous: 90 misaligned mixed hits in 900 lookups and 0 loads"),
        # One that failed early has seen little, and that is no excuse for it.
        (
            {"violation": "stale: a block", "program": "step(1,2)", "misaligned": 0},
            "FAIL",
            "stale: a block; smallest program: step(",
        ),
    ],
)
def test_programs_that_do_not(arm: Arm, change: dict[str, object], status: str, reason: str) -> None:
    verdict = judge_stateful(SEARCHED | change, arm.expected, arm)
    assert verdict.status == status
    assert verdict.reason.startswith(reason)


def test_programs_on_another_arm_say_nothing(arm: Arm) -> None:
    assert judge_stateful(SEARCHED, {}, arm).reason.startswith("wrong-arm: ")
