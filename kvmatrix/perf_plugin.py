"""pytest-benchmark as the front end of the perf suite.

Arms must be measured interleaved, in processes of their own. So a measurement is taken once for all arms, and each arm's
benchmark then replays its rounds through pytest-benchmark on a clock that shows the measured times: its statistics,
JSON and compare work on exactly what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from rich.console import Console

from kvmatrix.cells import STOCK, Cell, plan_cells
from kvmatrix.config import Matrix
from kvmatrix.errors import DiskError, ExitCode, InfraError
from kvmatrix.expectations import is_problem
from kvmatrix.facts import without_paths
from kvmatrix.live import AGAIN, Tell
from kvmatrix.perf_generate import GenerateRun
from kvmatrix.perf_harness import measure_harness
from kvmatrix.perf_lookup import lookup_geometries, measure_lookup, name_of
from kvmatrix.qualified import conformance_of, is_qualified
from kvmatrix.records import PerfRow, ProbeRow, Status
from kvmatrix.runner import Context, probe_names
from kvmatrix.session import Session, exit_code
from kvmatrix.suite_plugin import SuitePlugin

HARNESS_REPEATS = 2
Group = Literal["lookup", "generate", "harness"]


class ReplayClock:
    """A clock that moves only when a recorded round is replayed, by that round's seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._rounds: list[float] = []

    def __call__(self) -> float:
        return self.now

    def load(self, rounds: list[float]) -> None:
        self._rounds = list(rounds)

    def replay(self) -> None:
        self.now += self._rounds.pop(0)


CLOCK = ReplayClock()


