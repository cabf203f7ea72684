"""Letters that name a model's layers in order, and what they mean: ``c`` and ``d`` are chunked-local layers, ``d`` with chunks
twice as large; ``s`` has a sliding window; ``f`` is full attention. One size, in tokens, goes with all of them."""

from __future__ import annotations

from collections import Counter

from kvmatrix import oracle

CHUNKED = {"c": 1, "d": 2}
"""Chunked-local letters, and their chunks in sizes."""
SLIDING = "s"
PATTERN = "([cdf]+|[sf]+)"
"""Chunked-local and sliding-window layers are two architectures: no model has both."""


def chunk_of(letter: str, size: int) -> int | None:
    """Tokens of a layer's attention chunks; None where it has none."""
    return CHUNKED[letter] * size if letter in CHUNKED else None


def attention(letter: str, size: int) -> oracle.Attention:
    """How a layer attends; ``size`` is its chunk's or its window's, in tokens."""
    return oracle.sliding(size) if letter == SLIDING else oracle.of_chunk(chunk_of(letter, size))


def chunk_sizes(layers: str, size: int) -> list[int]:
    """The attention chunk sizes of a model, each once, smallest first."""
    return sorted({CHUNKED[letter] * size for letter in layers if letter in CHUNKED})


def kv_groups(layers: str) -> int:
    """KV groups that vLLM makes: equal-sized ones of the rarest kind's layer count, or of the commonest's where that is less
    than half as much again."""
    counts = Counter(layers).values()
    few, many = min(counts), max(counts)
    size = many if many < 1.5 * few else few
    return sum(-(-n // size) for n in counts)
