"""One vLLM engine on one cell: start, generate, drain, reset, read counters.

Runs inside a cell's child process. States are reached by generation and cache-reset calls alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

# Ours -> vLLM's name without the suffix "_total" that Prometheus adds, and the `source` label where it has one. Taken per
# request: the prefix-cache counters miss requests that wait for a load in releases before 0.29.0.
COUNTERS = {
    "device_hit_tokens": ("vllm:prompt_tokens_by_source", "local_cache_hit"),
    "external_hit_tokens": ("vllm:prompt_tokens_by_source", "external_kv_transfer"),
    "loaded_blocks": ("vllm:simple_kv_offload_load_blocks", ""),
    "preemptions": ("vllm:num_preemptions", ""),
}
RECOMPUTED = ("vllm:prompt_tokens_recomputed", "")
"""vLLM 0.19.1 takes a prompt whose every token but the last is cached for one that is cached whole, and counts that last token
both here and among the device's: a release that has the counter has the token to take off again."""
DRAIN_TIMEOUT_S = 60.0
MAX_NUM_SEQS = 16
"""Above the most chunks that a prompt has here: FLEX_ATTENTION keeps a row for each request, chunked-local attention makes a
request of each chunk, and with more of these than rows it raises (vLLM 0.32.0)."""
NUDGE_TOKEN = 3
"""A prompt of one token fills no block, so it leaves nothing in any cache."""


class EngineStateError(RuntimeError):
    """The engine did not reach a state that was asked for (a drain or a reset)."""


@dataclass
class Generation:
    """One finished request."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    """Per generated token: token id -> logprob in nats (the whole vocabulary when it was asked for)."""
    cached_tokens: int
    """vLLM's ``num_cached_tokens``: prompt tokens served from the device or from the CPU tier."""
    seconds: float
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class Timed:
    """One finished request with the times at which its tokens came, in seconds from its arrival."""

    token_ids: list[int]
    token_seconds: list[float]
    counters: dict[str, int]


@dataclass(frozen=True)
class EngineConfig:
    """What is asked of vLLM for one cell."""

    model: str
    backend: str
    mode: str
    block_size: int
    dtype: str
    max_model_len: int
    vocab_size: int
    num_gpu_blocks: int
    lazy_offload: bool = False
    cpu_bytes: int = 1 << 26
    max_num_batched_tokens: int = 512
    offload: bool = True
    disk_path: str = ""
    """File of the connector's disk tier, in place of host memory; it is sparse."""

    def llm_kwargs(self) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        kwargs: dict[str, Any] = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "enforce_eager": self.mode == "eager",
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_logprobs": self.vocab_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_gpu_blocks_override": self.num_gpu_blocks,
            "enable_prefix_caching": True,
            "disable_hybrid_kv_cache_manager": False,
            "disable_log_stats": False,
            "attention_backend": self.backend,
            "seed": 0,
        }
        if self.offload:
            kwargs["kv_transfer_config"] = KVTransferConfig(
                kv_connector="SimpleCPUOffloadConnector",
                kv_role="kv_both",
                kv_connector_extra_config=self._tier() | {"lazy_offload": self.lazy_offload},
            )
        return kwargs

    def _tier(self) -> dict[str, Any]:
        if not self.disk_path:
            return {"cpu_bytes_to_use": self.cpu_bytes}
        return {
            "kv_offload_backend": "disk",
            "disk_path": self.disk_path,
            "disk_capacity_bytes": self.cpu_bytes,
            "use_page_cache": True,  # reads and writes past it are refused by some file systems
        }


def _totals(metrics: Iterable[Any]) -> dict[tuple[str, str], float]:
    """Values by name and ``source`` label, summed over all other labels."""
    totals: dict[tuple[str, str], float] = {}
    for metric in metrics:
        key = metric.name.removesuffix("_total"), metric.labels.get("source", "")
        totals[key] = totals.get(key, 0) + getattr(metric, "value", 0)
    return totals


def _generation(output: Any, seconds: float, counters: dict[str, int]) -> Generation:
    completion = output.outputs[0]
    return Generation(
        token_ids=list(completion.token_ids),
        logprobs=[{t: lp.logprob for t, lp in step.items()} for step in completion.logprobs or ()],
        cached_tokens=int(output.num_cached_tokens or 0),
        seconds=seconds,
        counters=counters,
    )


