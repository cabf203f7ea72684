"""Markdown tables of the perf suite, from rows alone; nothing wrong is compared, and nothing that was not measured is a gap."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvmatrix import stats
from kvmatrix.bench_fields import FIELDS, RATES, TIMES, bench_fields
from kvmatrix.cells import STOCK
from kvmatrix.live import AGAIN
from kvmatrix.records import BenchRequest, PerfRow
from kvmatrix.report import compare
from kvmatrix.report.compare import Compared, is_measured, of_group
from kvmatrix.report.tables import table

MIB, GIB, GIGA = 2**20, 2**30, 1e9

LOOKUP_HEADERS = ["prompt / prefix", "groups", "CPU tier", "arm", "µs a call", "ratio to stock [95 %]", "verdict"]
LOOKUP_HEADERS += ["external tokens", "instructions to stock's", "outliers"]
GENERATE_HEADERS = ["workload", "arm", "request_throughput", "total_token_throughput", "median_ttft_ms", "TTFT ratio [95 %]"]
GENERATE_HEADERS += [
    "reference",
    "verdict",
    "external_hit_tokens",
    "declined_tokens",
    "recomputed_tokens",
    "loaded MiB",
    "right",
]


def struck(text: str, right: bool) -> str:
    return text if right else f"~~{text}~~"


def figure(value: float) -> str:
    """Three digits; whole numbers, and what is above a hundred, in full."""
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(compared: Compared) -> str:
    if compared.ratio is not None:
        return str(compared.ratio)
    return "1" if compared.reference == compared.arm == STOCK else ""


def _status_lines(row: PerfRow, lead: list[object], width: int, at: int) -> list[list[object]]:
    """Lines for what the row did not measure: its own status, and the arms that were left out. ``at``: the verdict's column."""

    def line(arm: str, text: str) -> list[object]:
        cells: list[object] = [*lead, arm]
        cells += [""] * (width - len(cells))
        cells[at] = text
        return cells

    lines = [] if row.status == "PASS" else [line("", f"{row.status}: {row.reason}")]
    return lines + [line(arm, reason) for arm, reason in row.left_out.items()]


# --- lookup -----------------------------------------------------------------------------------------------------------


def _place(row: PerfRow) -> list[object]:
    g = row.geometry
    prompt = f"{g['prompt']:,} / {g['prefix']:,}" if {"prompt", "prefix"} <= set(g) else row.workload
    return [prompt, g.get("groups", ""), "hit" if g.get("hit", True) else "miss"]


def lookup(rows: Sequence[PerfRow]) -> str:
    """Time of one lookup call, arm beside arm."""
    body: list[list[object]] = []
    for row in of_group(rows, "lookup"):
        if is_measured(row):
            body += [[*_place(row), *_lookup_cells(row, c)] for c in compare.lookups(row)]
        body += _status_lines(row, _place(row), len(LOOKUP_HEADERS), LOOKUP_HEADERS.index("verdict"))
    return table(LOOKUP_HEADERS, body)


def _lookup_cells(row: PerfRow, compared: Compared) -> list[object]:
    blocks = row.seconds[compared.arm]
    tokens = dict(row.answers.get(compared.arm, {})).get("external_tokens")
    far = sum(stats.outliers(block) for block in blocks)
    return [
        compared.arm,
        struck(f"{1e6 * compare.median_of_blocks(blocks):,.1f}", compared.right),
        _ratio(compared),
        compared.verdict,
        "" if tokens is None else f"{tokens:,}",
        _instructions(row, compared),
        f"{far} of {sum(map(len, blocks))}",
    ]


def _instructions(row: PerfRow, compared: Compared) -> str:
    counted = row.instructions
    if compared.reference != STOCK or not {compared.arm, STOCK} <= set(counted):
        return ""
    return f"{counted[compared.arm] / counted[STOCK]:.3f}"


def instructions_note(rows: Sequence[PerfRow]) -> str:
    """What counted the instructions, or why nothing could; empty where no row says."""
    said = dict.fromkeys(r.instructions_by for r in of_group(rows, "lookup") if r.instructions_by)
    return f"Instructions: {'; '.join(said)}." if said else ""


