"""What a request costs, per class of hit and arm, in a live engine whose state was established just before."""

from collections.abc import Callable

import pytest

from kvmatrix.perf_plugin import CLOCK
from kvmatrix.records import PerfRow


@pytest.mark.benchmark(timer=CLOCK)
def test_generate(generate_row: tuple[PerfRow, str], replay: Callable[[PerfRow, str], None]) -> None:
    row, arm = generate_row
    replay(row, arm)
    assert arm == "stock" or all(row.answers[arm]["same_as_cold"]), f"{arm} gave another output than cold"