class Engine:
    """vLLM's offline engine with readers for what it really did."""

    def __init__(self, config: EngineConfig) -> None:
        from vllm import LLM

        self.config = config
        self._started = 0
        self._outputs: dict[str, Any] = {}
        """The newest output of each request that :meth:`step` has advanced; of one that is not streamed, its last one alone."""
        started = time.perf_counter()
        self.llm = LLM(**config.llm_kwargs())
        self.start_seconds = time.perf_counter() - started

    def _core_call(self, method: str, *args: Any) -> Any:
        client = self.llm.llm_engine.engine_core
        core = getattr(client, "engine_core", None)
        if core is not None and hasattr(core, method):
            return getattr(core, method)(*args)
        return client.call_utility(method, *args)

    def state(self) -> dict[str, Any]:
        """Resolved configuration, KV groups, imported digests and connector accounting, read from the engine core."""
        return dict(self._core_call("kvmatrix_state"))

    def worker_state(self) -> dict[str, Any]:
        """Backends per layer and copied blocks, read from the first worker."""
        return dict(self.llm.collective_rpc("kvmatrix_state")[0])

    def cpu_resident_tokens(self, prompt: list[int]) -> int:
        return int(self._core_call("kvmatrix_cpu_resident", prompt))

    def cpu_blocks(self, prompt: list[int]) -> list[list[bool]]:
        """``[group][whole block of the prompt]``: does the CPU tier hold it."""
        return [[block >= 0 for block in group] for group in self.cpu_block_ids(prompt)]

    def cpu_block_ids(self, prompt: list[int]) -> list[list[int]]:
        """``[group][whole block of the prompt]``: the CPU tier's block of it, -1 where it has none."""
        return [list(group) for group in self._core_call("kvmatrix_cpu_block_ids", prompt)]

    def device_forget(self, prompt: list[int], first: int) -> None:
        """Make the device's prefix cache lose the prompt's blocks from ``first`` on, of every group."""
        self._core_call("kvmatrix_device_forget", prompt, first)

    def cpu_forget(self, prompt: list[int], first: int, last: int) -> None:
        """Make the CPU tier lose the prompt's blocks ``first`` to ``last - 1`` of every group."""
        self._core_call("kvmatrix_cpu_forget", prompt, first, last)

    def counters(self) -> dict[str, int]:
        """vLLM's own Prometheus counters, summed over labels, by the names of ``COUNTERS``."""
        totals = _totals(self.llm.get_metrics())
        counted = {ours: int(totals.get(theirs, 0)) for ours, theirs in COUNTERS.items()}
        counted["device_hit_tokens"] -= int(totals.get(RECOMPUTED, 0))
        if COUNTERS["loaded_blocks"] not in totals and self.config.offload:
            # Before vLLM 0.30.0 the connector has no counter of its own: take the copy backend's.
            counted["loaded_blocks"] = (self.worker_state()["copied_blocks"] or {}).get("load", 0)
        return counted

    def _params(self, max_tokens: int, logprobs: bool, stream: bool = False) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=self.config.vocab_size if logprobs else None,
            output_kind=RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY,
        )

    def generate(self, prompt: list[int], max_tokens: int = 1, logprobs: bool = True) -> Generation:
        """Greedy generation of one request, with its counters taken after its transfers have drained."""
        return self.generate_batch([prompt], max_tokens, logprobs)[0]

    def generate_batch(self, prompts: list[list[int]], max_tokens: int = 1, logprobs: bool = True) -> list[Generation]:
        """Greedy generation of requests that are there at once, in order; each has the time and the counters of all of them."""
        before = self.counters()
        started = time.perf_counter()
        params = self._params(max_tokens, logprobs)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        self.drain()
        counters = self.counters_since(before)
        return [_generation(output, seconds, counters) for output in outputs]

    def timed(self, prompt: list[int], max_tokens: int) -> Timed:
        """Greedy generation of one request, token by token; its counters are taken after its transfers have drained.

        Raises:
            EngineStateError: the engine runs in a process of its own, or the request does not end.
        """
        before = self.counters()
        seconds: list[float] = []
        started = time.perf_counter()
        name = self.start(prompt, max_tokens, self._params(max_tokens, logprobs=False, stream=True))

        def note() -> bool:
            now = time.perf_counter() - started
            if (output := self._outputs.get(name)) is not None:
                seconds.extend([now] * (len(output.outputs[0].token_ids) - len(seconds)))
            return self._is_finished(name)

        self.step_until(note, "the end of a timed request")
        output = self._outputs.pop(name)
        self.drain()
        return Timed(list(output.outputs[0].token_ids), seconds, self.counters_since(before))

    def counters_since(self, before: dict[str, int]) -> dict[str, int]:
        """What :meth:`counters` has grown by since it was ``before``."""
        after = self.counters()
        return {k: after[k] - before[k] for k in after}

    def start(self, prompt: list[int], max_tokens: int, params: Any = None) -> str:
        """Add a request, and give its name; nothing is computed before the first :meth:`step`."""
        self._started += 1
        name = f"kvmatrix-{self._started}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params or self._params(max_tokens, True))
        return name

    def step(self) -> None:
        """One step of the engine; each request's newest output is kept, for :meth:`finish` and :meth:`timed`."""
        for output in self.llm.llm_engine.step():
            self._outputs[output.request_id] = output

    def _is_finished(self, name: str) -> bool:
        return name in self._outputs and self._outputs[name].finished

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def request_state(self, name: str) -> dict[str, Any]:
        """``id`` (vLLM's own), ``status`` and ``output_tokens`` of an unfinished request; empty when it is none."""
        for known, facts in dict(self._core_call("kvmatrix_requests")).items():
            if known == name or known.startswith(f"{name}-"):
                return {"id": known, **facts}
        return {}

    def preempt(self, name: str) -> None:
        """Preempt a running request, as vLLM does when the device is full."""
        self._core_call("kvmatrix_preempt", self.request_state(name)["id"])

    def step_until(self, reached: Callable[[], bool], what: str, timeout: float = DRAIN_TIMEOUT_S) -> None:
        """Step until ``reached``.

        Raises:
            EngineStateError: it was not within ``timeout`` seconds, or the engine runs in a process of its own.
        """
        if not hasattr(self.llm.llm_engine.engine_core, "engine_core"):
            raise EngineStateError("requests can be followed from step to step only where the engine runs in this process")
        deadline = time.monotonic() + timeout
        while not reached():
            if time.monotonic() > deadline:
                raise EngineStateError(f"{what} was not reached within {timeout:g} s")
            self.step()

    def finish(self, names: list[str]) -> list[Generation]:
        """Step until the named requests are done; their answers, without times and counters."""
        self.step_until(lambda: all(map(self._is_finished, names)), "the end of all requests")
        self.drain()
        return [_generation(self._outputs.pop(name), 0.0, {}) for name in names]

    def control_loads(self, what: str, block: int = -1) -> None:
        """Hold loads back, release them, or lose a block of the CPU tier at its next load.

        Raises:
            EngineStateError: the copy backend in use cannot.
        """
        if not all(self.llm.collective_rpc("kvmatrix_loads", args=(what, block))):
            raise EngineStateError(f"this copy backend cannot {what} a load")

    def drain(self, timeout: float = DRAIN_TIMEOUT_S) -> None:
        """Step or poll the engine until no store or load is queued or in flight.

        Raises:
            EngineStateError: transfers are still pending after ``timeout`` seconds.
        """
        if not self.config.offload:
            return
        deadline = time.monotonic() + timeout
        in_process = hasattr(self.llm.llm_engine.engine_core, "engine_core")
        while True:
            state = self.state()
            offload = state["offload"]
            if not offload["pending_stores"] and not offload["pending_loads"]:
                return
            if time.monotonic() > deadline:
                raise EngineStateError(f"transfers still pending after {timeout:g} s: {offload}")
            if self.config.lazy_offload or not state["has_requests"]:
                # In lazy mode a step without a token may plan stores, too, which a worker without a forward pass does not make.
                self.nudge()
            elif in_process:
                self.llm.llm_engine.step()
            else:
                time.sleep(0.005)

    def nudge(self) -> None:
        """Make an engine without requests step, by a prompt of one token: before vLLM 0.30.0 it does not do that by itself even
        with stores pending, and in lazy mode a store comes only with a step."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self.llm.generate([{"prompt_token_ids": [NUDGE_TOKEN]}], params, use_tqdm=False)

    def reset_device(self) -> None:
        """Empty the device tier and leave the CPU tier.

        Raises:
            EngineStateError: vLLM refused (blocks are still in use).
        """
        self.drain()
        if not self.llm.reset_prefix_cache():
            raise EngineStateError("vLLM refused to reset the device prefix cache: blocks are in use")

    def overwrite_device(self) -> int:
        """Overwrite every block of the device tier, of which none may be in use; how many there are.

        Raises:
            EngineStateError: a request has blocks.
        """
        if used := self.state()["used_device_blocks"]:
            raise EngineStateError(f"{used} device blocks are in use and must not be overwritten")
        return int(min(self.llm.collective_rpc("kvmatrix_overwrite")))

    def shutdown(self) -> None:
        """End the engine core's own process, where it has one; in-process it ends with this process."""
        client = self.llm.llm_engine.engine_core
        if not hasattr(client, "engine_core"):
            client.shutdown()
