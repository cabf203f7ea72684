"""Tables and verdicts from rows: never better than the rows, and byte for byte the same again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmatrix.errors import NothingRanError, RowsError
from kvmatrix.records import CellRow, EndRow, PerfRow, ProbeRow, Row, RowWriter, RunRow, read_rows
from kvmatrix.report import document, tables

RUN = "20260101T000000Z-abcd"
FIX = {"arm": "fix"}
PROBES = ["cold", "device-hit", "pure-cpu-hit", "mixed-aligned", "mixed-misaligned"]
WRONG = "wrong-output: tokens [137] for [338], logprob error 20.957 nats"
MakeRow = Callable[..., ProbeRow]


@pytest.fixture
def stock_fault(make_row: MakeRow) -> ProbeRow:
    return make_row(
        "mixed-misaligned",
        "FAIL",
        expected="FAIL",
        reason=WRONG,
        tokens=[137],
        cold_tokens=[338],
        max_logprob_error=20.957,
        cached_tokens=160,
        device_hit_tokens=32,
        external_hit_tokens=128,
        loaded_blocks=4,
        needed_loads=5,
    )


@pytest.fixture
def qualified(make_row: MakeRow, stock_fault: ProbeRow) -> list[ProbeRow]:
    """Rows of a run that went as hoped."""
    stock = [make_row(p) for p in PROBES[:-1]]
    fix = [make_row(p, cell=FIX, tokens=[338], cold_tokens=[338], patch_sha256="a" * 64) for p in PROBES]
    return [*stock, stock_fault, *fix]


def changed(rows: list[ProbeRow], arm: str, probe: str, **changes: Any) -> list[ProbeRow]:
    found = [r for r in rows if r.cell["arm"] == arm and r.probe == probe]
    assert len(found) == 1
    return [r.model_copy(update=changes) if r is found[0] else r for r in rows]


def cells(table: str) -> list[list[str]]:
    """A table's body, cell by cell."""
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_qualified(qualified: list[ProbeRow]) -> None:
    assert document.verdict(qualified, "fix") == "QUALIFIED: 5 of 5 probes PASS; stock fails 1 probes as expected."


@pytest.mark.parametrize(
    ("arm", "probe", "change"),
    [
        ("fix", "mixed-misaligned", {"status": "FAIL", "reason": WRONG}),
        ("fix", "mixed-aligned", {"status": "FAIL", "reason": "lost-reuse: 0 of 32"}),
        ("fix", "cold", {"status": "CRASH"}),
        ("fix", "cold", {"status": "TIMEOUT"}),
        ("fix", "cold", {"status": "INFRA"}),
        ("stock", "mixed-misaligned", {"status": "PASS"}),
        ("stock", "mixed-misaligned", {"status": "FAIL", "expected": "PASS"}),
        ("stock", "cold", {"status": "FAIL"}),
    ],
)
def test_any_row_that_is_not_as_expected_shows(qualified: list[ProbeRow], arm: str, probe: str, change: dict[str, str]) -> None:
    assert document.verdict(changed(qualified, arm, probe, **change), "fix").startswith("NOT QUALIFIED: ")


def test_a_patch_whose_failures_are_excused_is_not_qualified(qualified: list[ProbeRow]) -> None:
    """An expectation may say that a patch fails; that does not make it right."""
    rows = changed(qualified, "fix", "mixed-misaligned", status="FAIL", expected="FAIL", reason=WRONG)
    assert not document.verdict(rows, "fix").startswith("QUALIFIED")


