"""Interleaving, ratios of blocks with their intervals, and what may be said of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmatrix.stats import (
    MIN_BLOCKS,
    Interval,
    block_ratios,
    growth_exponent,
    interleaved_order,
    outliers,
    ratio_interval,
    shuffled_order,
    verdict,
    widening,
)

TIMES = st.floats(1e-6, 1e3)
SHAPES = st.tuples(st.integers(2, 8), st.integers(1, 4))


@st.composite
def paired_blocks(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    blocks, rounds = draw(SHAPES)
    side = st.lists(st.lists(TIMES, min_size=rounds, max_size=rounds), min_size=blocks, max_size=blocks)
    return draw(side), draw(side)


# --- order ------------------------------------------------------------------------------------------------------------


def test_the_order_is_abba() -> None:
    assert "".join(interleaved_order(["A", "B"], 4)) == "ABBAABBA"
    assert "".join(interleaved_order(["A", "B", "C"], 2)) == "ABCCBA"
    assert interleaved_order(["A", "B"], 0) == []


@pytest.mark.parametrize("rounds", [1, 5, 10])
def test_every_arm_has_its_rounds(rounds: int) -> None:
    order = interleaved_order(["A", "B", "C"], rounds)
    assert {a: order.count(a) for a in "ABC"} == dict.fromkeys("ABC", rounds)


def test_a_linear_drift_falls_on_both_arms_alike() -> None:
    order = interleaved_order(["A", "B"], 10)
    cost = {a: sum(i for i, x in enumerate(order) if x == a) for a in "AB"}
    assert cost["A"] == cost["B"]


def test_a_drifting_machine_leaves_the_ratio_alone() -> None:
    """It gets slower by a percent a round: the arms' ratio is still what it is, to less than a step of the drift."""
    order = interleaved_order(["A", "B"], 10)
    blocks: dict[str, list[list[float]]] = {"A": [], "B": []}
    for block in range(MIN_BLOCKS):
        for arm in "AB":
            of_arm = [i for i, x in enumerate(order) if x == arm]
            blocks[arm].append([(1.3 if arm == "B" else 1.0) * 1.01 ** (i + 20 * block) for i in of_arm])
    found = ratio_interval(blocks["B"], blocks["A"])
    assert found.estimate == pytest.approx(1.3, rel=1e-9)
    assert found.half_width < 1e-9


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_a_block_counts_as_one_value() -> None:
    """The median of its rounds' ratios, pair by pair: neither the ratio of medians nor the mean."""
    logs = block_ratios([[1.0, 20.0, 300.0], [8.0, 8.0]], [[2.0, 10.0, 100.0], [2.0, 4.0]])
    assert [math.exp(x) for x in logs] == pytest.approx([2.0, math.sqrt(8.0)])


def test_the_estimate_is_the_geometric_mean_of_blocks() -> None:
    found = ratio_interval([[2.0], [8.0]], [[1.0], [1.0]])
    assert found.estimate == pytest.approx(4.0)
    assert found.low < 2.0
    assert found.high > 8.0
    assert found.blocks == 2


