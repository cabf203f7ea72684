"""Ratios of interleaved timings, their intervals, and what may be said of them.

The unit of repetition is the block: one new process an arm. Rounds of one process share whatever that process drew (address
layout, hash seed, where the allocator put what), so more rounds make no interval narrower; more blocks do.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MIN_BLOCKS = 7
"""Fewer give no verdict: the interval of a handful of processes says more about its method than about the arms."""

CONFIDENCE = 0.95
RESAMPLES = 9_999
SEED = 7
"""Fixed, so that the table of a row is the same byte for byte whenever it is made."""

Verdict = Literal["faster", "slower", "no clear change", "unresolved"]
Rounds = Sequence[Sequence[float]]
"""Blocks of rounds, in seconds."""


@dataclass(frozen=True)
class Interval:
    """A ratio of two arms' times with its 95 % interval over ``blocks`` blocks."""

    estimate: float
    low: float
    high: float
    blocks: int

    @property
    def half_width(self) -> float:
        """Half the interval's length in logarithms: about its relative half-width."""
        return math.log(self.high / self.low) / 2

    @property
    def reach(self) -> float:
        """How far it gets from 1 at the farther end, in logarithms."""
        return max(abs(math.log(self.low)), abs(math.log(self.high)))

    def __str__(self) -> str:
        return f"{shown(self.estimate)} [{shown(self.low)}, {shown(self.high)}]"


