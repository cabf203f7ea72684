"""Cold answers of different cells held against each other."""

from __future__ import annotations

import math

from kvmatrix.agreement import STEPS, ColdAnswers, first_logprobs
from kvmatrix.engine import Generation

ROW = [-1.0, -2.0, -0.5]


def test_the_first_answer_has_nothing_to_differ_from() -> None:
    told = ColdAnswers().compare("a", "model", [2], [ROW])
    assert told == {"cells": 0, "same_tokens": True, "max_logprob_error": 0.0, "with": ""}


def test_every_pair_is_compared() -> None:
    answers = ColdAnswers()
    answers.compare("a", "model", [2], [ROW])
    assert answers.compare("b", "model", [2], [[-1.0, -2.25, -0.5]])["max_logprob_error"] == 0.25
    third = answers.compare("c", "model", [2], [[-1.0, -1.5, -0.5]])
    assert (third["cells"], third["max_logprob_error"], third["with"]) == (2, 0.75, "b")


def test_only_answers_to_the_same_are_compared() -> None:
    answers = ColdAnswers()
    answers.compare("a", ("model", 97), [2], [ROW])
    assert answers.compare("b", ("model", 161), [0], [[-9.0, -9.0, -9.0]])["cells"] == 0


def test_another_token_is_worse_than_a_large_difference() -> None:
    answers = ColdAnswers()
    answers.compare("large", "model", [2], [[-1.0, -5.0, -0.5]])
    answers.compare("other-token", "model", [0], [[-0.4, -2.0, -0.5]])
    told = answers.compare("c", "model", [2], [ROW])
    assert (told["same_tokens"], told["with"]) == (False, "other-token")
    assert math.isclose(told["max_logprob_error"], 0.6)


def test_a_nan_is_not_passed_over() -> None:
    answers = ColdAnswers()
    answers.compare("nan", "model", [2], [[-1.0, math.nan, -0.5]])
    answers.compare("near", "model", [2], [ROW])
    told = answers.compare("c", "model", [2], [ROW])
    assert math.isnan(told["max_logprob_error"])
    assert told["with"] == "nan"


def test_a_longer_answer_agrees_with_a_shorter_one_as_far_as_that_goes() -> None:
    answers = ColdAnswers()
    answers.compare("short", "model", [2], [ROW])
    told = answers.compare("long", "model", [2, 1], [ROW, [-3.0, -0.1, -4.0]])
    assert (told["same_tokens"], told["max_logprob_error"]) == (True, 0.0)


def test_what_is_kept_of_an_answer() -> None:
    answer = Generation([0] * (STEPS + 2), [{1: -2.0, 0: -1.0}] * (STEPS + 2), 0, 0.0)
    assert first_logprobs(answer) == [[-1.0, -2.0]] * STEPS