def test_a_slow_spell_of_the_machine_cancels_out() -> None:
    spells = [[1.0, 1.0, 9.0], [9.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    found = ratio_interval([[2 * s for s in block] for block in spells], spells)
    assert (found.low, found.estimate, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert str(found) == "2.000 [2.000, 2.000]"


def test_more_rounds_of_the_same_processes_make_no_interval_narrower() -> None:
    of_process = [1.0, 1.1, 0.9, 1.05, 0.95, 1.2, 0.8]
    few, many = ([[x] * rounds for x in of_process] for rounds in (1, 100))
    ones = [[[1.0] * rounds for _ in of_process] for rounds in (1, 100)]
    assert ratio_interval(few, ones[0]).half_width == pytest.approx(ratio_interval(many, ones[1]).half_width)


def test_a_block_far_off_is_not_left_out() -> None:
    calm, far = [[1.0]] * 7, [[1.0]] * 6 + [[100.0]]
    assert ratio_interval(far, calm).high > 2.0


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ([], [], "one or more"),
        ([[]], [[]], "one or more"),
        ([[1.0], []], [[1.0], []], "one or more"),
        ([[1.0, 2.0]], [[1.0]], "pairs"),
        ([[1.0], [2.0]], [[1.0]], "pairs"),
        ([[1.0, 0.0]], [[1.0, 1.0]], "no time"),
        ([[1.0, 1.0]], [[1.0, -1.0]], "no time"),
        ([[1.0]], [[math.nan]], "no time"),
        ([[math.inf]], [[1.0]], "without end"),
    ],
)
def test_what_gives_no_ratio(left: list[list[float]], right: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_ratios(left, right)


def test_one_block_gives_no_interval() -> None:
    with pytest.raises(ValueError, match="one block"):
        ratio_interval([[1.0, 2.0]], [[1.0, 2.0]])


@given(paired_blocks())
@settings(max_examples=30, deadline=None)
def test_an_arm_is_as_fast_as_itself(sides: tuple[list[list[float]], list[list[float]]]) -> None:
    found = ratio_interval(sides[0], sides[0])
    assert (found.low, found.estimate, found.high) == (1.0, 1.0, 1.0)


@given(paired_blocks())
@settings(max_examples=30, deadline=None)
def test_swapping_the_arms_inverts_the_ratio(sides: tuple[list[list[float]], list[list[float]]]) -> None:
    there, back = ratio_interval(*sides), ratio_interval(*reversed(sides))
    assert there.estimate == pytest.approx(1 / back.estimate)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
    assert there.low <= there.estimate <= there.high


@given(paired_blocks(), st.floats(0.01, 100.0))
@settings(max_examples=30, deadline=None)
def test_a_slower_arm_moves_the_whole_interval(sides: tuple[list[list[float]], list[list[float]]], factor: float) -> None:
    before = ratio_interval(*sides)
    after = ratio_interval([[factor * s for s in block] for block in sides[0]], sides[1])
    assert after.estimate == pytest.approx(factor * before.estimate)
    assert after.half_width == pytest.approx(before.half_width, abs=1e-9)


def test_the_same_rows_give_the_same_digits() -> None:
    rng = random.Random(3)
    sides = [[[rng.uniform(1, 2) for _ in range(3)] for _ in range(7)] for _ in range(2)]
    assert ratio_interval(*sides) == ratio_interval(*sides)


def test_the_interval_of_seven_blocks_covers_what_it_says() -> None:
    """95 % where the noise is normal. The plain percentile bootstrap, which covers 88 %, would be red here."""
    rng = random.Random(11)
    samples = 1000
    held = 0
    for _ in range(samples):
        found = ratio_interval([[math.exp(rng.gauss(0.1, 0.02))] for _ in range(MIN_BLOCKS)], [[1.0]] * MIN_BLOCKS)
        held += found.low <= math.exp(0.1) <= found.high
    assert 0.92 <= held / samples <= 0.975


def test_the_widening_is_students() -> None:
    assert widening(7) == pytest.approx(2.4469 / 1.95996 * math.sqrt(7 / 6), rel=1e-4)
    assert 1 < widening(1000) < 1.003


# --- words ------------------------------------------------------------------------------------------------------------


def test_small_ratios_are_shown_in_powers_of_ten() -> None:
    assert str(Interval(0.987, 0.975, 1.0009, 7)) == "0.987 [0.975, 1.001]"
    assert str(Interval(0.0004, 0.00031, 0.012, 7)) == "4.0e-04 [3.1e-04, 0.012]"


def test_the_half_width_is_relative() -> None:
    assert Interval(2.0, 2.0 / 1.01, 2.0 * 1.01, 7).half_width == pytest.approx(math.log(1.01))


CALM = Interval(1.0, 0.995, 1.005, 7)


def around(middle: float, half: float = 0.005, blocks: int = 7) -> Interval:
    return Interval(middle, middle * math.exp(-half), middle * math.exp(half), blocks)


@pytest.mark.parametrize(
    ("arm", "again", "expected"),
    [
        (around(1.0), CALM, "no clear change"),
        (around(1.02), CALM, "slower"),
        (around(0.98), CALM, "faster"),
        (around(1.008), CALM, "no clear change"),  # its lower end is inside the noise
        (around(0.993), CALM, "no clear change"),
        (around(1.02), Interval(1.01, 0.999, 1.021, 7), "unresolved"),
        (around(0.98), Interval(1.012, 1.003, 1.021, 7), "no clear change"),  # noise on one side counts on both
        (around(1.02), Interval(0.988, 0.979, 0.997, 7), "no clear change"),
        (around(1.0, half=0.02), CALM, "unresolved"),
        (around(1.0), around(1.0, half=0.02), "unresolved"),
        (around(3.0, half=0.2), around(1.0, half=0.05), "slower"),  # too wide for "no change", and clear
        (around(0.5, half=0.2), around(1.0, half=0.05), "faster"),
        (around(1.0, blocks=6), CALM, "unresolved"),
        (around(3.0, blocks=6), CALM, "unresolved"),
        (around(3.0), around(1.0, blocks=6), "unresolved"),
    ],
)
def test_verdicts(arm: Interval, again: Interval, expected: str) -> None:
    assert verdict(arm, again, resolution=0.01) == expected


# --- growth -----------------------------------------------------------------------------------------------------------


def test_growth_of_an_exact_power() -> None:
    exponent, low, high = growth_exponent([1e3, 1e4, 1e5], [1e-6, 1e-4, 1e-2])
    assert (exponent, low, high) == pytest.approx((2.0, 2.0, 2.0))


def test_growth_has_an_interval() -> None:
    """By hand: x = 0, 1, 2 and y = 0, 2, 2 have slope 1 and residual sum 2/3; t of one degree is 12.706."""
    exponent, low, high = growth_exponent([1.0, math.e, math.e**2], [1.0, math.e**2, math.e**2])
    assert exponent == pytest.approx(1.0)
    assert high - exponent == pytest.approx(12.706 * math.sqrt(2 / 3 / 2), rel=1e-4)
    assert exponent - low == pytest.approx(high - exponent)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [([1.0, 2.0], [1.0, 2.0]), ([1.0, 2.0, 3.0], [1.0, 2.0]), ([1.0, 2.0, 3.0], [1.0, 0.0, 1.0]), ([2.0] * 3, [1.0, 2.0, 3.0])],
    ids=["two-points", "unequal", "no-time", "one-size"],
)
def test_what_has_no_growth(tokens: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"points|positive|identical"):
        growth_exponent(tokens, seconds)


def test_outliers_are_outside_the_outer_fences() -> None:
    calm = [float(x) for x in range(100, 121)]  # quartiles 105 and 115: fences 75 and 145
    assert outliers(calm) == 0
    assert outliers([*calm[1:], 144.0]) == 0
    assert outliers([*calm[1:-1], 60.0, 160.0]) == 2
    assert outliers([]) == outliers([1.0]) == outliers([1.0, 1.0, 9.0]) == 0


def test_an_order_of_chance_has_every_arm_in_each_round_and_none_after_itself() -> None:
    order = shuffled_order(["A", "B", "C"], 200, seed=1)
    assert all(sorted(order[i : i + 3]) == ["A", "B", "C"] for i in range(0, 600, 3))
    assert all(a != b for a, b in itertools.pairwise(order))
    firsts = order[::3]
    assert min(firsts.count(arm) for arm in "ABC") > 40
    assert order == shuffled_order(["A", "B", "C"], 200, seed=1) != shuffled_order(["A", "B", "C"], 200, seed=2)
    assert shuffled_order(["A"], 3, seed=1) == ["A"] * 3
