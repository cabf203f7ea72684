"""The traffic of the perf suite, and the machine's model beside it."""

from __future__ import annotations

import itertools

import pytest

from kvmatrix import workloads
from kvmatrix.ceilings import break_even, flop_of_prompt
from kvmatrix.workloads import conversation_prompts

CONFIG = {"layers": "cf", "chunk": 4, "hidden_size": 8, "intermediate_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 2}
CONFIG |= {"vocab_size": 10}


def test_conversations_share_the_system_prompt_and_grow() -> None:
    prompts = conversation_prompts(1281, 12, 512, seed=3)
    system = int(1281 * 0.23)
    assert len(prompts) == 12
    assert len({tuple(p[:system]) for p in prompts}) == 1
    assert all(system < len(p) <= 1281 for p in prompts)
    grown = [i for i, p in enumerate(prompts) for earlier in prompts[:i] if p[: len(earlier)] == earlier]
    assert grown, "no turn continues an earlier one"


def test_the_trace_is_that_of_its_seed() -> None:
    assert conversation_prompts(321, 8, 512, 1) == conversation_prompts(321, 8, 512, 1)
    assert conversation_prompts(321, 8, 512, 1) != conversation_prompts(321, 8, 512, 2)


@pytest.mark.parametrize(("popularity", "one"), [(50.0, True), (0.0, False)])
def test_popularity_chooses_the_conversation(monkeypatch: pytest.MonkeyPatch, popularity: float, one: bool) -> None:
    monkeypatch.setattr(workloads, "POPULARITY", popularity)
    prompts = conversation_prompts(10_000, 4, 512, 5)
    goes_on = all(b[: len(a)] == a for a, b in itertools.pairwise(prompts))
    assert goes_on == one


def test_operations_of_a_prompt_by_hand() -> None:
    weights = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
    seen = {"c": 1 + 2 + 3 + 4 + 1, "f": 1 + 2 + 3 + 4 + 5}
    expected = 2 * 8 * 10 + 2 * 2 * weights * 5 + 4 * 8 * (seen["c"] + seen["f"])
    assert flop_of_prompt(5, 0, CONFIG) == expected
    assert flop_of_prompt(5, 4, CONFIG) == 2 * 8 * 10 + 2 * 2 * weights + 4 * 8 * (1 + 5)


def test_a_load_pays_for_its_step() -> None:
    assert break_even(0.01, 1e-6, 1.01e-4) == pytest.approx(100)
    assert break_even(0.01, 2e-4, 1e-4) is None
