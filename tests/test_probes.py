"""What a probe means to establish, and how two answers are compared."""

from __future__ import annotations

import math

import pytest

from kvmatrix import oracle
from kvmatrix.engine import Generation
from kvmatrix.probes import PROBES, logprob_error, plan, random_prompt, reference_comparison

GROUPS = [oracle.chunked(128), oracle.FULL]
NAN = float("nan")


def generation(*steps: dict[int, float], tokens: list[int] | None = None) -> Generation:
    return Generation(tokens or [max(s, key=lambda t: s[t]) for s in steps], list(steps), 0, 0.0)


@pytest.mark.parametrize(
    ("probe", "device", "cpu", "reuse", "loads"),
    [
        ("cold", 0, 0, 0, 0),
        ("device-hit", 160, 0, 0, 0),
        ("pure-cpu-hit", 0, 160, 160, 1 + 5),
        ("mixed-aligned", 128, 160, 32, 1 + 1),
        ("mixed-misaligned", 32, 160, 128, 1 + 4),
        ("mixed-head-gone", 32, 0, 128, 1 + 4),
        ("corrupted-load", 0, 160, 160, 1 + 5),
        ("follow-up", 160, 0, 0, 0),
        ("abort-loading", 32, 160, 128, 1 + 4),
        # A misaligned prefix, none, an aligned one, and nothing at all.
        ("batch", 32 + 0 + 128, 160, 128 + 160 + 32, 5 + 6 + 2),
        # The misaligned hit twice, because its request is preempted, and another request's pure CPU hit.
        ("preempted-loading", 32, 160, 128 + 160, 5 + 5 + 6),
    ],
)
def test_plans(probe: str, device: int, cpu: int, reuse: int, loads: int) -> None:
    p = plan(probe, prompt=161, prefix=32, block=32, groups=GROUPS)
    assert (p.device_tokens, p.cpu_tokens, p.reuse_tokens, p.needed_loads) == (device, cpu, reuse, loads)
    assert p.gone_blocks == (1 if probe == "mixed-head-gone" else 0)


@pytest.mark.parametrize(
    ("prompt", "prefix", "window", "loads"),
    [
        (161, 96, 96, 2 + 2),
        (161, 32, 96, 4 + 3),
        (289, 192, 100, 3 + 3),
        (289, 96, 100, 6 + 4),
        (161, 32, 1, 4 + 0),
        (161, 32, 1000, 4 + 4),
    ],
    ids=["inside the window", "before it", "no multiple", "no multiple, before it", "the token alone", "wider than the prompt"],
)
def test_plans_with_a_sliding_window(prompt: int, prefix: int, window: int, loads: int) -> None:
    """Blocks of the full group, and those of the other one that the window reaches back to."""
    groups = [oracle.FULL, oracle.sliding(window)]
    p = plan("mixed-misaligned", prompt=prompt, prefix=prefix, block=32, groups=groups)
    assert (p.device_tokens, p.reuse_tokens, p.needed_loads) == (prefix, prompt - 1 - prefix, loads)


def test_a_plan_with_two_chunk_sizes() -> None:
    """Aligned means aligned for both."""
    two = [oracle.chunked(64), oracle.chunked(128), oracle.FULL]
    aligned = plan("mixed-aligned", prompt=225, prefix=96, block=32, groups=two)
    assert (aligned.device_tokens, aligned.needed_loads) == (128, 1 + 3 + 3)
    assert plan("mixed-misaligned", prompt=225, prefix=96, block=32, groups=two).needed_loads == 1 + 3 + 4


