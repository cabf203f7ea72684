"""Measuring processes that answer from a script, in place of :func:`kvmatrix.live.live`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


class FakeLive:
    """Children are the names of their arms; each request and its arm are kept in ``asked``."""

    def __init__(self, answer: Answer, ready: dict[str, Any]) -> None:
        self.answer, self.told_ready = answer, ready
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.started: list[dict[str, dict[str, Any]]] = []
        self.open = 0

    def start_all(self, jobs: dict[str, dict[str, Any]], name: str) -> dict[str, tuple[str, dict[str, Any]]]:
        assert self.open == 1, "the processes of a block end before those of the next one start"
        self.started.append(jobs)
        return {arm: (arm, dict(self.told_ready)) for arm in jobs}

    def ask(self, child: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((child, request))
        return self.answer(child, request)

    @contextlib.contextmanager
    def live(self, *_: Any) -> Iterator[FakeLive]:
        self.open += 1
        yield self
        self.open -= 1