def growth(rows: Sequence[PerfRow]) -> str:
    """How a lookup's time grows with the prompt: the exponent of tokens, where three or more lengths have the rest alike.

    Empty where there are none.
    """
    points: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in (r for r in of_group(rows, "lookup") if is_measured(r)):
        g = row.geometry
        for arm in (a for a in row.seconds if compare.is_sound(row, a)):
            key = (g.get("block"), g.get("chunk"), g["prefix"], g.get("groups", ""), g.get("hit", True), arm)
            points.setdefault(key, {})[g["prompt"]] = compare.median_of_blocks(row.seconds[arm])
    body = []
    for (_, _, prefix, groups, hit, arm), by_prompt in points.items():
        if len(by_prompt) >= 3:
            exponent, low, high = stats.growth_exponent(list(by_prompt), list(by_prompt.values()))
            prompts = f"{min(by_prompt):,} to {max(by_prompt):,} ({len(by_prompt)})"
            shown = f"{exponent:.2f} [{low:.2f}, {high:.2f}]"
            body.append([f"{prefix:,}", groups, "hit" if hit else "miss", arm, prompts, shown])
    return table(["prefix", "groups", "CPU tier", "arm", "prompts", "exponent of the prompt [95 %]"], body) if body else ""


# --- requests ---------------------------------------------------------------------------------------------------------


def generate(rows: Sequence[PerfRow]) -> str:
    """One request per class of hit, arm beside arm."""
    body: list[list[object]] = []
    for row in of_group(rows, "generate"):
        if is_measured(row):
            body += [[row.workload, *_generate_cells(row.requests[c.arm], c)] for c in compare.generation(row)]
        body += _status_lines(row, [row.workload], len(GENERATE_HEADERS), GENERATE_HEADERS.index("verdict"))
    return table(GENERATE_HEADERS, body)


def _generate_cells(blocks: compare.Requests, compared: Compared) -> list[object]:
    requests = [r for block in blocks for r in block]
    fields = bench_fields(blocks)

    def middle(of: Callable[[BenchRequest], float]) -> str:
        return figure(statistics.fmean(of(r) for r in requests))

    return [
        compared.arm,
        *(struck(figure(fields[f]), compared.right) for f in GENERATE_HEADERS[2:5]),
        _ratio(compared),
        compared.reference,
        compared.verdict,
        middle(lambda r: r.external_hit_tokens),
        middle(lambda r: r.declined_tokens),
        middle(lambda r: r.recomputed_tokens),
        middle(lambda r: r.loaded_bytes / MIB),
        f"{sum(r.right for r in requests)} of {len(requests)}",
    ]


def between_patches(rows: Sequence[PerfRow]) -> str:
    """Where stock is no reference: the patches' times to the first token against those of the first of them.

    Empty where there are not two.
    """
    body = []
    for row in (r for r in of_group(rows, "generate") if is_measured(r)):
        compared = compare.generation(row)
        right = [c.arm for c in compared if c.right and c.arm not in (STOCK, AGAIN)]
        if any(c.arm == STOCK and c.right for c in compared) or len(right) < 2:
            continue
        first = compare.times(row.requests[right[0]])
        for arm in right[1:]:
            body.append([row.workload, arm, right[0], str(stats.ratio_interval(compare.times(row.requests[arm]), first))])
    return table(["workload", "arm", "against", "TTFT ratio [95 %]"], body) if body else ""


def all_fields(rows: Sequence[PerfRow]) -> str:
    """Every figure of vLLM's serving benchmark, under its name; empty where no request was measured."""
    body = []
    timed = {f for f in FIELDS if f in RATES or f.endswith(TIMES)}
    for row in (r for r in of_group(rows, "generate") if is_measured(r)):
        for arm, blocks in row.requests.items():
            fields, right = bench_fields(blocks), compare.is_right(blocks)
            shown = [struck(figure(fields[f]), right or f not in timed) if f in fields else "" for f in FIELDS]
            body.append([row.workload, arm, *shown])
    return table(["workload", "arm", *FIELDS], body) if body else ""


# --- machine and harness ----------------------------------------------------------------------------------------------


