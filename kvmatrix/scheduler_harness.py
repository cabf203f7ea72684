"""vLLM's real ``SimpleCPUOffloadScheduler`` with real block pools and hashes, and no model.

Builds the scheduler for a geometry, fills its CPU tier, runs a lookup and the load that follows it, and reports what was
answered, which blocks would be loaded and from where, what is pinned meanwhile, and whether every pin was given back.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvmatrix import oracle
from kvmatrix.oracle import Attention, Needs

MAX_MODEL_LEN_SLACK = 64


def group_spec(block: int, group: Attention) -> Any:
    """vLLM's spec of a small layer that attends so."""
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

    common = {"block_size": block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if group.kind == "full":
        return FullAttentionSpec(**common)
    if group.kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=group.size)
    return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.size)


def kv_cache_config(block: int, groups: Sequence[Attention], num_blocks: int) -> tuple[Any, int]:
    """A KVCacheConfig with one layer per group, and the page size in bytes."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    specs = [group_spec(block, g) for g in groups]
    page = specs[0].page_size_bytes
    names = [f"layer.{i}" for i in range(len(specs))]
    placement = {"layers": names, "layer_stride": page * num_blocks, "block_stride": page, "offset": 0}
    known = {f.name for f in dataclasses.fields(KVCacheTensor)}
    if "layers" not in known:  # before vLLM 0.30.0: one tensor shared by layers, without placement
        placement = {"shared_by": names}
    tensor = KVCacheTensor(size=page * num_blocks * len(specs), **placement)
    layers = [KVCacheGroupSpec([n], s) for n, s in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=layers), page


def vllm_config(max_model_len: int, block: int) -> Any:
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


@dataclass
class Loads:
    """What a hit loads, or would load."""

    loaded: list[list[bool]] = field(default_factory=list)
    """``[group][i]``: does block ``prefix / block + i`` get its own copy from the CPU tier."""
    fault: str = ""
    """What is wrong with how it is done, soundness aside: a code, a colon and a sentence. Empty: nothing."""
    copies: int = 0
    """Blocks that are copied."""
    null_copies: int = 0
    """Of these, with the device's null block for a target: the transfer is wasted, and the KV is nowhere."""
    null_needed: int = 0
    """Of ``null_copies``, blocks that attention needs."""


def contract_fault(answer: Any, is_async: Any, left: int, block: int) -> str:
    """What no caller may be answered; empty when the answer is a possible one.

    ``left``: prompt tokens behind the device prefix, less the last one, which is always computed.
    """
    if answer is None:
        return "answers None, which asks to be asked again for ever: nothing is under way that would change it"
    if answer < 0 or answer % block:
        return f"answers {answer} tokens, which is no number of blocks of {block}"
    if answer > left:
        return f"answers {answer} tokens where at most {left} can be served"
    if bool(is_async) != (answer > 0):
        return f"answers ({answer}, {is_async}), a hit is loaded asynchronously and a miss is not"
    return ""


