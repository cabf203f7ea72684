"""From axes to cells: ids, what a selection keeps, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvmatrix import oracle
from kvmatrix.cells import Cell, Selection, plan_cells
from kvmatrix.config import Matrix, Project
from kvmatrix.errors import UsageError
from kvmatrix.runner import probe_id, probe_names

ARMS = ["stock", "fix"]


@pytest.fixture
def matrix(project: Project) -> Matrix:
    return project.matrix


def refused(matrix: Matrix, **selection: Any) -> str:
    with pytest.raises(UsageError) as caught:
        plan_cells(matrix, Selection(**selection), ARMS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ids_are_unique(matrix: Matrix) -> None:
    """Of all cells that the axes can give, the values that matrix.toml leaves out included."""
    wide = matrix.model_copy(
        update={"axes": matrix.axes.model_copy(update={"dtype": ("float32", "bfloat16"), "offload": ("eager", "lazy")})}
    )
    cells = plan_cells(wide, Selection(), ARMS)
    assert len({c.id for c in cells}) == len(cells)
    rows = [probe_id(c, name) for c in cells for name in probe_names(c, wide)]
    assert len(set(rows)) == len(rows)


def test_ids_are_stable(make_cell: Callable[..., Cell]) -> None:
    """They name files and join rows of different runs."""
    assert make_cell().id == "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32-stock"
    assert make_cell(tier="scheduler", chunk=64, block=16).id == "0.32.0-host-scheduler-c64-b16-stock"
    assert probe_id(make_cell(arm="fix"), "cold") == "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32-fix-cold"


def test_a_default_vanishes_from_the_id(make_cell: Callable[..., Cell]) -> None:
    plain = make_cell()
    assert plain.dtype not in plain.id.split("-")
    assert plain.id == make_cell(dtype="float32", offload="eager").id
    assert make_cell(dtype="bfloat16").id == "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32-bfloat16-stock"
    assert make_cell(offload="lazy").id == "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32-lazy-stock"
    assert make_cell(dtype="bfloat16", offload="lazy").id == "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32-bfloat16-lazy-stock"


def test_the_whole_matrix(matrix: Matrix) -> None:
    cells = plan_cells(matrix, Selection(level="full"), ARMS)
    llm = [c for c in cells if c.tier == "llm"]
    backends = {b for p in matrix.pins if p.version == matrix.defaults.pin for b in p.backends}
    assert {(c.backend, c.mode, c.arm) for c in llm} == {(b, m, a) for b in backends for m in matrix.axes.mode for a in ARMS}
    assert [c.arm for c in cells if c.tier == "scheduler"] == ARMS


def test_stock_comes_first_within_a_geometry(matrix: Matrix) -> None:
    cells = plan_cells(matrix, Selection(), ARMS)
    for stock, fix in zip(cells[::2], cells[1::2], strict=True):
        assert (stock.arm, fix.arm) == ("stock", "fix")
        assert stock.model_copy(update={"arm": "fix"}) == fix


@pytest.mark.parametrize(
    ("selection", "keeps"),
    [
        ({"backends": ("CPU_ATTN",)}, lambda c: c.backend == "CPU_ATTN"),
        ({"backends": ("CPU_ATTN", "TRITON_ATTN")}, lambda c: c.backend in ("CPU_ATTN", "TRITON_ATTN")),
        ({"modes": ("eager",)}, lambda c: c.mode == "eager"),
        ({"dtypes": ("float32",)}, lambda c: c.tier == "llm" and c.dtype == "float32"),
        ({"offloads": ("lazy", "disk")}, lambda c: c.offload in ("lazy", "disk")),
        ({"chunks": (64,)}, lambda c: c.chunk == 64),
        ({"blocks": (32,)}, lambda c: c.block == 32),
        ({"tiers": ("scheduler",)}, lambda c: c.tier == "scheduler"),
        ({"arms": ("fix",)}, lambda c: c.arm == "fix"),
        (
            {"backends": ("CPU_ATTN",), "modes": ("eager",), "arms": ("stock",)},
            lambda c: (c.backend, c.mode, c.arm) == ("CPU_ATTN", "eager", "stock"),
        ),
    ],
    ids=["backend", "backends", "mode", "dtype", "offload", "chunk", "block", "tier", "arm", "together"],
)
def test_a_selection_keeps_its_cells_and_no_other(
    matrix: Matrix, selection: dict[str, Any], keeps: Callable[[Cell], bool]
) -> None:
    whole = plan_cells(matrix, Selection(), ARMS)
    kept = plan_cells(matrix, Selection(**selection), ARMS)
    assert kept == [c for c in whole if keeps(c)]
    assert 0 < len(kept) < len(whole)


@pytest.mark.parametrize(
    ("axis", "value", "known"),
    [
        ("pins", "0.1.0", "0.32.0"),
        ("device", "tpu", "host"),
        ("backends", "NOPE", "FLEX_ATTENTION"),
        ("modes", "fast", "compiled"),
        ("dtypes", "int4", "float32"),
        ("offloads", "tape", "lazy"),
        ("chunks", 4096, "128"),
        ("blocks", 8, "16"),
        ("tiers", "gpu", "scheduler"),
        ("arms", "other", "fix"),
    ],
)
def test_an_unknown_value_is_refused_with_what_is_known(matrix: Matrix, axis: str, value: Any, known: str) -> None:
    message = refused(matrix, **{axis: value if axis == "device" else (value,)})
    assert repr(value) in message
    assert known in message


def test_the_first_unknown_of_several_is_named(matrix: Matrix) -> None:
    assert "'NOPE'" in refused(matrix, backends=("CPU_ATTN", "NOPE"))


def test_a_selection_that_leaves_nothing(matrix: Matrix) -> None:
    """Each value is known, but no cell has them together."""
    assert "--full has all geometries" in refused(matrix, backends=("TRITON_ATTN",), chunks=(256,))
    assert "leaves no cell" in (
        told := refused(matrix, backends=("TRITON_ATTN",), blocks=(64,), modes=("compiled",), level="full")
    )
    assert "--full" not in told


def test_levels_contain_each_other(matrix: Matrix) -> None:
    quick, default, full = (
        {c.id for c in plan_cells(matrix, Selection(level=level), ARMS)} for level in ("quick", "default", "full")
    )
    assert quick < default < full


def test_the_default_has_every_class_and_the_prefix_in_the_first_three_chunks(matrix: Matrix) -> None:
    cells = [c for c in plan_cells(matrix, Selection(), ["stock"]) if c.tier == "llm"]
    assert {c.hit_class for c in cells} == {"corrupt", "safe-short", "safe-crossing", "control"}
    assert {c.prefix // c.chunk for c in cells} == {0, 1, 2}
    assert {c.chunk for c in cells if "c" in c.layers} >= {64, 128, 256}
    assert {"sf", "cdf"} <= {c.layers for c in cells}
    assert {c.block for c in cells} == {16, 32, 64}
    assert {c.kv_groups for c in cells if c.hit_class != "control"} >= {2, 4}
    assert any(c.new_tokens > (c.chunk - c.prompt % c.chunk) for c in cells), "an answer that goes on over a chunk boundary"


def test_the_class_of_a_hit(make_cell: Callable[..., Cell]) -> None:
    assert make_cell(prompt=161).hit_class == make_cell(prompt=255).hit_class == "corrupt"
    assert make_cell(prompt=129).hit_class == "safe-short"
    assert make_cell(prompt=257).hit_class == "safe-crossing"
    assert make_cell(layers="ff").hit_class == "control"


@pytest.mark.parametrize(
    ("layers", "prompt", "prefix", "expected"),
    [
        ("cdf", 225, 96, "corrupt"),
        ("cdf", 193, 64, "corrupt"),
        ("cdf", 129, 64, "safe-short"),
        ("cdf", 257, 64, "safe-crossing"),
        ("ddf", 193, 64, "corrupt"),
        ("ccf", 193, 64, "aligned"),
        ("sf", 193, 64, "control"),
    ],
)
def test_the_worse_of_two_sizes_decides(
    make_cell: Callable[..., Cell], layers: str, prompt: int, prefix: int, expected: str
) -> None:
    """A prefix of 64 is aligned for chunks of 64 and ends inside one of 128."""
    assert make_cell(layers=layers, chunk=64, prompt=prompt, prefix=prefix).hit_class == expected


def test_stock_is_unsound_where_any_group_is(make_cell: Callable[..., Cell]) -> None:
    """Against the suffix-only lookup, counted out block by block in both groups."""
    block, size = 4, 8
    classes = set()
    for prefix in range(0, 32, block):
        for hit in range(block, 64, block):
            cell = make_cell(layers="cdf", block=block, chunk=size, prefix=prefix, prompt=prefix + hit + 1)
            lost = False
            for chunk in (size, 2 * size):
                loaded = [i * block >= hit // chunk * chunk for i in range(hit // block)]
                lost = lost or bool(oracle.missing_blocks(prefix, hit, block, oracle.chunked(chunk), loaded))
            assert (cell.hit_class == "corrupt") == lost, (prefix, hit)
            classes.add(cell.hit_class)
    assert classes == {"aligned", "safe-short", "safe-crossing", "corrupt"}


def test_an_id_tells_geometries_apart(make_cell: Callable[..., Cell]) -> None:
    made = [make_cell(), make_cell(prompt=255), make_cell(prefix=64), make_cell(layers="ccf"), make_cell(new_tokens=40)]
    assert len({c.id for c in made}) == len(made)
    assert make_cell(layers="ccf", new_tokens=40).id == "0.32.0-host-CPU_ATTN-eager-c128-b32-p161-d32-ccf-n40-stock"


def test_a_value_given_twice_gives_its_cells_once(matrix: Matrix) -> None:
    pin = matrix.defaults.pin
    once = plan_cells(matrix, Selection(pins=(pin,), backends=("CPU_ATTN",)), ARMS)
    assert plan_cells(matrix, Selection(pins=(pin, pin), backends=("CPU_ATTN", "CPU_ATTN")), ARMS) == once


@pytest.mark.parametrize(
    ("layers", "groups"),
    [("cf", 2), ("cccf", 4), ("ccf", 3), ("cfcf", 2), ("f", 1), ("ff", 1), ("cccccff", 4), ("ccccccff", 4)],
)
def test_kv_groups(make_cell: Callable[..., Cell], layers: str, groups: int) -> None:
    assert make_cell(layers=layers).kv_groups == groups
