"""What this machine could do at best: the bounds that a load and a recomputation are held against.

Runs inside a child, in the pin's environment and with its threads, so that both bounds are those of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

COPY_BYTES = 1 << 27
"""More than a core's own caches hold."""
MATRIX = 1024
REPEATS = 5


def measure() -> dict[str, Any]:
    """Of each the best of ``REPEATS``: a ceiling is not an average.

    ``copy_bytes_per_s``: bytes copied from one tensor to another in a second. ``matmul_flop_per_s``: float32 operations of a
    matrix product in a second, 2 n^3 for matrices of n x n. ``threads``: torch's.
    """
    import torch

    source, target = torch.ones(COPY_BYTES, dtype=torch.int8), torch.empty(COPY_BYTES, dtype=torch.int8)
    left, right = (torch.rand(MATRIX, MATRIX) for _ in range(2))
    product = torch.empty(MATRIX, MATRIX)
    return {
        "copy_bytes_per_s": COPY_BYTES / _best(lambda: target.copy_(source)),
        "matmul_flop_per_s": 2 * MATRIX**3 / _best(lambda: torch.mm(left, right, out=product)),
        "threads": torch.get_num_threads(),
    }


def _best(call: Callable[[], object]) -> float:
    """Shortest of the calls, in seconds, after one that does not count."""
    call()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def flop_of_prompt(tokens: int, first: int, config: dict[str, Any]) -> float:
    """Floating-point operations to compute the prompt's tokens from ``first`` on, of a dense Llama 4 with gated MLPs.

    Two operations a weight and token for the projections and the MLP; for attention two products of ``heads x head_dim`` with
    each position that the token sees, in a chunked layer those of its own chunk; the head's projection for the last token.
    Norms, rotations and the softmax are left out.

    Args:
        config: ``layers`` (letters), ``chunk``, ``hidden_size``, ``intermediate_size``, ``heads``, ``kv_heads``, ``head_dim``,
            ``vocab_size``.
    """
    hidden, width = config["hidden_size"], config["heads"] * config["head_dim"]
    weights = (
        2 * hidden * width + 2 * hidden * config["kv_heads"] * config["head_dim"] + 3 * hidden * config["intermediate_size"]
    )
    total = 2.0 * hidden * config["vocab_size"]
    for letter in config["layers"]:
        total += 2.0 * weights * (tokens - first)
        seen = (p % config["chunk"] + 1 if letter == "c" else p + 1 for p in range(first, tokens))
        total += 4.0 * width * sum(seen)
    return float(total)


def break_even(step_seconds: float, load_per_token: float, recompute_per_token: float) -> float | None:
    """From how many tokens on loading is predicted to be faster than recomputing; None: never.

    A load costs one step of the engine more than a prompt without one: the step that launches it computes nothing.

    Args:
        step_seconds: what a step costs that computes one token.
        load_per_token, recompute_per_token: seconds a token at the ceilings.
    """
    gained = recompute_per_token - load_per_token
    return step_seconds / gained if gained > 0 else None
