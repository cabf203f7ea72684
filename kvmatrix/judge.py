"""From observations to a status. A probe that did not establish its state is INFRA, never PASS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvmatrix.arms import Arm, Keeps
from kvmatrix.cells import Cell
from kvmatrix.config import Tolerances
from kvmatrix.records import Status


@dataclass(frozen=True)
class Verdict:
    status: Status
    reason: str = ""


def requested(cell: Cell) -> dict[str, Any]:
    return {
        "backend": cell.backend,
        "mode": cell.mode,
        "block_size": cell.block,
        "attention_chunk_size": cell.chunk if "c" in cell.layers else None,
        "dtype": cell.dtype,
        "offload": cell.offload,
    }


def resolved(engine: dict[str, Any]) -> dict[str, Any]:
    """What the engine says it runs, in the terms of :func:`requested`, plus facts that have no request."""
    state, worker = engine["state"], engine["worker"]
    eager = state["enforce_eager"] and state["compilation_mode"] == "NONE" and worker["compiled"] == 0
    compiled = not state["enforce_eager"] and state["compilation_mode"] != "NONE" and worker["compiled"] > 0
    chunks = sorted({g["attention_chunk_size"] for g in state["groups"] if g["attention_chunk_size"]})
    return {
        "backend": ",".join(sorted(set(worker["backends"].values()))),
        "mode": "eager" if eager else "compiled" if compiled else f"unclear ({state['compilation_mode']})",
        "block_size": state["block_size"],
        "attention_chunk_size": chunks[0] if len(chunks) == 1 else chunks or None,
        "dtype": state["dtype"],
        "offload": (state["offload"] or {}).get("mode"),
        "compilation_mode": state["compilation_mode"],
        "cudagraph_mode": state["cudagraph_mode"],
        "kv_groups": [g["kind"] for g in state["groups"]],
        "cache_dtype": state["cache_dtype"],
        "max_num_seqs": state["max_num_seqs"],
        "num_gpu_blocks": state["num_gpu_blocks"],
        "weights_sha256": engine.get("weights_sha256"),
    }


def judge_engine(cell: Cell, engine: dict[str, Any]) -> Verdict:
    """Whether the engine that came up is the one that the cell names."""
    asked, got = requested(cell), resolved(engine)
    for axis, value in asked.items():
        if got[axis] != value:
            return Verdict("UNSUPPORTED", f"not-honoured: {axis} {value} was asked for, vLLM runs {got[axis]}")
    kinds = set(got["kv_groups"])
    if "FullAttentionSpec" not in kinds or ("c" in cell.layers and "ChunkedLocalAttentionSpec" not in kinds):
        return Verdict("INFRA", f"vacuous: the KV groups are {sorted(kinds)}, no chunked-local beside full attention")
    return Verdict("PASS")


def judge_probe(observed: dict[str, Any], arm: Arm, tolerances: Tolerances, vocab_size: int, cold: Verdict | None) -> Verdict:
    """Status of one LLM probe; ``cold`` is the verdict of the cell's cold probe (None when this is it)."""
    for problem in _not_established(observed, arm, vocab_size):
        return Verdict("INFRA", problem)
    if cold is not None and cold.status != "PASS":
        return Verdict("INFRA", f"no-reference: the cold answer is {cold.status}, there is nothing to compare with")
    for fault in _faults(observed, tolerances, arm.keeps):
        return Verdict("FAIL", fault)
    return Verdict("PASS")


def _not_established(o: dict[str, Any], arm: Arm, vocab_size: int) -> Iterator[str]:
    plan, counters = o["plan"], o["counters"]
    if o["imported"] != arm.expected:
        yield f"wrong-arm: the engine imported {_short(o['imported'])}, arm {arm.name} is {_short(arm.expected)}"
    if o["vocab_compared"] != vocab_size:
        yield f"logprobs: {o['vocab_compared']} of {vocab_size} logprobs were returned"
    if counters["preemptions"]:
        yield f"preempted: {counters['preemptions']} preemptions during the probe"
    if counters["device_hit_tokens"] != plan["device_tokens"]:
        yield (
            f"not-established: the device served {counters['device_hit_tokens']} tokens,"
            f" the probe needs {plan['device_tokens']}"
        )
    if o["cpu_resident_tokens"] < plan["cpu_tokens"]:
        yield (f"not-established: the CPU tier holds {o['cpu_resident_tokens']} tokens, the probe needs {plan['cpu_tokens']}")
    if (gone := plan["gone_blocks"]) and not _only_head_gone(o["cpu_blocks"], gone):
        yield f"not-established: the first {gone} blocks alone must be gone from the CPU tier, it holds {o['cpu_blocks']}"
    if o["cached_tokens"] != counters["device_hit_tokens"] + counters["external_hit_tokens"]:
        yield (
            f"counters: {o['cached_tokens']} cached tokens are not {counters['device_hit_tokens']} device"
            f" + {counters['external_hit_tokens']} external"
        )
    if plan["reuse_tokens"] == 0 and counters["external_hit_tokens"]:
        yield f"not-established: {counters['external_hit_tokens']} external tokens where none were planned"


