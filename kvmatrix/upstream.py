"""``kvmatrix upstream``: vLLM's own tests of the connector, from a user's checkout, against each arm in its pin's environment.

One process at a time, stock's first. A process that died or hung in a test is followed by another for the tests that are left,
so each test has a row whatever the one before it did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmatrix import facts, upstream_source
from kvmatrix.arms import Arm
from kvmatrix.cells import STOCK
from kvmatrix.errors import ExitCode, InfraError, KvmatrixError, UsageError
from kvmatrix.expectations import Expectation, expected_status
from kvmatrix.judge import Verdict
from kvmatrix.processes import Job, JobTimeout
from kvmatrix.records import EXECUTED, UpstreamRow
from kvmatrix.runner import Context, ended_how
from kvmatrix.session import Session
from kvmatrix.upstream_source import FOLDER, Source
from kvmatrix.upstream_verdict import counts, exit_code, judge_collection, judge_test

BACKEND = "TRITON_ATTN"
"""Whose parents fork the tests' processes. Few of the tests run attention; those that do name this backend, and its host
device has all that CPU_ATTN's has."""
PYTEST_USAGE_ERROR = 4
STAND_INS = FOLDER.replace("/", ".") + "."
"""Test modules that are given the host device where they ask for a GPU."""

Say = Callable[[str], None]


