"""Ratios of interleaved timings, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Paired ratios of one arm's rounds to another's: the middle, the quartiles, and how many pairs."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{_shown(self.median)} [{_shown(self.low)}, {_shown(self.high)}]"


def _shown(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.01 else f"{ratio:.1e}"


def interleaved_order(arms: Sequence[str], rounds: int) -> list[str]:
    """ABBA ABBA …: ``rounds`` of each arm, so that a drift of the machine falls on both alike."""
    order: list[str] = []
    for index in range(rounds):
        order += arms if index % 2 == 0 else reversed(arms)
    return order


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Ratio of each round of one arm to the round of the other arm beside it.

    Raises:
        ValueError: fewer than two pairs, unequal counts, or a time that is not positive.
    """
    if len(numerator) != len(denominator) or len(numerator) < 2:
        raise ValueError(f"need two or more pairs, got {len(numerator)} and {len(denominator)} rounds")
    if min(*numerator, *denominator) <= 0:
        raise ValueError("a round took no time")
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(statistics.median(ratios), low, high, len(ratios))
