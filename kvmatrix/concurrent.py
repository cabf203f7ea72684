"""Probes with several requests under way at once: a batch with different prefixes, an abort and a preemption during a load.

Each request has a prompt of its own and is compared with its own cold answer from the same engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvmatrix.engine import Generation
from kvmatrix.probes import ProbeRunner, logprob_error, random_prompt

LOADING = "WAITING_FOR_REMOTE_KVS"
"""vLLM's status of a request whose blocks are on their way."""


class ConcurrentProbes:
    """The probes of :data:`kvmatrix.probes.SEVERAL`, in the engine of a :class:`ProbeRunner`."""

    def __init__(self, runner: ProbeRunner) -> None:
        self.runner, self.engine, self.geometry = runner, runner.engine, runner.geometry

    def run(self, name: str) -> tuple[Generation, dict[str, Any]]:
        """The answer to the runner's own prompt, and under ``requests`` and ``states`` what else there was."""
        steps = {"batch": self._batch, "abort-loading": self._abort_loading, "preempted-loading": self._preempted_loading}
        return steps[name]()

    def _other(self, number: int) -> tuple[list[int], Generation]:
        """Another prompt of the same length, and its cold answer, which also brings it into the CPU tier."""
        seed = self.geometry["seed"] + 101 * number
        prompt = random_prompt(self.geometry["prompt"], self.runner.vocab, seed)
        return prompt, self.runner.ask(prompt)

    def _batch(self) -> tuple[Generation, dict[str, Any]]:
        assert self.runner.cold is not None
        plan = self.runner.plan("batch")
        asked = [(self.runner.prompt, self.runner.cold), *(self._other(n) for n in range(1, len(plan.requests)))]
        self.runner.clear_device()
        for (prompt, _), request in zip(asked, plan.requests, strict=True):
            if request.device_tokens:
                self.runner.hold_on_device(prompt, request.device_tokens)
            if not request.device_tokens + request.reuse_tokens:
                self.engine.cpu_forget(prompt, 0, len(prompt) // self.geometry["block"])
        self.runner.note_residency()
        answers = self.engine.generate_batch([p for p, _ in asked], max_tokens=self.geometry["new_tokens"])
        requests = [_compared(answer, cold) for answer, (_, cold) in zip(answers, asked, strict=True)]
        first = replace(answers[0], cached_tokens=sum(a.cached_tokens for a in answers))
        return first, {"requests": requests}

    def _abort_loading(self) -> tuple[Generation, dict[str, Any]]:
        """A pure CPU hit is aborted while it loads, then a mixed one; the answer is the one to the same prompt after that."""
        plan = self.runner.plan("abort-loading")
        self.runner.clear_device()
        states = {"a pure CPU hit was aborted while it loaded": self._aborted_in_load()}
        self.runner.hold_on_device(self.runner.prompt, plan.device_tokens)
        if not self._aborted_in_load():  # a declined lookup: what the aborted request computed is on the device now
            self.runner.hold_prefix_alone(plan.device_tokens)
        return self.runner.ask_measured(), {"states": states}

    def _aborted_in_load(self) -> bool:
        """Whether a request with the runner's prompt came to wait for a load, and was aborted then."""
        self.engine.control_loads("hold")
        name = self.engine.start(self.runner.prompt, self.geometry["new_tokens"])
        self.engine.step_until(lambda: self._is_past_lookup(name), "a scheduled request")
        loading = bool(self.engine.request_state(name).get("status") == LOADING)
        self.engine.abort(name)
        self.engine.control_loads("release")
        self.engine.drain()
        return loading

    def _is_past_lookup(self, name: str) -> bool:
        state = self.engine.request_state(name)
        return not state or state["status"] != "WAITING"

    def _preempted_loading(self) -> tuple[Generation, dict[str, Any]]:
        """The request is preempted in the middle of its answer, while another one's blocks are on their way, and loses all but
        its prefix on the device: it is resumed by another mixed hit."""
        assert self.runner.cold is not None
        other, other_cold = self._other(1)
        plan = self.runner.plan("preempted-loading")
        self.runner.hold_prefix_alone(plan.device_tokens)
        self.runner.note_residency()
        before = self.engine.counters()
        first = self.engine.start(self.runner.prompt, self.geometry["new_tokens"])
        self.engine.step_until(lambda: self.engine.request_state(first)["output_tokens"] >= 2, "the first tokens")
        self.engine.control_loads("hold")
        second = self.engine.start(other, self.geometry["new_tokens"])
        self.engine.step_until(lambda: self._is_past_lookup(second), "a scheduled request")
        states = {
            "another request was loading": self.engine.request_state(second).get("status") == LOADING,
            "the request was running": self.engine.request_state(first).get("status") == "RUNNING",
        }
        self.engine.preempt(first)
        self.engine.device_forget(self.runner.prompt, plan.device_tokens // self.geometry["block"])
        self.engine.step()
        self.engine.control_loads("release")
        answer, other_answer = self.engine.finish([first, second])
        cached = answer.cached_tokens + other_answer.cached_tokens
        measured = replace(answer, counters=self.engine.counters_since(before), cached_tokens=cached)
        requests = [_compared(answer, self.runner.cold), _compared(other_answer, other_cold)]
        return measured, {"states": states, "requests": requests}


def _compared(answer: Generation, cold: Generation) -> dict[str, Any]:
    return {
        "tokens": answer.token_ids,
        "cold_tokens": cold.token_ids,
        "max_logprob_error": logprob_error(answer, cold),
        "cached_tokens": answer.cached_tokens,
    }