def shown(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.01 else f"{ratio:.1e}"


def interleaved_order(arms: Sequence[str], rounds: int) -> list[str]:
    """ABBA ABBA …: ``rounds`` of each arm, so that a drift of the machine falls on both alike."""
    order: list[str] = []
    for index in range(rounds):
        order += arms if index % 2 == 0 else reversed(arms)
    return order


def shuffled_order(arms: Sequence[str], rounds: int, seed: int) -> list[str]:
    """``rounds`` of each arm, in every round each arm once, in an order of chance, the same for the same seed.

    No arm comes right after itself: it would find its own code and data in the processor's caches, the others would not. With
    several arms ABBA does that to the first and the last of them.
    """
    rng = random.Random(seed)
    order: list[str] = []
    for _ in range(rounds):
        left = list(arms)
        rng.shuffle(left)
        if order and len(left) > 1 and left[0] == order[-1]:
            left[0], left[-1] = left[-1], left[0]
        order += left
    return order


def block_ratios(numerator: Rounds, denominator: Rounds) -> list[float]:
    """Per block, the median of its rounds' log ratios: round i against round i, the same prompt or the same moment.

    Raises:
        ValueError: no blocks, an empty one, unequal shapes, or a time that is not positive and finite.
    """
    shapes = [[len(block) for block in side] for side in (numerator, denominator)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"rounds have no pairs: {shapes[0]} and {shapes[1]} of them in the blocks")
    if not shapes[0] or 0 in shapes[0]:
        raise ValueError("need one or more blocks, each of one or more rounds")
    if not all(0 < s < math.inf for side in (numerator, denominator) for block in side for s in block):
        raise ValueError("a round took no time, or one without end")
    return [
        statistics.median(math.log(a) - math.log(b) for a, b in zip(above, below, strict=True))
        for above, below in zip(numerator, denominator, strict=True)
    ]


def ratio_interval(numerator: Rounds, denominator: Rounds) -> Interval:
    """The geometric mean of the blocks' ratios, with a 95 % interval bootstrapped over the blocks.

    The interval is scipy's percentile bootstrap of :data:`RESAMPLES` resamples, its ends moved out by :func:`widening`: a
    bootstrap of n values is too narrow by sqrt((n - 1) / n), and knows nothing of Student's t. How often an interval held the
    truth, in percent of 4,000 samples of blocks (a rate is good to 0.4; 2,000 resamples each):

    ======  ==================  ==========  ====  ===========  ===========  ===========  =========
    blocks  noise               percentile  BCa   **widened**  widened BCa  bootstrap-t  Student t
    ======  ==================  ==========  ====  ===========  ===========  ===========  =========
    5       normal              84.8        84.6  95.0         94.7         95.5         95.7
    7       normal              87.6        87.4  94.4         94.1         94.4         95.0
    7       t, 3 degrees        85.2        83.1  95.0         93.6         92.4         95.2
    7       lognormal, s = 0.7  82.0        83.2  89.0         90.4         91.7         88.6
    12      normal              91.2        91.0  95.4         94.9         95.2         95.3
    ======  ==================  ==========  ====  ===========  ===========  ===========  =========

    BCa's correction of bias and skewness is itself estimated from the few values: it helps under skewed noise only, and where
    blocks agree it is undefined. bootstrap-t is a third longer at five blocks. Student's t is as good under symmetric noise,
    and knows no skewness at all. Where all blocks agree the interval is the estimate.

    Raises:
        ValueError: as :func:`block_ratios`, or fewer than two blocks.
    """
    logs = block_ratios(numerator, denominator)
    if len(logs) < 2:
        raise ValueError("one block has no interval: need two or more")
    return _bootstrapped(tuple(logs))


@functools.cache
def _bootstrapped(logs: tuple[float, ...]) -> Interval:
    """The interval of the blocks' log ratios; sentences, tables and plots of a row all ask for the same ones."""
    # Slow to import, and most of the commands that import this module measure nothing.
    from scipy.stats import bootstrap

    found = bootstrap(
        (logs,),
        lambda x, axis: x.mean(axis=axis),
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=SEED,
    ).confidence_interval
    estimate, factor = statistics.fmean(logs), widening(len(logs))
    # The mean of a resample of equal blocks may differ from the estimate in the last digit: an end never passes it.
    low = estimate - factor * max(0.0, estimate - float(found.low))
    high = estimate + factor * max(0.0, float(found.high) - estimate)
    return Interval(math.exp(estimate), math.exp(low), math.exp(high), len(logs))


def widening(blocks: int) -> float:
    """What the length of a 95 % percentile bootstrap of ``blocks`` values is to be multiplied by; near 1 for many of them."""
    from scipy.stats import norm, t

    middle = (1 + CONFIDENCE) / 2
    return float(t.ppf(middle, blocks - 1) / norm.ppf(middle) * math.sqrt(blocks / (blocks - 1)))


def verdict(arm: Interval, again: Interval, resolution: float) -> Verdict:
    """What may be said of an arm, given ``again``: what stock measured once more differs by is noise, whatever it comes from.

    ``resolution``: the half-width over which "no clear change" would say too much. It does not stand in the way of a clear one.
    """
    if min(arm.blocks, again.blocks) < MIN_BLOCKS:
        return "unresolved"
    if math.log(arm.low) > again.reach:
        return "slower"
    if math.log(arm.high) < -again.reach:
        return "faster"
    return "unresolved" if max(arm.half_width, again.half_width) > resolution else "no clear change"


def growth_exponent(tokens: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(exponent, low, high) of seconds as a power of tokens: least squares of the logarithms, with Student's 95 % interval.

    Raises:
        ValueError: fewer than three points, unequal counts, equal tokens only, or a value that is not positive.
    """
    if len(tokens) != len(seconds) or len(tokens) < 3:
        raise ValueError(f"need three or more points, got {len(tokens)} and {len(seconds)}")
    if min(*tokens, *seconds) <= 0:
        raise ValueError("tokens and seconds must be positive")
    from scipy.stats import linregress, t

    line = linregress([math.log(x) for x in tokens], [math.log(y) for y in seconds])
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(tokens) - 2) * line.stderr)
    return float(line.slope), float(line.slope) - reach, float(line.slope) + reach


def outliers(rounds: Sequence[float]) -> int:
    """How many rounds lie outside Tukey's outer fences, three interquartile ranges from the quartiles. They stay in."""
    if len(rounds) < 2:
        return 0
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    fence = 3 * (high - low)
    return sum(s < low - fence or s > high + fence for s in rounds)
