"""Run inside the default pin's environment: each public case on the real vLLM, and with one thing of vLLM broken or mended.

Prints one JSON object: label -> what :func:`kvmatrix.public_cases.run` found, or ``{"refused": reason}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from vllm.v1.attention.backends import utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler as Manager

from kvmatrix import public_cases
from kvmatrix.scheduler_harness import Unsupported

Patch = AbstractContextManager[Any]
LOOKUP = "get_num_new_matched_tokens"


def around(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """``owner.name`` is replaced by ``change``, which is given the original first."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: change(original, *args, **options))


def declines_misaligned(original: Any, self: Any, request: Any, prefix: int) -> Any:
    chunked = len(self.cpu_kv_cache_config.kv_cache_groups) > 1
    return (0, False) if chunked and prefix % 64 else original(self, request, prefix)


def forgets_the_boundary(original: Any, self: Any, request: Any, prefix: int) -> Any:
    """Serves the last token too, where it ends a block."""
    answer, is_async = original(self, request, prefix)
    return (answer + 16, True) if (request.num_tokens - prefix) % 16 == 0 else (answer, is_async)


def rounds_down(original: Any, self: Any, request: Any, prefix: int) -> Any:
    return original(self, request, prefix // self.block_size * self.block_size)


def reads_anyway(original: Any, self: Any, request: Any, prefix: int) -> Any:
    request.skip_reading_prefix_cache = False
    return original(self, request, prefix)


def whole_chunks(original: Any, chunk: int, *args: Any) -> Any:
    made = original(chunk, *args)
    made[0].seq_lens.fill_(chunk)
    return made


def frees_twice(original: Any, self: Any, gpu: Any, cpu: Any, *rest: Any) -> None:
    original(self, gpu, cpu, *rest)
    self.cpu_block_pool.free_blocks([self.cpu_block_pool.blocks[i] for i in cpu])


def caches_at_once(original: Any, self: Any, output: Any) -> Any:
    """A store is visible before it is copied."""
    specs = original(self, output)
    for gpu, cpu in zip(specs[0], specs[1], strict=True):
        block = self._gpu_block_pool.blocks[gpu]
        self.cpu_block_pool._insert_block_hash(block.block_hash, self.cpu_block_pool.blocks[cpu], num_tokens=None)
    return specs


def stores_too_early(original: Any, self: Any, state: Any, ids: Any) -> Any:
    """Takes the tokens of the step that is being scheduled for computed."""
    state.request.num_computed_tokens += 16
    try:
        return original(self, state, ids)
    finally:
        state.request.num_computed_tokens -= 16


def without_a_word(*args: Any, **options: Any) -> Any:
    raise AssertionError


class Accepts:
    """A scheduler that can be made for any sizes, and fails at its first request."""

    cpu_block_pool = None

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def bind_gpu_block_pool(self, pool: Any) -> None: ...

    get_num_new_matched_tokens = without_a_word


BROKEN: dict[str, tuple[str, Callable[[], Patch]]] = {
    "declined": ("57325-suffix-only", lambda: around(Manager, LOOKUP, declines_misaligned)),
    "not-pinned": ("39702-evicted-before-load", lambda: mock.patch.object(BlockPool, "touch", return_value=None)),
    "nothing-kept": (
        "39702-evicted-before-load",
        lambda: around(Manager, "update_state_after_alloc", lambda original, *args: without_a_word()),
    ),
    "rounded-down": ("28950-inside-a-block", lambda: around(Manager, LOOKUP, rounds_down)),
    "whole-chunks": ("21694-smallest-chunk", lambda: around(utils, "make_local_attention_virtual_batches", whole_chunks)),
    "three-groups": (
        "51150-llama4-groups",
        lambda: around(kv_cache_utils, "get_kv_cache_groups", lambda original, *args: original(*args)[:3]),
    ),
    "half-a-window": (
        "48959-unaligned-window",
        lambda: mock.patch.object(SlidingWindowManager, "_contiguous_blocks_for_hit", return_value=64),
    ),
    "last-token-too": ("44599-at-the-boundaries", lambda: around(Manager, LOOKUP, forgets_the_boundary)),
    "never-given-back": (
        "42085-second-long-prompt",
        lambda: mock.patch.object(Manager, "_process_store_event", return_value=None),
    ),
    "freed-twice": ("42571-double-free", lambda: around(Manager, "_process_store_completion", frees_twice)),
    "bare-assertion": ("56396-block-below-hash", lambda: mock.patch.object(Manager, "__init__", without_a_word)),
    "fails-later": (
        "56396-block-below-hash",
        lambda: mock.patch("vllm.v1.simple_kv_offload.manager.SimpleCPUOffloadScheduler", Accepts),
    ),
    "reads-anyway": ("44585-skips-the-cache", lambda: around(Manager, LOOKUP, reads_anyway)),
    "resets-both": (
        "57727-reset",
        lambda: around(Scheduler, "reset_prefix_cache", lambda original, self: original(self, reset_connector=True)),
    ),
    "resets-nothing": ("57727-reset-with-connector", lambda: mock.patch.object(Manager, "reset", return_value=True)),
    "visible-at-once": ("45704-store-order", lambda: around(Manager, "prepare_store_specs", caches_at_once)),
    "stored-too-early": ("45704-store-order", lambda: around(Manager, "_select_eager_blocks_to_store", stores_too_early)),
    "never-cached": (
        "45704-store-order",
        lambda: around(
            Manager,
            "_process_store_completion",
            lambda original, self, gpu, cpu, *_: self._release_transfer_refs(mock.Mock(gpu_block_ids=gpu, cpu_block_ids=cpu)),
        ),
    ),
}


def found(name: str) -> dict[str, Any]:
    try:
        return public_cases.run(name)
    except Unsupported as e:
        return {"refused": str(e)}


if __name__ == "__main__":
    results = {name: found(name) for name in public_cases.cases()}
    for label, (case, patch) in BROKEN.items():
        with patch():
            results[label] = found(public_cases.PREFIX + case)
    print(json.dumps(results))
