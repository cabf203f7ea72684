"""The harness itself: a cell from the preloaded parent against the same cell in a process of its own."""

from kvmatrix.records import PerfRow

LIMIT = 0.40


def test_isolation(isolation_row: PerfRow) -> None:
    forked, alone = (min(isolation_row.seconds[k]) for k in ("fork", "process"))
    assert forked / alone <= LIMIT, f"{forked:.1f} s from the parent against {alone:.1f} s alone"
