"""Tables of the perf suite: nothing wrong is compared, nothing unmeasured is a gap, and no word is better than its rows."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from perf_rows import RATIOS, break_even_row, generate_row, lookup_row, noisy, perf_row

from kvmatrix.bench_fields import FIELDS
from kvmatrix.live import AGAIN
from kvmatrix.records import PerfRow
from kvmatrix.report import document, perf_tables
from kvmatrix.report.perf_tables import GENERATE_HEADERS, LOOKUP_HEADERS

INTERVAL = re.compile(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]")


def cells(table: str) -> list[list[str]]:
    """A table's body, cell by cell."""
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def by_arm(table: str, headers: list[str]) -> dict[str, dict[str, str]]:
    """Arm -> header -> cell, of a table of one row of rows."""
    lines = [dict(zip(headers, line, strict=True)) for line in cells(table)]
    return {line["arm"]: line for line in lines}


# --- lookup -----------------------------------------------------------------------------------------------------------

RATIO, TIME = "ratio to stock [95 %]", "µs a call"


def lookups(*rows: PerfRow) -> dict[str, dict[str, str]]:
    return by_arm(perf_tables.lookup(rows), LOOKUP_HEADERS)


def test_lookups_stand_beside_stock() -> None:
    shown = lookups(lookup_row(ratios={AGAIN: 1.0, "fix": 1.1, "other": 0.5, "same": 1.0}))
    assert list(shown) == ["stock", AGAIN, "fix", "other", "same"]
    assert [shown["stock"][h] for h in LOOKUP_HEADERS] == [
        *("8,193 / 4,096", "2", "hit", "stock", "20.0", "1", "", "4,096", "", "0 of 14"),
    ]
    assert shown["fix"][TIME] == "22.0"
    assert shown["fix"][RATIO].startswith("1.100 [1.09")
    assert [shown[a]["verdict"] for a in ("fix", "other", "same")] == ["slower", "faster", "no clear change"]
    assert shown[AGAIN]["verdict"] == "A/A ±0.1 %"
    assert INTERVAL.fullmatch(shown[AGAIN][RATIO])


def test_an_unsound_stock_is_no_reference() -> None:
    shown = lookups(lookup_row(unsound=("stock", AGAIN)))
    assert shown["stock"][TIME] == "~~20.0~~"
    assert shown[AGAIN][TIME] == "~~20.0~~"
    assert shown["stock"]["verdict"] == "unsound answer"
    for arm in ("fix", "other"):
        assert shown[arm][TIME] == "20.0"
        assert shown[arm]["verdict"] == "stock's answer is unsound"
    assert {line[RATIO] for line in shown.values()} == {""}


def test_an_unsound_patch_has_no_ratio() -> None:
    shown = lookups(lookup_row(unsound=("fix",), status="FAIL", reason="unsound: …"))
    assert (shown["fix"][TIME], shown["fix"][RATIO], shown["fix"]["verdict"]) == ("~~20.0~~", "", "unsound answer")
    assert INTERVAL.fullmatch(shown["other"][RATIO])
    assert shown[""]["verdict"] == "FAIL: unsound: …"


def test_a_noise_over_the_resolution_leaves_it_open() -> None:
    row = lookup_row()
    row.geometry["resolution"] = 0.0005
    assert lookups(row)["fix"]["verdict"] == "unresolved"
    del row.geometry["resolution"]
    assert lookups(row)["fix"]["verdict"] == "unresolved"


def test_without_stock_again_nothing_is_told_from_noise() -> None:
    shown = lookups(lookup_row(ratios={"fix": 3.0}, left_out={AGAIN: "no-time: …"}))
    assert shown["fix"]["verdict"] == "unresolved (no A/A)"
    assert shown["fix"][RATIO].startswith("3.000 [")
    assert shown[AGAIN]["verdict"] == "no-time: …"


def test_a_few_blocks_give_no_verdict() -> None:
    assert lookups(lookup_row(ratios={AGAIN: 1.0, "fix": 3.0}, blocks=2))["fix"]["verdict"] == "unresolved"


