"""pytest plug-in of :mod:`kvmatrix.upstream_child`: a message for each fact, at the moment at which it is known.

Messages: ``collected`` (node ids), ``start`` (one node id), ``test`` (how it ended), ``collect`` (a file that was skipped
whole, or could not be collected) and ``conftest`` (a conftest that could not be loaded: no test runs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest

from kvmatrix import overlay, upstream_child

MAX_TEXT = 4000
"""Characters of a failure that are sent on: its first lines, in which the kind of failure shows."""


class GpuStandIns(Protocol):
    """See :class:`kvmatrix.host.gpu_tests.StandIns`."""

    def wanted_by(self, module: str) -> bool: ...

    def active(self) -> contextlib.AbstractContextManager[None]: ...


class Teller:
    """Tells each test's start and end. ``done``: node ids that another process has run already."""

    def __init__(self, done: Sequence[str], send: Callable[[dict[str, Any]], None], stand_ins: GpuStandIns | None) -> None:
        self.done = set(done)
        self.send = send
        self.stand_ins = stand_ins
        self._reports: list[pytest.TestReport] = []
        self._stood_in = False

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self) -> Iterator[None]:
        try:
            return (yield)
        except Exception as e:
            cause = getattr(e, "cause", None) or e
            self.send({"type": "conftest", "error": f"{type(cause).__name__}: {cause}"[:MAX_TEXT]})
            raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            message = {"type": "collect", "nodeid": report.nodeid, "outcome": report.outcome}
            self.send(message | {"text": _text(report), "imported": overlay.imported_digests()})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.send({"type": "collected", "nodeids": [i.nodeid for i in items]})
        items[:] = [i for i in items if i.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        module = getattr(getattr(item, "module", None), "__name__", "")
        self._stood_in = self.stand_ins is not None and self.stand_ins.wanted_by(module)
        with self.stand_ins.active() if self.stand_ins is not None and self._stood_in else contextlib.nullcontext():
            return (yield)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self.send({"type": "start", "nodeid": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.send(
            {
                "type": "test",
                "nodeid": nodeid,
                **outcome(self._reports),
                "seconds": round(sum(r.duration for r in self._reports), 4),
                "stand_ins": self._stood_in,
                "imported": overlay.imported_digests(),
                "vllm": upstream_child.vllm_file(),
            }
        )


def outcome(reports: Sequence[pytest.TestReport]) -> dict[str, str]:
    """How a test ended, from the reports of its phases: the worst of them counts.

    ``outcome`` is ``passed``, ``failed`` or ``skipped``; an expected failure of upstream's own has passed.
    """
    failed = next((r for r in reports if r.failed), None)
    if failed is not None:
        return {"outcome": "failed", "when": failed.when or "", "text": _text(failed)}
    skipped = next((r for r in reports if r.skipped), None)
    if skipped is None:
        return {"outcome": "passed", "when": "", "text": ""}
    if hasattr(skipped, "wasxfail"):
        return {"outcome": "passed", "when": "", "text": f"xfailed: {skipped.wasxfail}"}
    return {"outcome": "skipped", "when": skipped.when or "", "text": _text(skipped)}


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The message of a failure without its traceback, or the reason of a skip."""
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:MAX_TEXT]
    # A file that does not import comes as text: pytest marks the lines that are the error itself.
    text = str(longrepr)
    error = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return ("\n".join(error) or text)[:MAX_TEXT]
