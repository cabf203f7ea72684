"""Cold answers of different cells held against each other.

Cells that have one model, prompt and dtype must give one answer, whatever their backend, mode, block size, arm and pin.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from typing import Any

from kvmatrix.engine import Generation

STEPS = 4
"""Generated tokens whose logprobs are compared: later ones add little, and a row's message stays small."""

Logprobs = list[list[float]]
"""[steps, vocab], in nats, by token id."""


def first_logprobs(answer: Generation) -> Logprobs:
    """Full-vocabulary logprobs of an answer's first steps."""
    return [[step[token] for token in sorted(step)] for step in answer.logprobs[:STEPS]]


class ColdAnswers:
    """The cold answers of a run's cells so far; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Hashable, list[tuple[str, list[int], Logprobs]]] = {}

    def compare(self, name: str, same: Hashable, tokens: list[int], logprobs: Logprobs) -> dict[str, Any]:
        """Keep the answer of cell ``name``, and hold it against each that was kept with an equal ``same``.

        Tells how many these were, whether all had the same tokens, the largest logprob difference, and with which cell.
        """
        with self._lock:
            others = list(self._known.setdefault(same, []))
            self._known[same].append((name, tokens, logprobs))
        compared = [_compare(tokens, logprobs, their_tokens, theirs) for _, their_tokens, theirs in others]
        # The worst: another token first, then what is not a number, then the largest difference.
        worst = max(
            range(len(others)), key=lambda i: (not compared[i][0], math.isnan(compared[i][1]), compared[i][1]), default=-1
        )
        equal, error = compared[worst] if others else (True, 0.0)
        return {
            "cells": len(others),
            "same_tokens": equal,
            "max_logprob_error": error,
            "with": others[worst][0] if others else "",
        }


def _compare(tokens: list[int], ours: Logprobs, their_tokens: list[int], theirs: Logprobs) -> tuple[bool, float]:
    """Whether two answers have the same tokens as far as both go, and their largest difference in nats."""
    steps = min(len(tokens), len(their_tokens))
    return tokens[:steps] == their_tokens[:steps], _largest_difference(tokens, their_tokens, ours, theirs)


def _largest_difference(tokens: list[int], their_tokens: list[int], ours: Logprobs, theirs: Logprobs) -> float:
    """Up to and including the first step that chose differently; NaN when any figure is."""
    worst = 0.0
    for step, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        differences = [abs(a - b) for a, b in zip(left, right, strict=True)]
        if any(map(math.isnan, differences)):
            return math.nan
        worst = max(worst, *differences)
        if tokens[step] != their_tokens[step]:
            break
    return worst
