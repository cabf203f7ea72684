"""What a running engine says about itself, from the process that schedules and the processes that compute.

Methods are attached to vLLM's ``EngineCore`` and ``WorkerBase`` under ``kvmatrix_*`` names, so the same calls work
in-process and over vLLM's own utility and collective RPC. None adds anything to a step; ``kvmatrix_cpu_forget``,
``kvmatrix_preempt``, ``kvmatrix_device_forget``, ``kvmatrix_loads`` and ``kvmatrix_overwrite`` change what they name, all
others only read.
"""

from __future__ import annotations

import time
from typing import Any

from kvmatrix import overlay


def attach() -> None:
    """Attach the readers to vLLM's classes; harmless when repeated."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    EngineCore.kvmatrix_state = core_state
    EngineCore.kvmatrix_cpu_resident = cpu_resident
    EngineCore.kvmatrix_cpu_block_ids = cpu_block_ids
    EngineCore.kvmatrix_cpu_forget = cpu_forget
    EngineCore.kvmatrix_device_forget = device_forget
    EngineCore.kvmatrix_requests = requests
    EngineCore.kvmatrix_preempt = preempt
    WorkerBase.kvmatrix_state = worker_state
    WorkerBase.kvmatrix_loads = control_loads
    WorkerBase.kvmatrix_overwrite = overwrite_device


def _manager(core: Any) -> Any:
    connector = core.scheduler.connector
    return getattr(connector, "scheduler_manager", None)


def _device_pool(core: Any) -> Any:
    return core.scheduler.kv_cache_manager.block_pool


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
        "used_device_blocks": core.scheduler.kv_cache_config.num_blocks - 1 - _device_pool(core).get_num_free_blocks(),
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
    return _copies(core, prompt, _manager(core).cpu_block_pool)


def _copies(core: Any, prompt: list[int], pool: Any) -> list[list[Any]]:
    """``[group][block of the prompt]``: the pool's cached block of it, or None."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    hashes = _block_hashes(core, prompt)
    copies = []
    for group, facts in enumerate(core.scheduler.kv_cache_config.kv_cache_groups):
        size = facts.kv_cache_spec.block_size
        own = hashes if size == pool.hash_block_size else BlockHashListWithBlockSize(hashes, pool.hash_block_size, size)
        found = [pool.get_cached_block(own[i], [group]) for i in range(len(own))]
        copies.append([f[0] if f else None for f in found])
    return copies


def cpu_block_ids(core: Any, prompt: list[int]) -> list[list[int]]:
    """``[group][whole block of the prompt]``: id of the CPU tier's block of it, -1 where it has none."""
    return [[-1 if block is None else block.block_id for block in group] for group in _cpu_copies(core, prompt)]


def cpu_forget(core: Any, prompt: list[int], first: int, last: int) -> None:
    """Evict the prompt's blocks ``first`` to ``last - 1`` of every group from the CPU tier, by the pool's own eviction."""
    gone = {block.block_id for group in _cpu_copies(core, prompt) for block in group[first:last] if block is not None}
    _manager(core).cpu_block_pool.evict_blocks(gone)


def device_forget(core: Any, prompt: list[int], first: int) -> None:
    """Evict the prompt's blocks from ``first`` on, of every group, from the device's prefix cache, where nobody uses them."""
    pool = _device_pool(core)
    cached = [block for group in _copies(core, prompt, pool) for block in group[first:] if block is not None]
    pool.evict_blocks({block.block_id for block in cached if block.ref_cnt == 0})


def requests(core: Any) -> dict[str, dict[str, Any]]:
    """Of each unfinished request, by vLLM's internal id: its status and the number of tokens that it has generated."""
    return {
        name: {"status": request.status.name, "output_tokens": request.num_output_tokens}
        for name, request in core.scheduler.requests.items()
    }


def preempt(core: Any, request_id: str) -> None:
    """Preempt one running request, as the scheduler does when the device is full.

    Raises:
        KeyError: no such request is running.
    """
    scheduler = core.scheduler
    request = next((r for r in scheduler.running if r.request_id == request_id), None)
    if request is None:
        raise KeyError(request_id)
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    # It may be resumed in the very next step, as after a forced reset of the cache, which forgets this for all.
    scheduler.prev_step_scheduled_req_ids.discard(request_id)


def worker_state(worker: Any) -> dict[str, Any]:
    """Facts of a computing process: the backend each attention layer really uses, and blocks the copy backend moved."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    backends = {name: layer.attn_backend.get_name() for name, layer in layers.items() if hasattr(layer, "attn_backend")}
    copier = _copy_backend()
    copied, control = getattr(copier, "copied_blocks", None), getattr(copier, "loads", None)
    return {
        "backends": backends,
        "copied_blocks": dict(copied) if copied else None,
        "lost_blocks": control.lost_blocks if control is not None else None,
        "block_bytes": _block_bytes(),
        "disk": "Disk" in type(copier).__name__,
        "compiled": _compiled_graphs(),
    }


def _block_bytes() -> int:
    """Bytes that one loaded block moves, over all tensors of the device tier; 0 where there is no offload."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return 0
    caches = get_kv_transfer_group().worker_handler.gpu_kv_caches
    return sum(cache[0].numel() * cache.element_size() for cache in caches.values())


def _copy_backend() -> Any:
    """The offload worker's copy backend; None where there is no offload."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    return getattr(getattr(get_kv_transfer_group(), "worker_handler", None), "_backend", None)


def control_loads(worker: Any, what: str, block: int = -1) -> bool:
    """``hold`` loads, ``release`` them, or ``lose`` the CPU tier's ``block`` at its next load; False: this backend cannot."""
    control = getattr(_copy_backend(), "loads", None)
    if control is None:
        return False
    {"hold": control.hold, "release": control.release, "lose": lambda: control.lose(block)}[what]()
    return True


GARBAGE = 0x3C
"""Of every byte of an overwritten block: a small finite number in each floating-point format."""


def overwrite_device(worker: Any) -> int:
    """Overwrite every block of the device tier, so that nothing that was in it can be taken for KV; how many there are."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    caches = get_kv_transfer_group().worker_handler.gpu_kv_caches
    for cache in caches.values():
        cache.fill_(GARBAGE)
    return min(len(cache) for cache in caches.values())


def _compiled_graphs() -> int:
    """Graphs that torch.compile captured in this process (dynamo's own counter)."""
    import sys

    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0
