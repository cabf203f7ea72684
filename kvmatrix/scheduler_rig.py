"""vLLM's real ``Scheduler``, offload connector, block pools and hashes over a worker that keeps tags in place of KV.

A program is a list of operations, each a name and numbers, and each valid in any state: an index counts round what is there.
What must hold after every one of them is in :mod:`kvmatrix.rig_invariants`.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvmatrix import oracle, rig_invariants
from kvmatrix.kv_memory import Content, Copies, Job, Tier, content, digests
from kvmatrix.rig_factory import BLOCK, BUDGET, LONGEST_ANSWER, LONGEST_PROMPT, Factory
from kvmatrix.rig_invariants import Violation

Operation = Sequence[int | str]

DEFAULT_POOLS = (8, 100)
"""Device blocks beyond the least that one request can need, and blocks of the CPU tier."""
CHOICES = 6
"""How many pending copies a step's choice tells apart."""
LIVE = 6
"""Requests that may be waiting or running; a further one is not added."""
DRAIN_STEPS = 300


def prompt_tokens(branch: int, cut: int, length: int) -> list[int]:
    """A prompt of the family: ``cut`` tokens that all have in common, then the branch's own."""
    cut = min(cut, length)
    return [100 + i for i in range(cut)] + [1000 * (branch + 1) + i for i in range(cut, length)]