def ceiling(rows: Sequence[PerfRow]) -> str:
    """What the machine can do at most: copies and arithmetic by themselves."""
    body = []
    for row in of_group(rows, "ceiling"):
        if row.status != "PASS":
            body.append([row.workload, f"{row.status}: {row.reason}"])
            continue
        for name, value in row.answers.items():
            if name.endswith("_bytes_per_s"):
                body.append([name.removesuffix("_bytes_per_s"), f"{value / GIB:,.2f} GiB/s"])
            elif name.endswith("_flop_per_s"):
                body.append([name.removesuffix("_flop_per_s"), f"{value / GIGA:,.1f} GFLOP/s"])
            else:
                body.append([name, figure(value) if isinstance(value, int | float) else value])
    return table(["ceiling", "value"], body)


def achieved(rows: Sequence[PerfRow]) -> str:
    """What requests reach of the ceilings: a cold prompt of arithmetic, one from the CPU tier of copies. Empty without them.

    The fraction is of the time to the first token as a whole, in which the engine does other things, too.
    """
    ceilings = next((r.answers for r in of_group(rows, "ceiling") if r.status == "PASS"), None)
    if ceilings is None:
        return ""
    body: list[list[object]] = []
    for row in (r for r in of_group(rows, "generate") if is_measured(r) and r.workload in ("cold", "pure-cpu-hit")):
        for arm, blocks in row.requests.items():
            requests = [r for block in blocks for r in block]
            ttft = statistics.median(r.ttft for r in requests)
            if row.workload == "cold":
                share, of = ceilings["flop_of_prompt"] / ttft / ceilings["matmul_flop_per_s"], "matmul"
            else:
                moved = statistics.fmean(r.loaded_bytes for r in requests)
                share, of = moved / ttft / ceilings["copy_bytes_per_s"], "copy"
            body.append([row.workload, arm, of, f"{100 * share:.2g} %"])
    return table(["workload", "arm", "ceiling", "reached"], body) if body else ""


def break_even(rows: Sequence[PerfRow]) -> str:
    """Loading from the CPU tier beside computing again, by length, with the length from which on loading wins."""
    parts = []
    for row in of_group(rows, "break-even"):
        if not is_measured(row):
            parts.append(f"{row.workload}: {row.status}: {row.reason}")
            continue
        points = compare.break_even(row)
        body = [[f"{p.tokens:,}", f"{1e3 * p.load:,.2f}", f"{1e3 * p.recompute:,.2f}", str(p.ratio)] for p in points]
        headers = ["tokens", "load, ms", "recompute, ms", "load to recompute [95 %]"]
        parts += [table(headers, body), break_even_line(row)]
    return "\n\n".join(parts)


def break_even_line(row: PerfRow) -> str:
    found, predicted = compare.beats_from(compare.break_even(row)), row.answers.get("predicted_tokens")
    measured = "at no measured length" if found is None else f"from {found:,} tokens (measured)"
    return f"loading beats recomputing {measured}, " + (
        "none predicted" if predicted is None else f"{predicted:,.0f} predicted"
    )


def harness(rows: Sequence[PerfRow]) -> str:
    """A cell from the preloaded parent against a process of its own, with the stages of either where they were timed."""
    body, stages = [], []
    for row in of_group(rows, "harness"):
        name = f"{row.geometry.get('backend', '')} {row.geometry.get('mode', '')} cell".strip()
        if row.status != "PASS":
            body.append([name, "", "", f"{row.status}: {row.reason}"])
            continue
        fork, process = row.seconds["fork"], row.seconds["process"]
        medians = [f"{compare.median_of_blocks(blocks):.1f}" for blocks in (fork, process)]
        body.append([name, *medians, compare.plain_or_interval(fork, process)])
        timed = [dict(row.answers.get(isolation, {})) for isolation in ("fork", "process")]
        for stage in dict.fromkeys(s for isolation in timed for s in isolation):
            stages.append([name, stage, *(_seconds(isolation.get(stage)) for isolation in timed)])
    columns = ["s from the preloaded parent", "s in a process of its own"]
    text = table(["what", *columns, "ratio [95 %]"], body)
    return f"{text}\n\n{table(['what', 'stage', *columns], stages)}" if stages else text


