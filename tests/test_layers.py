"""What the letters of a model's layers mean, in vLLM's config and in transformers' masks."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvmatrix import chunk_sizes
from kvmatrix import layers as letters


def test_sizes_of_chunks() -> None:
    assert [letters.chunk_of(letter, 64) for letter in "cdsf"] == [64, 128, None, None]
    assert letters.chunk_sizes("fdcdc", 64) == [64, 128]
    assert letters.chunk_sizes("ddf", 64) == [128]
    assert letters.chunk_sizes("ssf", 64) == letters.chunk_sizes("f", 64) == []


@pytest.mark.parametrize(
    ("layers", "known"),
    [("cdf", True), ("cc", True), ("sf", True), ("ff", True), ("csf", False), ("ds", False), ("cx", False), ("", False)],
)
def test_chunked_and_sliding_layers_are_never_in_one_model(layers: str, known: bool) -> None:
    assert bool(re.fullmatch(letters.PATTERN, layers)) == known


@pytest.mark.parametrize(
    ("layers", "groups"),
    [("sf", 2), ("ssf", 3), ("cdf", 3), ("ccdf", 4), ("cccfcccf", 4), ("ccfff", 3), ("cccffff", 2), ("cc", 1)],
)
def test_groups_of_a_kind_have_the_rarest_kinds_size_or_the_commonest(layers: str, groups: int) -> None:
    assert letters.kv_groups(layers) == groups


# --- chunk sizes by layer ---------------------------------------------------------------------------------------------


def test_each_layer_sees_its_own_size() -> None:
    config = SimpleNamespace(attention_chunk_size=64, **{chunk_sizes.ATTRIBUTE: [64, 128, 0]})
    seen = [chunk_sizes.of_layer(config, f"model.layers.{i}.self_attn").attention_chunk_size for i in range(3)]
    assert seen == [64, 128, 0]
    assert config.attention_chunk_size == 64


def test_a_model_that_names_no_sizes_is_left_alone() -> None:
    config = SimpleNamespace(attention_chunk_size=64)
    assert chunk_sizes.of_layer(config, "model.layers.1.self_attn") is config


IN_ENV = """
import json, torch
from kvmatrix import chunk_sizes
from vllm.model_executor.models.llama4 import Llama4Attention

mask = chunk_sizes.chunk_mask(7, 3, torch.float32)
seen = [[at for at, value in enumerate(row) if value == 0] for row in mask[0, 0].tolist()]
original = Llama4Attention.__init__
chunk_sizes.give_vllm()
once = Llama4Attention.__init__
chunk_sizes.give_vllm()
print(json.dumps([seen, list(mask.shape), mask.min().item() < -1e30, once is not original, Llama4Attention.__init__ is once]))
"""


def test_in_the_pins_own_environment(run_in_env: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The mask of chunks of three tokens, position by position; and vLLM's class is wrapped once, however often it is asked."""
    done = run_in_env(IN_ENV)
    assert done.returncode == 0, done.stderr
    seen, shape, *facts = json.loads(done.stdout.splitlines()[-1])
    assert seen == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6]]
    assert shape == [1, 1, 7, 7]
    assert facts == [True, True, True]
