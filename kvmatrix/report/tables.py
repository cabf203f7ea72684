"""Markdown tables (GitHub's form) from rows, fit to paste into a pull request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from kvmatrix.cells import Cell
from kvmatrix.expectations import is_problem
from kvmatrix.probes import PROBES
from kvmatrix.records import ProbeRow

STOCK = "stock"
CLASSLESS = ("cold", "device-hit", "corrupted-load", "pure-cpu-hit", "mixed-aligned")
"""Probes that have no misaligned device prefix."""


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate([[_cell(v) for v in r] for r in rows], headers=headers, tablefmt="github", disable_numparse=True)


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def status_text(row: ProbeRow) -> str:
    """The status, with what was expected wherever that is not plain."""
    if row.status == "FAIL" and not is_problem(row):
        return "FAIL (expected)"
    if is_problem(row):
        return f"**{row.status}** (expected {row.expected})" if row.status != row.expected else f"**{row.status}**"
    return row.status


def number(value: float | None) -> str:
    """A logprob error in nats: three digits, small ones in powers of ten."""
    if value is None:
        return ""
    return f"{value:.3f}" if value >= 0.01 else f"{value:.1e}" if value else "0"


SHOWN_TOKENS = 2


def _short(tokens: Sequence[int]) -> str:
    more = f",… ({len(tokens)})" if len(tokens) > SHOWN_TOKENS else ""
    return ",".join(map(str, tokens[:SHOWN_TOKENS])) + more


def _tokens(row: ProbeRow) -> str:
    if row.tokens is None or row.cold_tokens is None:
        return ""
    shown = [_short(t) for t in (row.cold_tokens, row.tokens)]
    return shown[0] if row.tokens == row.cold_tokens else f"{shown[0]} → {shown[1]}"


def _cached(row: ProbeRow) -> str:
    if row.cached_tokens is None:
        return ""
    return f"{row.cached_tokens} ({row.device_hit_tokens} + {row.external_hit_tokens})"


def qualification(rows: Sequence[ProbeRow], probe: str = "mixed-misaligned") -> str:
    """The table that matters most: the misaligned mixed hit of every LLM cell, arm beside arm."""
    shown = [r for r in rows if r.cell["tier"] == "llm" and r.probe == probe]
    body = [
        [
            r.cell["pin"],
            r.cell["backend"],
            r.cell["mode"],
            r.cell["block"],
            r.cell["chunk"],
            f"{r.cell['prompt']} / {r.cell['prefix']}",
            Cell.model_validate(r.cell).hit_class,
            r.cell["layers"],
            r.cell["dtype"],
            r.cell["offload"],
            r.cell["arm"],
            _tokens(r),
            _cached(r),
            r.reuse_tokens,
            number(r.max_logprob_error),
            status_text(r),
        ]
        for r in sorted(shown, key=_cell_order)
    ]
    headers = ["vLLM", "backend", "mode", "block", "chunk", "prompt / prefix", "class", "layers", "dtype", "offload", "arm"]
    headers += ["token: cold → mixed", "cached (device + CPU)", "CPU, ideal", "max logprob error", "status"]
    return _without_constant(headers, body, ("vLLM", "layers", "dtype", "offload"))


def probe_counts(rows: Sequence[ProbeRow]) -> str:
    """How each arm's cells fared in each probe of the LLM tier, by class of hit where that decides what stock answers."""
    counts: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    llm = [r for r in rows if r.cell["tier"] == "llm"]
    for row in sorted(llm, key=lambda r: PROBES.index(r.probe) if r.probe in PROBES else len(PROBES)):
        hit_class = Cell.model_validate(row.cell).hit_class if row.probe not in CLASSLESS else "any"
        by_arm = counts.setdefault((row.probe, hit_class), {})
        by_arm.setdefault(row.cell["arm"], Counter())[status_text(row)] += 1
    arms = list(dict.fromkeys(r.cell["arm"] for r in sorted(llm, key=_cell_order)))
    body = [
        [
            probe,
            hit_class,
            *(", ".join(f"{n} {status}" for status, n in by_arm[a].items()) if a in by_arm else "" for a in arms),
        ]
        for (probe, hit_class), by_arm in counts.items()
    ]
    return table(["probe", "class of the misaligned hit", *arms], body)


