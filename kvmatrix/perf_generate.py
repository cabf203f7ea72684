"""Requests in live engines, all arms in one run: blocks of new engines, the arms interleaved request by request."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmatrix.ceilings import break_even, flop_of_prompt
from kvmatrix.cells import STOCK, Cell
from kvmatrix.checkpoint import CheckpointSpec
from kvmatrix.config import PerfSize
from kvmatrix.errors import InfraError
from kvmatrix.live import Live, Tell, live, measured_arm
from kvmatrix.processes import Job
from kvmatrix.records import BenchRequest, PerfRow
from kvmatrix.runner import Context, cell_job, llm_geometry
from kvmatrix.stats import shuffled_order
from kvmatrix.workloads import HIT_WORKLOADS, TRACE

WARM_UP = 0
"""Seed of the prompt that each engine is asked first, through every class of hit; it is not measured."""


@dataclass
class Measured:
    """What came of one workload so far: arm -> blocks -> requests."""

    order: list[list[str]] = field(default_factory=list)
    requests: dict[str, list[list[BenchRequest]]] = field(default_factory=dict)

    def open_block(self, arms: Sequence[str]) -> None:
        self.order.append([])
        for arm in arms:
            self.requests.setdefault(arm, []).append([])

    def add(self, arm: str, request: BenchRequest) -> None:
        self.order[-1].append(arm)
        self.requests[arm][-1].append(request)


def perf_cell(size: PerfSize, backend: str, mode: str, pin: str, arm: str) -> Cell:
    """The cell whose engine the measurements run."""
    return Cell(
        tier="llm",
        pin=pin,
        device="host",
        arm=arm,
        backend=backend,
        mode=mode,
        chunk=size.chunk,
        block=size.block,
        prompt=size.prompt,
        prefix=size.block,
        layers=size.layers,
    )


class GenerateRun:
    """The generation workloads of one run.

    After :meth:`measure`, also when it was cut short, :meth:`rows` has what was measured.
    """

    def __init__(self, ctx: Context, pin: str, arms: Sequence[str], size: str, tell: Tell) -> None:
        self.ctx, self.pin, self.arms, self.tell = ctx, pin, list(arms), tell
        self.perf = ctx.matrix.perf
        self.size_name, self.size = size, self.perf.sizes[size]
        self.left_out: dict[str, str] = {}
        self.imported: dict[str, dict[str, str]] = {}
        self.measured: dict[str, Measured] = {w: Measured() for w in self.perf.workloads}
        self.ceilings: list[dict[str, Any]] = []
        self.lengths = list(_lengths(self.size))
        self.timed_lengths: dict[str, list[list[float]]] = {"load": [], "recompute": []}
        self.blocks_done = 0
        self.block_bytes = 0

    def measure(self) -> None:
        """All blocks.

        Raises:
            InfraError: an engine ended, is another than asked for, or a request did not find the state that it is about.
        """
        for block in range(self.perf.blocks):
            self._block(block)
            self.blocks_done = block + 1

    def _block(self, block: int) -> None:
        arms = self.arms if block % 2 == 0 else self.arms[::-1]
        for measured in self.measured.values():
            measured.open_block(self.arms)
        seeds = [1 + block * self.size.requests + i for i in range(self.size.requests)]
        self.tell(f"requests, block {block + 1} of {self.perf.blocks}")
        references = self._control(block, arms)
        with live(self.ctx, self.pin, self.perf.backend) as group:
            jobs = {arm: self._job(arm, offload=True) for arm in arms}
            started = group.start_all(jobs, f"generate-{block}")
            children = {arm: child for arm, (child, _) in started.items()}
            self.imported = {arm: started[arm][1]["imported"] for arm in self.arms}
            self.block_bytes = started[arms[0]][1]["block_bytes"]
            self._warm_up(group, children)
            self._hits(group, children, seeds)
            self._trace(group, children, block, references)
            self._ceilings(group, children[arms[0]], seeds[0])

    def _control(self, block: int, arms: list[str]) -> dict[str, list[dict[str, Any]]]:
        """The conversations in engines without the connector: per arm the answers, the reference of those with it."""
        answers: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        if not any(w in self.measured for w in TRACE):
            return answers
        with live(self.ctx, self.pin, self.perf.backend) as group:
            started = group.start_all({arm: self._job(arm, offload=False) for arm in arms}, f"no-offload-{block}")
            children = {arm: child for arm, (child, _) in started.items()}
            for arm in arms:
                group.ask(children[arm], {"workload": "cold", "seed": WARM_UP})
            for turn, arm in self._turns(arms, -1 - block):
                told = group.ask(children[arm], {"workload": "no-offload", "seed": 1 + block, "turn": turn})
                answers[arm].append(told)
                self._keep("no-offload", arm, told | {"right": True})
        return answers

    def _trace(self, group: Live, children: dict[str, Job], block: int, references: dict[str, list[dict[str, Any]]]) -> None:
        if "multi-turn" not in self.measured:
            return
        for turn, arm in self._turns(list(children), block):
            told = group.ask(children[arm], {"workload": "multi-turn", "seed": 1 + block, "turn": turn})
            reference = references[arm][turn]
            right = told["token_ids"] == reference["token_ids"]
            self._keep("multi-turn", arm, told | {"right": right, "reference_ttft": reference["ttft"]})

    def _warm_up(self, group: Live, children: dict[str, Job]) -> None:
        for child in children.values():
            group.ask(child, {"workload": "cold", "seed": WARM_UP})
            for workload in HIT_WORKLOADS:
                group.ask(child, {"workload": workload, "seed": WARM_UP, "prefix": self._prefix(workload, WARM_UP)})

    def _hits(self, group: Live, children: dict[str, Job], seeds: list[int]) -> None:
        """Each prompt through the classes of hit, every class on all arms before the next one."""
        steps = ["cold", *(w for w in HIT_WORKLOADS if w in self.measured)]
        asked = [(seed, workload) for seed in seeds for workload in steps]
        order = iter(shuffled_order(list(children), len(asked), seeds[0]))
        for seed, workload in asked:
            prefix = self._prefix(workload, seed)
            for arm in itertools.islice(order, len(children)):
                told = group.ask(children[arm], {"workload": workload, "seed": seed, "prefix": prefix})
                if problem := void(workload, told, self.size):
                    raise InfraError(f"void: {workload} on {arm}: {problem}")
                self._keep(workload, arm, told)

    def _keep(self, workload: str, arm: str, told: dict[str, Any]) -> None:
        if workload in self.measured:
            fields = {k: v for k, v in told.items() if k in BenchRequest.model_fields}
            self.measured[workload].add(arm, BenchRequest(**fields))

    def _ceilings(self, group: Live, child: Job, seed: int) -> None:
        """The machine's ceilings, and prompts of several lengths cold and loaded, on the engine of the block's first arm."""
        self.ceilings.append(group.ask(child, {"workload": "ceilings"}))
        taken: dict[str, list[float]] = {"load": [], "recompute": []}
        for length in self.lengths:
            # A seed of its own: a shorter prompt of the same seed would be its beginning, and be served.
            request = {"seed": -(seed << 32) - length, "length": length + 1, "prefix": 0}
            taken["recompute"].append(group.ask(child, request | {"workload": "cold"})["ttft"])
            loaded = group.ask(child, request | {"workload": "pure-cpu-hit"})
            if loaded["external_hit_tokens"] != length:
                raise InfraError(f"void: {loaded['external_hit_tokens']} tokens of {length} were loaded for the break-even")
            taken["load"].append(loaded["ttft"])
        for kind, seconds in taken.items():
            self.timed_lengths[kind].append(seconds)

    def _turns(self, arms: list[str], seed: int) -> Iterator[tuple[int, str]]:
        for index, arm in enumerate(shuffled_order(arms, self.size.turns, seed)):
            yield index // len(arms), arm

    def _prefix(self, workload: str, seed: int) -> int:
        """Tokens that the device is to hold: uniform over the blocks inside the first chunk where it is to be misaligned."""
        size = self.size
        misaligned = size.block * random.Random(seed).randrange(1, size.chunk // size.block)
        return {"device-hit": size.servable_tokens, "mixed-aligned": size.chunk, "mixed-misaligned": misaligned}.get(
            workload, 0
        )

    def _job(self, arm: str, offload: bool) -> dict[str, Any]:
        size, llm = self.size, self.ctx.matrix.llm
        cell = perf_cell(size, self.perf.backend, self.perf.mode, self.pin, measured_arm(arm))
        # The device has room for one of the longest prompts: conversations push each other out of it.
        sizes = llm_geometry(size.prompt, size.block, size.block, cell.kv_groups, size.new_tokens)
        per_token = CheckpointSpec.kv_bytes_of_token(len(size.layers))
        tokens = size.prompt * (size.requests * 2 + size.turns + 6)
        return cell_job(cell, self.ctx) | {
            "kind": "generate",
            "arm": arm,
            "checkpoint": _checkpoint(size, llm.vocab_size, sizes["max_model_len"]),
            "geometry": sizes
            | {"chunk": size.chunk, "turns": size.turns, "offload": offload, "seed": llm.seed}
            | {"cpu_bytes": max(llm.cpu_bytes, per_token * tokens * cell.kv_groups)},
        }

    def rows(self, reason: str = "") -> list[PerfRow]:
        """The rows of what was measured; ``reason``: why it came to no end."""
        status: Any = "INFRA" if reason else "PASS"
        return [self._row(w, status, reason) for w in self.measured] + self._ceiling_rows(status, reason)

    def _row(self, workload: str, status: Any, reason: str) -> PerfRow:
        measured = self.measured[workload]
        if status == "PASS" and (wrong := self._wrong_arm(measured)):
            status, reason = "FAIL", f"wrong-output: {wrong} answers otherwise than the reference"
        return PerfRow(
            run=self.ctx.run,
            id=self._id(workload),
            group="generate",
            workload=workload,
            size=self.size_name,
            geometry=self._geometry(),
            status=status,
            reason=reason,
            order=measured.order,
            seconds={a: [[r.e2el for r in block] for block in blocks] for a, blocks in measured.requests.items()},
            requests=measured.requests,
            left_out=self.left_out,
            imported=self.imported,
        )

    def _wrong_arm(self, measured: Measured) -> str:
        """A patched arm with a wrong answer; stock's are what the fixes are about."""
        arms = (a for a, blocks in measured.requests.items() if not all(r.right for b in blocks for r in b))
        return next((a for a in arms if measured_arm(a) != STOCK), "")

    def _id(self, workload: str) -> str:
        cell = perf_cell(self.size, self.perf.backend, self.perf.mode, self.pin, "x")
        return f"{cell.id.removesuffix('-x')}-{self.size_name}-{workload}"

    def _geometry(self) -> dict[str, Any]:
        return self.size.model_dump() | {
            "backend": self.perf.backend,
            "mode": self.perf.mode,
            "resolution": self.perf.generate_resolution,
            "block_bytes": self.block_bytes,
        }

    def _ceiling_rows(self, status: Any, reason: str) -> list[PerfRow]:
        common = {"run": self.ctx.run, "size": self.size_name, "status": status, "reason": reason}
        if not self.ceilings:
            return []
        best = {k: max(c[k] for c in self.ceilings) for k in ("copy_bytes_per_s", "matmul_flop_per_s")}
        model = self._model()
        answers = best | {"threads": self.ceilings[0]["threads"], **model}
        rows = [PerfRow(id=self._id("ceilings"), group="ceiling", workload="ceilings", geometry={}, answers=answers, **common)]
        if "device-hit" in self.measured:
            requests = self.measured["device-hit"].requests[self.arms[0]]
            step = statistics.median_high(r.ttft for block in requests for r in block)
            per_token = {"load": model["bytes_per_token"] / best["copy_bytes_per_s"]}
            per_token["recompute"] = model["flop_per_token"] / best["matmul_flop_per_s"]
            predicted = break_even(step, per_token["load"], per_token["recompute"])
            told = answers | {"step_seconds": step, "predicted_tokens": predicted, "seconds_per_token": per_token}
            rows.append(
                PerfRow(
                    id=self._id("break-even"),
                    group="break-even",
                    workload="break-even",
                    geometry={"lengths": self.lengths},
                    seconds=self.timed_lengths,
                    answers=told,
                    **common,
                )
            )
        return rows

    def _model(self) -> dict[str, float]:
        """Bytes and operations of one prompt token, of the model that is measured."""
        size = self.size
        spec = _checkpoint(size, self.ctx.matrix.llm.vocab_size, 1)
        config = {
            "layers": size.layers,
            "chunk": size.chunk,
            "hidden_size": size.hidden_size,
            "intermediate_size": spec["intermediate_size"],
            "heads": CheckpointSpec.num_attention_heads,
            "kv_heads": CheckpointSpec.num_key_value_heads,
            "head_dim": CheckpointSpec.head_dim,
            "vocab_size": spec["vocab_size"],
        }
        flop = flop_of_prompt(size.prompt, 0, config)
        kv_bytes = CheckpointSpec.kv_bytes_of_token(len(size.layers))
        return {"bytes_per_token": kv_bytes, "flop_per_token": flop / size.prompt, "flop_of_prompt": flop}


