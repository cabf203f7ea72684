"""Workloads of the throughput measurements: one round is one request whose state was just established.

Every round has a prompt of its own, so that no round is served what another one left behind.
"""

from __future__ import annotations

import random
from typing import Any

from kvmatrix.engine import Engine
from kvmatrix.probes import random_prompt


class WorkloadRunner:
    """Measures rounds in one live engine.

    ``geometry`` has ``prompt``, ``block``, ``chunk`` and ``new_tokens`` in tokens.
    """

    def __init__(self, engine: Engine, geometry: dict[str, Any], chunks: list[int | None]) -> None:
        self.engine = engine
        self.geometry = geometry
        self.chunks = chunks

    def device_prefix(self, workload: str, rng: random.Random) -> int:
        """Tokens that the device holds when the measured request comes.

        A misaligned prefix is uniform over the block offsets inside the first chunk; an aligned one is that chunk.
        """
        block, chunk = self.geometry["block"], self.geometry["chunk"]
        if workload == "mixed-aligned":
            return int(chunk)
        if workload == "mixed-misaligned":
            return int(block) * rng.randrange(1, chunk // block)
        return 0

    def round(self, workload: str, seed: int) -> dict[str, Any]:
        """One round: the same prompt cold, then in the workload's state. Times are in seconds of the whole request."""
        rng = random.Random(seed)
        prompt = random_prompt(self.geometry["prompt"], self.engine.config.vocab_size, seed)
        prefix = self.device_prefix(workload, rng)
        cold = self._ask(prompt)
        self.engine.reset_device()
        if prefix:
            other = 3 + (prompt[prefix] - 2) % (self.engine.config.vocab_size - 3)
            self._ask([*prompt[:prefix], other])
        measured = self._ask(prompt)
        self.engine.reset_device()
        return {
            "workload": workload,
            "prefix": prefix,
            "cold_seconds": cold.seconds,
            "seconds": measured.seconds,
            "output_tokens": len(measured.token_ids),
            "meant_output_tokens": self.geometry["new_tokens"],
            "reusable_tokens": (len(prompt) - 1) // self.geometry["block"] * self.geometry["block"] - prefix,
            "device_hit_tokens": measured.counters["device_hit_tokens"],
            "external_hit_tokens": measured.counters["external_hit_tokens"],
            "cold_hit_tokens": cold.cached_tokens,
            "same_as_cold": measured.token_ids == cold.token_ids,
        }

    def _ask(self, prompt: list[int]) -> Any:
        return self.engine.generate(prompt, max_tokens=self.geometry["new_tokens"], logprobs=False)
