"""Jobs that a cell's child process runs: each takes a JSON object and sends messages as it goes.

A message is sent the moment its fact is known, so that a later crash loses nothing that was finished.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvmatrix import overlay

Send = Callable[[dict[str, Any]], None]
Receive = Callable[[], dict[str, Any] | None]


def run(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """Run ``job`` (its ``kind`` names one of ``JOBS``).

    Raises:
        KeyError: an unknown kind.
    """
    JOBS[job["kind"]](job, send, receive)


def engine_config(job: dict[str, Any], model: str) -> Any:
    from kvmatrix.engine import EngineConfig

    cell, geometry = job["cell"], job["geometry"]
    return EngineConfig(
        model=model,
        backend=cell["backend"],
        mode=cell["mode"],
        block_size=cell["block"],
        dtype=cell["dtype"],
        max_model_len=geometry["max_model_len"],
        vocab_size=job["checkpoint"]["vocab_size"],
        num_gpu_blocks=geometry["num_gpu_blocks"],
        lazy_offload=cell["offload"] == "lazy",
        disk_path=str(Path(job["cwd"]) / f"kv-{os.getpid()}") if cell["offload"] == "disk" else "",
        cpu_bytes=geometry["cpu_bytes"],
        offload=geometry.get("offload", True),
        max_num_batched_tokens=max(512, geometry["requests"] * geometry["max_model_len"]),
    )


_kept: list[Any] = []
"""Engines of this process. It ends with them, and to take one apart before that would cost as much as several probes."""


def start_engine(job: dict[str, Any], model: str, send: Send) -> tuple[Any, dict[str, Any]]:
    """Start the cell's engine on the checkpoint ``model`` and send what it resolved to."""
    from kvmatrix import checkpoint
    from kvmatrix.engine import Engine

    send({"type": "stage", "stage": "engine start"})
    config = engine_config(job, model)
    if config.disk_path and find_spec("vllm.v1.simple_kv_offload.disk_backend") is None:
        raise NotImplementedError("the connector of this release has no disk tier")
    engine = Engine(config)
    _kept.append(engine)
    if config.disk_path:
        for file in Path(config.disk_path).parent.glob(f"{Path(config.disk_path).name}.*"):
            file.unlink()  # vLLM has it open: a cell that is killed leaves nothing behind
    state, worker = engine.state(), engine.worker_state()
    send(
        {
            "type": "engine",
            "state": state,
            "worker": worker,
            "start_seconds": engine.start_seconds,
            "weights_sha256": checkpoint.weights_sha256(model),
        }
    )
    return engine, state


