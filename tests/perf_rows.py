"""Rows of the perf suite for the tests of its tables and plots, with the ratios that a test asks for."""

from __future__ import annotations

from typing import Any

from kvmatrix.live import AGAIN
from kvmatrix.records import BenchRequest, PerfRow
from kvmatrix.stats import MIN_BLOCKS

RUN = "20260101T000000Z-abcd"
NOISE = (0.999, 1.001, 1.0, 0.998, 1.002, 1.0, 1.0)
"""A block's own factor: A/A intervals of about two tenths of a percent."""
RATIOS = {AGAIN: 1.0, "fix": 1.0, "other": 1.0}


def perf_row(group: str, workload: str, **changes: Any) -> PerfRow:
    fields: dict[str, Any] = {"run": RUN, "id": f"{group}-{workload}", "group": group, "workload": workload}
    return PerfRow(**fields | {"geometry": {}, "status": "PASS"} | changes)


def noisy(seconds: float, of_stock: bool, blocks: int) -> list[list[float]]:
    """Blocks of two rounds; every arm but stock has its own noise."""
    return [[seconds * (1 if of_stock else NOISE[b % len(NOISE)])] * 2 for b in range(blocks)]


def lookup_row(
    prompt: int = 8193,
    prefix: int = 4096,
    ratios: dict[str, float] | None = None,
    unsound: tuple[str, ...] = (),
    blocks: int = MIN_BLOCKS,
    stock_seconds: float = 2e-5,
    **changes: Any,
) -> PerfRow:
    arms = {"stock": 1.0} | (RATIOS if ratios is None else ratios)
    geometry = {"block": 16, "chunk": 8192, "groups": 2, "prompt": prompt, "prefix": prefix, "hit": True, "resolution": 0.01}
    fields: dict[str, Any] = {
        "geometry": geometry,
        "seconds": {a: noisy(stock_seconds * r, a == "stock", blocks) for a, r in arms.items()},
        "answers": {a: {"external_tokens": prompt - 1 - prefix, "sound": a not in unsound} for a in arms},
    }
    return perf_row("lookup", f"p{prompt}-d{prefix}", **fields | changes)


def bench_request(ttft: float, right: bool = True, reference: float | None = None, **changes: Any) -> BenchRequest:
    fields: dict[str, Any] = {
        "prompt_tokens": 1281,
        "output_tokens": 3,
        "ttft": ttft,
        "itl": [0.01, 0.03],
        "e2el": ttft + 0.04,
        "reference_ttft": reference,
        "prefix": 32,
        "device_hit_tokens": 32,
        "external_hit_tokens": 1216,
        "declined_tokens": 32,
        "recomputed_tokens": 33,
        "loaded_bytes": 3 * 2**20,
        "right": right,
    }
    return BenchRequest(**fields | changes)


def generate_row(
    workload: str = "mixed-aligned",
    ratios: dict[str, float] | None = None,
    wrong: tuple[str, ...] = (),
    reference: float | None = 2.0,
    blocks: int = MIN_BLOCKS,
    **changes: Any,
) -> PerfRow:
    """``wrong``: arms whose last request came out wrong. Stock takes 0.2 s to the first token, the reference ``reference``."""
    arms = {"stock": 1.0} | (RATIOS if ratios is None else ratios)
    requests = {}
    for arm, ratio in arms.items():
        times = noisy(0.2 * ratio, arm == "stock", blocks)
        requests[arm] = [
            [bench_request(t, not (arm in wrong and b == blocks - 1 and r == 1), reference) for r, t in enumerate(block)]
            for b, block in enumerate(times)
        ]
    fields: dict[str, Any] = {"geometry": {"prompt": 1281, "resolution": 0.04}, "requests": requests}
    return perf_row("generate", workload, **fields | changes)


def break_even_row(load: list[float], recompute: list[float], blocks: int = MIN_BLOCKS, **answers: Any) -> PerfRow:
    lengths = [256 * 2**i for i in range(len(load))]
    sides = {"load": load, "recompute": recompute}
    seconds = {arm: [[s * NOISE[(b + len(arm)) % 7] for s in side] for b in range(blocks)] for arm, side in sides.items()}
    return perf_row("break-even", "small", geometry={"lengths": lengths}, seconds=seconds, answers=answers)
