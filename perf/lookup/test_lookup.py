"""What the lookup call itself costs, per arm, with the whole prompt in the CPU tier and no model."""

from collections.abc import Callable

import pytest

from kvmatrix.cells import STOCK
from kvmatrix.live import measured_arm
from kvmatrix.perf_plugin import CLOCK
from kvmatrix.records import PerfRow


@pytest.mark.benchmark(timer=CLOCK)
def test_lookup(lookup_row: tuple[PerfRow, str], replay: Callable[[PerfRow, str], None]) -> None:
    row, arm = lookup_row
    replay(row, arm)
    assert measured_arm(arm) == STOCK or row.answers[arm]["sound"], f"{arm} promises KV that is not there"
