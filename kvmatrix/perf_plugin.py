"""pytest-benchmark as the front end of the perf suite.

Arms must be measured interleaved, in processes of their own. So a measurement is taken once for all arms, and each arm's
benchmark then replays its rounds through pytest-benchmark on a clock that shows the measured times: its statistics,
JSON and compare work on exactly what was measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import pytest
from rich.console import Console

from kvmatrix import perf_run
from kvmatrix.cells import Cell, plan_cells
from kvmatrix.config import Matrix
from kvmatrix.errors import DiskError, ExitCode, InfraError
from kvmatrix.expectations import is_problem
from kvmatrix.facts import without_paths
from kvmatrix.qualified import conformance_of, is_qualified
from kvmatrix.records import PerfRow, ProbeRow
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


def lookup_geometries(matrix: Matrix) -> list[dict[str, Any]]:
    """For each prompt a misaligned prefix (half a chunk), an aligned one (a chunk) where it fits, and none."""
    lookup = matrix.perf.lookup
    found = []
    for prompt in lookup.prompts:
        for prefix in (0, lookup.chunk // 2, lookup.chunk):
            if prefix + lookup.block < prompt:
                found.append({"block": lookup.block, "chunks": [None, lookup.chunk], "prompt": prompt, "prefix": prefix})
    return found


class PerfPlugin(SuitePlugin):
    """Registered by ``kvmatrix perf``; takes the measurements and keeps their rows."""

    def __init__(self, session: Session, console: Console) -> None:
        super().__init__()
        self.session = session
        self.console = console
        self.rows: dict[str, PerfRow] = {}
        self.probe_rows: list[ProbeRow] = []
        self._ctx: Context | None = None
        self._stack = contextlib.ExitStack()
        self._bench: perf_run.GenerateBench | None = None
        self._refusal_text: str | None = None

    @property
    def matrix(self) -> Matrix:
        return self.session.project.matrix

    @property
    def pin(self) -> str:
        return self.session.pins[0].version

    @property
    def arms(self) -> list[str]:
        return self.session.arms_on(self.pin)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        arms = self.arms
        if "lookup_row" in metafunc.fixturenames:
            cases = [(g, a) for g in lookup_geometries(self.matrix) for a in arms]
            ids = [f"p{g['prompt']}-d{g['prefix']}-{a}" for g, a in cases]
            metafunc.parametrize("lookup_row", cases, ids=ids, indirect=True)
        if "generate_row" in metafunc.fixturenames:
            workloads = [(w, a) for w in self.matrix.perf.workloads for a in arms]
            metafunc.parametrize("generate_row", workloads, ids=[f"{w}-{a}" for w, a in workloads], indirect=True)

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
        rounds = self.matrix.perf.lookup.rounds
        row = self._once(
            "lookup",
            f"lookup-{geometry['prompt']}-{geometry['prefix']}",
            lambda ctx: perf_run.measure_lookup(ctx, self.pin, self.arms, geometry, rounds, self._tell(request)),
        )
        return row, arm

    @pytest.fixture
    def generate_row(self, request: pytest.FixtureRequest) -> tuple[PerfRow, str]:
        workload, arm = request.param
        row = self._once("generate", f"generate-{workload}", lambda ctx: self._generate(ctx, workload, self._tell(request)))
        return row, arm

    @pytest.fixture
    def isolation_row(self, request: pytest.FixtureRequest) -> PerfRow:
        return self._once(
            "harness",
            "isolation",
            lambda ctx: perf_run.measure_harness(ctx, self._smallest_cell(), HARNESS_REPEATS, self._tell(request)),
        )

    @pytest.fixture
    def replay(self, request: pytest.FixtureRequest) -> Callable[[PerfRow, str], None]:
        def run(row: PerfRow, arm: str) -> None:
            if row.status == "NOT_RUN":
                pytest.skip(row.reason)
            if row.status != "PASS":
                pytest.fail(f"{row.id} is {row.status}: {row.reason}", pytrace=False)
            benchmark = request.getfixturevalue("benchmark")  # only now: unused, it would complain
            benchmark.group = f"{row.group} {row.workload}"
            benchmark.extra_info["arm"] = arm
            CLOCK.load(row.seconds[arm])
            benchmark.pedantic(CLOCK.replay, rounds=len(row.seconds[arm]), iterations=1)

        return run

    def _once(self, group: Group, key: str, measure: Callable[[Context], PerfRow]) -> PerfRow:
        if key not in self.rows:
            assert self._ctx is not None
            try:
                row = measure(self._ctx)
                self._ctx.writer.write(row)
            except InfraError as e:
                row = PerfRow(
                    run=self._ctx.run,
                    id=key,
                    group=group,
                    workload=key,
                    geometry={},
                    status="INFRA",
                    reason=without_paths(str(e)),
                )
                self._ctx.writer.write(row)
            except DiskError as e:
                self.error = e
                pytest.exit(str(e), returncode=e.code)
            self.rows[key] = row
        return self.rows[key]

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

    def _smallest_cell(self) -> Cell:
        return self._cells("stock")[0]

    def _generate(self, ctx: Context, workload: str, tell: Callable[[str], None]) -> PerfRow:
        if self._refusal_text is None:
            self._refusal_text = self._refusal(ctx, tell)
        if self._refusal_text:
            cell = perf_run.perf_cell(self.matrix.perf, self.pin, "host", "x")
            return PerfRow(
                run=ctx.run,
                id=f"{cell.id.removesuffix('-x')}-generate-{workload}",
                group="generate",
                workload=workload,
                geometry={"backend": cell.backend},
                status="NOT_RUN",
                reason=self._refusal_text,
            )
        if self._bench is None:
            group = self._stack.enter_context(perf_run.live(ctx, self.pin, self.matrix.perf.backend))
            self._bench = perf_run.GenerateBench(ctx, group, self.pin, self.arms, tell)
        return self._bench.measure(workload)

    def _refusal(self, ctx: Context, tell: Callable[[str], None]) -> str:
        """Why no throughput may be measured: conformance that is not as expected. What is missing is run first."""
        asked = self.session.selection.backends
        if asked and self.matrix.perf.backend not in asked:
            return f"not-selected: throughput is measured on {self.matrix.perf.backend}, the selection leaves it out"
        for arm in self.arms:
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
        if any(r.reason.startswith("not-qualified") for r in self.rows.values()):
            return ExitCode.UNEXPECTED
        if "PASS" not in statuses:
            return ExitCode.NOTHING_RAN
        return exit_code(self.probe_rows) if self.probe_rows else ExitCode.OK

    def finish(self) -> None:
        """End the measuring processes and write the run's last row."""
        self._stack.close()
        statuses = [r.status for r in self.rows.values()] + [r.status for r in self.probe_rows]
        self.session.close(self.exit_code, statuses)
