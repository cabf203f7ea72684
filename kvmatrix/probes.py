"""Probes: one prompt geometry each, established in a running engine by generation and cache resets only.

Every probe returns observations (tokens, logprob errors, vLLM's counters and the plan they are checked against). What
they mean is decided by :mod:`kvmatrix.judge`, outside the engine's process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, get_args

from kvmatrix import oracle
from kvmatrix.config import ProbeName
from kvmatrix.engine import Engine, EngineStateError, Generation

PROBES: tuple[ProbeName, ...] = get_args(ProbeName)
"""In the order in which they are run."""
REQUESTS = 4
"""Of a batch, and what such a pool has room for."""
SEVERAL = ("batch", "abort-loading", "preempted-loading")
"""Probes that have several requests under way at once: they need a device pool with room for all of them."""


@dataclass(frozen=True)
class ProbePlan:
    """What a probe means to establish, in tokens, before its measured request is sent."""

    probe: str
    prompt_tokens: int
    device_tokens: int
    """Prompt tokens that the device must serve."""
    cpu_tokens: int
    """Prompt tokens, counted from 0, that the CPU tier alone must be able to serve."""
    reuse_tokens: int
    """External tokens that a lookup with nothing lost would return."""
    needed_loads: int
    """Blocks over all groups that a sound lookup with nothing lost must load."""
    gone_blocks: int = 0
    """Leading blocks of the prompt that the CPU tier must have lost in every group; the device holds them."""
    preemptions: int = 0
    requests: list[RequestPlan] = field(default_factory=list)
    """Of a probe that asks several at once: each of them. The figures above are their sums then."""


@dataclass(frozen=True)
class RequestPlan:
    """One of several requests that are there at once; in tokens."""

    device_tokens: int
    reuse_tokens: int
    """External tokens that a lookup with nothing lost would return."""
    aligned: bool
    """Whether the device prefix ends on a boundary of every chunk: stock is right then."""


def plan(
    probe: str,
    *,
    prompt: int,
    prefix: int,
    block: int,
    groups: Sequence[oracle.Attention],
    new_tokens: int = 1,
) -> ProbePlan:
    """The plan of ``probe`` for a prompt of ``prompt`` tokens.

    ``prefix`` is the misaligned device prefix; ``groups`` has each KV group's attention; ``new_tokens`` are generated.

    Raises:
        ValueError: the geometry cannot establish the probe.
    """
    reusable = (prompt - 1) // block * block
    if probe == "cold":
        return ProbePlan(probe, prompt, 0, 0, 0, 0)
    if probe == "device-hit":
        return ProbePlan(probe, prompt, reusable, 0, 0, 0)
    device = _device_prefix(probe, reusable, prefix, [g.chunk for g in groups if g.chunk])
    if probe not in ("pure-cpu-hit", "corrupted-load") and not 0 < device < reusable:
        raise ValueError(f"{probe}: prompt {prompt} leaves no device prefix with a CPU suffix (prefix {device})")
    if device % block:
        raise ValueError(f"{probe}: device prefix {device} is not a multiple of the block size {block}")
    if probe == "follow-up":
        return ProbePlan(probe, prompt, reusable, 0, 0, 0)
    if probe == "batch":
        return _batch_plan(prompt, prefix, block, groups)
    if probe == "preempted-loading":
        return _preempted_plan(prompt, prefix, block, groups, new_tokens)
    loads = _needed_loads(reusable, device, block, groups)
    if probe == "mixed-head-gone":
        return ProbePlan(probe, prompt, device, 0, reusable - device, loads, gone_blocks=device // block)
    return ProbePlan(probe, prompt, device, reusable, reusable - device, loads)


def _device_prefix(probe: str, reusable: int, prefix: int, chunks: list[int]) -> int:
    """Device prefix of a probe, in tokens; of one that follows a misaligned mixed hit or has several requests, that hit's.

    Raises:
        ValueError: there is none in this geometry, or no such probe.
    """
    if probe in ("pure-cpu-hit", "corrupted-load"):
        return 0
    if probe == "mixed-aligned":
        if not chunks:
            raise ValueError("a model without chunked layers has no aligned prefix")
        return (reusable - 1) // max(chunks) * max(chunks)
    if probe not in PROBES:
        raise ValueError(f"unknown probe {probe!r}: known are {', '.join(PROBES)}")
    if chunks and prefix % max(chunks) == 0:
        raise ValueError(f"{probe}: prefix {prefix} ends on a boundary of chunk {max(chunks)}")
    return prefix


Groups = Sequence[oracle.Attention]


def _needed_loads(end: int, device: int, block: int, groups: Groups) -> int:
    """Blocks over all groups that a hit up to token ``end`` needs behind a device prefix of ``device`` tokens."""
    return sum(1 for g in groups for i in oracle.needed_blocks(end, block, g) if i >= device // block)


def _batch_plan(prompt: int, prefix: int, block: int, groups: Groups) -> ProbePlan:
    """Four prompts at once: with the misaligned device prefix, with none, with an aligned or a longer one, and a cold one."""
    reusable = (prompt - 1) // block * block
    period = math.lcm(block, *(g.chunk for g in groups if g.chunk))
    boundary = (reusable - 1) // period * period
    third = boundary if boundary else min(prefix + block, reusable - block)
    requests = [RequestPlan(p, reusable - p, p % period == 0) for p in (prefix, 0, third)]
    loads = sum(_needed_loads(reusable, r.device_tokens, block, groups) for r in requests)
    device, reuse = (sum(getattr(r, name) for r in requests) for name in ("device_tokens", "reuse_tokens"))
    asked = [*requests, RequestPlan(0, 0, True)]
    assert len(asked) == REQUESTS
    return ProbePlan("batch", prompt, device, reusable, reuse, loads, requests=asked)


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    """``length`` token ids, none of them special (ids 0..2), the same for the same arguments."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def logprob_error(a: Generation, b: Generation) -> float:
    """Largest |difference| in nats over the common vocabulary, up to and including the first step that chose differently.

    NaN when any of them is NaN: no comparison with a tolerance holds then.
    """
    worst = 0.0
    for step, (left, right) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
        errors = [abs(left[t] - right[t]) for t in left.keys() & right.keys()]
        if any(math.isnan(e) for e in errors):
            return math.nan  # `max` would pass over it
        worst = max(worst, *errors)
        if a.token_ids[step] != b.token_ids[step]:
            break
    return worst


