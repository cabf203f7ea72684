"""What the lookup call itself costs, per arm, with the whole prompt in the CPU tier and no model."""

from collections.abc import Callable

import pytest

from kvmatrix.perf_plugin import CLOCK
from kvmatrix.records import PerfRow


@pytest.mark.benchmark(timer=CLOCK)
def test_lookup(lookup_row: tuple[PerfRow, str], replay: Callable[[PerfRow, str], None]) -> None:
    row, arm = lookup_row
    assert row.answers[arm]["external_tokens"] >= 0
    replay(row, arm)
