"""Copy backend, streams and events for a device whose memory is host memory.

The contract is the one of vLLM's DMA backend: ``launch_copy`` returns at once, copies run on another thread in the order
they were launched, an event is appended to the worker's list once its copy was issued, and completion is seen only by
polling that event. :class:`CopyPlan` can make copies late or reverse them, to show that nothing assumes otherwise, and
:class:`LoadControl` holds loads back or loses a block of them while an engine runs.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

PLAN_ENV_VAR = "KVMATRIX_HOST_COPY"


@dataclass(frozen=True)
class CopyPlan:
    """How copies misbehave, for tests. The default is a prompt, ordered copy."""

    hold_polls: int = 0
    """The bytes move only when the event has been polled this often."""
    delay_polls: int = 0
    """After the bytes moved, the event answers False this often before it answers True."""
    reorder: bool = False
    """Held copies of one direction run newest first."""
    zero_loads: int = 0
    """The first this many loaded blocks arrive as zeros: a corrupted load that a sound check must notice."""

    @classmethod
    def from_env(cls) -> CopyPlan:
        """The plan in ``KVMATRIX_HOST_COPY`` (a JSON object of field values).

        Raises:
            ValueError: the variable is not JSON, or names an unknown field.
        """
        raw = json.loads(os.environ.get(PLAN_ENV_VAR) or "{}")
        unknown = set(raw) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{PLAN_ENV_VAR}: unknown field {sorted(unknown)[0]!r}")
        return cls(**raw)


class LoadControl:
    """What is done to loads on purpose while an engine runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._losing: set[int] = set()
        self.lost_blocks = 0
        """Loaded blocks that arrived as zeros because of :meth:`lose`."""

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def hold(self) -> None:
        """Let no load that is not waited for arrive, until :meth:`release`."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def wait(self) -> None:
        """Return when loads are not held.

        Raises:
            RuntimeError: they are for longer than a minute.
        """
        if not self._open.wait(timeout=60):
            raise RuntimeError("loads were held for longer than 60 s")

    def lose(self, source: int) -> None:
        """Let the next load of block ``source`` of the CPU tier arrive as zeros."""
        with self._lock:
            self._losing.add(source)

    def lost(self, sources: Sequence[int]) -> list[int]:
        """Positions in ``sources``, the blocks of a load, of those that are to arrive as zeros; each is lost once."""
        with self._lock:
            positions = [i for i, source in enumerate(sources) if source in self._losing]
            self._losing -= set(sources)
            self.lost_blocks += len(positions)
        return positions


class HostEvent:
    """Stands in for ``torch.Event``. Recorded on a compute stream it is complete: CPU kernels run synchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._copy: _Copy | None = None

    @classmethod
    def of_copy(cls, copy: _Copy) -> HostEvent:
        event = cls()
        event._copy = copy
        return event

    def record(self, stream: Any = None) -> None:
        self._copy = None

    def query(self) -> bool:
        return self._copy is None or self._copy.poll()

    def synchronize(self) -> None:
        if self._copy is not None:
            self._copy.finish()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class HostStream:
    """Stands in for ``torch.cuda.Stream``; ordering is kept by the copy thread's queue."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = 0
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

    def wait_event(self, event: HostEvent) -> None:
        event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _Copy:
    """One launched copy: its bytes move once, under a lock, when the plan allows it."""

    def __init__(self, backend: HostCopyBackend, src: Sequence[int], dst: Sequence[int], is_store: bool) -> None:
        self._backend = backend
        self.src, self.dst, self.is_store = list(src), list(dst), is_store
        self.held = False
        """Its bytes move when it is polled or waited for, not on the copy thread."""
        self.moved = threading.Event()
        self.error: Exception | None = None
        self._holds = backend.plan.hold_polls
        self._delays = backend.plan.delay_polls

    def poll(self) -> bool:
        if not self.moved.is_set():
            if not self.held or (not self.is_store and self._backend.loads.held):
                return False
            self._holds -= 1
            if self._holds > 0:
                return False
            self._backend.run_held(self)
        if self.error is not None:
            raise self.error
        if self._delays > 0:
            self._delays -= 1
            return False
        return True

    def finish(self) -> None:
        if self.held:
            self._backend.run_held(self)
        if not self.moved.wait(timeout=60):
            raise RuntimeError("host copy did not finish within 60 s")
        if self.error is not None:
            raise self.error


class HostCopyBackend:
    """Drop-in for ``DmaCopyBackend`` on host memory: a thread that copies blocks between the two tiers.

    Caches are ``{layer: int8 tensor of shape [num_blocks, block_bytes]}``, one dict a tier, with equal keys.
    """

    def __init__(self) -> None:
        self.plan = CopyPlan.from_env()
        self.loads = LoadControl()
        self._lock = threading.Lock()
        self._held: list[_Copy] = []
        self._queue: queue.SimpleQueue[tuple[_Copy, int, list[Any], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._zero_left = self.plan.zero_loads
        self.copied_blocks = {"load": 0, "store": 0}
        self._caches: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None

    def init(
        self,
        gpu_caches: dict[str, torch.Tensor],
        cpu_caches: dict[str, torch.Tensor],
        device: torch.device,
        load_stream: Any,
        store_stream: Any,
    ) -> None:
        self._caches = (gpu_caches, cpu_caches)
        self._thread = threading.Thread(target=self._copy_loop, name="kvmatrix-host-copy", daemon=True)
        self._thread.start()

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        copy = _Copy(self, src_blocks, dst_blocks, is_store)
        self._queue.put((copy, event_idx, events_list, wait_event))

    def shutdown(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _copy_loop(self) -> None:
        while (item := self._queue.get()) is not None:
            copy, event_idx, events_list, wait_event = item
            if wait_event is not None:
                wait_event.synchronize()
            if self.plan.hold_polls or (not copy.is_store and self.loads.held):
                with self._lock:
                    copy.held = True
                    self._held.append(copy)
            else:
                try:
                    self._move(copy)
                except Exception as e:  # raised again where the copy is waited for
                    copy.error = e
                    copy.moved.set()
            events_list.append((event_idx, HostEvent.of_copy(copy)))

    def run_held(self, copy: _Copy) -> None:
        """Move ``copy`` and, with ``reorder``, every other held copy of its direction, newest first."""
        with self._lock:
            if copy.moved.is_set():
                return
            batch = [copy]
            if self.plan.reorder:
                batch = [c for c in reversed(self._held) if c.is_store == copy.is_store]
            self._held = [c for c in self._held if c not in batch]
        for c in batch:
            self._move(c)

    def _move(self, copy: _Copy) -> None:
        assert self._caches is not None
        gpu, cpu = self._caches
        src, dst = (gpu, cpu) if copy.is_store else (cpu, gpu)
        src_ids, dst_ids = torch.tensor(copy.src), torch.tensor(copy.dst)
        lost = [] if copy.is_store else self._lost_of(copy)
        for layer, cache in src.items():
            dst[layer][dst_ids] = cache[src_ids]
            if lost:
                dst[layer][dst_ids[lost]] = 0
        self.copied_blocks["store" if copy.is_store else "load"] += len(copy.src)
        copy.moved.set()

    def _lost_of(self, copy: _Copy) -> list[int]:
        """Positions in a load of the blocks that arrive as zeros."""
        zeroed = min(self._zero_left, len(copy.dst))
        self._zero_left -= zeroed
        return sorted({*range(zeroed), *self.loads.lost(copy.src)})


class _HostCuda(types.SimpleNamespace):
    Stream = HostStream

    @staticmethod
    def current_stream(device: Any = None) -> HostStream:
        return HostStream()


class HostTorch(types.ModuleType):
    """``torch`` as the offload worker sees it: host streams and events, everything else unchanged."""

    cuda = _HostCuda
    Event = HostEvent

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def patch_worker() -> None:
    """Give vLLM's offload worker the host copy backend, streams and events, and no pinned memory."""
    import vllm.v1.simple_kv_offload.worker as worker

    worker.torch = HostTorch()
    worker.DmaCopyBackend = HostCopyBackend
    if hasattr(worker, "PIN_MEMORY"):
        worker.PIN_MEMORY = False
    else:  # before vLLM 0.24.0 the worker asks a function
        worker.is_pin_memory_available = lambda: False