class PerfPlugin(SuitePlugin):
    """Registered by ``kvmatrix perf``; takes the measurements and keeps their rows."""

    def __init__(self, session: Session, console: Console) -> None:
        super().__init__()
        self.session = session
        self.console = console
        self.rows: dict[str, PerfRow] = {}
        self.probe_rows: list[ProbeRow] = []
        self._ctx: Context | None = None
        self._generated = False

    @property
    def matrix(self) -> Matrix:
        return self.session.project.matrix

    @property
    def pin(self) -> str:
        return self.session.pins[0].version

    @property
    def size(self) -> str:
        """Of the model: the one asked for, ``tiny`` for a quick run, or the matrix's."""
        return self.session.selection.size or ("tiny" if self.session.selection.level == "quick" else self.matrix.perf.size)

    @property
    def arms(self) -> list[str]:
        """Stock twice, so that what differs by noise alone is in every run, then the patches."""
        return [STOCK, AGAIN, *(a for a in self.session.arms_on(self.pin) if a != STOCK)]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        arms = self.arms
        if "lookup_row" in metafunc.fixturenames:
            cases = [(g, a) for g in self._lookups() for a in arms]
            ids = [f"{name_of(g)}-{a}" for g, a in cases]
            metafunc.parametrize("lookup_row", cases, ids=ids, indirect=True)
        if "generate_row" in metafunc.fixturenames:
            workloads = [(w, a) for w in self.matrix.perf.workloads for a in arms]
            metafunc.parametrize("generate_row", workloads, ids=[f"{w}-{a}" for w, a in workloads], indirect=True)

    def _lookups(self) -> list[dict[str, Any]]:
        return lookup_geometries(self.matrix, self.session.selection.level)

    def pytest_benchmark_update_machine_info(self, config: pytest.Config, machine_info: dict[str, Any]) -> None:
        machine_info.pop("node", None)  # the host's name

    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        for key in ("project", "branch"):  # names of the checkout's folder and of somebody's branch
            output_json.get("commit_info", {}).pop(key, None)

    def begin(self, items: list[pytest.Item]) -> None:
        self._ctx = self.session.open([i.name for i in items])

    @pytest.fixture
    def lookup_row(self, request: pytest.FixtureRequest) -> tuple[PerfRow, str]:
        geometry, arm = request.param
        tell = self._tell(request)

        def measure(ctx: Context) -> PerfRow:
            perf = self.matrix.perf
            resolution, count = perf.lookup_resolution, self.session.selection.level == "full"
            return measure_lookup(ctx, self.pin, self.arms, geometry, perf.lookup_blocks, resolution, tell, count)

        return self._once("lookup", name_of(geometry), measure), arm

    @pytest.fixture
    def generate_row(self, request: pytest.FixtureRequest) -> tuple[PerfRow, str]:
        workload, arm = request.param
        self._generate(self._tell(request))
        return self.rows[workload], arm

    @pytest.fixture
    def isolation_row(self, request: pytest.FixtureRequest) -> PerfRow:
        tell = self._tell(request)
        return self._once(
            "harness", "isolation", lambda ctx: measure_harness(ctx, self._cells(STOCK)[0], HARNESS_REPEATS, tell)
        )

    @pytest.fixture
    def replay(self, request: pytest.FixtureRequest) -> Callable[[PerfRow, str], None]:
        def run(row: PerfRow, arm: str) -> None:
            if row.status == "NOT_RUN" or arm in row.left_out:
                pytest.skip(row.left_out.get(arm, row.reason))
            if row.status != "PASS":
                pytest.fail(f"{row.id} is {row.status}: {row.reason}", pytrace=False)
            benchmark = request.getfixturevalue("benchmark")  # only now: unused, it would complain
            benchmark.group = f"{row.group} {row.workload}"
            benchmark.extra_info["arm"] = arm
            rounds = [seconds for block in row.seconds[arm] for seconds in block]
            CLOCK.load(rounds)
            benchmark.pedantic(CLOCK.replay, rounds=len(rounds), iterations=1)

        return run

    def _once(self, group: Group, key: str, measure: Callable[[Context], PerfRow]) -> PerfRow:
        if key not in self.rows:
            assert self._ctx is not None
            try:
                self._keep(key, measure(self._ctx))
            except InfraError as e:
                self._keep(key, self._broken(group, key, "INFRA", str(e)))
        return self.rows[key]

    def _keep(self, key: str, row: PerfRow) -> None:
        assert self._ctx is not None
        self.rows[key] = row
        try:
            self._ctx.writer.write(row)
        except DiskError as e:
            self.error = e
            pytest.exit(str(e), returncode=e.code)

    def _broken(self, group: Group, key: str, status: Status, reason: str, **more: Any) -> PerfRow:
        return PerfRow(
            run=self.session.run,
            id=f"{self.pin}-{group}-{key}",
            group=group,
            workload=key,
            geometry={},
            status=status,
            reason=without_paths(reason),
            **more,
        )

    def _tell(self, request: pytest.FixtureRequest) -> Callable[[str], None]:
        capture: Any = request.config.pluginmanager.getplugin("capturemanager")

        def tell(text: str) -> None:
            with capture.global_and_fixture_disabled():
                self.console.print(f"measuring {text}", markup=False, highlight=False, soft_wrap=True)

        return tell

    def _cells(self, arm: str) -> list[Cell]:
        """The conformance cells that stand behind ``arm``'s throughput: same backend and mode."""
        selection = self.session.selection.model_copy(
            update={"backends": (self.matrix.perf.backend,), "modes": (self.matrix.perf.mode,), "arms": (arm,)}
            | {"pins": (self.pin,), "chunks": (), "blocks": (), "dtypes": (), "offloads": (), "tiers": (), "level": "quick"}
        )
        return plan_cells(self.matrix, selection, self.arms)

    def _generate(self, tell: Tell) -> None:
        """Measure all workloads together, once: their requests are interleaved. What an early end leaves is kept."""
        if self._generated:
            return
        self._generated = True
        assert self._ctx is not None
        refused = self._refusals(self._ctx, tell)
        if STOCK in refused:
            for workload in self.matrix.perf.workloads:
                self._keep(workload, self._broken("generate", workload, "NOT_RUN", refused[STOCK]))
            return
        run = GenerateRun(self._ctx, self.pin, [a for a in self.arms if a not in refused], self.size, tell)
        run.left_out = refused
        reason = "ended early"  # unless it is known better: what is cut short must never look whole
        try:
            run.measure()
            reason = ""
        except InfraError as e:
            reason = without_paths(str(e))
        finally:
            reason = reason and f"{reason} (after {run.blocks_done} of {self.matrix.perf.blocks} blocks)"
            for row in run.rows(reason):
                self._keep(row.workload, row)

    def _refusals(self, ctx: Context, tell: Tell) -> dict[str, str]:
        """Arm -> why no throughput of it may be measured: its conformance is not as expected. What is missing is run first."""
        asked = self.session.selection.backends
        if asked and self.matrix.perf.backend not in asked:
            why = f"not-selected: throughput is measured on {self.matrix.perf.backend}, the selection leaves it out"
            return dict.fromkeys(self.arms, why)
        refused = {arm: self._refusal(ctx, arm, tell) for arm in self.session.arms_on(self.pin)}
        found = {arm: why for arm, why in refused.items() if why}
        return found | ({AGAIN: found[STOCK]} if STOCK in found else {})

    def _refusal(self, ctx: Context, arm: str, tell: Tell) -> str:
        for cell in self._cells(arm):
            rows = conformance_of(cell, ctx.arms[cell.pin, arm], ctx.home)
            if not rows:
                tell(f"conformance of {cell.id} first: this machine has no row of it")
                rows = self.session.run_cells([cell])
                self.probe_rows += rows
            if not is_qualified(rows, probe_names(cell, self.matrix)):
                bad = next((r for r in rows if is_problem(r) or r.status not in ("PASS", "FAIL")), None)
                detail = f"{bad.id} is {bad.status}" if bad else f"{cell.id} has no row"
                return f"not-qualified: {detail}; no figure is taken from a cell whose conformance is not as expected"
        return ""

    def result(self) -> ExitCode:
        statuses = [r.status for r in self.rows.values()]
        if "FAIL" in statuses:
            return ExitCode.UNEXPECTED
        if any(s in ("INFRA", "CRASH", "TIMEOUT") for s in statuses):
            return ExitCode.INFRA
        if any(why.startswith("not-qualified") for r in self.rows.values() for why in (r.reason, *r.left_out.values())):
            return ExitCode.UNEXPECTED
        if "PASS" not in statuses:
            return ExitCode.NOTHING_RAN
        return exit_code(self.probe_rows) if self.probe_rows else ExitCode.OK

    def finish(self) -> None:
        """Write the run's last row."""
        statuses = [r.status for r in self.rows.values()] + [r.status for r in self.probe_rows]
        self.session.close(self.exit_code, statuses)
