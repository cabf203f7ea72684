"""Public reports as probes: their verdicts on made-up findings, and each case on the real vLLM, as it is and broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmatrix import oracle, public_cases
from kvmatrix.arms import Arm
from kvmatrix.config import Project
from kvmatrix.judge import Verdict, judge_public
from kvmatrix.public_cases import Found
from kvmatrix.rig_invariants import Violation
from kvmatrix.scheduler_harness import Unsupported

HERE = Path(__file__).parent
REPORT = re.compile(r"#(\d{4,6})")


# --- the verdict ------------------------------------------------------------------------------------------------------


def lookup(**changes: Any) -> dict[str, Any]:
    """A sound lookup of 64 tokens behind a misaligned prefix, with the blocks before the prefix's end gone."""
    return {
        "block": 16,
        "chunks": [None, 64],
        "prompt": 81,
        "prefix": 16,
        "external_tokens": 64,
        "is_async": True,
        "missing": [[], []],
        "ideal_tokens": 64,
        "boundary_resident": False,
        "faults": [],
        "null_needed": 0,
        "leaked_cpu_pins": 0,
        "leaked_device_refs": 0,
        "pending_hits": 0,
        "must_serve": False,
    } | changes


def judged(arm: Arm, *lookups: dict[str, Any], asked: int = 0, faults: tuple[str, ...] = (), **changes: Any) -> Verdict:
    found = {"asked": asked, "faults": list(faults), "lookups": list(lookups)}
    return judge_public(found, changes.get("imported", arm.expected), arm)


def test_what_is_right_passes(arm: Arm) -> None:
    assert judged(arm, lookup()).status == "PASS"
    assert judged(arm, asked=3).status == "PASS"


def test_the_first_fault_is_told_with_how_many_there_are(arm: Arm) -> None:
    verdict = judged(arm, lookup(), asked=8, faults=("early: store 0", "early: store 1"))
    assert verdict == Verdict("FAIL", "early: store 0, the first of 2 in 8 tries")


def test_a_lookup_is_judged_as_the_tiers_own_cases_are(arm: Arm) -> None:
    verdict = judged(arm, lookup(), lookup(missing=[[], [4]]))
    assert verdict.status == "FAIL"
    assert verdict.reason.startswith("unsound: answers (64, True), without KV (group: blocks) {1: [4]}, block 16, groups ")
    assert verdict.reason.endswith("prompt 81, prefix 16, the first of 1 in 2 lookups")


def test_a_long_reason_is_cut(arm: Arm) -> None:
    reason = judged(arm, lookup(missing=[[], list(range(1000))])).reason
    assert len(reason) < 350
    assert "…, block 16" in reason


@pytest.mark.parametrize(("keeps", "status"), [("aligned", "PASS"), ("resident", "PASS"), ("all", "FAIL")])
def test_the_arms_promise_counts(arm: Arm, keeps: Any, status: str) -> None:
    promised = arm.model_copy(update={"keeps": keeps})
    assert judged(promised, lookup(external_tokens=0, is_async=False)).status == status
    assert judged(promised, lookup(external_tokens=0, is_async=False, prefix=64)).status == "FAIL", "due on every arm"
    assert judged(promised, lookup(external_tokens=0, is_async=False, must_serve=True)).status == "FAIL"


def test_another_arm_or_nothing_asked_is_no_pass(arm: Arm) -> None:
    assert judged(arm, lookup(), imported={"m": "c" * 64}).reason.startswith("wrong-arm: ")
    assert judged(arm, lookup(), imported={"m": "c" * 64}).status == "INFRA"
    assert judged(arm) == Verdict("INFRA", "vacuous: nothing was asked, and nothing could be served in 0 lookups")
    assert judged(arm, lookup(external_tokens=0, is_async=False, ideal_tokens=0)).status == "INFRA"


# --- what is vLLM's fault and what is not -----------------------------------------------------------------------------


def run_with(monkeypatch: pytest.MonkeyPatch, case: Callable[[Found], None]) -> dict[str, Any]:
    monkeypatch.setattr(public_cases, "cases", lambda: {"public-1-x": case})
    return public_cases.run("public-1-x")


def test_what_another_package_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(found: Found) -> None:
        json.loads("{")

    (fault,) = run_with(monkeypatch, bad)["faults"]
    assert fault.startswith("raised: JSONDecodeError in ")


def test_what_this_package_raises_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(found: Found) -> None:
        oracle.needed_blocks(5, 4, oracle.FULL)

    with pytest.raises(ValueError, match="5 is not a multiple of 4"):
        run_with(monkeypatch, bad)


