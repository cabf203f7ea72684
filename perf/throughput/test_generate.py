"""What a request costs, per class of hit and arm, in a live engine whose state was established just before."""

from collections.abc import Callable

import pytest

from kvmatrix.cells import STOCK
from kvmatrix.live import measured_arm
from kvmatrix.perf_plugin import CLOCK
from kvmatrix.records import PerfRow


@pytest.mark.benchmark(timer=CLOCK)
def test_generate(generate_row: tuple[PerfRow, str], replay: Callable[[PerfRow, str], None]) -> None:
    row, arm = generate_row
    replay(row, arm)
    assert measured_arm(arm) == STOCK or all(r.right for block in row.requests[arm] for r in block), f"{arm} answers wrongly"