class SchedulerUnderTest:
    """One offload scheduler for a geometry, with a real device block pool bound to it.

    Args:
        block: block size of every group, in tokens.
        hash_block: tokens a block hash covers, a divisor of ``block`` (default: ``block``).
        groups: how each group attends; one must be full.
        tokens: longest prompt that will be asked about.

    Raises:
        Unsupported: this release cannot have such groups.
    """

    def __init__(
        self,
        block: int,
        groups: Sequence[Attention],
        tokens: int,
        lazy_offload: bool = False,
        hash_block: int | None = None,
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

        init_none_hash(sha256)
        self.block, self.groups = block, groups
        hash_block = hash_block or block
        self.hash_block = hash_block
        longest = -(-tokens // block)
        self.needs = Needs(block, groups, longest)
        num_blocks = (longest + 2) * len(groups) + 2
        config, page = kv_cache_config(block, groups, num_blocks)
        kwargs: dict[str, Any] = {"cpu_capacity_bytes": page * num_blocks * len(groups), "lazy_offload": lazy_offload}
        accepted = inspect.signature(SimpleCPUOffloadScheduler).parameters
        for name, size in (("scheduler_block_size", block), ("hash_block_size", hash_block)):
            if name in accepted:
                kwargs[name] = size
            elif size != block:
                raise Unsupported(f"refused: this release has no {name}: a block hash covers a whole block")
        try:
            self.scheduler = SimpleCPUOffloadScheduler(vllm_config(tokens + MAX_MODEL_LEN_SLACK, block), config, **kwargs)
        except (AssertionError, NotImplementedError, ValueError) as e:
            together = ", ".join(map(str, groups))
            raise Unsupported(f"refused: this release has no scheduler for groups with {together}: {e}") from e
        self.device_pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=hash_block)
        self.scheduler.bind_gpu_block_pool(self.device_pool)
        self.cpu_pool = self.scheduler.cpu_block_pool
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self._requests = 0
        self.stored: list[list[Any]] = []
        """``[group][block of the prompt]``: the CPU tier's block of it, None where it has none."""
        self.pins = hasattr(self.scheduler, "_pending_cpu_hits")
        """Whether this release keeps what a lookup found for the load that follows (from vLLM 0.22.1 on)."""
        self.skipped = self._skipped(longest)
        """``[end of a hit, in blocks][group]``: leading blocks that vLLM has no memory for: the null block stands there."""
        self.cpu_free = self.cpu_pool.get_num_free_blocks() if self.cpu_pool else 0
        self.device_free = self.device_pool.get_num_free_blocks() if self.cpu_pool else 0

    def request(self, tokens: int, **sampling: Any) -> Any:
        """A fresh request whose prompt is token ids 0..tokens-1, so that longer prompts share shorter ones' prefixes.

        ``sampling``: further arguments of its ``SamplingParams``.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._requests += 1
        return Request(
            request_id=f"r{self._requests}",
            prompt_token_ids=list(range(tokens)),
            sampling_params=SamplingParams(max_tokens=1, **sampling),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def fill_cpu(self, tokens: int, resident: list[list[bool]] | None = None) -> None:
        """Put the blocks of a ``tokens``-long prompt into the CPU tier; ``resident[group][block]`` leaves some out."""
        everything = [[True] * (tokens // self.block) for _ in self.groups]
        self.refill_cpu(self.request(tokens), resident or everything)

    def _skipped(self, longest: int) -> list[list[int]]:
        managers = self.scheduler.cpu_coordinator.single_type_managers if self.cpu_pool else []
        ends = range(0, longest * self.block + 1, self.block)
        return [[m.get_num_skipped_tokens(end) // self.block for m in managers] for end in ends]

    def _cache(self, pool: Any, request: Any, blocks: list[Any], group: int, runs: Iterable[tuple[int, int]]) -> None:
        """Give the ``blocks`` of each run (its first index, the one after its last) the hashes of ``request``'s in ``pool``."""
        for start, end in runs:
            pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=start,
                num_full_blocks=end,
                block_size=self.block,
                kv_cache_group_id=group,
            )

    def refill_cpu(self, request: Any, resident: list[list[bool]]) -> None:
        """Empty the CPU tier, then put the blocks of ``request`` that ``resident[group][block]`` names into it."""
        if not self.cpu_pool.reset_prefix_cache():
            raise RuntimeError("the CPU tier cannot be emptied: a lookup left a block pinned")
        self.stored = []
        for group, keep in enumerate(resident):
            blocks = self.cpu_pool.get_new_blocks(len(keep))
            self._cache(self.cpu_pool, request, blocks, group, _runs(keep))
            self.cpu_pool.free_blocks(reversed(blocks))
            self.stored.append([b if kept else None for b, kept in zip(blocks, keep, strict=True)])

    def planned(self, request: Any, prefix: int, external: int) -> Loads:
        """What :meth:`load` would do with the hit that the last lookup of ``request`` has pinned, where the release pins one.

        A fault is anything else pinned than the answered blocks, each once.
        """
        if not self.pins:
            return self.load(request, prefix, external)
        hit = self.scheduler._pending_cpu_hits.get(request.request_id)
        first, count = prefix // self.block, external // self.block
        if hit is None and external == 0 and self.cpu_pool.get_num_free_blocks() == self.cpu_free:
            return Loads([[] for _ in self.groups])
        if hit is not None and tuple(hit[1:]) == (external, prefix)[: len(hit) - 1]:
            plain = self._plain(hit[0], first, count)
            if plain is not None:
                return plain
        return self._looked_at(hit, prefix, external)

    def _plain(self, answered: Sequence[list[Any]], first: int, count: int) -> Loads | None:
        """The loads of a hit in which nothing is wrong, told without a look at each block's place; None: look closer.

        Each group answers null blocks and then its own blocks up to the hit's end, each pinned once, and no other is pinned.
        """
        loads, null = Loads(), self.cpu_pool.null_block
        skipped, needed, end = self.skipped[first + count], self.needs.firsts[first + count], first + count
        for group, blocks in enumerate(answered):
            if len(blocks) < count:
                return None
            padding = 0
            while padding < count and blocks[padding] is null:
                padding += 1
            taken = blocks[padding:count]
            if taken != self.stored[group][first + padding : end]:
                return None
            for block in taken:
                if block.ref_cnt != 1:
                    return None
            loads.copies += count - padding
            if skipped[group] > first + padding:
                loads.null_copies += skipped[group] - first - padding
                loads.null_needed += max(0, skipped[group] - max(first + padding, needed[group]))
            loads.loaded.append([False] * padding + [True] * (count - padding))
        return loads if self.cpu_free - self.cpu_pool.get_num_free_blocks() == loads.copies else None

    def _looked_at(self, hit: Any, prefix: int, external: int) -> Loads:
        """The loads of a hit, each of its blocks looked at, and what is wrong with them."""
        first, count = prefix // self.block, external // self.block
        odd, astray = 0, 0
        loads = Loads()
        for group, own in enumerate(self.stored):
            flags = []
            for index, (block, at) in enumerate(zip((hit[0][group] if hit else ())[:count], own[first:], strict=False)):
                if not block.is_null:
                    odd += block.ref_cnt != 1
                    astray += block is not at
                    self._count_copy(loads, group, first + index, first + count)
                flags.append(block is at)
            loads.loaded.append(flags)
        used = self.cpu_free - self.cpu_pool.get_num_free_blocks()
        if astray:
            loads.fault = f"misplaced: {astray} blocks would be loaded with the KV of another position"
        elif used != loads.copies or odd or (hit is None) != (external == 0):
            loads.fault = f"mispinned: {used} CPU blocks are pinned for {loads.copies} answered, {odd} of these not just once"
        elif hit is not None and tuple(hit[1:]) != (external, prefix)[: len(hit) - 1]:
            loads.fault = f"misrecorded: {tuple(hit[1:])} is kept for the load of {external} tokens behind {prefix}"
        return loads

    def _count_copy(self, loads: Loads, group: int, index: int, end: int) -> None:
        """Count the copy of a group's block for a hit that ends before block ``end``."""
        loads.copies += 1
        if index < self.skipped[end][group]:
            loads.null_copies += 1
            loads.null_needed += index >= self.needs.firsts[end][group]

    def drop_hit(self, request: Any) -> None:
        """Give back what the last lookup pinned, as a request that gets no blocks does."""
        pending = getattr(self.scheduler, "_pending_cpu_hits", {}).pop(request.request_id, None)
        if pending is not None:
            self.scheduler._free_pending_cpu_hit(pending)

    def left_behind(self) -> str:
        """What is still held now that nothing should be; empty when nothing is."""
        cpu = self.cpu_free - self.cpu_pool.get_num_free_blocks()
        device = self.device_free - self.device_pool.get_num_free_blocks()
        hits = len(self.scheduler._pending_cpu_hits) if self.pins else 0
        loads = len(self.scheduler._reqs_to_load)
        if cpu or device or hits or loads:
            return f"leaked: {cpu} CPU pins, {device} device references, {hits} pending hits, {loads} loads"
        return ""

    def let_go(self) -> None:
        """After a fault: give up every hit, load and pin by force, so that what follows starts clean."""
        if self.pins:
            self.scheduler._pending_cpu_hits.clear()
        self.scheduler._reqs_to_load.clear()
        for pool in (self.cpu_pool, self.device_pool):
            for block in pool.blocks:
                if not block.is_null and block.ref_cnt > 0:
                    block.ref_cnt = 1
                    pool.free_blocks([block])

    def ask(self, request: Any, prefix: int) -> tuple[Any, Any]:
        """The lookup's two answers as they are."""
        answer, is_async = self.scheduler.get_num_new_matched_tokens(request, prefix)
        return answer, is_async

    def lookup(self, request: Any, prefix: int) -> tuple[int, bool]:
        answer, is_async = self.ask(request, prefix)
        return int(answer or 0), bool(is_async)

    def checked_lookup(self, request: Any, prefix: int) -> tuple[int, str]:
        """The tokens that a lookup serves, 0 for an impossible answer, and what is wrong with it."""
        answer, is_async = self.ask(request, prefix)
        fault = contract_fault(answer, is_async, request.num_tokens - 1 - prefix, self.block)
        return (0, f"contract: {fault}") if fault else (int(answer), "")

    def load(self, request: Any, prefix: int, external: int) -> Loads:
        """Allocate, let the connector plan its load of ``external`` tokens, complete it; nothing is held afterwards."""
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.outputs import KVConnectorOutput

        first, end = prefix // self.block, (prefix + external) // self.block
        per_group = [self._device_blocks(end, self.skipped[end][group]) for group in range(len(self.groups))]
        for group_id, group in enumerate(per_group):
            # Before vLLM 0.30.0 the connector counts the hashed blocks to learn where the device prefix ends.
            held = [not block.is_null for block in group[:first]]
            self._cache(self.device_pool, request, group, group_id, _runs(held))
        blocks = KVCacheBlocks(tuple(per_group))
        self.scheduler.update_state_after_alloc(request, blocks, external)
        state = self.scheduler._reqs_to_load.get(request.request_id)
        loads = self._loads_of(state.transfer_meta if state is not None else None, per_group, first)
        if state is not None:
            self.scheduler.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))
        self.scheduler._reqs_to_store.pop(request.request_id, None)
        for group in per_group:
            self.device_pool.free_blocks([b for b in reversed(group) if not b.is_null])
        return loads

    def _device_blocks(self, end: int, skipped: int) -> list[Any]:
        """A request's device blocks before block ``end``, as vLLM allocates them: null where attention needs none any more."""
        return [*[self.device_pool.null_block] * skipped, *self.device_pool.get_new_blocks(end - skipped)]

    def _loads_of(self, transfer: Any, per_group: list[list[Any]], first: int) -> Loads:
        """A planned transfer, each of its copies held against the block that was stored for that position."""
        pairs = list(zip(transfer.gpu_block_ids, transfer.cpu_block_ids, strict=True)) if transfer is not None else []
        left = set(pairs)
        loads, astray = Loads(), len(pairs) - len(left)
        for group, (blocks, kept) in enumerate(zip(per_group, self.stored, strict=True)):
            flags = []
            for index in range(first, len(blocks)):
                stored = kept[index] if index < len(kept) else None
                pair = (blocks[index].block_id, stored.block_id if stored is not None else None)
                flags.append(pair in left)
                if pair in left:
                    left.remove(pair)
                    self._count_copy(loads, group, index, len(blocks))
            loads.loaded.append(flags)
        astray += len(left)
        loads.fault = f"misplaced: {astray} of {len(pairs)} copies are of another position" if astray else ""
        return loads

    def press(self) -> list[Any]:
        """Let other requests' stores take every free block of the CPU tier: what is not pinned is evicted.

        The blocks come back; :meth:`relieve` ends the stores.
        """
        taken: list[Any] = self.cpu_pool.get_new_blocks(self.cpu_pool.get_num_free_blocks())
        others = {block.block_id for block in taken}
        self.stored = [[None if b is None or b.block_id in others else b for b in own] for own in self.stored]
        return taken

    def relieve(self, taken: list[Any]) -> str:
        """End the stores of :meth:`press`; what is wrong with what survived them, empty when nothing is."""
        self.cpu_pool.free_blocks(taken)
        forgotten = sum(b is not None and b.block_hash is None for own in self.stored for b in own)
        return f"lost: {forgotten} blocks that were pinned are no more in the CPU tier's index" if forgotten else ""


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The stretches of set flags: first index, and index after the last."""
    start = None
    for index, flag in enumerate((*flags, False)):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            yield start, index
            start = None


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One lookup case.

    ``case``: ``block``, ``chunks`` and ``windows`` (of each group, None where it has none; no ``windows``: none has),
    ``prompt``, ``prefix`` (tokens) and ``absent`` (``[[group, block], ...]``: what the CPU tier lacks). Answers with the
    lookup's result, what would be loaded, what attention needs and lacks, the ideal, what was wrong on the way (``faults``),
    and the pins that were not given back.
    """
    block, chunks, prompt, prefix = case["block"], case["chunks"], case["prompt"], case["prefix"]
    full = prompt // block
    windows = case.get("windows") or [None] * len(chunks)
    groups = [oracle.sliding(w) if w else oracle.of_chunk(c) for c, w in zip(chunks, windows, strict=True)]
    resident = [[[g, i] not in case["absent"] for i in range(full)] for g in range(len(groups))]
    sut = SchedulerUnderTest(block, groups, prompt)
    sut.fill_cpu(prompt, resident)
    request = sut.request(prompt)
    sut.lookup(request, 0)  # an earlier call on the same request, whose pin the next one must give back
    answer, is_async = sut.ask(request, prefix)
    fault = contract_fault(answer, is_async, prompt - 1 - prefix, block)
    external = 0 if fault else int(answer)
    planned = sut.planned(request, prefix, external) if sut.pins else Loads()
    done = sut.load(request, prefix, external)
    faults = [f"contract: {fault}" if fault else "", planned.fault, done.fault]
    if sut.pins and external and planned.loaded != done.loaded:
        faults.append("misplaced: another set of blocks is loaded than was pinned")
    return {
        **case,
        "external_tokens": external,
        "is_async": bool(is_async),
        "loaded_blocks": sum(map(sum, done.loaded)),
        "null_copies": done.null_copies,
        "null_needed": done.null_needed,
        "missing": [
            oracle.missing_blocks(prefix, external, block, g, flags) for g, flags in zip(groups, done.loaded, strict=True)
        ],
        "ideal_tokens": oracle.longest_sound_hit(prefix, prompt, block, list(zip(groups, resident, strict=True))),
        "boundary_resident": oracle.boundary_resident(prefix, block, groups, resident),
        "faults": [f for f in faults if f],
        "leaked_cpu_pins": sut.cpu_free - sut.cpu_pool.get_num_free_blocks(),
        "leaked_device_refs": sut.device_free - sut.device_pool.get_num_free_blocks(),
        "pending_hits": len(getattr(sut.scheduler, "_pending_cpu_hits", ())),
    }


