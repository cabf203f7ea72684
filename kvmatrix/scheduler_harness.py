"""vLLM's real ``SimpleCPUOffloadScheduler`` with real block pools and hashes, and no model.

Builds the scheduler for a geometry, fills its CPU tier, runs a lookup and the load that follows it, and reports what was
answered, which blocks would be loaded, and whether every pin was given back.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvmatrix import oracle

MAX_MODEL_LEN_SLACK = 64


def _kv_cache_config(block: int, chunks: list[int | None], num_blocks: int) -> tuple[Any, int]:
    """A KVCacheConfig with one layer per group; ``chunks`` has None for full attention. Also the page size in bytes."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    common = {"block_size": block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**common) if c is None else ChunkedLocalAttentionSpec(**common, attention_chunk_size=c)
        for c in chunks
    ]
    page = specs[0].page_size_bytes
    names = [f"layer.{i}" for i in range(len(specs))]
    placement = {"layers": names, "layer_stride": page * num_blocks, "block_stride": page, "offset": 0}
    known = {f.name for f in dataclasses.fields(KVCacheTensor)}
    if "layers" not in known:  # before vLLM 0.30.0: one tensor shared by layers, without placement
        placement = {"shared_by": names}
    tensor = KVCacheTensor(size=page * num_blocks * len(specs), **placement)
    groups = [KVCacheGroupSpec([n], s) for n, s in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups), page


def _vllm_config(max_model_len: int, block: int) -> Any:
    """The few fields of VllmConfig that the offload scheduler and its coordinator read."""
    return SimpleNamespace(
        kv_events_config=None,
        cache_config=SimpleNamespace(block_size=block),  # where vLLM 0.19.1 has the block size from
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=1),
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=max_model_len),
        max_in_flight_tokens=max_model_len,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_model_len),
        num_prefill_lookahead_tokens=0,
    )


class Unsupported(Exception):
    """This release cannot be asked that; the message is a row's reason."""