@dataclass
class ArmRun:
    """One arm's tests. ``base`` is the job that all its processes are sent."""

    ctx: Context
    arm: Arm
    source: Source
    base: dict[str, Any]
    environment: dict[str, str]
    stock_files: frozenset[str] = frozenset()
    """Test files of which stock has run a test."""
    rows: list[UpstreamRow] = field(default_factory=list)
    _collected: list[str] = field(default_factory=list)
    _current: str | None = None
    _tries: int = 0
    _stopped: str = ""
    """Why no further process is started, where tests may be left."""

    def run(self) -> list[UpstreamRow]:
        """Run the tests and write their rows.

        Raises:
            UsageError: pytest does not take the arguments.
            DiskError: a row could not be written.
        """
        self._deadline = time.monotonic() + self.ctx.matrix.budgets.upstream_timeout_s
        while not self._stopped and self._one_process():
            pass
        for nodeid in self._left():
            self._write(nodeid, Verdict("NOT_RUN", self._stopped or "not-run: the tests' process ended without it"))
        return self.rows

    def _left(self) -> list[str]:
        done = {r.nodeid for r in self.rows}
        return [n for n in self._collected if n not in done]

    @property
    def _log(self) -> Path:
        suffix = f".{self._tries}" if self._tries > 1 else ""
        return self.ctx.folder / "logs" / f"upstream-{self.arm.pin}-{self.arm.name}{suffix}.log"

    def _one_process(self) -> bool:
        """Run a process over what is left; whether another is needed."""
        self._tries += 1
        before = {r.nodeid for r in self.rows}
        job = self.base | {
            "done": sorted(before),
            "scratch": f"{self.base['cwd']}-{self.arm.pin}-{self.arm.name}-{self._tries}",
        }
        try:
            parent = self.ctx.pool.get(self.ctx.envs[self.arm.pin].python, self.environment)
            child = parent.start(job, self._log)
        except InfraError as e:
            self._write(FOLDER, Verdict("INFRA", f"parent: {e}"))
            return False
        try:
            problem = self._follow(child)
        except BaseException:
            child.kill()
            child.finish()
            raise
        child.finish()
        if problem is None:
            return False
        if problem.status == "CRASH":
            problem = Verdict("CRASH", f"crash: the process ended {ended_how(child.exit_code)} {self._where()}")
        self._write(self._current or FOLDER, problem)
        self._current = None
        # Each process must answer for a test that had no row, or this would not end; outside a test there is none to go past.
        new = {r.nodeid for r in self.rows} - before
        return bool(new) and FOLDER not in new and bool(self._left())

    def _where(self) -> str:
        return "during this test" if self._current else "outside any test"

    def _follow(self, child: Job) -> Verdict | None:
        """Take the child's messages to its end; what went wrong comes back, None when nothing did."""
        while True:
            left = self._deadline - time.monotonic()
            limit = self.ctx.matrix.budgets.upstream_test_timeout_s
            try:
                message = child.receive(min(left, limit) if self._current else left)
            except JobTimeout:
                child.kill()
                return self._timed_out(limit)
            if message is None:
                return Verdict("CRASH")
            if message["type"] == "done":
                return None
            if message["type"] == "error":
                return Verdict("INFRA", f"child: {message['error']}: {message['message'][:400]}")
            self._handle(message)

    def _timed_out(self, limit: float) -> Verdict:
        if time.monotonic() < self._deadline:
            return Verdict("TIMEOUT", f"timeout: not done after {limit:g} s")
        budget = f"{self.ctx.matrix.budgets.upstream_timeout_s:g} s for all tests of the arm"
        self._stopped = f"timeout: the run was at its limit of {budget} before this test"
        return Verdict(
            "TIMEOUT" if self._current else "INFRA", f"timeout: {self._where()} the run came to its limit of {budget}"
        )

    def _handle(self, message: dict[str, Any]) -> None:
        kind, arm = message["type"], self.arm
        if kind == "start":
            self._current = message["nodeid"]
        elif kind == "test":
            verdict = judge_test(message, arm, str(self.ctx.envs[arm.pin].site_packages / "vllm") + os.sep)
            self._current = None
            fields = {name: message[name] for name in ("seconds", "stand_ins", "imported")}
            self._write(message["nodeid"], verdict, **fields)
        elif kind == "collected" and not self._collected:
            self._collected = message["nodeids"]
        elif kind == "collect" and self._tries == 1:
            verdict = judge_collection(message, _file(message["nodeid"]) in self.stock_files)
            self._write(message["nodeid"], verdict, imported=message["imported"])
        elif kind == "conftest":
            self._write("tests/conftest.py", Verdict("INFRA", f"conftest: {message['error'][:400]}"))
        elif kind == "ended" and message["exit"] == PYTEST_USAGE_ERROR and not self.rows:
            raise UsageError(f"pytest does not take the arguments (is the expression of -k right?): see {self._log}")

    def _write(self, nodeid: str, verdict: Verdict, **fields: Any) -> None:
        name, reason = _file(nodeid), facts.without_paths(verdict.reason)
        entry = self.ctx.expectations.find_test(self.arm.pin, "host", self.arm.name, nodeid)
        row = UpstreamRow(
            run=self.ctx.run,
            id=f"{self.arm.pin}-host-upstream-{self.arm.name}-{nodeid}",
            pin=self.arm.pin,
            device="host",
            arm=self.arm.name,
            nodeid=nodeid,
            file=name,
            file_sha256=self.source.file_sha256(name),
            source=self.source.identity,
            status=verdict.status,
            reason=reason,
            expected=expected_status(entry, verdict.status, reason),
            expectation=entry.why if entry else "",
            patch_sha256=self.arm.patch_sha256,
            log=str(self._log.relative_to(self.ctx.folder)),
            **fields,
        )
        self.ctx.writer.write(row)
        self.rows.append(row)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class UpstreamRun:
    """A run of the command: every selected arm on every selected pin."""

    def __init__(self, session: Session, source: Source, keyword: str, say: Say) -> None:
        self.session = session
        self.source = source
        self.keyword = keyword
        self.say = say
        self.rows: list[UpstreamRow] = []
        self.stale: list[Expectation] = []
        self.expired: list[Expectation] = []
        self.code: ExitCode | None = None
        """Set once the run has come to its end by itself."""

    def run(self) -> ExitCode:
        """Run everything; the rows are in ``rows``, and written.

        Raises:
            KeyboardInterrupt: after the children are ended; finished rows are kept.
            KvmatrixError: an environment, a patch, the checkout or the row file is not right.
        """
        arms = list(dict.fromkeys((c.pin, c.arm) for c in self.session.plan()))
        try:
            ctx = self.session.open([], {"source": self.source.facts()})
            around = self._surroundings(ctx)
            for pin, name in arms:
                self._run_arm(ctx, ctx.arms[pin, name], around[pin])
            self.expired = ctx.expectations.expired()
            self.stale = ctx.expectations.unused(self._whole_pins(), upstream=True)
            self.code = exit_code(self.rows, len(self.stale) + len(self.expired))
        except KeyboardInterrupt:
            self.code = ExitCode.INTERRUPTED
            raise
        except KvmatrixError as e:
            self.code = e.code
            raise
        finally:
            code = self.code if self.code is not None else ExitCode.INFRA
            self.session.close(code, [r.status for r in self.rows])
        return self.code

    def _whole_pins(self) -> set[str]:
        """Pins of which this run had everything that an entry can be about: all tests of their own release, every arm."""
        s = self.session.selection
        whole = not (self.keyword or s.arms or s.patches) and self.source.targets == (FOLDER,)
        ran = {r.pin for r in self.rows if r.status in EXECUTED}
        return {pin for pin in ran if whole and pin == self.source.version}

    def _surroundings(self, ctx: Context) -> dict[str, dict[str, Any]]:
        """What lies around the tests, made once a run: the fields of every job by pin, and the parents' variables."""
        view = ctx.folder / "view"
        ini = upstream_source.make_view(self.source, view)
        hub = upstream_source.make_hub(ctx.folder / "hub")
        pytest_folder = upstream_source.link_pytest(ctx.folder / "tools")
        common = {
            "kind": "upstream",
            "cwd": str(ctx.folder / "work"),
            "view": str(view),
            "ini": ini,
            "targets": list(self.source.targets),
            "keyword": self.keyword,
            "stand_ins": STAND_INS,
        }
        return {pin: self._of_pin(ctx, pin, common, hub, pytest_folder) for pin in ctx.envs}

    def _of_pin(
        self, ctx: Context, pin: str, common: dict[str, Any], hub: dict[str, str], pytest_folder: Path
    ) -> dict[str, Any]:
        needs = upstream_source.conftest_needs(self.source, ctx.envs[pin].site_packages)
        if needs:
            self.say(f"{', '.join(needs)}, which the checkout's conftest imports, in a folder beside the environment")
        budget = ctx.matrix.budgets.install_timeout_s
        folders = [pytest_folder, *upstream_source.install_needs(needs, ctx.home / "tools", budget)]
        plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
        # Some of the tests read vLLM's log: it is at the level that vLLM itself would choose.
        variables = ctx.parent_variables(pin, "host", BACKEND) | hub | plain | {"VLLM_LOGGING_LEVEL": "INFO"}
        return {"job": common | {"tools": [str(f) for f in folders]}, "variables": variables}

    def _run_arm(self, ctx: Context, arm: Arm, around: dict[str, Any]) -> None:
        self.say(f"vLLM {arm.pin}, {arm.name}: importing vLLM and collecting its tests …")
        started = time.monotonic()
        base = around["job"] | {"modules": list(arm.expected), "env": self._job_variables(ctx, arm)}
        done = frozenset(r.file for r in self.rows if (r.pin, r.arm) == (arm.pin, STOCK) and r.status in EXECUTED)
        run = ArmRun(ctx, arm, self.source, base, around["variables"], done)
        try:
            run.run()
        finally:
            self.rows += run.rows
        self.say(f"vLLM {arm.pin}, {arm.name}: {counts(run.rows) or 'no test'} ({time.monotonic() - started:.0f} s)")

    def _job_variables(self, ctx: Context, arm: Arm) -> dict[str, str]:
        cache = ctx.home / "cache" / ctx.envs[arm.pin].path.name / "vllm"
        return {"KVMATRIX_OVERLAY": str(arm.manifest), "VLLM_CACHE_ROOT": str(cache)}
