"""Whether a cell's conformance is known to be as expected on this machine: no figure is taken from any other cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvmatrix.arms import Arm
from kvmatrix.cells import Cell
from kvmatrix.errors import RowsError
from kvmatrix.expectations import is_problem
from kvmatrix.records import EXECUTED, AnyRow, EndRow, ProbeRow, RunRow, last_attempts, read_rows


def newest_runs(home: Path, suite: str | None = None, strict: bool = False) -> Iterator[tuple[Path, list[AnyRow]]]:
    """Row files of this machine that end properly, newest first; without a suite, those of mutants are left out.

    Damaged files are passed over, or with ``strict`` raise RowsError.
    """
    for path in sorted(home.glob("runs/*/rows.jsonl"), reverse=True):
        if path.stat().st_size == 0:
            continue  # ended before its first row
        try:
            rows = read_rows(path)
        except RowsError:
            if strict:
                raise
            continue
        first = rows[0]
        if not isinstance(first, RunRow) or not isinstance(rows[-1], EndRow):
            continue
        # What runs beside mutants is stopped early and judged against them: it qualifies nothing.
        if first.suite == suite or (suite is None and first.suite != "mutants"):
            yield path, rows


def conformance_of(cell: Cell, arm: Arm, home: Path) -> list[ProbeRow]:
    """The newest probe rows of ``cell`` with ``arm``'s very files on this machine; empty when it was never run."""
    for _, rows in newest_runs(home):
        found = [
            r
            for r in last_attempts(rows)
            if r.cell == cell.model_dump()
            and r.patch_sha256 == arm.patch_sha256
            and r.imported in ({}, arm.expected)  # empty: the probe did not run
        ]
        if any(r.status != "NOT_RUN" for r in found):
            return found
    return []


def is_qualified(rows: list[ProbeRow], probes: list[str]) -> bool:
    """Each of ``probes`` has a row, every one ran, and every one is as expected."""
    return {r.probe for r in rows} >= set(probes) and all(r.status in EXECUTED and not is_problem(r) for r in rows)