class LookupBench:
    """Times ``get_num_new_matched_tokens`` on one geometry.

    Args:
        block: tokens of a block in every group.
        chunks: attention chunk of each KV group in tokens, None for full attention.
        prompt: tokens of the request, ``prefix`` of which the device holds.
        hit: whether the CPU tier holds the whole prompt; otherwise it is empty.

    Raises:
        Unsupported: this release cannot have such groups.
    """

    def __init__(self, block: int, chunks: Sequence[int | None], prompt: int, prefix: int, hit: bool = True) -> None:
        self.sut = SchedulerUnderTest(block, [oracle.of_chunk(c) for c in chunks], prompt)
        self.prefix = prefix
        self.request = self.sut.request(prompt)
        if hit:  # by the request that is asked about: at a million tokens its hashes take a second
            self.sut.refill_cpu(self.request, [[True] * (prompt // block) for _ in chunks])

    @property
    def kv_groups(self) -> int:
        """KV groups of the CPU tier, read back: groups of the same attention are looked up in one go, and are still several."""
        return len(self.sut.scheduler.cpu_coordinator.single_type_managers)

    def answer(self) -> dict[str, Any]:
        """``external_tokens``; ``sound``: does attention find all KV of them; ``fault``: an answer that no caller may get."""
        sut, prefix = self.sut, self.prefix
        external, fault = sut.checked_lookup(self.request, prefix)
        loads = sut.planned(self.request, prefix, external)
        fault = fault or loads.fault
        found = all(
            not oracle.missing_blocks(prefix, external, sut.block, group, flags)
            for group, flags in zip(sut.groups, loads.loaded, strict=True)
        )
        return {"external_tokens": external, "sound": found and not loads.null_needed and not fault, "fault": fault}

    def time_calls(self, calls: int) -> tuple[float, int]:
        """Seconds that ``calls`` lookups took, one at least, and the last one's answer in tokens.

        Each drops the pin of the one before, as a retried request does.
        """
        lookup, request, prefix = self.sut.scheduler.get_num_new_matched_tokens, self.request, self.prefix
        answer: Any = None
        started = time.perf_counter()
        for _ in range(calls):
            answer = lookup(request, prefix)
        seconds = time.perf_counter() - started
        return seconds, int(answer[0] or 0)