@pytest.mark.parametrize(
    ("probe", "change"),
    [
        ("nosuch", {}),
        ("mixed-misaligned", {"prefix": 160}),
        ("mixed-misaligned", {"prefix": 40}),
        ("mixed-misaligned", {"prompt": 33}),
        ("mixed-head-gone", {"prompt": 33}),
        ("mixed-aligned", {"prompt": 129}),
        ("mixed-aligned", {"groups": [oracle.FULL]}),
        ("mixed-misaligned", {"prefix": 128}),
        ("follow-up", {"prefix": 128}),
        ("batch", {"prefix": 160}),
        ("preempted-loading", {"prefix": 128}),
    ],
)
def test_a_geometry_that_cannot_establish_its_probe(probe: str, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        plan(probe, **{"prompt": 161, "prefix": 32, "block": 32, "groups": GROUPS} | change)  # type: ignore[arg-type]


def test_a_resumed_hit_may_end_behind_the_prompt() -> None:
    """Its request has generated tokens by then: the fewest loads count, here those of a hit that ends on the boundary."""
    groups = [oracle.chunked(64), oracle.chunked(64), oracle.FULL]

    def loads(new_tokens: int) -> int:
        asked = plan("preempted-loading", prompt=191, prefix=96, block=32, groups=groups, new_tokens=new_tokens)
        return asked.needed_loads

    first, second = (1 + 1 + 2), (1 + 1 + 5)  # up to 160: from 96, and from 0
    assert loads(1) == first + second + first
    assert loads(2) == first + second + (0 + 0 + 3)  # up to 192


def test_the_requests_of_a_batch() -> None:
    asked = plan("batch", prompt=161, prefix=32, block=32, groups=GROUPS).requests
    assert [(r.device_tokens, r.reuse_tokens, r.aligned) for r in asked] == [
        (32, 128, False),
        (0, 160, True),
        (128, 32, True),
        (0, 0, True),
    ]
    # Without a boundary before the end of the hit, the third has a longer misaligned prefix; without chunks all are aligned.
    short = plan("batch", prompt=129, prefix=32, block=32, groups=GROUPS).requests
    assert [(r.device_tokens, r.aligned) for r in short] == [(32, False), (0, True), (64, False), (0, True)]
    full = plan("batch", prompt=161, prefix=32, block=32, groups=[oracle.FULL]).requests
    assert [(r.device_tokens, r.aligned) for r in full] == [(32, True), (0, True), (128, True), (0, True)]


def test_prompts_are_repeatable_and_have_no_special_tokens() -> None:
    prompt = random_prompt(500, 512, 7)
    assert prompt == random_prompt(500, 512, 7)
    assert prompt != random_prompt(500, 512, 8)
    assert prompt[:100] == random_prompt(100, 512, 7)
    assert 3 <= min(prompt) <= max(prompt) < 512


def test_the_largest_difference_counts() -> None:
    a, b = generation({0: -1.0, 1: -2.0, 2: -3.0}), generation({0: -1.0, 1: -2.25, 2: -2.9})
    assert logprob_error(a, b) == logprob_error(b, a) == 0.25
    assert logprob_error(a, a) == 0


def test_steps_after_a_different_choice_are_not_compared() -> None:
    a = generation({0: -0.5, 1: -1.0}, {0: -9.0, 1: -9.5})
    b = generation({0: -1.0, 1: -0.9}, {0: -1.0, 1: -1.5})
    assert logprob_error(a, b) == 0.5
    same_choice = generation({0: -0.5, 1: -1.0}, {0: -1.0, 1: -1.5})
    assert logprob_error(a, same_choice) == 8.0


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_nan_is_never_a_small_error(where: int) -> None:
    """``max`` drops it in most places; a verdict must not."""
    good = {0: -1.0, 1: -2.0, 2: -3.0}
    bad = good | {where: NAN}
    error = logprob_error(generation(bad, tokens=[0]), generation(good))
    assert math.isnan(error) or math.isinf(error)


def test_an_answer_that_is_nan_throughout() -> None:
    bad = generation({0: NAN, 1: NAN}, tokens=[0])
    assert not logprob_error(bad, bad) <= 0.005


def test_the_reference() -> None:
    cold = generation({0: -0.25, 1: -1.5})
    assert reference_comparison(cold, [0], [[-0.25, -1.0]]) == {"tokens": [0], "max_logprob_error": 0.5}


def test_cold_is_the_first_probe() -> None:
    assert PROBES[0] == "cold"
