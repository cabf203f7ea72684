"""Processes that stay and answer a request at a time, one an arm: what the perf suite measures in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvmatrix import judge
from kvmatrix.cells import STOCK, Cell
from kvmatrix.errors import InfraError
from kvmatrix.processes import Job, JobTimeout, Parent
from kvmatrix.runner import Context

AGAIN = "stock-again"
"""The A/A arm: stock once more, in processes of its own. What it differs from stock by is noise."""

Tell = Callable[[str], None]


def measured_arm(arm: str) -> str:
    """The arm whose files ``arm`` imports."""
    return STOCK if arm == AGAIN else arm


class Live:
    """Children of one measurement, one an arm, that answer a request at a time.

    ``parent``: forks them; by default the preloaded one of ``backend``.
    """

    def __init__(self, ctx: Context, pin: str, backend: str, parent: Parent | None = None) -> None:
        self.ctx = ctx
        self.pin = pin
        self.parent = parent or ctx.pool.get(ctx.envs[pin].python, ctx.parent_variables(pin, "host", backend))
        self.timeout = ctx.matrix.budgets.cell_timeout_s
        self._jobs: list[Job] = []
        self._arms: dict[int, str] = {}
        """Of each child, by its object: whose it is."""

    def start(self, job: dict[str, Any], name: str) -> tuple[Job, dict[str, Any]]:
        """Start a child and wait until it is ready; its ``ready`` message comes back.

        Raises:
            InfraError: it ended, failed or took too long.
        """
        child = self._begin(job, name)
        return child, self._ready(child, job)

    def start_all(self, jobs: Mapping[str, dict[str, Any]], name: str) -> dict[str, tuple[Job, dict[str, Any]]]:
        """Start a child for each arm's job, all at once, and wait until all are ready; for errors see :meth:`start`."""
        children = {arm: self._begin(job, f"{name}-{arm}") for arm, job in jobs.items()}
        return {arm: (child, self._ready(child, jobs[arm])) for arm, child in children.items()}

    def _begin(self, job: dict[str, Any], name: str) -> Job:
        child = self.parent.start(job, self.ctx.folder / "logs" / f"{name}.log")
        self._jobs.append(child)
        self._arms[id(child)] = job["arm"]
        return child

    def _ready(self, child: Job, job: dict[str, Any]) -> dict[str, Any]:
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

    def _check_arm(self, imported: dict[str, str], arm: str) -> None:
        if imported != self.ctx.arms[self.pin, measured_arm(arm)].expected:
            raise InfraError(f"the measuring process of {arm} imported other files than the arm's")

    def ask(self, child: Job, request: dict[str, Any]) -> dict[str, Any]:
        try:
            child.send(request)
        except OSError as e:
            raise InfraError(f"the measuring process of {self._arms[id(child)]} ended: {e}") from e
        return self._next(child)

    def _next(self, child: Job) -> dict[str, Any]:
        who = f"the measuring process of {self._arms[id(child)]}"
        try:
            message = child.receive(self.timeout)
        except JobTimeout:
            raise InfraError(f"{who} did not answer within {self.timeout:g} s") from None
        if message is None:
            raise InfraError(f"{who} ended by itself: see {self.ctx.folder / 'logs'}")
        if message["type"] == "error":
            raise InfraError(f"{who} failed: {message['error']}: {message['message']}")
        return message

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block of the measurement: the children that are started inside are ended with it."""
        before = len(self._jobs)
        try:
            yield
        finally:
            self._end(before)

    def _end(self, first: int) -> None:
        jobs, self._jobs = self._jobs[first:], self._jobs[:first]
        for job in jobs:
            job.finish()
            self._arms.pop(id(job), None)

    def close(self) -> None:
        self._end(0)


@contextlib.contextmanager
def live(ctx: Context, pin: str, backend: str, parent: Parent | None = None) -> Iterator[Live]:
    group = Live(ctx, pin, backend, parent)
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