class SchedulerUnderTest:
    """One offload scheduler for a geometry, with a real device block pool bound to it.

    Args:
        block: block size of every group, in tokens.
        hash_block: tokens a block hash covers, a divisor of ``block`` (default: ``block``).
        chunks: per group its attention chunk in tokens, None for full attention; one group must be full.
        tokens: longest prompt that will be asked about.
    """

    def __init__(
        self, block: int, chunks: list[int | None], tokens: int, lazy_offload: bool = False, hash_block: int | None = None
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

        init_none_hash(sha256)
        self.block, self.chunks = block, chunks
        hash_block = hash_block or block
        num_blocks = (-(-tokens // block) + 2) * len(chunks) + 2
        config, page = _kv_cache_config(block, chunks, num_blocks)
        kwargs: dict[str, Any] = {"cpu_capacity_bytes": page * num_blocks * len(chunks), "lazy_offload": lazy_offload}
        accepted = inspect.signature(SimpleCPUOffloadScheduler).parameters
        for name, size in (("scheduler_block_size", block), ("hash_block_size", hash_block)):
            if name in accepted:
                kwargs[name] = size
            elif size != block:
                raise Unsupported(f"refused: this release has no {name}: a block hash covers a whole block")
        self.scheduler = SimpleCPUOffloadScheduler(_vllm_config(tokens + MAX_MODEL_LEN_SLACK, block), config, **kwargs)
        self.device_pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=hash_block)
        self.scheduler.bind_gpu_block_pool(self.device_pool)
        self.cpu_pool = self.scheduler.cpu_block_pool
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self._requests = 0

    def request(self, tokens: int) -> Any:
        """A fresh request whose prompt is token ids 0..tokens-1, so that longer prompts share shorter ones' prefixes."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._requests += 1
        return Request(
            request_id=f"r{self._requests}",
            prompt_token_ids=list(range(tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def fill_cpu(self, tokens: int, resident: list[list[bool]] | None = None) -> None:
        """Put the blocks of a ``tokens``-long prompt into the CPU tier; ``resident[group][block]`` leaves some out."""
        everything = [[True] * (tokens // self.block) for _ in self.chunks]
        self.refill_cpu(self.request(tokens), resident or everything)

    def _cache(self, pool: Any, request: Any, blocks: list[Any], group: int, indices: Iterable[int]) -> None:
        """Give ``blocks`` at ``indices`` the hashes of ``request``'s blocks in ``pool``."""
        for index in indices:
            pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=index,
                num_full_blocks=index + 1,
                block_size=self.block,
                kv_cache_group_id=group,
            )

    def refill_cpu(self, request: Any, resident: list[list[bool]]) -> None:
        """Empty the CPU tier, then put the blocks of ``request`` that ``resident[group][block]`` names into it."""
        if not self.cpu_pool.reset_prefix_cache():
            raise RuntimeError("the CPU tier cannot be emptied: a lookup left a block pinned")
        for group, keep in enumerate(resident):
            blocks = self.cpu_pool.get_new_blocks(len(keep))
            self._cache(self.cpu_pool, request, blocks, group, (i for i, kept in enumerate(keep) if kept))
            self.cpu_pool.free_blocks(reversed(blocks))

    def planned_loads(self, request: Any, prefix: int, external: int) -> list[list[bool]]:
        """What :meth:`load` would load, from the hit that the lookup has pinned, where the release pins one."""
        if not hasattr(self.scheduler, "_pending_cpu_hits"):  # before vLLM 0.22.1 nothing is kept between the two calls
            return self.load(request, prefix, external)
        hit = self.scheduler._pending_cpu_hits.get(request.request_id)
        return [[not block.is_null for block in group] for group in hit[0]] if hit else [[] for _ in self.chunks]

    def drop_hit(self, request: Any) -> None:
        """Give back what the last lookup pinned, as a request that gets no blocks does."""
        pending = getattr(self.scheduler, "_pending_cpu_hits", {}).pop(request.request_id, None)
        if pending is not None:
            self.scheduler._free_pending_cpu_hit(pending)

    def lookup(self, request: Any, prefix: int) -> tuple[int, bool]:
        answer, is_async = self.scheduler.get_num_new_matched_tokens(request, prefix)
        return int(answer or 0), bool(is_async)

    def load(self, request: Any, prefix: int, external: int) -> list[list[bool]]:
        """Allocate, let the connector plan its load, complete it; ``[group][i]``: is block ``prefix/block + i`` loaded."""
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.outputs import KVConnectorOutput

        count = (prefix + external) // self.block
        per_group = [self.device_pool.get_new_blocks(count) for _ in self.chunks]
        for group_id, group in enumerate(per_group):
            # Before vLLM 0.30.0 the connector counts the hashed blocks to learn where the device prefix ends.
            self._cache(self.device_pool, request, group, group_id, range(prefix // self.block))
        blocks = KVCacheBlocks(tuple(per_group))
        self.scheduler.update_state_after_alloc(request, blocks, external)
        state = self.scheduler._reqs_to_load.get(request.request_id)
        targets = set(state.transfer_meta.gpu_block_ids) if state is not None else set()
        first = prefix // self.block
        loaded = [[b.block_id in targets for b in group[first:]] for group in per_group]
        if state is not None:
            self.scheduler.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))
        self.scheduler._reqs_to_store.pop(request.request_id, None)
        for group in per_group:
            self.device_pool.free_blocks(reversed(group))
        return loaded


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One lookup case.

    ``case``: ``block``, ``chunks``, ``prompt``, ``prefix`` (tokens) and ``absent`` (``[[group, block], ...]``: what the CPU
    tier lacks). Answers with the lookup's result, what would be loaded, what attention needs and lacks, the ideal, and the
    pins that were not given back.
    """
    block, chunks, prompt, prefix = case["block"], case["chunks"], case["prompt"], case["prefix"]
    full = prompt // block
    resident = [[[g, i] not in case["absent"] for i in range(full)] for g in range(len(chunks))]
    sut = SchedulerUnderTest(block, chunks, prompt)
    sut.fill_cpu(prompt, resident)
    cpu_free, device_free = sut.cpu_pool.get_num_free_blocks(), sut.device_pool.get_num_free_blocks()
    request = sut.request(prompt)
    sut.lookup(request, 0)  # an earlier call on the same request, whose pin the next one must give back
    external, is_async = sut.lookup(request, prefix)
    loaded = sut.load(request, prefix, external)
    return {
        **case,
        "external_tokens": external,
        "is_async": is_async,
        "loaded_blocks": sum(map(sum, loaded)),
        "missing": [oracle.missing_blocks(prefix, external, block, c, flags) for c, flags in zip(chunks, loaded, strict=True)],
        "ideal_tokens": oracle.longest_sound_hit(prefix, prompt, block, list(zip(chunks, resident, strict=True))),
        "leaked_cpu_pins": cpu_free - sut.cpu_pool.get_num_free_blocks(),
        "leaked_device_refs": device_free - sut.device_pool.get_num_free_blocks(),
        "pending_hits": len(getattr(sut.scheduler, "_pending_cpu_hits", ())),
    }


class LookupBench:
    """Times ``get_num_new_matched_tokens`` on one geometry whose whole prompt is in the CPU tier."""

    def __init__(self, block: int, chunks: list[int | None], prompt: int, prefix: int) -> None:
        self.sut = SchedulerUnderTest(block, chunks, prompt)
        self.sut.fill_cpu(prompt)
        self.prefix = prefix
        self.request = self.sut.request(prompt)

    def answer(self) -> int:
        return self.sut.lookup(self.request, self.prefix)[0]

    def time_calls(self, calls: int) -> float:
        """Seconds that ``calls`` lookups took; each drops the pin of the one before, as a retried request does."""
        lookup, request, prefix = self.sut.scheduler.get_num_new_matched_tokens, self.request, self.prefix
        started = time.perf_counter()
        for _ in range(calls):
            lookup(request, prefix)
        return time.perf_counter() - started
