"""Pairwise coverage: which pairs of axis values a selection of LLM cells has, and which it should have and has not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from kvmatrix.cells import Cell
from kvmatrix.config import AxisValue, Pairs

Value = tuple[str, AxisValue]
"""An axis and one of its values."""
Pair = frozenset[Value]


def facts(cell: Cell) -> dict[str, AxisValue]:
    """The axis values of an LLM cell, those included that follow from its figures."""
    before_boundary = cell.chunk - cell.prompt % cell.chunk
    return cell.model_dump() | {
        "hit_class": cell.hit_class,
        "position": cell.prefix // cell.chunk + 1,
        "ending": {1: "before", cell.chunk: "at", cell.chunk - 1: "behind"}.get(before_boundary, "inside"),
        "answer": "over" if cell.new_tokens > before_boundary else "within",
    }


def wanted(pairs: Pairs) -> set[Pair]:
    """Every pair of two axes' values that is not left out."""
    left_out = {p for entry in pairs.without for p in _between(entry.axes)}
    return set(_between(pairs.values)) - left_out


def covered(cells: Iterable[Cell], pairs: Pairs) -> set[Pair]:
    """The wanted pairs that some LLM cell has."""
    found: set[Pair] = set()
    for cell in {c.model_copy(update={"arm": ""}) for c in cells if c.tier == "llm"}:
        of_cell = facts(cell)
        found.update(frozenset(pair) for pair in itertools.combinations(((a, of_cell[a]) for a in pairs.values), 2))
    return found & wanted(pairs)


def shown(pair: Pair) -> str:
    return " with ".join(f"{axis} {value}" for axis, value in sorted(pair, key=str))


def _between(values: dict[str, tuple[AxisValue, ...]]) -> Iterable[Pair]:
    for (left, ours), (right, theirs) in itertools.combinations(values.items(), 2):
        yield from (frozenset({(left, a), (right, b)}) for a in ours for b in theirs)
