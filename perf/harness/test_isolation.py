"""The harness itself: a cell from the preloaded parent against the same cell in a process of its own."""

import pytest

from kvmatrix.records import PerfRow


def test_isolation(isolation_row: PerfRow) -> None:
    if isolation_row.status != "PASS":
        pytest.fail(f"{isolation_row.id} is {isolation_row.status}: {isolation_row.reason}", pytrace=False)
    forked, alone = (min(min(isolation_row.seconds[k])) for k in ("fork", "process"))
    assert forked < alone, f"a preloaded parent that saves nothing: {forked:.1f} s from the parent against {alone:.1f} s alone"
