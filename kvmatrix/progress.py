"""A progress bar with what runs now and how long is left; plain lines where the output is no terminal."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from kvmatrix.cells import Cell
from kvmatrix.expectations import is_problem
from kvmatrix.records import ProbeRow
from kvmatrix.runner import Progress as RunProgress
from kvmatrix.runner import expected_seconds


class RichProgress(RunProgress):
    """Progress of a run's cells on ``console``.

    Time left is the expected time of the cells that are not done, scaled by how the finished ones compared to theirs.
    """

    def __init__(self, console: Console, cells: Sequence[Cell], jobs: int) -> None:
        self.console = console
        self._jobs = jobs
        self._left = {c.id: expected_seconds(c) for c in cells}
        self._total = len(cells)
        self._done = 0
        self._expected_done = 0.0
        self._measured_done = 0.0
        self._running: dict[str, str] = {}
        self._lock = threading.RLock()
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.completed:g}/{task.total:g} cells"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("preparing", total=self._total, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def waiting_for_parents(self, count: int) -> None:
        self._say(f"importing vLLM once in {count} preloaded {'parent' if count == 1 else 'parents'} …")

    def cell_started(self, cell: Cell) -> None:
        self._update(cell, "waiting for its parent")

    def cell_stage(self, cell: Cell, stage: str) -> None:
        self._update(cell, stage)

    def cell_done(self, cell: Cell, rows: Sequence[ProbeRow], seconds: float) -> None:
        with self._lock:
            self._running.pop(cell.id, None)
            self._expected_done += self._left.pop(cell.id)
            self._measured_done += seconds
            self._done += 1
            self._bar.update(self._task, completed=self._done, left=self._time_left())
        self._say(f"[{self._done}/{self._total}] {summary(cell, rows)} ({seconds:.1f} s; {self._time_left()})")

    def _update(self, cell: Cell, stage: str) -> None:
        with self._lock:
            self._running[cell.id] = stage
            now = "; ".join(f"{i}: {s}" for i, s in self._running.items())
            self._bar.update(self._task, description=escape(now), left=self._time_left())

    def _time_left(self) -> str:
        if not self._left:
            return "last cell done"
        pace = self._measured_done / self._expected_done if self._expected_done > 20 else 1.0
        seconds = pace * sum(self._left.values()) / self._jobs
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary(cell: Cell, rows: Sequence[ProbeRow]) -> str:
    """One line for a finished cell: its id and what came of its probes."""
    counts: dict[str, int] = {}
    for row in rows:
        label = row.status if row.status == "PASS" or is_problem(row) else f"{row.status} (expected)"
        if row.status in ("UNSUPPORTED", "NOT_RUN"):
            label = row.status
        counts[label] = counts.get(label, 0) + 1
    text = ", ".join(f"{n} {label}" for label, n in counts.items())
    bad = next((r for r in rows if is_problem(r)), None)
    return f"{cell.id}: {text}" + (f" -- {bad.probe}: {bad.reason or 'passed, a failure was expected'}" if bad else "")
