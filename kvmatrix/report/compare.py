"""What the rows of the perf suite compare, and with what: the rules that tables, verdicts and plots share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from kvmatrix.cells import STOCK
from kvmatrix.live import AGAIN
from kvmatrix.records import EXECUTED, BenchRequest, PerfRow
from kvmatrix.stats import MIN_BLOCKS, Interval, Verdict, ratio_interval, verdict

UNSOUND = "unsound answer"
WRONG = "wrong output"
STOCK_UNSOUND = "stock's answer is unsound"
NO_AGAIN = "unresolved (no A/A)"
VERDICTS = (*get_args(Verdict), NO_AGAIN)

Requests = Sequence[Sequence[BenchRequest]]


@dataclass(frozen=True)
class Compared:
    """One arm of a row beside the row's reference."""

    arm: str
    right: bool
    """Whether what it answered may be compared at all."""
    reference: str
    """``stock``, ``cold``, ``no-offload``; empty where there is none."""
    ratio: Interval | None
    """Of its time to the reference's; none of the reference itself, and none where either answered wrongly."""
    verdict: str
    """One of :data:`VERDICTS` where it could be given; otherwise why not, or the width of the noise."""

    @property
    def is_resolved(self) -> bool:
        return self.verdict in ("faster", "slower", "no clear change")


def is_measured(row: PerfRow) -> bool:
    """Whether its figures count: a run that came to an end, right or wrong. A void one has none."""
    return row.status in EXECUTED and bool(row.seconds or row.requests)


def of_group(rows: Iterable[PerfRow], group: str) -> list[PerfRow]:
    return [r for r in rows if r.group == group]


def patches(rows: Iterable[PerfRow]) -> list[str]:
    """Arms that are neither stock nor stock again, in the order of the rows; also those that were left out."""
    arms = dict.fromkeys(a for r in rows if r.group in ("lookup", "generate") for a in (*r.seconds, *r.requests, *r.left_out))
    return [a for a in arms if a not in (STOCK, AGAIN)]


def width(noise: Interval) -> str:
    return f"A/A ±{100 * noise.half_width:.1f} %"


def median_of_blocks(blocks: Sequence[Sequence[float]]) -> float:
    """The median of the blocks' medians, in seconds."""
    return statistics.median(statistics.median(block) for block in blocks)


def is_sound(row: PerfRow, arm: str) -> bool:
    """Whether attention finds all that the lookup of ``arm`` promised."""
    return dict(row.answers.get(arm, {})).get("sound") is not False


def is_right(requests: Requests) -> bool:
    return all(r.right for block in requests for r in block)


def lookups(row: PerfRow) -> list[Compared]:
    """The arms of a lookup row; against stock, where stock's answer is sound."""
    right = {arm: is_sound(row, arm) for arm in row.seconds}
    return _against_stock(row, dict(row.seconds), right, STOCK_UNSOUND, UNSOUND)


def times(requests: Requests) -> list[list[float]]:
    """Seconds to the first token, blocks of requests."""
    return [[r.ttft for r in block] for block in requests]


def generation(row: PerfRow) -> list[Compared]:
    """The arms of a generation row by time to the first token.

    Against stock where all its requests are right; otherwise each against what the same prompt took with nothing cached.
    """
    right = {arm: is_right(requests) for arm, requests in row.requests.items()}
    if right.get(STOCK):
        return _against_stock(row, {a: times(r) for a, r in row.requests.items()}, right, "", WRONG)
    reference = own_reference(row)
    compared = []
    for arm, requests in row.requests.items():
        own = [[r.reference_ttft for r in block if r.reference_ttft is not None] for block in requests]
        whole = [len(block) for block in own] == [len(block) for block in requests]
        ratio = ratio_interval(times(requests), own) if right[arm] and whole else None
        why = WRONG if not right[arm] else "" if whole else "no reference was measured"
        compared.append(Compared(arm, right[arm], reference if ratio else "", ratio, why))
    return compared


def own_reference(row: PerfRow) -> str:
    """What ``reference_ttft`` was taken of: the turns of a conversation have no cold state in the same engine."""
    return "no-offload" if row.workload == "multi-turn" else "cold"


def _against_stock(row: PerfRow, seconds: dict[str, Any], right: dict[str, bool], no_stock: str, wrong: str) -> list[Compared]:
    has_stock = bool(right.get(STOCK))
    ratios = {
        arm: ratio_interval(blocks, seconds[STOCK])
        for arm, blocks in seconds.items()
        if has_stock and right[arm] and arm != STOCK
    }
    again = ratios.get(AGAIN)
    compared = []
    for arm in seconds:
        ratio = ratios.get(arm)
        if not right[arm]:
            word = wrong
        elif not has_stock:
            word = no_stock if STOCK in right else "stock was not measured"
        elif ratio is None:
            word = ""
        elif arm == AGAIN:
            word = width(ratio)
        else:
            # Rows without a resolution claim nothing but what is clear.
            word = verdict(ratio, again, float(row.geometry.get("resolution", 0))) if again else NO_AGAIN
        compared.append(Compared(arm, right[arm], STOCK if has_stock and right[arm] else "", ratio, word))
    return compared


@dataclass(frozen=True)
class BreakEven:
    """Loading ``tokens`` from the CPU tier beside computing them again, in seconds."""

    tokens: int
    load: float
    recompute: float
    ratio: Interval


def break_even(row: PerfRow) -> list[BreakEven]:
    """The measured lengths, shortest first."""
    load, recompute = row.seconds["load"], row.seconds["recompute"]
    points = []
    for index, tokens in enumerate(row.geometry["lengths"]):
        sides = [[[block[index]] for block in side] for side in (load, recompute)]
        points.append(BreakEven(int(tokens), median_of_blocks(sides[0]), median_of_blocks(sides[1]), ratio_interval(*sides)))
    return sorted(points, key=lambda p: p.tokens)


def beats_from(points: Sequence[BreakEven]) -> int | None:
    """The shortest measured length from which on loading is clearly faster at every length; None where there is none."""
    found = None
    for point in reversed(points):
        if point.ratio.high >= 1:
            break
        found = point.tokens
    return found


def plain_or_interval(numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]]) -> str:
    """A ratio with its interval, where there are blocks enough for one; otherwise the ratio of the medians."""
    if len(numerator) >= MIN_BLOCKS:
        return str(ratio_interval(numerator, denominator))
    return f"{median_of_blocks(numerator) / median_of_blocks(denominator):.3f}"
