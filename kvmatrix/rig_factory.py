"""Builds vLLM's real ``Scheduler`` with the real offload connector for small geometries, without a model."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from kvmatrix.oracle import FULL, Attention
from kvmatrix.scheduler_harness import Unsupported, kv_cache_config

BLOCK = 4
"""Tokens of a block in every group; matrix.toml's chunks are checked against it by :mod:`kvmatrix.config`."""
LONGEST_PROMPT = 44
LONGEST_ANSWER = 6
MAX_MODEL_LEN = 52
BUDGET = 16
"""Most tokens that a step may compute: long prompts take several steps, and lazy mode has a free queue to watch over."""
MAX_REQUESTS = 4
"""Requests that run side by side."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """vLLM says for each scheduler that it is made, and for each reset that it is refused."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _TextModel:
    """A model's configuration as far as scheduling asks: a decoder of text, with nothing special."""

    max_model_len = MAX_MODEL_LEN
    runner_type = "generate"
    architectures: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


NO_ADMISSION = (
    "refused: this release admits a request that waits for a load without keeping blocks free for its rest:"
    " on a small device it can stop for good, whatever the lookup"
)


def vllm_config(lazy: bool) -> Any:
    """A real VllmConfig, but for the model: none is needed, and to read one takes seconds."""
    from vllm.config import CacheConfig, KVTransferConfig, SchedulerConfig, VllmConfig

    scheduler = SchedulerConfig(
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=False,
    )
    transfer = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both", kv_connector_extra_config={"lazy_offload": lazy}
    )
    config = VllmConfig(
        scheduler_config=scheduler, cache_config=CacheConfig(enable_prefix_caching=True), kv_transfer_config=transfer
    )
    config.model_config = _TextModel()
    config.cache_config.block_size = BLOCK
    return config


@cache
def _parameters(call: Any) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)


def _accepted(call: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those of ``given`` that this release's ``call`` has a parameter for."""
    return {name: value for name, value in given.items() if name in _parameters(call)}


class Factory:
    """Makes schedulers of one shape; what is the same for all of them is made once.

    Args:
        local: the groups behind the first, which is of full attention.
        lazy: the connector's lazy mode.

    Raises:
        Unsupported: this release's scheduler cannot be built so.
    """

    def __init__(self, local: Sequence[Attention], lazy: bool) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.groups = [FULL, *local]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        try:
            self._config = vllm_config(lazy)
            self.scheduler(self.least_blocks, self.least_blocks)
        except (TypeError, AttributeError, ValueError) as e:
            raise Unsupported(f"refused: this release's scheduler cannot be built without a model: {e}") from e

    @property
    def least_blocks(self) -> int:
        """Device blocks for one request of any length, the null block and one spare."""
        return len(self.groups) * -(-MAX_MODEL_LEN // BLOCK) + 2

    def scheduler(self, device_blocks: int, cpu_blocks: int) -> Any:
        """A scheduler over empty tiers of these sizes, in blocks with the null block."""
        from vllm.v1.core.sched.scheduler import Scheduler

        if not hasattr(Scheduler, "_request_remaining_blocks"):  # 0.19.1
            raise Unsupported(NO_ADMISSION)

        kv_config, page = kv_cache_config(BLOCK, self.groups, device_blocks)
        extra = self._config.kv_transfer_config.kv_connector_extra_config
        extra["cpu_bytes_to_use"] = page * len(self.groups) * cpu_blocks
        self._config.cache_config.num_gpu_blocks = device_blocks
        # No request asks for structured output.
        grammars = SimpleNamespace(should_advance=lambda *_, **__: False, accept_tokens=lambda *_: True)
        given = {
            "vllm_config": self._config,
            "kv_cache_config": kv_config,
            "structured_output_manager": grammars,
            "block_size": BLOCK,
            "hash_block_size": BLOCK,
        }
        return Scheduler(**_accepted(Scheduler, given))

    def request(self, name: str, tokens: list[int], answer: int) -> Any:
        """A request for ``answer`` tokens after the prompt ``tokens``."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        given: dict[str, Any] = {
            "request_id": name,
            "prompt_token_ids": tokens,
            "sampling_params": SamplingParams(max_tokens=answer, ignore_eos=True),
            "pooling_params": None,
            "block_hasher": self._hasher,
            "eos_token_id": None,
        }
        return Request(**_accepted(Request, given))
