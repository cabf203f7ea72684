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

    def begin(self, job: dict[str, Any], name: str) -> Job:
        """Fork a child for ``job``, whose arm is in it, and do not wait for it: see :meth:`ready`."""
        child = self.parent.start(job, self.ctx.folder / "logs" / f"{name}.log")
        self._jobs.append(child)
        return child

    def ready(self, child: Job, job: dict[str, Any]) -> dict[str, Any]:
        """Wait until the child of ``job`` is ready; its ``ready`` message comes back.

        Raises:
            InfraError: it ended, failed, took too long, is another engine than the one asked for or another arm.
        """
        with_connector = job["geometry"].get("offload", True)  # without it vLLM imports nothing that an arm changes
        while True:
            message = self._next(child)
            if message["type"] == "engine":
                verdict = judge.judge_engine(Cell.model_validate(job["cell"]), message, with_connector)
                if verdict.status != "PASS":
                    raise InfraError(f"the engine to be measured is not the one that was asked for: {verdict.reason}")
            if message["type"] == "ready":
                if with_connector or message["imported"]:
                    self._check_arm(message["imported"], job["arm"])
                return message

    def start_all(self, jobs: dict[str, dict[str, Any]], name: str) -> tuple[dict[str, Job], dict[str, dict[str, Any]]]:
        """Start a child for each arm's job side by side; the children and their ``ready`` messages, by arm.

        Raises:
            InfraError: see :meth:`ready`.
        """
        children = {arm: self.begin(job, f"{name}-{arm}") for arm, job in jobs.items()}
        return children, {arm: self.ready(child, jobs[arm]) for arm, child in children.items()}

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
