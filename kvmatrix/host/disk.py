"""The connector's disk tier where the device's memory is host memory.

vLLM's ``DiskBackend`` stays as it is: its threads, staging buffers, file and offsets. Only the copies between the device and
a staging buffer, which it has CUDA or HIP make, are made by torch, and :class:`kvmatrix.host.copy.LoadControl` can reach its
loads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvmatrix.host.copy import HostTorch, LoadControl


class _Copies(NamedTuple):
    """Stands in for ``BatchMemcpyParams``: both sides of a copy, ``{layer: [num_blocks, block_bytes]}``."""

    source: dict[str, torch.Tensor]
    target: dict[str, torch.Tensor]


def _copies(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], stream: Any, **_: Any) -> _Copies:
    return _Copies(source, target)


def _copy_blocks(source_ids: list[int], target_ids: list[int], copies: _Copies) -> None:
    for layer, blocks in copies.source.items():
        copies.target[layer][torch.tensor(target_ids)] = blocks[torch.tensor(source_ids)]


def _not_pinned(tensor: torch.Tensor) -> None:
    """Stands in for ``pin_tensor``: what no device reads needs no registration."""


def patch_worker() -> None:
    """Give vLLM's offload worker a disk backend that works without a GPU; nothing before vLLM 0.29.0, which has none."""
    try:
        import vllm.v1.simple_kv_offload.disk_backend as vllm_disk
    except ImportError:
        return
    import vllm.v1.simple_kv_offload.worker as worker

    vllm_disk.torch = HostTorch()
    vllm_disk.build_params = _copies
    vllm_disk.copy_blocks = _copy_blocks
    vllm_disk.pin_tensor = _not_pinned
    worker.DiskBackend = _controlled(vllm_disk.DiskBackend)


def _controlled(backend: Any) -> Any:
    """``backend`` with counters, and with loads that can be held or lost."""

    class HostDiskBackend(backend):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.loads = LoadControl()
            self.copied_blocks = {"load": 0, "store": 0}

        def _do_store(self, gpu_blocks: list[int], disk_slots: list[int], stream: Any) -> None:
            super()._do_store(gpu_blocks, disk_slots, stream)
            self.copied_blocks["store"] += len(gpu_blocks)

        def _do_load(self, disk_slots: list[int], gpu_blocks: list[int], stream: Any) -> None:
            self.loads.wait()
            super()._do_load(disk_slots, gpu_blocks, stream)
            self.copied_blocks["load"] += len(gpu_blocks)

        def _readv_slot(self, buf_slot: int, file_offset: int) -> None:
            super()._readv_slot(buf_slot, file_offset)
            if self.loads.lost([file_offset // self._total_block_bytes]):
                for buffer in self._load_buffer_caches.values():
                    buffer[buf_slot] = 0

    return HostDiskBackend
