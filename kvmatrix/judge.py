"""From observations to a status. A probe that did not establish its state is INFRA, never PASS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvmatrix import layers as letters
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
        "attention_chunk_size": _one(letters.chunk_sizes(cell.layers, cell.chunk)),
        "sliding_window": cell.chunk if letters.SLIDING in cell.layers else None,
        "dtype": cell.dtype,
        "offload": cell.offload,
    }


def _one(sizes: list[int]) -> int | list[int] | None:
    return sizes[0] if len(sizes) == 1 else sizes or None


def resolved(engine: dict[str, Any]) -> dict[str, Any]:
    """What the engine says it runs, in the terms of :func:`requested`, plus facts that have no request."""
    state, worker = engine["state"], engine["worker"]
    eager = state["enforce_eager"] and state["compilation_mode"] == "NONE" and worker["compiled"] == 0
    compiled = not state["enforce_eager"] and state["compilation_mode"] != "NONE" and worker["compiled"] > 0
    return {
        "backend": ",".join(sorted(set(worker["backends"].values()))),
        "mode": "eager" if eager else "compiled" if compiled else f"unclear ({state['compilation_mode']})",
        "block_size": state["block_size"],
        "attention_chunk_size": _one(sorted({g["attention_chunk_size"] for g in state["groups"] if g["attention_chunk_size"]})),
        "sliding_window": _one(sorted({g["sliding_window"] for g in state["groups"] if g["sliding_window"]})),
        "dtype": state["dtype"],
        "offload": "disk" if worker.get("disk") else (state["offload"] or {}).get("mode"),
        "compilation_mode": state["compilation_mode"],
        "cudagraph_mode": state["cudagraph_mode"],
        "kv_groups": [g["kind"] for g in state["groups"]],
        "cache_dtype": state["cache_dtype"],
        "max_num_seqs": state["max_num_seqs"],
        "num_gpu_blocks": state["num_gpu_blocks"],
        "weights_sha256": engine.get("weights_sha256"),
    }


def judge_engine(cell: Cell, engine: dict[str, Any], offload: bool = True) -> Verdict:
    """Whether the engine that came up is the one that the cell names; without ``offload``, one that has no connector."""
    asked, got = requested(cell), resolved(engine)
    if not offload:
        asked["offload"] = None
    for axis, value in asked.items():
        if got[axis] != value:
            return Verdict("UNSUPPORTED", f"not-honoured: {axis} {value} was asked for, vLLM runs {got[axis]}")
    kinds = set(got["kv_groups"])
    for letter in sorted({*cell.layers, "f"}):
        if _SPECS[letter] not in kinds:
            return Verdict("INFRA", f"vacuous: the KV groups are {sorted(kinds)}, layers {cell.layers!r} need {_SPECS[letter]}")
    return Verdict("PASS")


_SPECS = {
    "c": "ChunkedLocalAttentionSpec",
    "d": "ChunkedLocalAttentionSpec",
    "s": "SlidingWindowSpec",
    "f": "FullAttentionSpec",
}
"""The kind of KV group that each layer letter must be in; one of full attention must always be there."""


def judge_probe(
    observed: dict[str, Any],
    arm: Arm,
    tolerances: Tolerances,
    vocab_size: int,
    cold: Verdict | None,
    control: bool = False,
) -> Verdict:
    """Status of one LLM probe; ``cold`` is the verdict of the cell's cold probe (None when this is it).

    ``control``: the model has no chunked layer, so every arm must keep all of the hit.
    """
    if observed["probe"] == "corrupted-load":
        return judge_corrupted(observed, arm, tolerances)
    for problem in _not_established(observed, arm, vocab_size):
        return Verdict("INFRA", problem)
    if cold is not None and cold.status != "PASS":
        return Verdict("INFRA", f"no-reference: the cold answer is {cold.status}, there is nothing to compare with")
    for fault in _faults(observed, tolerances, "all" if control else arm.keeps):
        return Verdict("FAIL", fault)
    return Verdict("PASS")


def _other_files(imported: dict[str, str], arm: Arm) -> Verdict | None:
    """The verdict on whatever was asked of other files than the arm's; None where they are the arm's."""
    if imported == arm.expected:
        return None
    return Verdict("INFRA", f"wrong-arm: imported {_short(imported)}, arm {arm.name} is {_short(arm.expected)}")


def judge_corrupted(observed: dict[str, Any], arm: Arm, tolerances: Tolerances) -> Verdict:
    """Whether the loss of one block of any group is noticed. A cell that would not notice it is INFRA, with all its rows."""
    if other := _other_files(observed["imported"], arm):
        return other
    if not observed["detail"]["damage"]:
        return Verdict("INFRA", "blind: attention needs no block of any hit of this geometry")
    for damage in observed["detail"]["damage"]:
        which = f"block {damage['block']} of group {damage['group']}"
        if damage["lost"] != 1:
            return Verdict("INFRA", f"not-established: {which} was to be lost on the way, and {damage['lost']} blocks were")
        if not _wrong(damage["tokens"], observed["cold_tokens"], damage["max_logprob_error"], tolerances):
            error = f"{damage['max_logprob_error']:.6g} nats"
            return Verdict("INFRA", f"blind: the loss of {which} moves logprobs by {error} and changes no token")
    return Verdict("PASS")


def judge_agreement(agreement: dict[str, Any], tolerances: Tolerances) -> Verdict:
    """Whether a cold answer is the one that every other cell with its model, prompt and dtype gave, whatever backend, mode,
    block size, arm and pin it has."""
    if _agrees(agreement["same_tokens"], agreement["max_logprob_error"], tolerances):
        return Verdict("PASS")
    error = f"{agreement['max_logprob_error']:.6g} nats"
    return Verdict("FAIL", f"disagreement: the cold answer differs from that of {agreement['with']} by {error}")


def _agrees(same_tokens: bool, error: float, tolerances: Tolerances) -> bool:
    """Whether two answers that were computed in different ways are one; an error that is not a number is none."""
    return (same_tokens or tolerances.reference_ties) and error <= tolerances.max_reference_error


def _wrong(tokens: list[int], cold: list[int], error: float, tolerances: Tolerances) -> bool:
    """Whether an answer is not the cold one; an error that is not a number is wrong."""
    return tokens != cold or not error <= tolerances.max_logprob_error


def _not_established(o: dict[str, Any], arm: Arm, vocab_size: int) -> Iterator[str]:
    plan, counters = o["plan"], o["counters"]
    if o["imported"] != arm.expected:
        yield f"wrong-arm: the engine imported {_short(o['imported'])}, arm {arm.name} is {_short(arm.expected)}"
    if o["vocab_compared"] != vocab_size:
        yield f"logprobs: {o['vocab_compared']} of {vocab_size} logprobs were returned"
    yield from _states_missed(o)
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


def _states_missed(o: dict[str, Any]) -> Iterator[str]:
    meant, preemptions = o["plan"]["preemptions"], o["counters"]["preemptions"]
    if preemptions != meant:
        yield f"preempted: {preemptions} preemptions during the probe, {meant} were meant"
    for state, reached in o["detail"].get("states", {}).items():
        if not reached:
            yield f"not-established: it is not so that {state}"


def _only_head_gone(cpu_blocks: list[list[bool]], gone: int) -> bool:
    """Whether no group has the first ``gone`` blocks, and the rest is there: all of it in the full-attention group.

    A chunked-local group may lack blocks behind the prefix too, those that no hit needs.
    """
    return not any(any(group[:gone]) for group in cpu_blocks) and any(all(group[gone:]) for group in cpu_blocks)


_SOUND = ("pure-cpu-hit", "mixed-aligned")
_KEPT: dict[Keeps, tuple[str, ...]] = {
    "aligned": _SOUND,
    "resident": (*_SOUND, "mixed-misaligned", "abort-loading"),
    "all": (*_SOUND, "mixed-misaligned", "abort-loading", "mixed-head-gone"),
}
"""Per promise of a patch, the probes whose whole external hit it must keep; for each request of several, see
:func:`_faults_of_requests`."""


def _faults_of_requests(o: dict[str, Any], tolerances: Tolerances, keeps: Keeps) -> Iterator[str]:
    """What is wrong with the requests of a probe that has several, each against its own cold answer and its own plan."""
    asked = o["detail"].get("requests", [])
    for number, answer in enumerate(asked):
        error = answer["max_logprob_error"]
        if _wrong(answer["tokens"], answer["cold_tokens"], error, tolerances):
            which = f"request {number}: tokens {answer['tokens']} for {answer['cold_tokens']}"
            yield f"wrong-output: {which}, logprob error {error:.6g} nats"
    for number, (answer, planned) in enumerate(zip(asked, o["plan"]["requests"], strict=False)):
        external, reuse = answer["cached_tokens"] - planned["device_tokens"], planned["reuse_tokens"]
        if external != reuse and (planned["aligned"] or keeps != "aligned"):
            yield f"lost-reuse: request {number} is served {external} of {reuse} external tokens, which can soundly be served"


def _faults(o: dict[str, Any], tolerances: Tolerances, keeps: Keeps) -> Iterator[str]:
    plan, counters = o["plan"], o["counters"]
    error = o["max_logprob_error"]
    reference = o.get("reference")
    if reference and not _agrees(reference["tokens"] == o["tokens"], reference["max_logprob_error"], tolerances):
        yield (
            f"reference: tokens {o['tokens']} against transformers' {reference['tokens']},"
            f" logprob error {reference['max_logprob_error']:.6g} nats"
        )
    if _wrong(o["tokens"], o["cold_tokens"], error, tolerances):
        yield f"wrong-output: tokens {o['tokens']} for {o['cold_tokens']}, logprob error {error:.6g} nats"
    yield from _faults_of_requests(o, tolerances, keeps)
    external, reuse = counters["external_hit_tokens"], plan["reuse_tokens"]
    if o["probe"] in _KEPT[keeps] and external != reuse:
        yield f"lost-reuse: {external} of {reuse} external tokens, which stock or the patch can soundly serve"
    if external == reuse and counters["loaded_blocks"] < plan["needed_loads"]:
        yield f"unsound-load: {counters['loaded_blocks']} blocks loaded, attention needs {plan['needed_loads']}"
    if o["pending_hits"]:
        yield f"leaked-pin: {o['pending_hits']} pending CPU hits are still pinned after the request"
    if o["used_device_blocks"]:
        yield f"leaked-block: {o['used_device_blocks']} device blocks are still in use after the request"


def judge_case(case: dict[str, Any], arm: Arm) -> Verdict:
    """Status of one scheduler case: sound, nothing leaked, and no reuse lost where stock is right or the patch promises it."""
    if other := _other_files(case["imported"], arm):
        return other
    answer = f"({case['external_tokens']}, {case['is_async']})"
    if case["faults"]:
        return Verdict("FAIL", case["faults"][0])
    if case["is_async"] != (case["external_tokens"] > 0):
        return Verdict("FAIL", f"contract: answers {answer}, a hit is loaded asynchronously and a miss is not")
    if any(case["missing"]):
        lacking = {g: m for g, m in enumerate(case["missing"]) if m}
        return Verdict("FAIL", f"unsound: answers {answer}, without KV (group: blocks) {lacking}")
    if case["null_needed"]:
        return Verdict("FAIL", f"unsound: answers {answer}, {case['null_needed']} needed blocks are copied to the null block")
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
    if other := _other_files(imported, arm):
        return other
    if not totals["ideal"]:
        return Verdict("INFRA", f"vacuous: nothing could be served in any of {totals['geometries']} geometries")
    if totals["residency"] == "evicted-pinned" and not totals["pressed"]:
        return Verdict("INFRA", f"vacuous: no hit of {totals['geometries']} geometries was held while the CPU tier was filled")
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
    if other := _other_files(imported, arm):
        return other
    if tried["faults"]:
        return Verdict("FAIL", f"{tried['first_fault']}, the first of {tried['faults']} in {tried['asked']} tries")
    return Verdict("PASS")


def judge_public(found: dict[str, Any], imported: dict[str, str], arm: Arm) -> Verdict:
    """Status of a public report's case: nothing that it asks is wrong, and each of its lookups is what the arm owes."""
    if other := _other_files(imported, arm):
        return other
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
    if other := _other_files(imported, arm):
        return other
    if totals["violation"]:
        return Verdict("FAIL", f"{totals['violation']}; smallest program: {totals['program']}")
    if totals["misaligned"] < MIN_MISALIGNED or not totals["loads"]:
        of = f"{totals['lookups']} lookups and {totals['loads']} loads of {totals['programs']} programs"
        return Verdict("INFRA", f"vacuous: {totals['misaligned']} misaligned mixed hits in {of}")
    return Verdict("PASS")


def _short(digests: dict[str, str]) -> str:
    return ", ".join(f"{m.rsplit('.', 1)[-1]} {d[:12]}" for m, d in digests.items()) or "nothing"