def _only_head_gone(cpu_blocks: list[list[bool]], gone: int) -> bool:
    """Whether no group has the first ``gone`` blocks, and the rest is there: all of it in the full-attention group.

    A chunked-local group may lack blocks behind the prefix too, those that no hit needs.
    """
    return not any(any(group[:gone]) for group in cpu_blocks) and any(all(group[gone:]) for group in cpu_blocks)


_SOUND = ("pure-cpu-hit", "mixed-aligned")
_KEPT: dict[Keeps, tuple[str, ...]] = {
    "aligned": _SOUND,
    "resident": (*_SOUND, "mixed-misaligned"),
    "all": (*_SOUND, "mixed-misaligned", "mixed-head-gone"),
}
"""Per promise of a patch, the probes whose whole external hit it must keep."""


def _faults(o: dict[str, Any], tolerances: Tolerances, keeps: Keeps) -> Iterator[str]:
    plan, counters = o["plan"], o["counters"]
    error = o["max_logprob_error"]
    reference = o.get("reference")
    if reference and (
        reference["tokens"] != o["tokens"] or not reference["max_logprob_error"] <= tolerances.max_reference_error
    ):
        yield (
            f"reference: tokens {o['tokens']} against transformers' {reference['tokens']},"
            f" logprob error {reference['max_logprob_error']:.6g} nats"
        )
    if o["tokens"] != o["cold_tokens"] or not error <= tolerances.max_logprob_error:
        yield f"wrong-output: tokens {o['tokens']} for {o['cold_tokens']}, logprob error {error:.6g} nats"
    external, reuse = counters["external_hit_tokens"], plan["reuse_tokens"]
    if o["probe"] in _KEPT[keeps] and external != reuse:
        yield f"lost-reuse: {external} of {reuse} external tokens, which stock or the patch can soundly serve"
    if external == reuse and counters["loaded_blocks"] < plan["needed_loads"]:
        yield f"unsound-load: {counters['loaded_blocks']} blocks loaded, attention needs {plan['needed_loads']}"
    if o["pending_hits"]:
        yield f"leaked-pin: {o['pending_hits']} pending CPU hits are still pinned after the request"


def judge_case(case: dict[str, Any], arm: Arm) -> Verdict:
    """Status of one scheduler case: sound, nothing leaked, and no reuse lost where stock is right or the patch promises it."""
    if case["imported"] != arm.expected:
        return Verdict("INFRA", f"wrong-arm: imported {_short(case['imported'])}, arm {arm.name} is {_short(arm.expected)}")
    answer = f"({case['external_tokens']}, {case['is_async']})"
    if case["faults"]:
        return Verdict("FAIL", case["faults"][0])
    if case["is_async"] != (case["external_tokens"] > 0):
        return Verdict("FAIL", f"contract: answers {answer}, a hit is loaded asynchronously and a miss is not")
    if any(case["missing"]):
        lacking = {g: m for g, m in enumerate(case["missing"]) if m}
        return Verdict("FAIL", f"unsound: answers {answer}, without KV (group: blocks) {lacking}")
    if case["leaked_cpu_pins"] or case["leaked_device_refs"] or case["pending_hits"]:
        return Verdict(
            "FAIL",
            f"leaked: {case['leaked_cpu_pins']} CPU pins, {case['leaked_device_refs']} device references,"
            f" {case['pending_hits']} pending hits",
        )
    aligned = all(c is None or case["prefix"] % c == 0 for c in case["chunks"])
    promised = aligned or arm.keeps == "all" or (arm.keeps == "resident" and case["boundary_resident"])
    if promised and case["external_tokens"] != case["ideal_tokens"]:
        return Verdict("FAIL", f"lost-reuse: answers {answer}, {case['ideal_tokens']} tokens can be served")
    return Verdict("PASS")