def reference_comparison(cold: Generation, tokens: list[int], rows: list[list[float]]) -> dict[str, Any]:
    """transformers' greedy ``tokens`` and its largest logprob difference to ``cold``; ``rows`` is [steps, vocab] in nats."""
    reference = Generation(tokens, [dict(enumerate(row)) for row in rows], 0, 0.0)
    return {"tokens": tokens, "max_logprob_error": logprob_error(cold, reference)}


def _preempted_plan(prompt: int, prefix: int, block: int, groups: Groups, new_tokens: int) -> ProbePlan:
    """A misaligned mixed hit, and a pure CPU hit beside it. The first is preempted and loads once more, which vLLM's counters
    of hit tokens leave out; its second hit may reach up to where its own answer has come, so the loads are the fewest."""
    reusable = (prompt - 1) // block * block
    requests = [RequestPlan(prefix, reusable - prefix, False), RequestPlan(0, reusable, True)]
    ends = range(reusable, prompt + new_tokens, block)
    again = min(_needed_loads(end, prefix, block, groups) for end in ends)
    loads = _needed_loads(reusable, prefix, block, groups) + _needed_loads(reusable, 0, block, groups) + again
    return ProbePlan(
        "preempted-loading", prompt, prefix, reusable, 2 * reusable - prefix, loads, preemptions=1, requests=requests
    )