class Rig:
    """One scheduler, its worker, and the record of what was done to them.

    Args:
        counts: is added to; what the names mean is in :data:`kvmatrix.stateful.COUNTS`.
    """

    def __init__(self, factory: Factory, counts: Counter[str]) -> None:
        self.factory, self.groups, self.counts = factory, factory.groups, counts
        self.program: list[Operation] = []
        self.prefixes: dict[str, list[int]] = {}
        """Request -> digests of its tokens so far."""
        self.hashed: dict[Any, Content] = {}
        """vLLM's block hash with group -> what a block of that hash must hold."""
        self._looked_up: set[str] = set()
        self._operations: dict[str, Callable[..., None]] = {
            "pools": self._pools,
            "add": self._add,
            "step": self._step,
            "copy": self._copy,
            "abort": self._abort,
            "preempt": self._preempt,
            "reset-device": self._reset_device,
            "reset-cpu": self._reset_cpu,
        }
        self._pools(*DEFAULT_POOLS)

    def apply(self, name: str, *numbers: int) -> None:
        """Do one operation, then check what must hold.

        Raises:
            Violation: something does not, or vLLM raised.
        """
        self.program.append([name, *numbers])
        self._guarded(self._operations[name], *numbers)
        self._guarded(rig_invariants.check, self)

    def finish(self) -> None:
        """Let every request and copy come to its end, then check that nothing is left of them.

        Raises:
            Violation: something is, or the end does not come.
        """
        for _ in range(DRAIN_STEPS):
            if not self.live() and not self.copies.jobs and not self.manager.has_pending_stores():
                break
            self._guarded(self._step, BUDGET, 2**CHOICES - 1)
            self._guarded(rig_invariants.check, self)
        rig_invariants.check_drained(self)

    def live(self) -> list[str]:
        """Requests that the scheduler still knows, finished ones that wait for a copy among them."""
        return list(self.scheduler.requests)

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Violation:
            raise
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            if Path(where.filename).parent == Path(__file__).parent:
                raise  # a fault of the rig: it must not pass for one of vLLM
            raise Violation("raised", f"{type(e).__name__} in {where.name}: {' '.join(str(e).split())[:200]}") from e

    # --- operations

    def _pools(self, spare: int, cpu_blocks: int) -> None:
        """Begin anew with a device pool of ``spare`` blocks more than the least and a CPU pool of ``cpu_blocks``."""
        blocks = self.factory.least_blocks + spare
        self.scheduler = self.factory.scheduler(blocks, cpu_blocks)
        self.manager = self.scheduler.connector.scheduler_manager
        self.device_pool, self.cpu_pool = self.scheduler.kv_cache_manager.block_pool, self.manager.cpu_block_pool
        self.device, self.cpu = Tier(blocks, BLOCK), Tier(len(self.cpu_pool.blocks), BLOCK)
        self.copies = Copies(self.device, self.cpu)
        self.bookkeeping = [name for name, value in vars(self.manager).items() if rig_invariants.is_empty(value)]
        """The offload scheduler's containers: empty now, and to be empty when all is done."""
        self._watch_pool(self.device, self.device_pool)
        self._watch_pool(self.cpu, self.cpu_pool)
        self._watch_lookup()

    def _add(self, branch: int, cut: int, length: int, answer: int) -> None:
        if len(self.live()) >= LIVE:
            return
        name = f"r{len(self.prefixes)}"
        tokens = prompt_tokens(branch, cut, max(1, min(length, LONGEST_PROMPT)))
        request = self.factory.request(name, tokens, max(1, min(answer, LONGEST_ANSWER)))
        self.prefixes[name] = []
        self._learn(request)
        self.scheduler.add_request(request)
        self.counts["requests"] += 1

    def _step(self, budget: int, choice: int) -> None:
        """One step of the engine: schedule, compute, issue copies, report those that ``choice`` (a bit each) names."""
        from vllm.v1.outputs import ModelRunnerOutput

        self.scheduler.max_num_scheduled_tokens = max(1, min(budget, BUDGET))
        before = self.scheduler.running[:]
        output = self.scheduler.schedule()
        self.counts["steps"] += 1
        self.counts["preemptions"] += sum(r not in self.scheduler.running for r in before)
        meta = output.kv_connector_metadata
        if meta.need_flush:
            self.copies.run_all()
        sampled = self._compute(output.num_scheduled_tokens)
        self._issue(meta)
        ids = list(sampled)
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[sampled[name] for name in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self._report(meta, choice),
        )
        requests = [self.scheduler.requests[name] for name in ids]
        self.scheduler.update_from_output(output, answer)
        for request in requests:
            self._learn(request)

    def _copy(self, which: int) -> None:
        """Run one pending copy now, and report it later."""
        waiting = [job for job in self.copies.jobs if not job.ran]
        if waiting:
            self.copies.run(waiting[which % len(waiting)])

    def _abort(self, which: int) -> None:
        from vllm.v1.request import RequestStatus

        unfinished = [r for r in self.scheduler.requests.values() if not r.is_finished()]
        if unfinished:
            request = unfinished[which % len(unfinished)]
            self.counts["aborts"] += 1
            self.counts["aborts_loading"] += request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _preempt(self) -> None:
        """Preempt the last running request, as the scheduler does when the device is full."""
        if self.scheduler.running:
            request = self.scheduler.running.pop()
            self.scheduler._preempt_request(request, time.monotonic())
            # It may be resumed in the very next step, as after a forced reset of the cache, which forgets this for all.
            self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            self.counts["preemptions"] += 1

    def _reset_device(self) -> None:
        """Forget the device's prefix cache: with nothing in flight the running requests are preempted for it."""
        waits = [r for r in self.scheduler.requests.values() if r not in self.scheduler.running and r.num_computed_tokens]
        busy = bool(waits or self.copies.jobs or self.manager.has_pending_stores())
        self.counts["preemptions"] += 0 if busy else len(self.scheduler.running)
        self.counts["device_resets"] += bool(self.scheduler.reset_prefix_cache(reset_running_requests=not busy))

    def _reset_cpu(self) -> None:
        if hasattr(self.manager, "reset"):  # from vLLM 0.27.1 on
            self.scheduler.connector.reset_cache()
            self.counts["cpu_resets"] += 1

    # --- the worker

    def _compute(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Write the scheduled tokens' KV and check that attention finds what it needs; request -> token, where one is due."""
        work = []
        for name, count in scheduled.items():
            request = self.scheduler.requests[name]
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            work.append((request, tables, request.num_computed_tokens - count, request.num_computed_tokens))
        # One forward pass: each layer writes the whole batch's KV before it attends.
        for request, tables, start, end in work:
            for group, table in enumerate(tables):
                rig_invariants.check_targets(self, request, group, table, start, end)
                self.device.write(table, group, self.prefixes[request.request_id], start, end)
        for request, tables, start, end in work:
            rig_invariants.check_attention(self, request, tables, start, end)
        return {
            request.request_id: [self.prefixes[request.request_id][-1] % 7] if end == request.num_tokens else []
            for request, _, _, end in work
        }

    def _issue(self, meta: Any) -> None:
        """Take over what the connector asks the worker for."""
        if meta.store_event >= 0 and meta.store_gpu_blocks:
            self.copies.jobs.append(Job("store", meta.store_event, list(meta.store_gpu_blocks), list(meta.store_cpu_blocks)))
        if meta.load_event >= 0:
            job = Job("load", meta.load_event, list(meta.load_cpu_blocks), list(meta.load_gpu_blocks))
            rig_invariants.check_load(self, job, meta.load_event_to_reqs.get(job.event, []))
            self.copies.jobs.append(job)

    def _report(self, meta: Any, choice: int) -> Any:
        from vllm.v1.outputs import KVConnectorOutput
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        everything = choice == 2**CHOICES - 1
        done = self.copies.report([everything or bool(choice >> (i % CHOICES) & 1) for i in range(len(self.copies.jobs))])
        received = {name for job in done if job.kind == "load" for name in meta.load_event_to_reqs.get(job.event, ())}
        stored = {job.event: 1 for job in done if job.kind == "store"}
        self.counts["loads"] += sum(job.kind == "load" for job in done)
        self.counts["stores"] += len(stored)
        return KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(completed_store_events=stored) if stored else None,
        )

    # --- what is observed on the way

    def _learn(self, request: Any) -> None:
        """Note the digests of a request's tokens, and what a block of each of its hashes must hold."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        prefix = digests(request.all_token_ids, self.prefixes[request.request_id])
        for index, block_hash in enumerate(request.block_hashes):
            for group in range(len(self.groups)):
                key = make_block_hash_with_group_id(block_hash, group)
                if key not in self.hashed:
                    self.hashed[key] = content(group, prefix, index, BLOCK)

    def _watch_pool(self, tier: Tier, pool: Any) -> None:
        """A block that is given out holds nothing of use any more, whoever had it."""
        original = pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            before = sum(block.block_hash is not None for block in pool.blocks)
            blocks = original(count)
            self.counts["evictions"] += before - sum(block.block_hash is not None for block in pool.blocks)
            tier.clear(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = get_new_blocks

    def _watch_lookup(self) -> None:
        original = self.manager.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            mixed = num_computed_tokens > 0 and self._servable(request, num_computed_tokens) > 0
            answer = original(request, num_computed_tokens)
            misaligned = mixed and any(num_computed_tokens % g.chunk for g in self.groups if g.chunk)
            self.counts["lookups"] += 1
            self.counts["retries"] += request.request_id in self._looked_up
            self._looked_up.add(request.request_id)
            self.counts["mixed"] += mixed
            self.counts["misaligned"] += misaligned
            self.counts["misaligned_served"] += misaligned and bool(answer[0])
            return answer

        self.manager.get_num_new_matched_tokens = get_num_new_matched_tokens

    def _servable(self, request: Any, prefix: int) -> int:
        """Tokens behind ``prefix`` that the CPU tier could soundly serve, by what it holds now."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        held = self.cpu_pool.cached_block_hash_to_block
        resident = [
            [held.get_one_block(make_block_hash_with_group_id(h, g)) is not None for h in request.block_hashes]
            for g in range(len(self.groups))
        ]
        return oracle.longest_sound_hit(prefix, request.num_tokens, BLOCK, list(zip(self.groups, resident, strict=True)))