def judge_sweep(totals: dict[str, Any], imported: dict[str, str], arm: Arm) -> Verdict:
    """Status of a sweep: every hit sound, nothing leaked, and no reuse lost where stock is right or the patch promises it."""
    if imported != arm.expected:
        return Verdict("INFRA", f"wrong-arm: imported {_short(imported)}, arm {arm.name} is {_short(arm.expected)}")
    if not totals["ideal"]:
        return Verdict("INFRA", f"vacuous: nothing could be served in any of {totals['geometries']} geometries")
    of = f"{totals['geometries']} geometries"
    if totals["contract"]:
        return Verdict("FAIL", f"contract: {totals['contract']} lookups in {of}, first {totals['first_contract']}")
    if totals["unsound"]:
        return Verdict("FAIL", f"unsound: {totals['unsound']} of {of}, first {totals['first_unsound']}")
    if totals["misplanned"]:
        return Verdict("FAIL", f"{totals['first_misplanned']}, the first of {totals['misplanned']} in {of}")
    if totals["leaked"]:
        return Verdict("FAIL", f"leaked: blocks stay pinned after {totals['leaked']} rounds of lookups, in {of}")
    for lost, which in _PROMISED[arm.keeps]:
        if totals[lost]:
            return Verdict("FAIL", f"lost-reuse: {totals[lost]} of {of}, {which}, first {totals[f'first_{lost}']}")
    return Verdict("PASS")


_PROMISED = {
    "aligned": [("lost_aligned", "all aligned")],
    "resident": [("lost_aligned", "all aligned"), ("lost_resident", "whose reuse the patch promises")],
    "all": [("lost_aligned", "all aligned"), ("lost", "whose reuse the patch promises")],
}
"""Per promise of a patch, which lookups must have got the ideal hit, and how they are called."""


def judge_protocol(tried: dict[str, Any], imported: dict[str, str], arm: Arm) -> Verdict:
    """Status of one check of the calls around a lookup."""
    if imported != arm.expected:
        return Verdict("INFRA", f"wrong-arm: imported {_short(imported)}, arm {arm.name} is {_short(arm.expected)}")
    if tried["faults"]:
        return Verdict("FAIL", f"{tried['first_fault']}, the first of {tried['faults']} in {tried['asked']} tries")
    return Verdict("PASS")


def judge_public(found: dict[str, Any], imported: dict[str, str], arm: Arm) -> Verdict:
    """Status of a public report's case: nothing that it asks is wrong, and each of its lookups is what the arm owes."""
    if imported != arm.expected:
        return Verdict("INFRA", f"wrong-arm: imported {_short(imported)}, arm {arm.name} is {_short(arm.expected)}")
    lookups, faults = found["lookups"], found["faults"]
    if not found["asked"] and not any(lookup["ideal_tokens"] for lookup in lookups):
        return Verdict("INFRA", f"vacuous: nothing was asked, and nothing could be served in {len(lookups)} lookups")
    if faults:
        return Verdict("FAIL", f"{faults[0]}, the first of {len(faults)} in {found['asked']} tries")
    wrong = [reason for lookup in lookups if (reason := _public_lookup(lookup | {"imported": imported}, arm))]
    return Verdict("FAIL", f"{wrong[0]}, the first of {len(wrong)} in {len(lookups)} lookups") if wrong else Verdict("PASS")


def _public_lookup(lookup: dict[str, Any], arm: Arm) -> str:
    """What is wrong with one lookup of a public case, and where; empty when nothing is."""
    reason = judge_case(lookup, arm).reason
    served, ideal = lookup["external_tokens"], lookup["ideal_tokens"]
    if not reason and lookup["must_serve"] and served != ideal:
        reason = f"lost-reuse: answers ({served}, {lookup['is_async']}), {ideal} tokens can be served"
    place = f"block {lookup['block']}, groups {lookup['chunks']}, prompt {lookup['prompt']}, prefix {lookup['prefix']}"
    return reason and f"{_cut(reason)}, {place}"


MAX_REASON = 200


def _cut(reason: str) -> str:
    """A reason short enough for a table: at large geometries it would list hundreds of blocks."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"


MIN_MISALIGNED = 20
"""Lookups behind a misaligned device prefix with a suffix in the CPU tier that a stateful test must have come to."""


def judge_stateful(totals: dict[str, Any], imported: dict[str, str], arm: Arm) -> Verdict:
    """Status of a stateful test: no program broke an invariant, and enough of them came to the lookup that is in question."""
    if imported != arm.expected:
        return Verdict("INFRA", f"wrong-arm: imported {_short(imported)}, arm {arm.name} is {_short(arm.expected)}")
    if totals["violation"]:
        return Verdict("FAIL", f"{totals['violation']}; smallest program: {totals['program']}")
    if totals["misaligned"] < MIN_MISALIGNED or not totals["loads"]:
        of = f"{totals['lookups']} lookups and {totals['loads']} loads of {totals['programs']} programs"
        return Verdict("INFRA", f"vacuous: {totals['misaligned']} misaligned mixed hits in {of}")
    return Verdict("PASS")


def _short(digests: dict[str, str]) -> str:
    return ", ".join(f"{m.rsplit('.', 1)[-1]} {d[:12]}" for m, d in digests.items()) or "nothing"