def test_a_fault_of_the_release_is_counted_apart(qualified: list[ProbeRow], make_row: MakeRow) -> None:
    """It is no fault of the patch, and it does not stand for the fault that the patch is about."""
    known = {"expected": "FAIL", "of_every_arm": True, "reason": "still-served: 40 tokens"}
    both = [make_row("public-1-x", "FAIL", cell=cell, **known) for cell in ({}, FIX)]
    text = document.verdict([*qualified, *both], "fix")
    assert text == (
        "QUALIFIED: 5 of 6 probes PASS; stock fails 1 probes as expected;"
        " 1 fail on every arm by the release's own known faults."
    )
    passing = changed(qualified, "stock", "mixed-misaligned", status="PASS", expected="PASS")
    assert "stock of this release shows no fault" in document.verdict([*passing, *both], "fix")
    stock = [r for r in passing if r.cell["arm"] == "stock"]
    assert document.verdict([*stock, both[0]], "stock").startswith("NOT AFFECTED: 5 of 6 probes PASS")
    excused = [r.model_copy(update={"of_every_arm": False}) for r in both]
    assert document.verdict([*qualified, *excused], "fix").startswith("NOT QUALIFIED: ")


def test_a_report_that_the_release_refuses_leaves_no_gap(qualified: list[ProbeRow], make_row: MakeRow) -> None:
    refused = [make_row("public-1-x", "UNSUPPORTED", cell=cell, reason="refused: vLLM's words") for cell in ({}, FIX)]
    assert document.verdict([*qualified, *refused], "fix").startswith("QUALIFIED: 5 of 6 ")
    expected = [make_row("cold", "UNSUPPORTED", cell=c | {"layers": "cc"}, expected="UNSUPPORTED") for c in ({}, FIX)]
    told = document.verdict([*qualified, *expected], "fix")
    assert told.startswith("QUALIFIED: 5 of 6 probes PASS; ")
    assert told.endswith("; 1 are refused by vLLM, as expected.")
    gone = [r.model_copy(update={"reason": "not-run: the cell ended without it"}) for r in refused]
    assert document.verdict([*qualified, *gone], "fix").startswith("QUALIFIED where it ran; 2 rows")


def test_without_the_fault_on_stock_nothing_is_shown(qualified: list[ProbeRow]) -> None:
    rows = changed(qualified, "stock", "mixed-misaligned", status="NOT_RUN", expected="FAIL")
    assert document.verdict(rows, "fix").startswith("INCOMPLETE: ")


def test_a_release_whose_stock_is_right_is_called_that(qualified: list[ProbeRow]) -> None:
    rows = changed(qualified, "stock", "mixed-misaligned", status="PASS", expected="PASS")
    assert document.verdict(rows, "fix") == "QUALIFIED: 5 of 5 probes PASS; stock of this release shows no fault."
    unexpected = changed(qualified, "stock", "mixed-misaligned", status="PASS", expected="FAIL")
    assert document.verdict(unexpected, "fix").startswith("NOT QUALIFIED: ")
    assert document.verdict([r for r in qualified if r.cell["arm"] == "fix"], "fix").startswith("INCOMPLETE: ")


def test_without_rows_of_the_patch_nothing_is_shown(qualified: list[ProbeRow]) -> None:
    stock = [r for r in qualified if r.cell["arm"] == "stock"]
    assert document.verdict(stock, "fix").startswith("INCOMPLETE: ")
    assert document.verdict([], "fix").startswith("INCOMPLETE: ")


@pytest.mark.parametrize("status", ["UNSUPPORTED", "NOT_RUN"])
def test_rows_that_did_not_run_show(qualified: list[ProbeRow], make_row: MakeRow, status: str) -> None:
    extra = [make_row(p, status, {"arm": "fix", "mode": "compiled"}) for p in PROBES]
    text = document.verdict([*qualified, *extra], "fix")
    assert text.startswith("QUALIFIED where it ran; 5 rows did not run")
    assert "5 of 10 probes PASS" in text


@pytest.mark.parametrize("status", ["UNSUPPORTED", "NOT_RUN"])
def test_a_patch_that_never_ran_is_not_qualified(qualified: list[ProbeRow], status: Any) -> None:
    rows = [r.model_copy(update={"status": status}) if r.cell["arm"] == "fix" else r for r in qualified]
    assert document.verdict(rows, "fix").startswith("INCOMPLETE: ")