def run_cell(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """``kind = cell``: transformers' answer to the cell's prompt, then the probes of the cell in one engine."""
    from kvmatrix import checkpoint
    from kvmatrix.agreement import first_logprobs
    from kvmatrix.probes import ProbeRunner, random_prompt, reference_comparison

    geometry = job["geometry"]
    prompt = random_prompt(geometry["prompt"], job["checkpoint"]["vocab_size"], geometry["seed"])
    send({"type": "stage", "stage": "checkpoint"})
    model = checkpoint.ensure(job["checkpoint"], job["checkpoints"])
    send({"type": "stage", "stage": "reference"})
    reference = checkpoint.reference(model, prompt, geometry["new_tokens"])
    engine, state = start_engine(job, model, send)
    runner = ProbeRunner(engine, geometry, state["groups"])
    for observed in runner.run(job["probes"], on_start=lambda name: send({"type": "stage", "stage": name})):
        if observed["probe"] == "cold" and runner.cold is not None:
            observed["reference"] = reference_comparison(runner.cold, *reference)
            observed["logprobs"] = first_logprobs(runner.cold)
        send({"type": "probe", **observed})
    send({"type": "summary", "filler_requests": runner.fillers, "worker": engine.worker_state()})
    engine.shutdown()


def run_facts(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """``kind = facts``: versions and the platform that vLLM chose in this environment."""
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform

    send(
        {
            "type": "facts",
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "platform": type(current_platform).__name__,
        }
    )


def run_scheduler(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """``kind = scheduler``: cases, calls around them, sweeps, stateful tests and public reports, on the real classes."""
    from kvmatrix import protocol, public_cases, reuse, scheduler_harness

    for case in job["cases"]:
        send({"type": "stage", "stage": case["name"]})
        send({"type": "case", **scheduler_harness.run_case(case), "imported": overlay.imported_digests()})
    for check in job["protocol"]:
        _answer(send, "protocol", check["name"], "tried", partial(protocol.run, check["check"], check["shapes"]))
    for sweep in job["sweeps"]:
        ask = partial(reuse.sweep, sweep["shapes"], sweep["residency"], sweep.get("hit_class"))
        _answer(send, "sweep", sweep["name"], "totals", ask)
    for programs in job["stateful"]:
        _answer(send, "stateful", programs["name"], "totals", partial(run_programs, programs, job["tools"]))
    for name in job["public"]:
        _answer(send, "public", name, "found", partial(public_cases.run, name))


def _answer(send: Send, kind: str, name: str, key: str, ask: Callable[[], dict[str, Any]]) -> None:
    """Send what ``ask`` gives under ``key``, or why this release cannot be asked."""
    from kvmatrix.scheduler_harness import Unsupported

    send({"type": "stage", "stage": name})
    try:
        answer: dict[str, Any] = {key: ask()}
    except Unsupported as e:
        answer = {"refused": str(e)}
    send({"type": kind, "name": name, "imported": overlay.imported_digests(), **answer})


def run_programs(asked: dict[str, Any], tools: str) -> dict[str, Any]:
    """Totals of one stateful test; ``tools``: folder of hypothesis.

    Raises:
        Unsupported: this release cannot be driven so.
    """
    if tools not in sys.path:
        sys.path.append(tools)  # behind the pin's own packages: it must not replace one of them
    from kvmatrix import stateful

    return stateful.run(asked["chunks"], asked["lazy"], asked["programs"], asked["steps"], asked["seed"])


def run_lookup(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """``kind = lookup``: answer ``{"calls": n}`` requests with the seconds of n lookups, and what the last one answered.

    Python's collector is off: it would walk all that the process holds in whichever round its counter runs full, a round of any
    arm. vLLM's engine takes what it holds at its start out of the collector's sight for the same reason.
    """
    from kvmatrix import scheduler_harness

    gc.disable()
    try:
        bench = scheduler_harness.LookupBench(**job["geometry"])
    except scheduler_harness.Unsupported as e:
        send({"type": "ready", "refused": str(e), "imported": overlay.imported_digests()})
        return
    answer = bench.answer()
    send({"type": "ready", "answer": answer, "kv_groups": bench.kv_groups, "imported": overlay.imported_digests()})
    while (request := receive()) is not None:
        seconds, external = bench.time_calls(request["calls"])
        send({"type": "timing", "seconds": seconds, "external_tokens": external})


def run_generate(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """``kind = generate``: a live engine that answers each request with a measured one of a workload, or with the ceilings."""
    from kvmatrix import ceilings, checkpoint
    from kvmatrix.workloads import WorkloadRunner

    engine, _ = start_engine(job, checkpoint.ensure(job["checkpoint"], job["checkpoints"]), send)
    runner = WorkloadRunner(engine, job["geometry"])
    send({"type": "ready", "imported": engine.state()["imported"], "block_bytes": runner.block_bytes})
    while (request := receive()) is not None:
        if request["workload"] == "ceilings":
            send({"type": "ceilings", **ceilings.measure()})
        else:
            send({"type": "request", **runner.measure(request)})
    engine.shutdown()


def run_upstream(job: dict[str, Any], send: Send, receive: Receive) -> None:
    """``kind = upstream``: vLLM's own tests, from a checkout, against the arm that this process imports."""
    from kvmatrix import upstream_child

    upstream_child.run(job, send)


JOBS: dict[str, Callable[[dict[str, Any], Send, Receive], None]] = {
    "cell": run_cell,
    "facts": run_facts,
    "scheduler": run_scheduler,
    "lookup": run_lookup,
    "generate": run_generate,
    "upstream": run_upstream,
}


def enter_child(job: dict[str, Any]) -> None:
    """Put a fresh child into the job's environment, and load its arm before anything can import the stock file."""
    for name, value in job.get("env", {}).items():
        os.environ[name] = value
    Path(job["cwd"]).mkdir(parents=True, exist_ok=True)
    os.chdir(job["cwd"])
    overlay.install()
    if job.get("cell", {}).get("mode") == "eager":
        _run_everything_eagerly()


def _run_everything_eagerly() -> None:
    """An eager cell compiles nothing, vLLM's small helpers included: it must run where there is no C++ compiler."""
    import torch

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for processes that this one starts
    torch.compiler.set_stance("force_eager")
