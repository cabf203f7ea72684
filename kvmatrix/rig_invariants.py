"""What must hold of vLLM's scheduler and its two block pools, whatever was done to them before.

Each check is given the :class:`~kvmatrix.scheduler_rig.Rig` and raises :class:`Violation` with the invariant's name:

``unsound``      attention would read KV that is not the request's own
``misdirected``  a load brings KV to a block that did not ask for it
``stale``        a cached block's content is not what its hash says
``references``   a block's reference count is not the number of its users
``queue``        a block is free and in use at once, or neither
``pin``          a lookup's pin outlives the request's wait
``leaked``       something is left when all is done
``stuck``        the end does not come
``raised``       vLLM itself raised

``stuck`` may be vLLM's own fault, whatever the lookup: the blocks that its admission of loads keeps free for a request that
waits with blocks (``_request_remaining_blocks``) are a chunked-local group's cap less the length of its table, in which null
blocks count. Several such requests can then fill a small device pool, each short of blocks, and none of them is ever preempted.
It takes many more programs than a default run has; an expectation for it would have to say so.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvmatrix.kv_memory import Job, Tier, content

if TYPE_CHECKING:
    from kvmatrix.scheduler_rig import Rig

NULL = 0
"""Id of the block that stands for no block, in both pools."""


class Violation(Exception):
    """Something that must hold does not; the message is ``<invariant>: <what was seen>``."""

    def __init__(self, invariant: str, seen: str) -> None:
        super().__init__(f"{invariant}: {seen}")
        self.invariant = invariant


def is_empty(value: object) -> bool:
    """Whether something is a container that holds nothing."""
    return isinstance(value, (dict, list, set, deque)) and not value


def check(rig: Rig) -> None:
    """All that must hold between two operations."""
    _check_references(rig, "device", rig.device_pool, device_users(rig))
    _check_references(rig, "cpu", rig.cpu_pool, cpu_users(rig))
    _check_cached(rig, "device", rig.device_pool, rig.device)
    _check_cached(rig, "cpu", rig.cpu_pool, rig.cpu)
    _check_pins(rig)


def device_users(rig: Rig) -> Counter[int]:
    """Block -> how many use it: requests that have it in a table, copies, and stores that wait to be issued."""
    users = Counter(rig.copies.pinned("device"))
    for manager in rig.scheduler.kv_cache_manager.coordinator.single_type_managers:
        for name, blocks in manager.req_to_blocks.items():
            if blocks and name not in rig.scheduler.requests:
                raise Violation("references", f"{name} is gone and still has device blocks")
            users.update(block.block_id for block in blocks)
    for transfer in getattr(rig.manager, "_pending_finished_stores", ()):
        users.update(transfer.gpu_block_ids)
    return users


def cpu_users(rig: Rig) -> Counter[int]:
    """Block -> how many use it: copies, lookups whose load is not planned yet, and stores that wait to be issued."""
    users = Counter(rig.copies.pinned("cpu"))
    for blocks in _pending_hits(rig).values():
        users.update(block.block_id for block in blocks)
    for transfer in getattr(rig.manager, "_pending_finished_stores", ()):
        users.update(transfer.cpu_block_ids)
    return users


def _pending_hits(rig: Rig) -> dict[str, list[Any]]:
    """Request -> the CPU blocks that its last lookup pinned."""
    pending = getattr(rig.manager, "_pending_cpu_hits", {})
    return {name: [b for group in hit[0] for b in group] for name, hit in pending.items()}


def _check_references(rig: Rig, tier: str, pool: Any, users: Counter[int]) -> None:
    free = Counter(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    for block in pool.blocks:
        if block.block_id == NULL:
            continue
        if block.ref_cnt != users[block.block_id]:
            raise Violation(
                "references",
                f"{tier} block {block.block_id} counts {block.ref_cnt} references, {users[block.block_id]} use it",
            )
        if free[block.block_id] != (block.ref_cnt == 0):
            raise Violation(
                "queue",
                f"{tier} block {block.block_id} with {block.ref_cnt} references is queued as free {free[block.block_id]} times",
            )
    if sum(free.values()) != pool.get_num_free_blocks():
        raise Violation("queue", f"{tier}: {sum(free.values())} blocks are queued, {pool.get_num_free_blocks()} counted")


def _check_cached(rig: Rig, name: str, pool: Any, tier: Tier) -> None:
    for block in pool.blocks:
        # Up to vLLM 0.29.0 a block has its hash while it is being stored: it is cached once it can be found under it.
        if block.block_hash is None or pool.cached_block_hash_to_block.get_one_block(block.block_hash) is not block:
            continue
        held, meant = tier.blocks[block.block_id], rig.hashed.get(block.block_hash)
        if held != meant:
            raise Violation("stale", f"{name} block {block.block_id} is cached as KV that it does not hold")


def _check_pins(rig: Rig) -> None:
    for name in _pending_hits(rig):
        request = rig.scheduler.requests.get(name)
        if request is None or request.is_finished():
            raise Violation("pin", f"{name} is finished and its lookup still pins CPU blocks")
        if request.num_computed_tokens:
            raise Violation("pin", f"{name} has its blocks and its lookup still pins CPU blocks")


def check_targets(rig: Rig, request: Any, group: int, table: Sequence[int], start: int, end: int) -> None:
    """The tokens [start, end) that a step computes have a real block each."""
    size = rig.device.size
    for index in range(start // size, -(-end // size)):
        if index >= len(table) or table[index] == NULL:
            raise Violation("unsound", f"{request.request_id} has no block in group {group} from token {index * size} on")


def check_attention(rig: Rig, request: Any, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
    """Attention finds the KV of every token that those of [start, end) look at, in every group."""
    for group, (attention, table) in enumerate(zip(rig.groups, tables, strict=True)):
        first = attention.first_needed_token(start)
        prefix = rig.prefixes[request.request_id]
        wrong = rig.device.first_wrong(table, group, prefix, first, end)
        if wrong is not None:
            place = f"group {group} ({attention})"
            raise Violation("unsound", f"token {start} needs token {wrong} in {place}, its KV is not there")


def check_load(rig: Rig, job: Job, names: Iterable[str]) -> None:
    """Every block of a load is asked for by one of its requests, and is brought the KV that belongs there."""
    asked = {}
    for name in names:
        for group, table in enumerate(rig.scheduler.kv_cache_manager.get_block_ids(name)):
            for index, block in enumerate(table):
                asked[block] = content(group, rig.prefixes[name], index, rig.device.size)
    for source, target in zip(job.sources, job.targets, strict=True):
        if target == NULL or target not in asked:
            raise Violation("misdirected", f"a load writes device block {target}, which none of its requests has")
        if rig.cpu.blocks[source] != asked[target]:
            raise Violation("misdirected", f"a load brings device block {target} the KV of another place")


def check_drained(rig: Rig) -> None:
    """Nothing runs, nothing is copied, nothing is remembered and nothing is pinned."""
    if rig.live():
        raise Violation("stuck", f"{', '.join(rig.live())} do not come to an end")
    if rig.copies.jobs:
        raise Violation("stuck", f"{len(rig.copies.jobs)} copies are still asked for, with no request left")
    left = [name for name in rig.bookkeeping if not is_empty(getattr(rig.manager, name))]
    if left:
        raise Violation("leaked", f"{', '.join(left)} of the offload scheduler are not empty when all is done")
    for tier, pool in (("device", rig.device_pool), ("cpu", rig.cpu_pool)):
        if pinned := [b.block_id for b in pool.blocks if b.ref_cnt and b.block_id != NULL]:
            raise Violation("leaked", f"{tier} blocks {pinned} are pinned when all is done")