def test_a_patch_that_did_not_run_where_stock_fails_is_not_qualified(qualified: list[ProbeRow]) -> None:
    rows = changed(qualified, "fix", "mixed-misaligned", status="NOT_RUN", reason="not-run: …")
    assert document.verdict(rows, "fix").startswith("INCOMPLETE: ")


def test_each_patch_has_a_verdict_of_its_own(qualified: list[ProbeRow], make_row: MakeRow) -> None:
    rows = [*qualified, make_row("mixed-misaligned", "FAIL", {"arm": "other"}, reason=WRONG)]
    summary = document.conformance_summary(rows)
    assert "fix on vLLM 0.32.0, host device: QUALIFIED: " in summary
    assert "other on vLLM 0.32.0, host device: NOT QUALIFIED: " in summary


# --- conformance tables -----------------------------------------------------------------------------------------------


def test_an_expected_failure_is_shown_as_such(qualified: list[ProbeRow]) -> None:
    stock, fix = cells(tables.qualification(qualified))
    assert "stock" in stock
    assert "338 → 137" in stock
    assert "160 (32 + 128)" in stock
    assert stock[-2:] == ["20.957", "FAIL (expected)"]
    assert "fix" in fix
    assert "338" in fix
    assert fix[-1] == "PASS"


@pytest.mark.parametrize(
    ("status", "expected", "shown"),
    [
        ("PASS", "PASS", "PASS"),
        ("FAIL", "FAIL", "FAIL (expected)"),
        ("FAIL", "PASS", "**FAIL** (expected PASS)"),
        ("PASS", "FAIL", "**PASS** (expected FAIL)"),
        ("CRASH", "FAIL", "**CRASH** (expected FAIL)"),
        ("TIMEOUT", "PASS", "**TIMEOUT** (expected PASS)"),
        ("INFRA", "PASS", "**INFRA** (expected PASS)"),
        ("UNSUPPORTED", "FAIL", "UNSUPPORTED"),
        ("NOT_RUN", "PASS", "NOT_RUN"),
    ],
)
def test_status_texts(make_row: MakeRow, status: str, expected: str, shown: str) -> None:
    assert tables.status_text(make_row(status=status, expected=expected)) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (0.0, "0"), (20.957, "20.957"), (0.01, "0.010"), (3.81e-6, "3.8e-06"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert tables.number(value) == shown


def test_pipes_and_line_breaks_do_not_break_a_table(make_row: MakeRow) -> None:
    row = make_row(status="CRASH", reason="crash: a | b\nand more")
    text = tables.left_out([row])
    assert "a \\| b and more" in text
    assert len(text.splitlines()) == 3
    columns = {line.replace("\\|", "").count("|") for line in text.splitlines()}
    assert len(columns) == 1


def test_what_is_left_out_is_listed_with_its_reason(qualified: list[ProbeRow], make_row: MakeRow) -> None:
    assert tables.left_out(qualified) == ""
    bad = [
        make_row("cold", "UNSUPPORTED", {"backend": "FLEX_ATTENTION"}, reason="refused: no such kernel"),
        make_row("cold", "NOT_RUN", {"backend": "TRITON_ATTN"}, reason="not-run: …"),
        make_row("device-hit", "PASS", expected="FAIL"),
    ]
    text = tables.left_out([*qualified, *bad])
    assert len(cells(text)) == 3
    assert "refused: no such kernel" in text
    assert "no fault was seen" in text


def test_all_probes(qualified: list[ProbeRow]) -> None:
    body = cells(tables.probes(qualified))
    assert len(body) == 10
    assert [r[1] for r in body] == ["stock"] * 5 + ["fix"] * 5
    assert any("4 / 5" in r for r in body)


def test_probes_are_counted_by_arm_and_class(qualified: list[ProbeRow], make_row: MakeRow) -> None:
    crossing = {"prompt": 257}
    more = [make_row(p, cell=crossing | arm) for p in ("mixed-misaligned", "cold") for arm in ({}, FIX)]
    text = tables.probe_counts([*qualified, *more, make_row(cell={"tier": "scheduler"})])
    assert cells(text) == [
        ["cold", "any", "2 PASS", "2 PASS"],
        ["device-hit", "any", "1 PASS", "1 PASS"],
        ["pure-cpu-hit", "any", "1 PASS", "1 PASS"],
        ["mixed-aligned", "any", "1 PASS", "1 PASS"],
        ["mixed-misaligned", "corrupt", "1 FAIL (expected)", "1 PASS"],
        ["mixed-misaligned", "safe-crossing", "1 PASS", "1 PASS"],
    ]


def test_proofs_are_of_the_rows(make_row: MakeRow) -> None:
    def damaged(*errors: float, status: str = "PASS") -> ProbeRow:
        return make_row("corrupted-load", status, detail={"damage": [{"max_logprob_error": e} for e in errors]})

    def agreed(others: int, error: float, dtype: str = "float32") -> ProbeRow:
        return make_row(cell={"dtype": dtype}, detail={"agreement": {"cells": others, "max_logprob_error": error}})

    rows = [damaged(4.0, 2.5), damaged(3.0), agreed(0, 0.0), agreed(1, 2e-5), agreed(2, 1e-5), agreed(1, 0.25, "bfloat16")]
    assert tables.proofs(rows) == [
        "Every cell lost one block of each KV group on purpose, 3 in all: each loss was noticed,"
        f" the least of them by 2.500 nats ({rows[0].id}).",
        "Cold answers to one prompt of one model, bfloat16: 1 pairs of cells compared, largest difference 0.250 nats.",
        "Cold answers to one prompt of one model, float32: 3 pairs of cells compared, largest difference 2.0e-05 nats.",
    ]
    assert tables.proofs([make_row(), damaged(0.001, status="INFRA")]) == []


def test_lookups_beside_each_other(make_row: MakeRow) -> None:
    scheduler = {"tier": "scheduler", "chunk": 64, "block": 16}
    name = "prefix16-tail-present"
    unsound = "unsound: answers (64, True)"
    stock = make_row(
        name,
        "FAIL",
        scheduler,
        expected="FAIL",
        reason=unsound,
        reuse_tokens=64,
        resolved={"answer": [64, True], "missing": []},
    )
    fix = make_row(name, "PASS", scheduler | FIX, reuse_tokens=64, resolved={"answer": [0, False], "missing": []})
    alone = make_row("prefix0-tail-present", "PASS", scheduler, reuse_tokens=80, resolved={"answer": [80, True], "missing": []})
    body = cells(tables.lookups([stock, fix, alone]))
    assert body[0] == [name, "64", "(64, True) FAIL (expected)", "(0, False) PASS"]
    assert body[1] == ["prefix0-tail-present", "80", "(80, True) PASS", "NOT_RUN"]


def test_reuse_kept(make_row: MakeRow) -> None:
    scheduler = {"tier": "scheduler", "chunk": 64, "block": 16}
    sums = {"geometries": 2480, "ideal": 196928, "ideal_resident": 1000, "unsound": 0}
    name = "reuse-one-size-all"
    stock = make_row(
        name,
        "FAIL",
        scheduler,
        expected="FAIL",
        reason="unsound: 696",
        sweep=sums | {"kept": 123904, "kept_resident": 500, "unsound": 1696},
    )
    fix = make_row(name, "PASS", scheduler | FIX, sweep=sums | {"kept": 196927, "kept_resident": 1000})
    refused = make_row("reuse-fine-hash-all", "UNSUPPORTED", scheduler, reason="refused: no such shape")
    body = cells(tables.reuse([stock, fix, refused]))
    assert body[0] == [
        "one-size-all",
        "2,480",
        "196,928",
        "62.9 % (50 %), 1,696 unsound: FAIL (expected)",
        "99.9 % (100 %) PASS",  # one token is missing
    ]
    assert body[1] == ["fine-hash-all", "", "", "UNSUPPORTED", "NOT_RUN"]
    assert "one-size" not in tables.lookups([stock, fix])


SCHEDULER = {"tier": "scheduler", "chunk": 64, "block": 16}


def swept(make_row: MakeRow, name: str, cell: dict[str, Any], started: float, **sums: int) -> ProbeRow:
    totals = {"geometries": 1000, "ideal": 64, "kept": 48, "unsound": 0, "copies": 20, "null_copies": 5, "null_needed": 0}
    return make_row(name, "PASS", SCHEDULER | cell, sweep=totals | sums | {"started": started, "seconds": 2.0})


def test_the_line_of_the_scheduler_tier(make_row: MakeRow) -> None:
    """Classes are not counted twice, controls keep all whatever the arm, and the time is that from first to last."""
    rows = [
        swept(make_row, "class-corrupt", {}, 1000.0),
        swept(make_row, "reuse-a-all", {}, 1010.0, unsound=7),
        swept(make_row, "reuse-b-all", {}, 1012.0, kept=0),
        swept(make_row, "control-c-all", {}, 1014.0, kept=64),
        swept(make_row, "reuse-a-all", FIX, 1099.0, kept=64),
    ]
    assert tables.sweep_lines(rows) == [
        "scheduler tier: 4,000 geometries on 2 arms in 101 s, vLLM 0.32.0; reuse kept of what can soundly be served:"
        " stock 37.5 % (7 geometries unsound), fix 100 %"
    ]
    assert tables.sweep_lines(rows[-1:])[0].startswith("scheduler tier: 1,000 geometries on 1 arm in 2 s, ")


def test_rows_without_their_times_give_no_line(make_row: MakeRow) -> None:
    old = make_row("reuse-a-all", "PASS", SCHEDULER, sweep={"geometries": 9, "ideal": 64, "kept": 64, "unsound": 0})
    assert tables.sweep_lines([old]) == []
    assert tables.null_copies([old]) == ""


def test_copies_to_the_null_block(make_row: MakeRow) -> None:
    rows = [
        swept(make_row, "class-safe-short", {}, 0.0),
        swept(make_row, "class-safe-short", FIX, 0.0, null_copies=0, null_needed=0),
        swept(make_row, "class-corrupt", {}, 0.0, null_copies=4321, copies=9876, null_needed=3),
        swept(make_row, "reuse-a-all", {}, 0.0),
    ]
    assert cells(tables.null_copies(rows)) == [
        ["safe-short", "1,000", "5 of 20 (0)", "0 of 20 (0)"],
        ["corrupt", "1,000", "4,321 of 9,876 (3)", "NOT_RUN"],
    ]


# --- publishing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, run_row: RunRow, qualified: list[ProbeRow], make_perf_row: Callable[..., PerfRow]) -> Path:
    """A machine's home with a finished run of each suite."""

    def write(run: str, suite: str, rows: list[Row]) -> None:
        end = EndRow(run=run, finished="2026-01-01T00:01:00Z", exit_code=0, counts={}, seconds=60.0)
        cell = CellRow(
            run=run, id="0.32.0-host-CPU_ATTN-eager-fix", status="OK", isolation="fork", seconds=1.0, max_rss_kib=2048
        )
        with RowWriter(tmp_path / "home" / "runs" / run / "rows.jsonl") as writer:
            for row in (run_row.model_copy(update={"suite": suite}), *rows, cell, end):
                writer.write(row.model_copy(update={"run": run}))

    write("20260101T000000Z-0000", "conformance", list(qualified))
    write("20260101T001000Z-0000", "perf", [make_perf_row()])
    return tmp_path / "home"


def test_published_tables_are_what_their_rows_give(home: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    (written,) = document.publish(home, results)
    assert written.relative_to(results).parts[:3] == ("0.32.0", "host", "fix")
    text = written.read_text(encoding="utf-8")
    assert "**QUALIFIED: 5 of 5 probes PASS" in text
    assert "Lookup call" in text
    assert "2 MiB resident" in text
    assert "![lookup-ratio](lookup-ratio.svg)" in text
    assert {p.name for p in written.parent.iterdir()} == {"conformance.jsonl", "perf.jsonl", "tables.md", "lookup-ratio.svg"}
    assert document.stale_tables(results) == []
    assert document.tables_of(written.parent).encode() == written.read_bytes()


def test_a_patch_is_published_with_its_own_rows_and_stocks(home: Path, qualified: list[ProbeRow], tmp_path: Path) -> None:
    path, rows, _ = document.newest_pair(home)
    other = [r.model_copy(update={"cell": r.cell | {"arm": "other"}}) for r in qualified if r.cell["arm"] == "fix"]
    strange = CellRow(run=rows[0].run, id="0.33.0-host-CPU_ATTN-eager-fix", status="OK", isolation="fork", seconds=1.0)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[-1:-1] = [f"{r.model_dump_json()}\n".encode() for r in (*other, strange)]
    path.write_bytes(b"".join(lines))
    for written in document.publish(home, tmp_path / "results"):
        patch = written.parent.parent.name
        published = (written.parent / "conformance.jsonl").read_bytes().splitlines(keepends=True)
        assert set(published) <= set(lines)
        kept = read_rows(written.parent / "conformance.jsonl")
        assert {r.cell["arm"] for r in kept if isinstance(r, ProbeRow)} == {"stock", patch}
        assert {r.id.split("-")[0] for r in kept if isinstance(r, CellRow)} <= {"0.32.0"}
    assert patch in ("fix", "other")


def test_a_named_run_is_published(home: Path, tmp_path: Path) -> None:
    run = document.newest_pair(home)[1][0].run
    (written,) = document.publish(home, tmp_path / "results", run)
    assert written.parent.name == run
    with pytest.raises(NothingRanError, match="with the id 20990101T000000Z-ffff"):
        document.publish(home, tmp_path / "results", "20990101T000000Z-ffff")


def test_one_changed_byte_is_found(home: Path, tmp_path: Path) -> None:
    (written,) = document.publish(home, tmp_path / "results")
    data = written.read_bytes()
    for at in (0, len(data) // 2, len(data) - 1):
        written.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert document.stale_tables(tmp_path / "results") == [written]
    written.write_bytes(data)
    assert document.stale_tables(tmp_path / "results") == []


def test_a_changed_row_is_found(home: Path, tmp_path: Path) -> None:
    (written,) = document.publish(home, tmp_path / "results")
    rows = written.with_name("conformance.jsonl")
    text = rows.read_text(encoding="utf-8")
    rows.write_text(text.replace('"max_logprob_error":20.957', '"max_logprob_error":20.958'), encoding="utf-8")
    assert document.stale_tables(tmp_path / "results") == [written]


def test_missing_tables_are_found(home: Path, tmp_path: Path) -> None:
    (written,) = document.publish(home, tmp_path / "results")
    written.unlink()
    assert document.stale_tables(tmp_path / "results") == [written]


def test_tables_without_their_rows_are_found(home: Path, tmp_path: Path) -> None:
    """They could say anything."""
    (written,) = document.publish(home, tmp_path / "results")
    written.with_name("conformance.jsonl").unlink()
    assert document.stale_tables(tmp_path / "results") == [written]


def test_damaged_published_rows(home: Path, tmp_path: Path) -> None:
    (written,) = document.publish(home, tmp_path / "results")
    rows = written.with_name("conformance.jsonl")
    rows.write_text(rows.read_text(encoding="utf-8")[:-10], encoding="utf-8")
    with pytest.raises(RowsError, match="line"):
        document.stale_tables(tmp_path / "results")


def test_nothing_to_publish(tmp_path: Path) -> None:
    with pytest.raises(NothingRanError):
        document.publish(tmp_path / "home", tmp_path / "results")
