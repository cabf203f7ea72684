"""Interleaving and paired ratios."""

from __future__ import annotations

import pytest

from kvmatrix.stats import interleaved_order, paired_ratio


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


def test_ratios_are_of_pairs() -> None:
    ratio = paired_ratio([1.0, 20.0, 300.0], [2.0, 10.0, 100.0])
    assert (ratio.median, ratio.pairs) == (2.0, 3)
    assert (ratio.low, ratio.high) == (1.25, 2.5)


def test_a_slow_spell_of_the_machine_cancels_out() -> None:
    spell = [1.0, 1.0, 9.0, 9.0, 1.0]
    ratio = paired_ratio([2.0 * s for s in spell], [1.0 * s for s in spell])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)
    assert str(ratio) == "2.000 [2.000, 2.000]"


def test_nothing_is_left_out() -> None:
    assert paired_ratio([1.0, 1.0, 1.0, 100.0], [1.0] * 4).high > 1.0


@pytest.mark.parametrize(
    ("left", "right"),
    [([1.0], [1.0]), ([], []), ([1.0, 2.0], [1.0, 2.0, 3.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, -1.0])],
    ids=["one-pair", "none", "unequal", "zero", "negative"],
)
def test_what_gives_no_ratio(left: list[float], right: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|no time"):
        paired_ratio(left, right)
