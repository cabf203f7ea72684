"""Workloads of the perf suite, in a live engine: each measured request comes right after its state was established.

A prompt belongs to one block of the run. It is asked cold once, which also fills the CPU tier, and then in each class of hit,
after the device tier was reset and given the prefix that the class is about. No request is served what another prompt left.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from kvmatrix.engine import Engine, Timed
from kvmatrix.probes import random_prompt

HIT_WORKLOADS = ("device-hit", "pure-cpu-hit", "mixed-aligned", "mixed-misaligned")
"""In the order in which a prompt goes through them: the one that stock answers wrongly comes last."""
TRACE = ("multi-turn", "no-offload")
"""The same conversations, with the connector and without."""
CONVERSATIONS = 3
POPULARITY = 1.1
"""Exponent of Zipf's law, by which the next conversation is chosen."""
SYSTEM_SHARE = 0.23
"""Share of the longest prompt that all conversations begin with: it ends inside a chunk."""
ANSWER = 4
"""Tokens of an answer that stands in the next turn's prompt: drawn from the seed, so that each arm has the same traffic."""


def conversation_prompts(longest: int, turns: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of a seeded trace of conversations: a shared system prompt, turns that grow, popularity by Zipf's law.

    Args:
        longest: no prompt has more tokens; a conversation that would is begun anew.
        turns: requests of the trace.
    """
    rng = random.Random(seed)
    system = random_prompt(int(longest * SYSTEM_SHARE), vocab, seed)
    weights = [1 / rank**POPULARITY for rank in range(1, CONVERSATIONS + 1)]
    histories = [list(system) for _ in range(CONVERSATIONS)]
    prompts = []
    for turn in range(turns):
        chosen = rng.choices(range(CONVERSATIONS), weights)[0]
        question = random_prompt(rng.randint(longest // 10, longest // 4), vocab, seed + 1 + turn)
        if len(histories[chosen]) + len(question) > longest:
            histories[chosen] = list(system)
        prompt = histories[chosen] + question
        prompts.append(prompt)
        histories[chosen] = prompt + random_prompt(ANSWER, vocab, ~seed - turn)
    return prompts


class WorkloadRunner:
    """Measures requests in one live engine.

    ``geometry`` has ``prompt``, ``block``, ``chunk``, ``new_tokens`` and ``turns`` in tokens and requests.
    """

    def __init__(self, engine: Engine, geometry: dict[str, Any]) -> None:
        self.engine = engine
        self.geometry = geometry
        self.vocab = engine.config.vocab_size
        self.block_bytes = engine.worker_state()["block_bytes"]
        self._cold: dict[tuple[int, int], Timed] = {}
        """By seed and length of the prompt."""
        self._trace: list[list[int]] = []
        """Prompts of the conversations that go on, from their first turn."""

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of ``workload``, as the fields of :class:`kvmatrix.records.BenchRequest` and ``token_ids``.

        ``request`` has ``workload`` and ``seed``; of a hit ``prefix``, of a conversation ``turn``; ``length`` in tokens, where
        another than the geometry's.
        """
        workload, seed = request["workload"], request["seed"]
        if workload in TRACE:
            return self._turn(seed, request["turn"])
        length = request.get("length", self.geometry["prompt"])
        prompt = random_prompt(length, self.vocab, seed)
        if workload == "cold":
            self.engine.reset_device()
            cold, fields = self._timed(prompt, 0)
            self._cold[seed, length] = cold
            return fields | {"right": True}
        prefix = request["prefix"]
        self._establish(workload, prompt, prefix)
        _, fields = self._timed(prompt, prefix)
        reference = self._cold[seed, length]
        right = fields["token_ids"] == reference.token_ids
        return fields | {"right": right, "reference_ttft": reference.token_seconds[0]}

    def _establish(self, workload: str, prompt: list[int], prefix: int) -> None:
        """Bring the device tier to ``prefix`` tokens of the prompt; a cold prompt has left what ``device-hit`` needs."""
        if workload == "device-hit":
            return
        self.engine.reset_device()
        if prefix:
            other = 3 + (prompt[prefix] - 2) % (self.vocab - 3)  # no special token, and another one than the prompt's
            self.engine.generate([*prompt[:prefix], other], max_tokens=self.geometry["new_tokens"], logprobs=False)

    def _turn(self, seed: int, turn: int) -> dict[str, Any]:
        if turn == 0:
            self.engine.reset_device()
            self._trace = conversation_prompts(self.geometry["prompt"], self.geometry["turns"], self.vocab, seed)
        _, fields = self._timed(self._trace[turn], -1)
        return fields

    def _timed(self, prompt: list[int], prefix: int) -> tuple[Timed, dict[str, Any]]:
        held = self.engine.cpu_resident_tokens(prompt) if self.engine.config.offload else 0
        timed = self.engine.timed(prompt, self.geometry["new_tokens"])
        device, external = (timed.counters[f"{tier}_hit_tokens"] for tier in ("device", "external"))
        at = timed.token_seconds
        return timed, {
            "prompt_tokens": len(prompt),
            "output_tokens": len(timed.token_ids),
            "ttft": at[0],
            "itl": [b - a for a, b in itertools.pairwise(at)],
            "e2el": at[-1],
            "prefix": prefix,
            "device_hit_tokens": device,
            "external_hit_tokens": external,
            "declined_tokens": max(0, held - device - external),
            "recomputed_tokens": len(prompt) - device - external,
            "loaded_bytes": timed.counters["loaded_blocks"] * self.block_bytes,
            "token_ids": timed.token_ids,
        }
