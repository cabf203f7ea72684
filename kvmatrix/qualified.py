"""Whether a cell's conformance is known to be as expected on this machine: no figure is taken from any other cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvmatrix.arms import Arm
from kvmatrix.cells import Cell
from kvmatrix.errors import RowsError
from kvmatrix.expectations import is_problem
from kvmatrix.records import AnyRow, EndRow, ProbeRow, RunRow, last_attempts, read_rows


def newest_runs(home: Path, suite: str | None = None, strict: bool = False) -> Iterator[tuple[Path, list[AnyRow]]]:
    """Row files of this machine that end properly, newest first.

    Damaged files are passed over, or with ``strict`` raise RowsError.
    """
    for path in sorted(home.glob("runs/*/rows.jsonl"), reverse=True):
        try:
            rows = read_rows(path)
        except RowsError:
            if strict:
                raise
            continue
        first = rows[0]
        if isinstance(first, RunRow) and (suite is None or first.suite == suite) and isinstance(rows[-1], EndRow):
            yield path, rows


def conformance_of(cell: Cell, arm: Arm, home: Path) -> list[ProbeRow]:
    """The newest probe rows of ``cell`` with ``arm``'s very files on this machine; empty when there are none."""
    for _, rows in newest_runs(home):
        found = [
            r
            for r in last_attempts(rows)
            if r.cell == cell.model_dump() and r.patch_sha256 == arm.patch_sha256 and r.imported == arm.expected
        ]
        if found:
            return found
    return []


def is_qualified(rows: list[ProbeRow]) -> bool:
    """Every probe ran, and every one is as expected."""
    return bool(rows) and all(r.status in ("PASS", "FAIL") and not is_problem(r) for r in rows)