def test_instructions_are_to_stocks() -> None:
    counted = {"stock": 1000.0, "fix": 1234.0}
    shown = lookups(lookup_row(instructions=counted))
    assert shown["fix"]["instructions to stock's"] == "1.234"
    assert shown["other"]["instructions to stock's"] == ""
    unsound = lookups(lookup_row(instructions=counted, unsound=("stock",)))
    assert unsound["fix"]["instructions to stock's"] == ""
    rows = [lookup_row(instructions_by="perf"), lookup_row(instructions_by="perf")]
    assert perf_tables.instructions_note(rows) == "Instructions: perf."
    assert perf_tables.instructions_note([lookup_row()]) == ""


def test_outliers_are_counted_and_stay() -> None:
    calm = [1.0 + 0.01 * i for i in range(20)]
    row = lookup_row(seconds={"stock": [calm, calm], "fix": [calm, [*calm[1:], 9.0]]})
    assert lookups(row)["fix"]["outliers"] == "1 of 40"


def test_growth_needs_three_prompts() -> None:
    sizes = [(8193, 1e-5), (16385, 2e-5), (131073, 16e-5)]
    rows = [lookup_row(prompt, stock_seconds=s) for prompt, s in sizes]
    assert perf_tables.growth(rows[:2]) == ""
    stock, again, *_ = cells(perf_tables.growth(rows))
    assert stock[:5] == ["4,096", "2", "hit", "stock", "8,193 to 131,073 (3)"]
    assert stock[5] == "1.00 [1.00, 1.00]"
    assert again[3] == AGAIN
    unsound = [lookup_row(8193, unsound=("stock",)), *rows[1:]]
    assert "| stock " not in perf_tables.growth(unsound)
    assert "| fix " in perf_tables.growth(unsound)
    apart = [lookup_row(p, prefix=i * 16) for i, (p, _) in enumerate(sizes)]
    assert perf_tables.growth(apart) == ""


# --- requests ---------------------------------------------------------------------------------------------------------

TTFT = "TTFT ratio [95 %]"


def requests(*rows: PerfRow) -> dict[str, dict[str, str]]:
    return by_arm(perf_tables.generate(rows), GENERATE_HEADERS)


def test_requests_stand_beside_stock() -> None:
    shown = requests(generate_row(ratios={AGAIN: 1.0, "fix": 1.5, "other": 0.5}))
    stock = shown["stock"]
    assert [stock[h] for h in GENERATE_HEADERS[2:4]] == ["4.17", "5,350"]  # one, and 1284 tokens, in 0.24 s
    assert (stock["median_ttft_ms"], stock[TTFT], stock["reference"]) == ("200", "1", "stock")
    assert [stock[h] for h in GENERATE_HEADERS[8:]] == ["1,216", "32", "33", "3", "14 of 14"]
    assert shown["fix"][TTFT].startswith("1.500 [1.49")
    assert [shown[a]["verdict"] for a in ("stock", AGAIN, "fix", "other")] == ["", "A/A ±0.1 %", "slower", "faster"]


@pytest.mark.parametrize(("workload", "reference"), [("mixed-misaligned", "cold"), ("multi-turn", "no-offload")])
def test_where_stock_is_wrong_each_arm_stands_beside_its_own_reference(workload: str, reference: str) -> None:
    shown = requests(generate_row(workload, ratios={AGAIN: 1.0, "fix": 2.0}, wrong=("stock", AGAIN), reference=4.0))
    for arm in ("stock", AGAIN):
        assert shown[arm]["median_ttft_ms"] == "~~200~~"
        assert shown[arm]["request_throughput"].startswith("~~")
        assert shown[arm]["total_token_throughput"].startswith("~~")
        assert (shown[arm][TTFT], shown[arm]["reference"], shown[arm]["verdict"]) == ("", "", "wrong output")
        assert shown[arm]["right"] == "13 of 14"
    assert shown["fix"][TTFT].startswith("0.100 [")  # 0.4 s of 4 s
    assert shown["fix"]["reference"] == reference
    assert shown["fix"]["verdict"] == ""


def test_a_reference_that_was_not_measured_is_missed() -> None:
    shown = requests(generate_row(wrong=("stock",), reference=None))
    assert (shown["fix"][TTFT], shown["fix"]["verdict"]) == ("", "no reference was measured")


def test_a_patch_with_a_wrong_output_has_no_ratio() -> None:
    shown = requests(generate_row(wrong=("fix",), status="FAIL", reason="wrong-output: fix"))
    assert shown["fix"]["median_ttft_ms"] == "~~200~~"
    assert (shown["fix"][TTFT], shown["fix"]["verdict"]) == ("", "wrong output")
    assert INTERVAL.fullmatch(shown["other"][TTFT])
    assert shown["stock"]["median_ttft_ms"] == "200"
    assert shown[""]["verdict"] == "FAIL: wrong-output: fix"


