"""Counters of an engine, as the releases have them. Engines themselves are run in ``test_engine_run.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvmatrix.engine import Engine, EngineConfig

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
LOADED = "vllm:simple_kv_offload_load_blocks_total"
RECOMPUTED = "vllm:prompt_tokens_recomputed_total"


def metric(name: str, value: float, **labels: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, value=value, labels={"model_name": "m", "engine": "0"} | labels)


def engine(*metrics: SimpleNamespace, copied: dict[str, int] | None = None, offload: bool = True) -> Engine:
    """An engine that was never started; ``copied`` is what its worker says it has moved."""
    config = EngineConfig("m", "CPU_ATTN", "eager", 32, "float32", 192, 512, 16, offload=offload)
    made = object.__new__(Engine)
    made.config = config
    made.llm = SimpleNamespace(get_metrics=lambda: metrics, collective_rpc=lambda _: [{"copied_blocks": copied}])
    return made


def mixed_hit(device: int) -> list[SimpleNamespace]:
    """A prompt of 161 tokens: 32 of them from the device, 128 from the CPU tier, one computed."""
    return [
        metric(BY_SOURCE, device, source="local_cache_hit"),
        metric(BY_SOURCE, 128, source="external_kv_transfer"),
        metric(BY_SOURCE, 1, source="local_compute"),
        metric("vllm:num_preemptions_total", 0),
    ]


def hits(made: Engine) -> tuple[int, int]:
    counted = made.counters()
    return counted["device_hit_tokens"], counted["external_hit_tokens"]


def test_hit_tokens_by_source() -> None:
    assert hits(engine(*mixed_hit(32), metric(LOADED, 5))) == (32, 128)


def test_a_token_that_vllm_0_19_counts_twice_is_not_one_that_the_device_served() -> None:
    assert hits(engine(*mixed_hit(33), metric(RECOMPUTED, 1), copied={"load": 5})) == (32, 128)


def test_the_counter_of_recomputed_tokens_at_zero_changes_nothing() -> None:
    assert hits(engine(*mixed_hit(32), metric(RECOMPUTED, 0), copied={"load": 5})) == (32, 128)


@pytest.mark.parametrize(
    ("metrics", "copied", "offload", "expected"),
    [
        ([metric(LOADED, 3), metric(LOADED, 4, worker="1")], {"load": 5}, True, 7),
        ([], {"load": 5, "store": 9}, True, 5),
        ([], None, True, 0),
        ([], {"load": 5}, False, 0),
    ],
    ids=["the connector's own", "the copy backend's", "nothing copied yet", "no offload"],
)
def test_where_loaded_blocks_come_from(metrics: list[Any], copied: dict[str, int] | None, offload: bool, expected: int) -> None:
    assert engine(*metrics, copied=copied, offload=offload).counters()["loaded_blocks"] == expected