def proofs(rows: Sequence[ProbeRow]) -> list[str]:
    """Sentences on what the LLM cells would have noticed, and on how far their cold answers agree."""
    told = []
    damage = [(d["max_logprob_error"], r) for r in rows for d in r.detail.get("damage", ()) if r.status == "PASS"]
    if damage:
        least, row = min(damage, key=lambda d: d[0])
        told.append(
            f"Every cell lost one block of each KV group on purpose, {len(damage)} in all: each loss was noticed,"
            f" the least of them by {number(least)} nats ({row.id})."
        )
    compared = [(r.detail["agreement"], r) for r in rows if r.detail.get("agreement", {}).get("cells")]
    for dtype in sorted({r.cell["dtype"] for _, r in compared}):
        of_dtype = [a for a, r in compared if r.cell["dtype"] == dtype]
        worst = max(a["max_logprob_error"] for a in of_dtype)
        pairs = sum(a["cells"] for a in of_dtype)
        told.append(
            f"Cold answers to one prompt of one model, {dtype}: {pairs} pairs of cells compared,"
            f" largest difference {number(worst)} nats."
        )
    return told


def _without_single_pin(headers: list[str], body: list[list[Any]]) -> str:
    return _without_constant(headers, body, ("vLLM",))


def _without_constant(headers: list[str], body: list[list[Any]], names: Sequence[str]) -> str:
    """The table without those of the columns ``names`` that have the same value everywhere."""
    kept = [i for i, name in enumerate(headers) if name not in names or len({row[i] for row in body}) > 1]
    return table([headers[i] for i in kept], [[row[i] for i in kept] for row in body])


def _cell_order(row: ProbeRow) -> tuple[Any, ...]:
    c = row.cell
    sizes = tuple(c[name] for name in ("chunk", "block", "prompt", "prefix", "layers", "new_tokens") if name in c)
    return (c["pin"], c["tier"], c["backend"], *sizes, c["mode"], c["arm"] != STOCK, c["arm"])


def probes(rows: Sequence[ProbeRow]) -> str:
    """Every probe of every LLM cell."""
    body = [
        [
            r.cell["pin"],
            r.id.removeprefix(f"{r.cell['pin']}-{r.cell['device']}-").removesuffix(f"-{r.cell['arm']}-{r.probe}"),
            r.cell["arm"],
            r.probe,
            _tokens(r),
            _cached(r),
            "" if r.loaded_blocks is None else f"{r.loaded_blocks} / {r.needed_loads}",
            number(r.max_logprob_error),
            number(r.reference_error),
            status_text(r),
        ]
        for r in sorted((r for r in rows if r.cell["tier"] == "llm"), key=_cell_order)
    ]
    headers = ["vLLM", "cell", "arm", "probe", "token: cold → probe", "cached (device + CPU)", "blocks loaded / needed"]
    headers += ["max logprob error", "cold against transformers", "status"]
    return _without_single_pin(headers, body)


def lookups(rows: Sequence[ProbeRow]) -> str:
    """The scheduler tier's cases, one line a case, one column an arm."""
    cases, arms = _by_case([r for r in rows if r.cell["tier"] == "scheduler" and not is_sweep(r)])
    body = []
    for (pin, name), by_arm in cases.items():
        ideal = next(iter(by_arm.values())).reuse_tokens
        body.append([pin, name, ideal, *(_answer(by_arm.get(a)) for a in arms)])
    return _without_single_pin(["vLLM", "case", "soundly servable tokens", *arms], body)


def _by_case(rows: Sequence[ProbeRow]) -> tuple[dict[tuple[str, str], dict[str, ProbeRow]], list[str]]:
    """(pin, probe) -> arm -> row, and the arms, both in the order of first appearance."""
    cases: dict[tuple[str, str], dict[str, ProbeRow]] = {}
    for row in rows:
        cases.setdefault((row.cell["pin"], row.probe), {})[row.cell["arm"]] = row
    return cases, list(dict.fromkeys(r.cell["arm"] for r in rows))


CLASS, REUSE, CONTROL = "class-", "reuse-", "control-"
"""What the names of sweeps begin with: a class of hits by itself, shapes with chunked-local groups, and those without."""


def is_sweep(row: ProbeRow) -> bool:
    return row.probe.startswith((CLASS, REUSE, CONTROL))


def reuse(rows: Sequence[ProbeRow]) -> str:
    """The sweeps: of all tokens that could soundly be served, the share that each arm soundly serves.

    The share in brackets is over the geometries where the CPU tier also holds the blocks between the chunk boundary and the
    prefix's end.
    """
    cases, arms = _by_case([r for r in rows if is_sweep(r)])
    body = []
    for (pin, name), by_arm in cases.items():
        sums = next((r.sweep for r in by_arm.values() if r.sweep), {})
        shown = [f"{sums[key]:,}" for key in ("geometries", "ideal")] if sums else ["", ""]
        body.append([pin, name.removeprefix(REUSE), *shown, *(_share(by_arm.get(a)) for a in arms)])
    return _without_single_pin(["vLLM", "shapes, CPU tier", "geometries", "servable tokens", *arms], body)