def test_a_part_of_vllm_that_is_not_there_costs_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(found: Found) -> None:
        raise ImportError("cannot import name 'x'")

    with pytest.raises(Unsupported, match=r"refused: .*cannot import name 'x'"):
        run_with(monkeypatch, bad)


def test_what_a_program_breaks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(found: Found) -> None:
        raise Violation("stale", "a block")

    assert run_with(monkeypatch, bad)["faults"] == ["stale: a block"]


def test_what_was_asked_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(found: Found) -> None:
        found.ask("a fault")
        found.ask("")

    assert run_with(monkeypatch, case) == {"asked": 2, "faults": ["a fault"], "lookups": []}


# --- the documentation ------------------------------------------------------------------------------------------------


def test_every_case_says_which_report_it_is_of(project: Project) -> None:
    page = (project.root / "docs" / "public-cases.md").read_text(encoding="utf-8")
    for name, case in public_cases.cases().items():
        number = name.split("-")[1]
        assert number in REPORT.findall(case.__doc__ or ""), f"{name}: its text names no #{number}"
        assert f"`{name}`" in page, f"docs/public-cases.md has no {name}"


# --- the real vLLM ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(told_in_env: Callable[..., Any], project: Project) -> dict[str, Any]:
    """What each case finds on the default pin, and with one thing of it broken (``broken_vllm.py``)."""
    code = (HERE / "broken_vllm.py").read_text(encoding="utf-8")
    found: dict[str, Any] = told_in_env(code, PYTHONPATH=str(project.root))
    return found


OWN_FAULT = {"public-57727-reset": "still-served: the reset reports success, and 32 of 32 tokens come from the CPU tier"}
STOCKS = {"public-57325-suffix-only": "answers (64, True)", "public-51150-llama4-groups": "answers (8208, True)"}
REFUSED = {"public-56396-block-below-hash": "AssertionError: Each KV cache group's real block_size must be divisible by"}


@pytest.mark.parametrize("name", public_cases.cases())
def test_each_case_on_stock(results: dict[str, Any], arm: Arm, name: str) -> None:
    found = results[name]
    if name in REFUSED:
        assert found["refused"].startswith(f"refused: {REFUSED[name]}")
        return
    verdict = judge_public(found, arm.expected, arm)
    if name in OWN_FAULT | STOCKS:
        assert verdict.status == "FAIL"
        assert verdict.reason.startswith(OWN_FAULT.get(name, f"unsound: {STOCKS.get(name)}"))
    else:
        assert verdict == Verdict("PASS")


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("not-pinned", "evicted: |references|raised: |mispinned: |misplaced: "),
        ("nothing-kept", "raised: AssertionError in .* at the load of 19264 tokens"),
        ("rounded-down", r"contract: answers \(1024, True\) behind 16 tokens"),
        ("whole-chunks", r"wrong-keys: one query token of 1 is given \[4\] keys"),
        ("three-groups", "groups: vLLM makes .* of 8 layers"),
        ("half-a-window", "loads: 3126 blocks behind 0 tokens, 3190 are needed"),
        ("last-token-too", "contract: answers 16 tokens where at most 15 can be served, .* prompt 16, prefix 0"),
        ("never-given-back", "stuck: |leaked: |references: |raised: "),
        ("freed-twice", "references: |queue: |raised: "),
        ("bare-assertion", "raised: AssertionError in .* without a word"),
        ("fails-later", "raised: AssertionError in .* without a word"),
        ("reads-anyway", "reads-cache: 80 tokens behind 0 for a request with .*prompt_logprobs"),
        ("resets-nothing", "still-served: "),
        ("visible-at-once", "stale: cpu block .* is cached as KV that it does not hold"),
        ("stored-too-early", "early: store 0 reads .* blocks that are not computed"),
        ("never-cached", "lost-reuse: 0 of 32 stored tokens"),
    ],
)
def test_each_check_sees_what_it_is_about(results: dict[str, Any], arm: Arm, label: str, reason: str) -> None:
    verdict = judge_public(results[label], arm.expected, arm)
    assert verdict.status == "FAIL"
    assert re.match(reason, verdict.reason), verdict.reason


def test_a_lookup_that_declines_loses_what_is_promised(results: dict[str, Any], arm: Arm) -> None:
    assert judge_public(results["declined"], arm.expected, arm).status == "PASS"
    promised = arm.model_copy(update={"keeps": "all"})
    assert judge_public(results["declined"], arm.expected, promised).reason.startswith("lost-reuse: answers (0, False), 64 ")


def test_a_reset_of_both_tiers_passes(results: dict[str, Any], arm: Arm) -> None:
    assert judge_public(results["resets-both"], arm.expected, arm).status == "PASS"
