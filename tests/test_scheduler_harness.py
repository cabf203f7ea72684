"""The constructors that the offload scheduler has had, told apart on made-up ones; real ones run in the scheduler tier."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvmatrix.oracle import Window
from kvmatrix.scheduler_harness import SchedulerUnderTest, Unsupported

CHUNKS = [None, 64]


@dataclass
class OldTensor:
    """As before vLLM 0.30.0."""

    size: int
    shared_by: list[str]


@dataclass
class NewTensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


class Known:
    """A scheduler, whatever its constructor takes."""

    cpu_block_pool = None

    def bind_gpu_block_pool(self, pool: object) -> None:
        self.device_pool = pool


class First(Known):
    """vLLM 0.19.1 to 0.21.0: the block size is the cache's, and a hash covers a block."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, cpu_capacity_bytes: int, lazy_offload: bool = False) -> None:
        self.config, self.lazy = kv_cache_config, lazy_offload
        self.sizes = (vllm_config.cache_config.block_size,) * 2


class Second(Known):
    """From vLLM 0.22.1 on both sizes are asked for."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        cpu_capacity_bytes: int,
        scheduler_block_size: int,
        hash_block_size: int,
        lazy_offload: bool = False,
    ) -> None:
        self.config, self.lazy = kv_cache_config, lazy_offload
        self.sizes = (scheduler_block_size, hash_block_size)


def release(monkeypatch: pytest.MonkeyPatch, scheduler: type[Known], tensor: type) -> None:
    """Put a release of these shapes where the harness imports vLLM from."""

    def spec(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(page_size_bytes=1024, **fields)

    modules: dict[str, dict[str, Any]] = {
        "torch": {"float32": "float32"},
        "vllm.utils.hashing": {"sha256": hash},
        "vllm.v1.core.block_pool": {"BlockPool": SimpleNamespace},
        "vllm.v1.core.kv_cache_utils": {"get_request_block_hasher": lambda *_: None, "init_none_hash": lambda _: None},
        "vllm.v1.simple_kv_offload.manager": {"SimpleCPUOffloadScheduler": scheduler},
        "vllm.v1.kv_cache_interface": {
            "ChunkedLocalAttentionSpec": spec,
            "FullAttentionSpec": spec,
            "SlidingWindowSpec": spec,
            "KVCacheConfig": SimpleNamespace,
            "KVCacheGroupSpec": lambda layers, spec: SimpleNamespace(layers=layers, spec=spec),
            "KVCacheTensor": tensor,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("scheduler", "tensor"), [(First, OldTensor), (Second, OldTensor), (Second, NewTensor)])
def test_each_constructor_gets_its_block_size(monkeypatch: pytest.MonkeyPatch, scheduler: type[Known], tensor: type) -> None:
    release(monkeypatch, scheduler, tensor)
    made = SchedulerUnderTest(16, CHUNKS, 81, lazy_offload=True)
    assert (made.scheduler.sizes, made.scheduler.lazy) == ((16, 16), True)
    assert made.scheduler.device_pool is made.device_pool
    [shared] = made.scheduler.config.kv_cache_tensors
    assert getattr(shared, "shared_by" if tensor is OldTensor else "layers") == ["layer.0", "layer.1"]


def test_smaller_hash_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, Second, NewTensor)
    assert SchedulerUnderTest(16, CHUNKS, 81, hash_block=8).scheduler.sizes == (16, 8)


def test_smaller_hash_blocks_where_a_hash_covers_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, First, OldTensor)
    with pytest.raises(Unsupported, match="no hash_block_size"):
        SchedulerUnderTest(16, CHUNKS, 81, hash_block=8)


def test_each_kind_of_group_has_its_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, Second, NewTensor)
    groups = SchedulerUnderTest(16, [None, 64, Window(40)], 81).scheduler.config.kv_cache_groups
    sizes = [(getattr(g.spec, "attention_chunk_size", 0), getattr(g.spec, "sliding_window", 0)) for g in groups]
    assert sizes == [(0, 0), (64, 0), (0, 40)]