def null_copies(rows: Sequence[ProbeRow]) -> str:
    """Per class of a mixed hit: of the blocks that each arm copies, those with the device's null block for a target.

    In brackets, those among them that attention needs. Empty where no class was asked.
    """
    cases, arms = _by_case([r for r in rows if r.probe.startswith(CLASS) and r.sweep])
    body = []
    for (pin, name), by_arm in cases.items():
        geometries = next(iter(by_arm.values())).sweep["geometries"]
        body.append([pin, name.removeprefix(CLASS), f"{geometries:,}", *(_null_copies(by_arm.get(a)) for a in arms)])
    return _without_single_pin(["vLLM", "class of the hit", "geometries", *arms], body) if body else ""


def _null_copies(row: ProbeRow | None) -> str:
    if row is None:
        return "NOT_RUN"
    s = row.sweep
    return f"{s['null_copies']:,} of {s['copies']:,} ({s['null_needed']:,})"


def sweep_lines(rows: Sequence[ProbeRow]) -> list[str]:
    """Per pin a sentence: how many geometries were asked, of how many arms, how long it took, and the reuse that each arm kept.

    The geometries of the classes are among those of the sweeps, and are not counted twice. The time is from the start of the
    first sweep to the end of the last one; rows that do not have it give no sentence.
    """
    timed = [r for r in rows if is_sweep(r) and "started" in r.sweep]
    return [_sweep_line(pin, [r for r in timed if r.cell["pin"] == pin]) for pin in dict.fromkeys(r.cell["pin"] for r in timed)]


def _sweep_line(pin: str, rows: Sequence[ProbeRow]) -> str:
    counted = [r for r in rows if not r.probe.startswith(CLASS)]
    arms = list(dict.fromkeys(r.cell["arm"] for r in rows))
    took = max(_end(r) for r in rows) - min(float(r.sweep["started"]) for r in rows)
    asked = _total(counted, "geometries")
    kept = [_arm_reuse(arm, [r for r in counted if r.cell["arm"] == arm and r.probe.startswith(REUSE)]) for arm in arms]
    several = "s" if len(arms) > 1 else ""
    return (
        f"scheduler tier: {asked:,} geometries on {len(arms)} arm{several} in {took:.0f} s, vLLM {pin};"
        f" reuse kept of what can soundly be served: {', '.join(kept)}"
    )


def _arm_reuse(arm: str, rows: Sequence[ProbeRow]) -> str:
    unsound = _total(rows, "unsound")
    shown = f"{arm} {percent(_total(rows, 'kept'), _total(rows, 'ideal'))}"
    return shown + (f" ({unsound:,} geometries unsound)" if unsound else "")


def _end(row: ProbeRow) -> float:
    return float(row.sweep["started"]) + float(row.sweep["seconds"])


def _total(rows: Sequence[ProbeRow], what: str) -> int:
    return sum(int(r.sweep[what]) for r in rows)


def _share(row: ProbeRow | None) -> str:
    if row is None or not row.sweep:
        return "NOT_RUN" if row is None else status_text(row)
    s = row.sweep
    kept = f"{percent(s['kept'], s['ideal'])} ({percent(s['kept_resident'], s['ideal_resident'])})"
    return f"{kept}, {s['unsound']:,} unsound: {status_text(row)}" if s["unsound"] else f"{kept} {status_text(row)}"


def percent(part: int | float | str, whole: int | float | str) -> str:
    """``part`` of ``whole`` in percent, rounded down: what is not all of it is never shown as 100 %."""
    return f"{int(1000 * int(part) / int(whole)) / 10:g} %" if whole else "none"


def _answer(row: ProbeRow | None) -> str:
    if row is None:
        return "NOT_RUN"
    answer = row.resolved.get("answer")
    shown = f"({answer[0]}, {answer[1]}) " if answer else ""
    return f"{shown}{status_text(row)}"


def left_out(rows: Sequence[ProbeRow]) -> str:
    """What did not run, or was not as expected, with the reason; empty when there is nothing."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for r in sorted(rows, key=_cell_order):
        if is_problem(r) or r.status in ("UNSUPPORTED", "NOT_RUN"):
            key = (r.id.removesuffix(f"-{r.probe}"), status_text(r), r.reason or "no fault was seen")
            grouped.setdefault(key, []).append(r.probe)
    body = [[cell, ", ".join(probes), status, reason] for (cell, status, reason), probes in grouped.items()]
    return table(["cell", "probes", "status", "reason"], body) if body else ""
