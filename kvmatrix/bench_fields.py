"""The figures of vLLM's serving benchmark, under its names, from measured requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvmatrix.records import BenchRequest

COUNTS = ("completed", "total_input_tokens", "total_output_tokens")
RATES = ("duration", "request_throughput", "output_throughput", "total_token_throughput")
TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
STATISTICS = ("mean", "median", "std", "p99")
SUMS = ("external_hit_tokens", "declined_tokens", "recomputed_tokens", "loaded_bytes")
"""The tiers' own, over all requests: vLLM's benchmark has none of these."""

FIELDS = (*COUNTS, *RATES, *(f"{statistic}_{time}" for time in TIMES for statistic in STATISTICS), *SUMS)


def bench_fields(blocks: Iterable[Sequence[BenchRequest]]) -> dict[str, float]:
    """Field -> figure of one arm, over the requests of all blocks: seconds, requests or tokens a second, and milliseconds.

    There is one request at a time, so ``duration`` is the sum of the requests' own times, without what prepared them. As vLLM
    does, ``std`` is of the population and ``p99`` interpolates. A request of one token has no time per output token, and where
    none has a time its statistics are left out (vLLM shows 0).

    Raises:
        ValueError: there is no request.
    """
    requests = [r for block in blocks for r in block]
    if not requests:
        raise ValueError("no requests: there is nothing to show")
    inputs, outputs = sum(r.prompt_tokens for r in requests), sum(r.output_tokens for r in requests)
    duration = sum(r.e2el for r in requests)
    fields: dict[str, float] = {
        "completed": len(requests),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "duration": duration,
        "request_throughput": len(requests) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    times = {
        "ttft_ms": [r.ttft for r in requests],
        "tpot_ms": [(r.e2el - r.ttft) / (r.output_tokens - 1) for r in requests if r.output_tokens > 1],
        "itl_ms": [gap for r in requests for gap in r.itl],
        "e2el_ms": [r.e2el for r in requests],
    }
    for name, seconds in times.items():
        if seconds:
            of = (np.mean(seconds), np.median(seconds), np.std(seconds), np.percentile(seconds, 99))
            fields |= {f"{statistic}_{name}": 1e3 * float(value) for statistic, value in zip(STATISTICS, of, strict=True)}
    return fields | {name: sum(getattr(r, name) for r in requests) for name in SUMS}
