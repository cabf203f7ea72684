"""Processes that stay and answer a request at a time, one an arm: what the perf suite measures in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kvmatrix import judge
from kvmatrix.cells import STOCK, Cell
from kvmatrix.errors import InfraError
from kvmatrix.processes import Job, JobTimeout
from kvmatrix.runner import Context

AGAIN = "stock-again"
"""The A/A arm: stock once more, in processes of its own. What it differs from stock by is noise."""

Tell = Callable[[str], None]


def measured_arm(arm: str) -> str:
    """The arm whose files ``arm`` imports."""
    return STOCK if arm == AGAIN else arm


class Live:
    """Children of one measurement, one an arm, that answer a request at a time."""

    def __init__(self, ctx: Context, pin: str, backend: str) -> None:
        self.ctx = ctx
        self.pin = pin
        self.parent = ctx.pool.get(ctx.envs[pin].python, ctx.parent_variables(pin, "host", backend))
        self.timeout = ctx.matrix.budgets.cell_timeout_s
        self._jobs: list[Job] = []

    def start(self, job: dict[str, Any], name: str) -> tuple[Job, dict[str, Any]]:
        """Start a child and wait until it is ready; its ``ready`` message comes back.

        Raises:
            InfraError: it ended, failed or took too long.
        """
        child = self.parent.start(job, self.ctx.folder / "logs" / f"{name}.log")
        self._jobs.append(child)
        while True:
            message = self._next(child)
            if message["type"] == "engine":
                verdict = judge.judge_engine(Cell.model_validate(job["cell"]), message)
                if verdict.status != "PASS":
                    raise InfraError(f"the engine to be measured is not the one that was asked for: {verdict.reason}")
            if message["type"] == "ready":
                self._check_arm(message["imported"], job["arm"])
                return child, message

    def _check_arm(self, imported: dict[str, str], arm: str) -> None:
        if imported != self.ctx.arms[self.pin, measured_arm(arm)].expected:
            raise InfraError(f"the measuring process of {arm} imported other files than the arm's")

    def ask(self, child: Job, request: dict[str, Any]) -> dict[str, Any]:
        try:
            child.send(request)
        except OSError as e:
            raise InfraError(f"a measuring process ended: {e}") from e
        return self._next(child)

    def _next(self, child: Job) -> dict[str, Any]:
        try:
            message = child.receive(self.timeout)
        except JobTimeout:
            raise InfraError(f"a measuring process did not answer within {self.timeout:g} s") from None
        if message is None:
            raise InfraError(f"a measuring process ended by itself: see {self.ctx.folder / 'logs'}")
        if message["type"] == "error":
            raise InfraError(f"a measuring process failed: {message['error']}: {message['message']}")
        return message

    def close(self) -> None:
        for job in self._jobs:
            job.finish()


@contextlib.contextmanager
def live(ctx: Context, pin: str, backend: str) -> Iterator[Live]:
    group = Live(ctx, pin, backend)
    try:
        yield group
    finally:
        group.close()


def overlay_job(ctx: Context, pin: str, arm: str, **fields: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "cwd": str(ctx.folder / "work"),
        "env": {"KVMATRIX_OVERLAY": str(ctx.arms[pin, measured_arm(arm)].manifest)},
        **fields,
    }
