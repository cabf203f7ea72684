"""Probes: one prompt geometry each, established in a running engine by generation and cache resets only.

Every probe returns observations (tokens, logprob errors, vLLM's counters and the plan they are checked against). What
they mean is decided by :mod:`kvmatrix.judge`, outside the engine's process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvmatrix import oracle
from kvmatrix.engine import Engine, Generation

PROBES = ("cold", "device-hit", "pure-cpu-hit", "mixed-aligned", "mixed-misaligned", "mixed-head-gone")


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


def plan(probe: str, *, prompt: int, prefix: int, block: int, chunks: list[int | None]) -> ProbePlan:
    """The plan of ``probe`` for a prompt of ``prompt`` tokens.

    ``prefix`` is the misaligned device prefix; ``chunks`` has each KV group's chunk (None: full attention).

    Raises:
        ValueError: the geometry cannot establish the probe.
    """
    reusable = (prompt - 1) // block * block
    chunk = max(c for c in chunks if c) if any(chunks) else None
    if probe == "cold":
        return ProbePlan(probe, prompt, 0, 0, 0, 0)
    if probe == "device-hit":
        return ProbePlan(probe, prompt, reusable, reusable, 0, 0)
    if probe == "pure-cpu-hit":
        device = 0
    elif probe == "mixed-aligned":
        if chunk is None:
            raise ValueError("a model without chunked layers has no aligned prefix")
        device = (reusable - 1) // chunk * chunk
    elif probe in ("mixed-misaligned", "mixed-head-gone"):
        device = prefix
    else:
        raise ValueError(f"unknown probe {probe!r}: known are {', '.join(PROBES)}")
    if probe.startswith("mixed") and not 0 < device < reusable:
        raise ValueError(f"{probe}: prompt {prompt} leaves no device prefix with a CPU suffix (prefix {device})")
    if device % block:
        raise ValueError(f"{probe}: device prefix {device} is not a multiple of the block size {block}")
    first = device // block
    loads = sum(1 for c in chunks for i in oracle.needed_blocks(reusable, block, oracle.of_chunk(c)) if i >= first)
    if probe == "mixed-head-gone":
        return ProbePlan(probe, prompt, device, 0, reusable - device, loads, gone_blocks=first)
    return ProbePlan(probe, prompt, device, reusable, reusable - device, loads)


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


class ProbeRunner:
    """Runs probes in one engine, all against one prompt and its cold answer."""

    def __init__(self, engine: Engine, geometry: dict[str, Any], chunks: list[int | None]) -> None:
        self.engine = engine
        self.geometry = geometry
        self.chunks = chunks
        self.vocab = engine.config.vocab_size
        self.prompt = random_prompt(geometry["prompt"], self.vocab, geometry["seed"])
        self.cold: Generation | None = None
        self.fillers = 0
        self.resident = 0
        """Tokens of the prompt, counted from 0, in the CPU tier just before the measured request."""
        self.cpu_blocks: list[list[bool]] = []
        """``[group][whole block of the prompt]``: did the CPU tier hold it then."""

    def run(self, names: list[str], on_start: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Observations of ``names`` in order; ``cold`` is always taken first, because the others are compared to it."""
        steps: dict[str, Callable[[], Generation]] = {
            "cold": self._cold,
            "device-hit": self._ask_measured,
            "pure-cpu-hit": self._pure_cpu_hit,
            "mixed-aligned": lambda: self._mixed("mixed-aligned"),
            "mixed-misaligned": lambda: self._mixed("mixed-misaligned"),
            "mixed-head-gone": lambda: self._mixed("mixed-head-gone"),
        }
        ordered = ["cold"] + [n for n in PROBES if n in names and n != "cold"]
        for name in ordered:
            on_start(name)
            generation = steps[name]()
            observed = self._observe(name, generation)
            if name in names:
                yield observed

    def plan(self, name: str) -> ProbePlan:
        g = self.geometry
        return plan(name, prompt=g["prompt"], prefix=g["prefix"], block=g["block"], chunks=self.chunks)

    def _ask(self, prompt: list[int] | None = None) -> Generation:
        return self.engine.generate(prompt or self.prompt, max_tokens=self.geometry["new_tokens"])

    def _cold(self) -> Generation:
        self.cold = self._ask()
        return self.cold

    def _ask_measured(self) -> Generation:
        """Ask, after noting what the CPU tier holds: afterwards it also holds what a declined lookup recomputed."""
        self.resident = self.engine.cpu_resident_tokens(self.prompt)
        self.cpu_blocks = self.engine.cpu_blocks(self.prompt)
        return self._ask()

    def _pure_cpu_hit(self) -> Generation:
        self._clear_device()
        return self._ask_measured()

    def _mixed(self, name: str) -> Generation:
        self._clear_device()
        plan = self.plan(name)
        prefix = self.prompt[: plan.device_tokens]
        # One more token, unlike the prompt's own, so that exactly the prefix becomes resident.
        other = 3 + (self.prompt[len(prefix)] - 2) % (self.vocab - 3)
        self.engine.generate([*prefix, other], max_tokens=self.geometry["new_tokens"], logprobs=False)
        if plan.gone_blocks:
            # What a device prefix in steady use comes to: nobody asks the CPU tier for these blocks, so they age there.
            self.engine.cpu_forget(self.prompt, 0, plan.gone_blocks)
        return self._ask_measured()

    def _clear_device(self) -> None:
        """Empty the device tier, then overwrite every one of its blocks: a block that is not loaded must not still
        hold the very KV that it should have been loaded with."""
        self.engine.reset_device()
        state = self.engine.state()
        longest = self.engine.config.max_model_len - 2
        blocks = state["num_gpu_blocks"]
        while blocks > 0:
            # The free queue is first in, first out: after as many allocations as there are blocks, each was written.
            share = -(-blocks // len(state["groups"]))
            length = min(longest, share * self.geometry["block"])
            blocks -= sum(-(-length // g["block_size"]) for g in state["groups"])
            self.fillers += 1
            filler = random_prompt(length, self.vocab, 1_000_003 * self.geometry["seed"] + self.fillers)
            self.engine.generate(filler, max_tokens=1, logprobs=False)

    def _observe(self, name: str, generation: Generation) -> dict[str, Any]:
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
            "imported": state["imported"],
            "seconds": generation.seconds,
        }
