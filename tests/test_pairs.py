"""Pairwise coverage of the default selection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from kvmatrix import pairs
from kvmatrix.cells import Cell, Selection, plan_cells
from kvmatrix.config import Pairs, Project
from kvmatrix.expectations import Expectations


def test_the_default_selection_has_every_pair(project: Project) -> None:
    matrix = project.matrix
    cells = plan_cells(matrix, Selection(), ["stock"])
    wanted = pairs.wanted(matrix.pairs)
    assert len(wanted) > 400
    assert sorted(pairs.shown(p) for p in wanted - pairs.covered(cells, matrix.pairs)) == []


def test_the_quick_selection_has_not(project: Project) -> None:
    cells = plan_cells(project.matrix, Selection(level="quick"), ["stock"])
    assert 0 < len(pairs.covered(cells, project.matrix.pairs)) < len(pairs.wanted(project.matrix.pairs))


def test_every_value_of_a_geometry_is_wanted_or_known_to_be_special(project: Project) -> None:
    """A new chunk, block, dtype or tier in matrix.toml must not be left out of the pairs by forgetting it."""
    values, refused = project.matrix.pairs.values, Expectations.load(project.root / "conformance" / "expectations").refusal
    for cell in plan_cells(project.matrix, Selection(level="full"), ["stock"]):
        if cell.tier == "llm" and cell.layers in values["layers"] and cell.hit_class != "aligned" and not refused(cell):
            facts = pairs.facts(cell)
            assert all(facts[axis] in known for axis, known in values.items()), cell.id


def test_facts_of_a_cell(make_cell: Callable[..., Cell]) -> None:
    facts = pairs.facts(make_cell(chunk=64, prompt=225, prefix=160, new_tokens=40))
    assert (facts["position"], facts["ending"], facts["answer"], facts["hit_class"]) == (3, "inside", "over", "corrupt")
    endings = {p: pairs.facts(make_cell(prompt=p, prefix=32))["ending"] for p in (254, 255, 256, 257, 258)}
    assert list(endings.values()) == ["inside", "before", "at", "behind", "inside"]
    assert pairs.facts(make_cell(prompt=255, new_tokens=1))["answer"] == "within"
    assert pairs.facts(make_cell(prompt=255, new_tokens=2))["answer"] == "over"


def test_what_is_wanted() -> None:
    asked = Pairs.model_validate(
        {
            "values": {"mode": ["eager", "compiled"], "block": [16, 32], "several": [True]},
            "without": [{"why": "x", "mode": ["compiled"], "block": [16]}],
        }
    )
    wanted = {pairs.shown(p) for p in pairs.wanted(asked)}
    assert wanted == {
        "block 16 with mode eager",
        "block 32 with mode eager",
        "block 32 with mode compiled",
        "mode eager with several True",
        "mode compiled with several True",
        "block 16 with several True",
        "block 32 with several True",
    }


def test_a_cell_covers_its_own_pairs(make_cell: Callable[..., Cell]) -> None:
    asked = Pairs.model_validate({"values": {"mode": ["eager", "compiled"], "block": [16, 32], "several": [False, True]}})
    found = {pairs.shown(p) for p in pairs.covered([make_cell(), make_cell(tier="scheduler")], asked)}
    assert found == {"block 32 with mode eager", "mode eager with several False", "block 32 with several False"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"why": "x", "mode": ["eager"]}, "two axes"),
        ({"why": "x", "mode": ["eager"], "block": [64]}, "block 64"),
        ({"mode": ["eager"], "block": [16]}, "why"),
    ],
)
def test_an_entry_that_leaves_nothing_out(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Pairs.model_validate({"values": {"mode": ["eager"], "block": [16]}, "without": [entry]})