def _seconds(value: Any) -> str:
    if value is None:
        return ""
    return f"{statistics.median(value) if isinstance(value, list) else value:.2f}"


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdict_lines(rows: Sequence[PerfRow]) -> list[str]:
    """One sentence a patch: what became of the lookup and of requests, and how much of it could not be told."""
    return [_verdict_line(rows, patch) for patch in compare.patches(rows)]


def _verdict_line(rows: Sequence[PerfRow], patch: str) -> str:
    counted: Counter[str] = Counter()
    parts = [_lookup_part(rows, patch, counted), _requests_part(rows, patch, counted)]
    told = [p for p in parts if p]
    if asked := counted.total():
        told.append(f"{counted['unresolved']} of {asked} comparisons unresolved")
    return f"{patch}: {'; '.join(told)}"


def _lookup_part(rows: Sequence[PerfRow], patch: str, counted: Counter[str]) -> str:
    said: dict[str, list[Compared | None]] = {}
    noise = []
    for row in of_group(rows, "lookup"):
        if patch in row.left_out:
            said.setdefault("left out", []).append(None)
            continue
        if not is_measured(row):
            said.setdefault(row.status, []).append(None)
            continue
        compared = {c.arm: c for c in compare.lookups(row)}
        if patch in compared:
            said.setdefault(compared[patch].verdict, []).append(compared[patch])
            _count(compared[patch], counted)
        if AGAIN in compared and (again := compared[AGAIN].ratio):
            noise.append(again.half_width)
    if not said:
        return ""
    total = sum(map(len, said.values()))
    at_most = f"A/A at most ±{100 * max(noise):.1f} %" if noise else "no A/A"
    each = [f"{word}{_span(found)} ({len(found)} of {total})" for word, found in said.items()]
    each[-1] = f"{each[-1].removesuffix(')')}; {at_most})"
    return f"lookup {', '.join(each)}"


def _span(found: Sequence[Compared | None]) -> str:
    """The ratios of what is faster or slower: a word alone says nothing of how much."""
    ratios = sorted(c.ratio.estimate for c in found if c and c.ratio and c.verdict in ("faster", "slower"))
    if not ratios:
        return ""
    ends = dict.fromkeys(stats.shown(r) for r in (ratios[0], ratios[-1]))
    return f" {' to '.join(ends)} of stock"


def _requests_part(rows: Sequence[PerfRow], patch: str, counted: Counter[str]) -> str:
    said = []
    for row in of_group(rows, "generate"):
        if patch in row.left_out:
            said.append(f"{row.workload} left out")
        elif not is_measured(row):
            said.append(f"{row.workload} {row.status}")
        for compared in compare.generation(row) if is_measured(row) else ():
            if compared.arm == patch:
                said.append(f"{row.workload} {_in_words(compared)}")
                _count(compared, counted)
    return f"requests: {', '.join(said)}" if said else ""


def _in_words(compared: Compared) -> str:
    if compared.ratio and compared.reference != STOCK:
        return f"{compared.ratio.estimate:.2g} of {compared.reference}"
    return f"{compared.verdict}{_span([compared])}"


def _count(compared: Compared, counted: Counter[str]) -> None:
    """Comparisons with stock alone: where stock is no reference nothing was asked."""
    if compared.verdict in compare.VERDICTS:
        counted["resolved" if compared.is_resolved else "unresolved"] += 1


def sections(rows: Sequence[PerfRow]) -> list[tuple[str, str]]:
    """(title, Markdown) of everything that the rows have, but the folded table of all fields."""
    groups = {r.group for r in rows}
    notes = (growth(rows), instructions_note(rows))
    found = []
    if "lookup" in groups:
        found.append(("Lookup call (`get_num_new_matched_tokens`)", "\n\n".join(filter(None, [lookup(rows), *notes]))))
    if "generate" in groups:
        found.append(("One request at a time, per class of hit", generate(rows)))
        if between := between_patches(rows):
            found.append(("The patches beside each other, where stock's output is wrong", between))
    if "ceiling" in groups:
        found.append(
            (
                "What the machine can do at most, and what is reached of it",
                "\n\n".join(filter(None, [ceiling(rows), achieved(rows)])),
            )
        )
    if "break-even" in groups:
        found.append(("Loading against recomputing", break_even(rows)))
    if "harness" in groups:
        found.append(("The harness", harness(rows)))
    return found
