"""What a running engine says about itself, from the process that schedules and the processes that compute.

Methods are attached to vLLM's ``EngineCore`` and ``WorkerBase`` under ``kvmatrix_*`` names, so the same calls work
in-process and over vLLM's own utility and collective RPC. All but ``kvmatrix_cpu_forget`` only read; none adds anything to a
step.
"""

from __future__ import annotations

from typing import Any

from kvmatrix import overlay


def attach() -> None:
    """Attach the readers to vLLM's classes; harmless when repeated."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    EngineCore.kvmatrix_state = core_state
    EngineCore.kvmatrix_cpu_resident = cpu_resident
    EngineCore.kvmatrix_cpu_blocks = cpu_blocks
    EngineCore.kvmatrix_cpu_forget = cpu_forget
    WorkerBase.kvmatrix_state = worker_state


def _manager(core: Any) -> Any:
    connector = core.scheduler.connector
    return getattr(connector, "scheduler_manager", None)


def core_state(core: Any) -> dict[str, Any]:
    """Facts of the scheduling process: imported digests, KV groups, resolved configuration, connector accounting."""
    config = core.vllm_config
    manager = _manager(core)
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    state: dict[str, Any] = {
        "imported": overlay.imported_digests(),
        "groups": [_group_facts(g) for g in groups],
        "num_gpu_blocks": core.scheduler.kv_cache_config.num_blocks,
        "block_size": config.cache_config.block_size,
        "cache_dtype": str(config.cache_config.cache_dtype),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "compilation_mode": getattr(config.compilation_config.mode, "name", str(config.compilation_config.mode)),
        "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", None),
        "has_requests": bool(core.scheduler.has_requests()),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "offload": None,
    }
    if manager is not None:
        state["offload"] = {
            "mode": "lazy" if manager._lazy_mode else "eager",
            "num_cpu_blocks": manager.num_cpu_blocks,
            "pending_stores": bool(manager.has_pending_stores())
            if hasattr(manager, "has_pending_stores")
            else bool(manager._store_event_to_blocks),
            "pending_loads": len(manager._reqs_to_load),
            "pending_hits": len(getattr(manager, "_pending_cpu_hits", ())),
            "used_cpu_blocks": manager.num_cpu_blocks - manager.cpu_block_pool.get_num_free_blocks(),
        }
    return state


def _group_facts(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    return {
        "kind": type(spec).__name__,
        "block_size": spec.block_size,
        "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
        "sliding_window": getattr(spec, "sliding_window", None),
        "layers": list(group.layer_names),
    }


def cpu_resident(core: Any, prompt: list[int]) -> int:
    """Tokens of ``prompt`` that the CPU tier alone would serve: its lookup from position 0, which pins nothing.

    A lookup from 0 has no device prefix, so no arm can change its answer.
    """
    found = _manager(core).cpu_coordinator.find_longest_cache_hit(_block_hashes(core, prompt), len(prompt) - 1)
    return int(found[1])


def _block_hashes(core: Any, prompt: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id="kvmatrix-residency",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=core.request_block_hasher,
    ).block_hashes


def _cpu_copies(core: Any, prompt: list[int]) -> list[list[Any]]:
    """``[group][block of the prompt]``: the CPU tier's block of it, or None."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    hashes, pool = _block_hashes(core, prompt), _manager(core).cpu_block_pool
    copies = []
    for group, facts in enumerate(core.scheduler.kv_cache_config.kv_cache_groups):
        size = facts.kv_cache_spec.block_size
        own = hashes if size == pool.hash_block_size else BlockHashListWithBlockSize(hashes, pool.hash_block_size, size)
        found = [pool.get_cached_block(own[i], [group]) for i in range(len(own))]
        copies.append([f[0] if f else None for f in found])
    return copies


def cpu_blocks(core: Any, prompt: list[int]) -> list[list[bool]]:
    """``[group][whole block of the prompt]``: does the CPU tier hold it."""
    return [[block is not None for block in group] for group in _cpu_copies(core, prompt)]


def cpu_forget(core: Any, prompt: list[int], first: int, last: int) -> None:
    """Evict the prompt's blocks ``first`` to ``last - 1`` of every group from the CPU tier, by the pool's own eviction."""
    gone = {block.block_id for group in _cpu_copies(core, prompt) for block in group[first:last] if block is not None}
    _manager(core).cpu_block_pool.evict_blocks(gone)


def worker_state(worker: Any) -> dict[str, Any]:
    """Facts of a computing process: the backend each attention layer really uses, and blocks the copy backend moved."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    layers = worker.vllm_config.compilation_config.static_forward_context
    backends = {name: layer.attn_backend.get_name() for name, layer in layers.items() if hasattr(layer, "attn_backend")}
    copied = None
    if has_kv_transfer_group():
        handler = getattr(get_kv_transfer_group(), "worker_handler", None)
        copied = getattr(getattr(handler, "_backend", None), "copied_blocks", None)
    return {"backends": backends, "copied_blocks": dict(copied) if copied else None, "compiled": _compiled_graphs()}


def _compiled_graphs() -> int:
    """Graphs that torch.compile captured in this process (dynamo's own counter)."""
    import sys

    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0