def _checkpoint(size: PerfSize, vocab_size: int, max_model_len: int) -> dict[str, Any]:
    return {
        "chunk": size.chunk,
        "layers": size.layers,
        "vocab_size": vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": 2 * size.hidden_size,
        "max_position_embeddings": 2 * max_model_len,
    }


def _lengths(size: PerfSize) -> Iterator[int]:
    """Tokens to load or recompute: whole blocks, each twice the one before, up to the prompt."""
    length = size.block
    while length < size.prompt:
        yield length
        length *= 2


def void(workload: str, told: dict[str, Any], size: PerfSize) -> str:
    """Why a request does not count: it did not find its state, or did not give all its tokens; empty when it does."""
    device, external = told["device_hit_tokens"], told["external_hit_tokens"]
    if told["output_tokens"] != size.new_tokens:
        return f"{told['output_tokens']} output tokens, {size.new_tokens} were meant"
    if device != told["prefix"]:
        return f"the device served {device} tokens, {told['prefix']} were meant"
    meant = {"cold": 0, "mixed-misaligned": external}.get(workload, size.servable_tokens - device)
    if external != meant:
        return f"the CPU tier served {external} tokens, {meant} were meant"
    if external and not told["loaded_bytes"]:
        return f"{external} external tokens, and no block was copied"
    return ""