Step = Callable[[], tuple[Generation, dict[str, Any]]]
"""A probe's measured answer, and what else it saw."""


def attention_of(group: Mapping[str, Any]) -> oracle.Attention:
    """How a KV group attends, from the facts that :func:`kvmatrix.introspect.core_state` tells of it."""
    if group["sliding_window"]:
        return oracle.sliding(group["sliding_window"])
    return oracle.of_chunk(group["attention_chunk_size"])


class ProbeRunner:
    """Runs probes in one engine, all against one prompt and its cold answer."""

    def __init__(self, engine: Engine, geometry: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        """``groups``: the facts of each KV group, of :func:`kvmatrix.introspect.core_state`."""
        self.engine = engine
        self.geometry = geometry
        self.groups = [attention_of(g) for g in groups]
        self.vocab = engine.config.vocab_size
        self.prompt = random_prompt(geometry["prompt"], self.vocab, geometry["seed"])
        self.cold: Generation | None = None
        self.fillers = 0
        self.resident = 0
        """Tokens of the prompt, counted from 0, in the CPU tier just before the measured request."""
        self.cpu_blocks: list[list[bool]] = []
        """``[group][whole block of the prompt]``: did the CPU tier hold it then."""

    def run(self, names: list[str], on_start: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Observations of ``names``. ``cold`` is taken first, because the others are compared to it, and the damaged loads are
        told first, because a cell that does not notice them says nothing."""
        kept: list[dict[str, Any]] = []
        told = "corrupted-load" not in names
        for name in [n for n in PROBES if n in names or n == "cold"]:
            on_start(name)
            observed = self._observe(name, *self._step(name)())
            if name not in names:
                continue
            kept.insert(0 if name == "corrupted-load" else len(kept), observed)
            told = told or name == "corrupted-load"
            if told:
                yield from kept
                kept = []

    def _step(self, name: str) -> Step:
        if name in SEVERAL:
            from kvmatrix.concurrent import ConcurrentProbes

            return partial(ConcurrentProbes(self).run, name)
        if name == "corrupted-load":
            return self._corrupted
        single: dict[str, Callable[[], Generation]] = {
            "cold": self._cold,
            "device-hit": self.ask_measured,
            "pure-cpu-hit": self._pure_cpu_hit,
            "follow-up": self.ask_measured,
        }
        ask = single.get(name, partial(self._mixed, name))
        return lambda: (ask(), {})

    def plan(self, name: str) -> ProbePlan:
        sizes = {key: self.geometry[key] for key in ("prompt", "prefix", "block", "new_tokens")}
        return plan(name, groups=self.groups, **sizes)

    def ask(self, prompt: list[int]) -> Generation:
        return self.engine.generate(prompt, max_tokens=self.geometry["new_tokens"])

    def _cold(self) -> Generation:
        self.cold = self.ask(self.prompt)
        return self.cold

    def note_residency(self) -> None:
        """Note what the CPU tier holds: after a request it also holds what a declined lookup recomputed."""
        self.resident = self.engine.cpu_resident_tokens(self.prompt)
        self.cpu_blocks = self.engine.cpu_blocks(self.prompt)

    def ask_measured(self) -> Generation:
        self.note_residency()
        return self.ask(self.prompt)

    def _pure_cpu_hit(self) -> Generation:
        self.clear_device()
        return self.ask_measured()

    def _mixed(self, name: str) -> Generation:
        plan = self.plan(name)
        self.hold_prefix_alone(plan.device_tokens)
        if plan.gone_blocks:
            # What a device prefix in steady use comes to: nobody asks the CPU tier for these blocks, so they age there.
            self.engine.cpu_forget(self.prompt, 0, plan.gone_blocks)
        return self.ask_measured()

    def hold_prefix_alone(self, tokens: int) -> None:
        """Empty the device, then make the first ``tokens`` tokens of the runner's prompt, whole blocks, resident there."""
        self.clear_device()
        self.hold_on_device(self.prompt, tokens)

    def hold_on_device(self, prompt: list[int], tokens: int) -> None:
        """Make the first ``tokens`` tokens of ``prompt``, whole blocks, and nothing behind them resident on the device."""
        # One more token, unlike the prompt's own, so that exactly the prefix becomes resident.
        other = 3 + (prompt[tokens] - 2) % (self.vocab - 3)
        self.engine.generate([*prompt[:tokens], other], max_tokens=self.geometry["new_tokens"], logprobs=False)

    def _corrupted(self) -> tuple[Generation, dict[str, Any]]:
        """Pure CPU hits that each lose one block of one group on the way: its first one that attention needs."""
        assert self.cold is not None
        plan, block = self.plan("corrupted-load"), self.geometry["block"]
        damage, answer = [], self.cold
        for group, attention in enumerate(self.groups):
            needed = oracle.needed_blocks(plan.reuse_tokens, block, attention)
            if not needed:
                continue  # the hit ends on this group's chunk boundary: nothing of it is loaded
            self.clear_device()
            lost = self.engine.worker_state()["lost_blocks"]
            self.engine.control_loads("lose", self.engine.cpu_block_ids(self.prompt)[group][needed[0]])
            answer = self.ask_measured()
            damage.append(
                {
                    "group": group,
                    "block": needed[0],
                    "lost": self.engine.worker_state()["lost_blocks"] - lost,
                    "tokens": answer.token_ids,
                    "max_logprob_error": logprob_error(answer, self.cold),
                }
            )
        return answer, {"damage": damage}

    def clear_device(self) -> None:
        """Empty the device tier, then overwrite every one of its blocks: a block that is not loaded must not still
        hold the very KV that it should have been loaded with.

        Where a forward pass takes seconds, one filler request is all the traffic there is, and the blocks are overwritten
        directly.
        """
        if self.engine.config.lazy_offload:
            # A step stores what the next ones might evict, which is all of so small a pool. The filler's own first step would
            # come too late for what it evicts itself.
            self.engine.nudge()
        self.engine.reset_device()
        state = self.engine.state()
        longest, blocks = self.engine.config.max_model_len - 2, state["num_gpu_blocks"]
        if self.geometry["slow"]:
            if self.engine.overwrite_device() != blocks:
                raise EngineStateError(f"not all of {blocks} device blocks were overwritten")
            longest, blocks = self.geometry["block"], 1
        while blocks > 0:
            # The free queue is first in, first out: after as many allocations as there are blocks, each was written.
            share = -(-blocks // len(state["groups"]))
            length = min(longest, share * self.geometry["block"])
            blocks -= sum(-(-length // g["block_size"]) for g in state["groups"])
            self.fillers += 1
            filler = random_prompt(length, self.vocab, 1_000_003 * self.geometry["seed"] + self.fillers)
            self.engine.generate(filler, max_tokens=1, logprobs=False)

    def _observe(self, name: str, generation: Generation, seen: dict[str, Any]) -> dict[str, Any]:
        assert self.cold is not None
        state = self.engine.state()
        return {
            "probe": name,
            "plan": asdict(self.plan(name)),
            "tokens": generation.token_ids,
            "cold_tokens": self.cold.token_ids,
            "max_logprob_error": logprob_error(generation, self.cold),
            "vocab_compared": min(len(step) for step in generation.logprobs),
            "cached_tokens": generation.cached_tokens,
            "counters": generation.counters,
            "cpu_resident_tokens": self.resident,
            "cpu_blocks": self.cpu_blocks,
            "pending_hits": state["offload"]["pending_hits"],
            "used_device_blocks": state["used_device_blocks"],
            "imported": state["imported"],
            "seconds": generation.seconds,
            "detail": seen,
        }
