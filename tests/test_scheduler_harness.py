"""The constructors that the offload scheduler has had, told apart on made-up ones; real ones run in the scheduler tier."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvmatrix.oracle import FULL, chunked, sliding
from kvmatrix.scheduler_harness import SchedulerUnderTest, Unsupported

GROUPS = [FULL, chunked(64)]


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
    made = SchedulerUnderTest(16, GROUPS, 81, lazy_offload=True)
    assert (made.scheduler.sizes, made.scheduler.lazy) == ((16, 16), True)
    assert made.scheduler.device_pool is made.device_pool
    [shared] = made.scheduler.config.kv_cache_tensors
    assert getattr(shared, "shared_by" if tensor is OldTensor else "layers") == ["layer.0", "layer.1"]


def test_smaller_hash_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, Second, NewTensor)
    assert SchedulerUnderTest(16, GROUPS, 81, hash_block=8).scheduler.sizes == (16, 8)


def test_smaller_hash_blocks_where_a_hash_covers_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, First, OldTensor)
    with pytest.raises(Unsupported, match="no hash_block_size"):
        SchedulerUnderTest(16, GROUPS, 81, hash_block=8)


def test_groups_that_a_release_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, scheduler_block_size: int, hash_block_size: int, **kwargs: Any) -> None:
        raise AssertionError("two kinds of groups at most")

    release(monkeypatch, refuse, NewTensor)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="groups with full attention, chunk 64, window 40: two kinds of groups at most"):
        SchedulerUnderTest(16, [*GROUPS, sliding(40)], 81)


def test_each_kind_of_group_has_its_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, Second, NewTensor)
    groups = SchedulerUnderTest(16, [*GROUPS, sliding(40)], 81).scheduler.config.kv_cache_groups
    sizes = [(getattr(g.spec, "attention_chunk_size", 0), getattr(g.spec, "sliding_window", 0)) for g in groups]
    assert sizes == [(0, 0), (64, 0), (0, 40)]


# --- the real scheduler -----------------------------------------------------------------------------------------------

REAL = """
import json
from dataclasses import asdict
from kvmatrix import reuse
from kvmatrix.oracle import FULL, chunked, sliding
from kvmatrix.scheduler_harness import SchedulerUnderTest

found = {}
groups = [FULL, chunked(64), sliding(40), sliding(33), chunked(48)]
sut = SchedulerUnderTest(16, groups, 400)
found["skipped"], found["first needed"] = sut.skipped, sut.needs.firsts


def looked_up(press):
    sut = SchedulerUnderTest(16, [FULL, chunked(64)], 97)
    sut.fill_cpu(97)
    request = sut.request(97)
    external, _ = sut.ask(request, 48)
    planned = sut.planned(request, 48, external)
    faults = press(sut, request, external)
    return asdict(planned), [f for f in faults if f] + [sut.left_behind()]


def survives(sut, request, external):
    taken = sut.press()
    done = sut.load(request, 48, external)
    found["loaded"] = asdict(done)
    return [done.fault, sut.relieve(taken)]


def unpinned(sut, request, external):
    sut.cpu_pool.free_blocks(b for g in sut.scheduler._pending_cpu_hits[request.request_id][0] for b in g if not b.is_null)
    taken = sut.press()
    done = sut.load(request, 48, external)
    return [done.fault]


def forgotten(sut, request, external):
    taken = sut.press()
    next(b for g in sut.scheduler._pending_cpu_hits[request.request_id][0] for b in g if not b.is_null).reset_hash()
    sut.load(request, 48, external)
    return [sut.relieve(taken)]


def pinned_twice(sut, request, external):
    blocks = [b for b in sut.scheduler._pending_cpu_hits[request.request_id][0][0]][:1]
    sut.cpu_pool.touch(blocks)
    fault = sut.planned(request, 48, external).fault
    sut.let_go()
    return [fault]


for press in (survives, unpinned, forgotten, pinned_twice):
    found[press.__name__] = looked_up(press)

shape = {"block": 4, "hash_block": 4, "chunks": [8], "windows": [6], "full_at": 1, "periods": 3}
plain = SchedulerUnderTest._plain
for way in (plain, lambda *_: None):
    SchedulerUnderTest._plain = way
    totals = reuse.sweep([shape], "random")
    found["plain" if way is plain else "looked at"] = {k: v for k, v in totals.items() if k not in ("started", "seconds")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def real(told_in_env: Callable[..., Any]) -> dict[str, Any]:
    """What the default pin's stock scheduler did with the harness."""
    answer: dict[str, Any] = told_in_env(REAL)
    return answer


def test_vllm_drops_just_the_blocks_that_the_oracle_does_not_need(real: dict[str, Any]) -> None:
    """What the next token sees is told by vLLM's own managers and by the definition of each kind of attention alike."""
    assert real["skipped"] == real["first needed"]
    assert real["skipped"][7] == [0, 4, 4, 5, 6]


def test_copies_to_the_null_block_are_the_same_planned_and_done(real: dict[str, Any]) -> None:
    """48 to 96: of the chunked group's three blocks the first lies before the boundary at 64."""
    planned, faults = real["survives"]
    assert (planned["copies"], planned["null_copies"], planned["null_needed"]) == (6, 1, 0)
    assert planned["loaded"] == [[True] * 3] * 2
    assert real["loaded"] == planned
    assert faults == [""]


def test_a_hit_that_was_not_pinned_does_not_survive(real: dict[str, Any]) -> None:
    assert real["unpinned"][1][0].startswith("misplaced: 6 of 6 copies")
    assert real["forgotten"][1][0] == "lost: 1 blocks that were pinned are no more in the CPU tier's index"


def test_a_block_that_is_pinned_twice_is_seen(real: dict[str, Any]) -> None:
    assert real["pinned_twice"][1] == ["mispinned: 6 CPU blocks are pinned for 6 answered, 1 of these not just once", ""]


def test_the_short_way_tells_what_the_long_one_does(real: dict[str, Any]) -> None:
    assert real["plain"] == real["looked at"]
    assert real["plain"]["unsound"] > 0
    assert real["plain"]["null_copies"] > 0
