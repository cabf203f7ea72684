"""The reference answer of a checkpoint is computed once, and kept for exactly what was asked."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix import checkpoint


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    calls: list[tuple[list[int], int]] = []

    def compute(folder: str, prompt: list[int], new_tokens: int) -> Any:
        calls.append((prompt, new_tokens))
        return [7] * new_tokens, [[-0.1 - len(prompt) / 3, -2.5]] * new_tokens

    monkeypatch.setattr(checkpoint, "reference_logprobs", compute)
    for library in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, SimpleNamespace(__version__="1.0"))
    return calls


def test_the_same_question_is_answered_from_what_was_kept(tmp_path: Path, computed: list[Any]) -> None:
    first = checkpoint.reference(str(tmp_path), [3, 4, 5], 2)
    assert checkpoint.reference(str(tmp_path), [3, 4, 5], 2) == first == ([7, 7], [[-1.1, -2.5]] * 2)
    assert computed == [([3, 4, 5], 2)]
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize("change", ["prompt", "new_tokens", "library"])
def test_another_question_is_computed(
    tmp_path: Path, computed: list[Any], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    checkpoint.reference(str(tmp_path), [3, 4, 5], 2)
    if change == "library":
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="2.0"))
    prompt = [3, 4, 6] if change == "prompt" else [3, 4, 5]
    checkpoint.reference(str(tmp_path), prompt, 3 if change == "new_tokens" else 2)
    assert len(computed) == 2