def test_patches_stand_beside_each_other_where_stock_is_wrong() -> None:
    wrong = generate_row("mixed-misaligned", ratios={AGAIN: 1.0, "fix": 2.0, "other": 3.0}, wrong=("stock",))
    [line] = cells(perf_tables.between_patches([generate_row(), wrong]))
    assert line == ["mixed-misaligned", "other", "fix", "1.500 [1.500, 1.500]"]
    assert perf_tables.between_patches([generate_row()]) == ""
    assert perf_tables.between_patches([generate_row(wrong=("stock", "fix"))]) == ""


def test_every_field_of_vllm_has_its_column() -> None:
    text = perf_tables.all_fields([generate_row(wrong=("fix",))])
    headers = [h.strip() for h in text.splitlines()[0].strip("|").split(" | ")]
    assert headers == ["workload", "arm", *FIELDS]
    lines = {line[1]: dict(zip(headers, line, strict=True)) for line in cells(text)}
    assert lines["stock"]["mean_tpot_ms"] == "20"
    assert lines["fix"]["mean_tpot_ms"] == "~~20~~"
    assert lines["fix"]["duration"].startswith("~~")
    assert lines["fix"]["completed"] == "14"
    assert lines["stock"]["loaded_bytes"] == f"{14 * 3 * 2**20:,}"
    assert perf_tables.all_fields([lookup_row()]) == ""


# --- what was not measured --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "render"),
    [
        ("lookup", perf_tables.lookup),
        ("generate", perf_tables.generate),
        ("ceiling", perf_tables.ceiling),
        ("harness", perf_tables.harness),
        ("break-even", perf_tables.break_even),
    ],
)
def test_a_measurement_that_was_not_taken_shows_why(group: str, render: Callable[[list[PerfRow]], str]) -> None:
    text = render([perf_row(group, "w", status="NOT_RUN", reason="not-qualified: …")])
    assert "NOT_RUN: not-qualified: …" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


@pytest.mark.parametrize(("make", "render"), [(lookup_row, perf_tables.lookup), (generate_row, perf_tables.generate)])
def test_a_void_measurement_shows_no_figure(make: Callable[..., PerfRow], render: Callable[[list[PerfRow]], str]) -> None:
    [line] = cells(render([make(status="INFRA", reason="void: cold hit")]))
    assert "INFRA: void: cold hit" in line
    assert not any(INTERVAL.search(cell) for cell in line)


@pytest.mark.parametrize(("make", "render"), [(lookup_row, perf_tables.lookup), (generate_row, perf_tables.generate)])
def test_an_arm_that_was_left_out_shows_why(make: Callable[..., PerfRow], render: Callable[[list[PerfRow]], str]) -> None:
    [line] = [c for c in cells(render([make(left_out={"late": "patch-mismatch: …"})])) if "late" in c]
    assert "patch-mismatch: …" in line


# --- machine and harness ----------------------------------------------------------------------------------------------


def test_ceilings_have_their_units() -> None:
    answers = {"copy_bytes_per_s": 3 * 2**30, "matmul_flop_per_s": 1.5e12, "threads": 2}
    assert cells(perf_tables.ceiling([perf_row("ceiling", "machine", answers=answers)])) == [
        ["copy", "3.00 GiB/s"],
        ["matmul", "1,500.0 GFLOP/s"],
        ["threads", "2"],
    ]


def test_loading_beats_recomputing_from_where_it_stays_faster() -> None:
    row = break_even_row([1.0, 1.0, 3.0, 4.0], [0.5, 2.0, 3.0, 9.0], predicted_tokens=612.4)
    text = perf_tables.break_even([row])
    assert text.endswith("loading beats recomputing from 2,048 tokens (measured), 612 predicted")
    first, *_, last = [line for line in cells(text) if len(line) == 4]
    assert first[:3] == ["256", "1,000.00", "500.00"]
    assert first[3].startswith("2.000 [1.99")
    assert last[:3] == ["2,048", "4,000.00", "9,000.00"]


def test_loading_may_never_win() -> None:
    assert perf_tables.break_even_line(break_even_row([2.0, 2.0], [1.0, 1.0])) == (
        "loading beats recomputing at no measured length, none predicted"
    )


