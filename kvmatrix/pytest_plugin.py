"""pytest as the front end of a conformance run.

The cells of the collected items run first, side by side, with their own progress; the items then only look at the rows.
So a crash of pytest, of a cell or of the machine costs no finished row, and `-k` narrows what is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvmatrix.cells import Cell
from kvmatrix.errors import ExitCode
from kvmatrix.expectations import Expectation, is_problem
from kvmatrix.records import ProbeRow
from kvmatrix.runner import probe_id, probe_names
from kvmatrix.session import Session, exit_code, planned_ids
from kvmatrix.suite_plugin import SuitePlugin


class ConformancePlugin(SuitePlugin):
    """Registered by ``kvmatrix conformance``; holds the run and, afterwards, its rows and exit code."""

    def __init__(self, session: Session, cells: Sequence[Cell]) -> None:
        super().__init__()
        self.session = session
        self.cells = list(cells)
        self.rows: dict[str, ProbeRow] = {}
        self.stale: list[Expectation] = []
        self.expired: list[Expectation] = []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for tier in ("llm", "scheduler"):
            fixture = f"{tier}_row"
            if fixture in metafunc.fixturenames:
                planned = [(c, name) for c in self.cells if c.tier == tier for name in probe_names(c, self.session.matrix)]
                metafunc.parametrize(fixture, planned, ids=[probe_id(c, n) for c, n in planned], indirect=True)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the placeholder of a tier that the selection leaves without cells: it would count as a skipped test."""
        items[:] = [i for i in items if self._param(i) is not None or not self._needs_row(i)]

    @staticmethod
    def _needs_row(item: pytest.Item) -> bool:
        return any(n in getattr(item, "fixturenames", ()) for n in ("llm_row", "scheduler_row"))

    @staticmethod
    def _param(item: pytest.Item) -> tuple[Cell, str] | None:
        spec: Any = getattr(item, "callspec", None)
        return next((p for p in (spec.params if spec else {}).values() if isinstance(p, tuple)), None)

    @pytest.fixture
    def llm_row(self, request: pytest.FixtureRequest) -> ProbeRow:
        return self._row(request.param)

    @pytest.fixture
    def scheduler_row(self, request: pytest.FixtureRequest) -> ProbeRow:
        return self._row(request.param)

    def _row(self, param: tuple[Cell, str]) -> ProbeRow:
        return self.rows[probe_id(*param)]

    def begin(self, items: list[pytest.Item]) -> None:
        self._run(self._wanted(items))

    def _wanted(self, items: Sequence[pytest.Item]) -> list[Cell]:
        wanted = {param[0].id for item in items if (param := self._param(item)) is not None}
        return [c for c in self.cells if c.id in wanted]

    def _run(self, cells: list[Cell]) -> None:
        if not cells:
            return
        ctx = self.session.open(planned_ids(cells, self.session.matrix))
        rows = self.session.run_cells(cells)
        self.rows = {r.id: r for r in rows}
        self.expired = ctx.expectations.expired()
        if len(cells) == len(self.cells) and self._whole_matrix():
            self.stale = ctx.expectations.unused({c.pin for c in cells})

    def _whole_matrix(self) -> bool:
        s = self.session.selection
        narrowed = (s.backends, s.modes, s.chunks, s.blocks, s.dtypes, s.offloads, s.tiers, s.arms)
        return s.level != "quick" and not any(narrowed)

    def result(self) -> ExitCode:
        return exit_code(list(self.rows.values()), len(self.stale) + len(self.expired))

    def finish(self) -> None:
        """Write the run's last row."""
        self.session.close(self.exit_code, [r.status for r in self.rows.values()])


def check(row: ProbeRow) -> None:
    """What a conformance item asserts of its row.

    An expected failure is shown as xfailed; an unexpected pass, or a failure with another reason, fails.
    """
    if row.status in ("UNSUPPORTED", "NOT_RUN"):
        pytest.skip(f"{row.status}: {row.reason}")
    if is_problem(row):
        expected = f"{row.expected} was expected" + (f" ({row.expectation})" if row.expectation else "")
        pytest.fail(f"{row.id} is {row.status}: {row.reason or 'no fault seen'}; {expected}", pytrace=False)
    if row.status == "FAIL":
        pytest.xfail(row.reason)
    assert row.status == "PASS"
