"""vLLM's figures from requests, against figures computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvmatrix.bench_fields import FIELDS, bench_fields
from kvmatrix.records import BenchRequest


def request(**changes: Any) -> BenchRequest:
    fields: dict[str, Any] = {
        "prompt_tokens": 100,
        "output_tokens": 3,
        "ttft": 1.0,
        "itl": [0.25, 0.75],
        "e2el": 2.0,
        "prefix": 32,
        "device_hit_tokens": 32,
        "external_hit_tokens": 40,
        "declined_tokens": 8,
        "recomputed_tokens": 28,
        "loaded_bytes": 1000,
        "right": True,
    }
    return BenchRequest(**fields | changes)


REQUESTS = [[request()], [request(prompt_tokens=200, output_tokens=5, ttft=2.0, itl=[0.5] * 4, e2el=6.0, loaded_bytes=1)]]


def test_every_figure_of_two_requests() -> None:
    assert bench_fields(REQUESTS) == pytest.approx(
        {
            "completed": 2,
            "total_input_tokens": 300,
            "total_output_tokens": 8,
            "duration": 8.0,
            "request_throughput": 0.25,
            "output_throughput": 1.0,
            "total_token_throughput": 38.5,
            "mean_ttft_ms": 1500.0,
            "median_ttft_ms": 1500.0,
            "std_ttft_ms": 500.0,
            "p99_ttft_ms": 1990.0,
            "mean_tpot_ms": 750.0,  # (2 - 1) / 2 and (6 - 2) / 4
            "median_tpot_ms": 750.0,
            "std_tpot_ms": 250.0,
            "p99_tpot_ms": 995.0,
            "mean_itl_ms": 500.0,  # 250, 750 and four times 500
            "median_itl_ms": 500.0,
            "std_itl_ms": 1e3 * (0.125 / 6) ** 0.5,
            "p99_itl_ms": 737.5,
            "mean_e2el_ms": 4000.0,
            "median_e2el_ms": 4000.0,
            "std_e2el_ms": 2000.0,
            "p99_e2el_ms": 5960.0,
            "external_hit_tokens": 80,
            "declined_tokens": 16,
            "recomputed_tokens": 56,
            "loaded_bytes": 1001,
        }
    )


def test_the_fields_are_in_order() -> None:
    assert tuple(bench_fields(REQUESTS)) == FIELDS


def test_how_requests_fall_into_blocks_changes_nothing() -> None:
    assert bench_fields([[r for block in REQUESTS for r in block]]) == bench_fields(REQUESTS)


def test_one_token_has_no_time_per_output_token() -> None:
    one = request(output_tokens=1, itl=[], e2el=1.0)
    assert {f for f in FIELDS if f not in bench_fields([[one]])} == {f for f in FIELDS if "tpot" in f or "itl" in f}
    assert bench_fields([[one, request()]])["mean_tpot_ms"] == pytest.approx(500.0)


def test_no_requests_give_no_figures() -> None:
    with pytest.raises(ValueError, match="no requests"):
        bench_fields([[], []])