def test_the_harness() -> None:
    few = perf_row("harness", "isolation", seconds={"fork": [[5.0]] * 2, "process": [[20.0]] * 2})
    assert cells(perf_tables.harness([few]))[0][1:] == ["5.0", "20.0", "0.250"]
    many = perf_row(
        "harness",
        "isolation",
        geometry={"backend": "CPU_ATTN", "mode": "eager"},
        seconds={"fork": noisy(5.0, False, 7), "process": noisy(20.0, True, 7)},
        answers={"fork": {"engine start": [1.0, 3.0, 2.0]}, "process": {"import": 4.5, "engine start": 2.5}},
    )
    text = perf_tables.harness([many])
    what, _, _, ratio = cells(text)[0]
    assert what == "CPU_ATTN eager cell"
    assert ratio.startswith("0.250 [0.2")
    assert [line[1:] for line in cells(text)[-2:]] == [["engine start", "2.00", "2.50"], ["import", "", "4.50"]]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_sentence_for_each_patch() -> None:
    rows = [
        *(lookup_row(8193 * 2**i) for i in range(3)),
        generate_row("cold"),
        generate_row("pure-cpu-hit", ratios=RATIOS | {"fix": 1.5}),
        generate_row("mixed-misaligned", ratios=RATIOS | {"other": 2.0}, wrong=("stock",), reference=2.0),
    ]
    assert perf_tables.verdict_lines(rows) == [
        "fix: lookup no clear change (3 of 3; A/A at most ±0.1 %); requests: cold no clear change, pure-cpu-hit slower 1.500 of"
        " stock, mixed-misaligned 0.1 of cold; 0 of 5 comparisons unresolved",
        "other: lookup no clear change (3 of 3; A/A at most ±0.1 %); requests: cold no clear change, pure-cpu-hit no clear"
        " change, mixed-misaligned 0.2 of cold; 0 of 5 comparisons unresolved",
    ]


def test_a_sentence_tells_what_is_missing_wrong_or_open() -> None:
    rows = [
        lookup_row(ratios={AGAIN: 1.0, "fix": 1.1}),
        lookup_row(ratios={AGAIN: 1.0, "fix": 1.3}),
        lookup_row(ratios={AGAIN: 1.0, "fix": 1.0}, blocks=3),
        lookup_row(ratios={AGAIN: 1.0, "fix": 1.0}, unsound=("stock",)),
        lookup_row(ratios={AGAIN: 1.0}, left_out={"fix": "…"}),
        lookup_row(status="NOT_RUN", seconds={}, answers={}),
        generate_row("cold", ratios={"fix": 1.0}),
        generate_row("device-hit", ratios={AGAIN: 1.0, "fix": 1.0}, wrong=("fix",), status="FAIL"),
        generate_row("multi-turn", status="INFRA"),
        generate_row("no-offload", ratios={AGAIN: 1.0}, left_out={"fix": "…"}),
    ]
    assert perf_tables.verdict_lines(rows)[0] == (
        "fix: lookup slower 1.100 to 1.300 of stock (2 of 6), unresolved (1 of 6), stock's answer is unsound (1 of 6),"
        " left out (1 of 6), NOT_RUN (1 of 6; A/A at most ±0.3 %); requests: cold unresolved (no A/A), device-hit wrong output,"
        " multi-turn INFRA, no-offload left out; 2 of 4 comparisons unresolved"
    )


def test_stock_alone_has_no_sentence() -> None:
    assert perf_tables.verdict_lines([lookup_row(ratios={AGAIN: 1.0}), generate_row(ratios={})]) == []


def test_the_summary_begins_with_the_verdicts_and_has_every_group() -> None:
    rows = [
        lookup_row(),
        generate_row("mixed-misaligned", wrong=("stock",)),
        perf_row("ceiling", "machine", answers={"copy_bytes_per_s": 2.0**30}),
        break_even_row([1.0, 1.0], [2.0, 2.0]),
        perf_row("harness", "isolation", seconds={"fork": [[1.0]], "process": [[2.0]]}),
    ]
    text = document.perf_summary(rows)
    assert text.startswith("- fix: lookup no clear change (1 of 1;")
    for said in ("µs a call", "TTFT ratio", "beside each other", "1.00 GiB/s", "from 256 tokens", "0.500", "<details>"):
        assert said in text
    assert text == document.perf_summary(rows)
    assert document.perf_summary([]) == ""
