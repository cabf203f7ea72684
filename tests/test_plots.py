"""Plots: what is drawn is what the rows say, and the same rows give the same bytes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from perf_rows import break_even_row, generate_row, lookup_row, perf_row

from kvmatrix.live import AGAIN
from kvmatrix.records import PerfRow
from kvmatrix.report.plots import write_plots

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"


@pytest.fixture
def rows() -> list[PerfRow]:
    return [
        lookup_row(ratios={AGAIN: 1.0, "fix": 1.2, "other": 0.9}),
        lookup_row(131073, 4096, unsound=("stock",)),
        generate_row(ratios={AGAIN: 1.0, "fix": 0.8, "other": 1.0}),
        generate_row("mixed-misaligned", ratios={AGAIN: 1.0, "fix": 2.0, "other": 3.0}, wrong=("stock", AGAIN)),
        break_even_row([1.0, 2.0, 4.0], [0.5, 3.0, 9.0], predicted_tokens=400.0),
    ]


def draw(rows: list[PerfRow], folder: Path) -> dict[str, ET.Element]:
    folder.mkdir(exist_ok=True)
    return {path.name: ET.parse(path).getroot() for path in write_plots(rows, folder)}  # noqa: S314


def texts(root: ET.Element) -> list[str]:
    return ["".join(t.itertext()).strip() for t in root.iter(f"{SVG}text")]


def ids(root: ET.Element) -> set[str]:
    return {g.get("id", "") for g in root.iter(f"{SVG}g")}


def marks(root: ET.Element, gid: str) -> list[tuple[float, float]]:
    """Where the marks of a group stand, in the SVG's own coordinates."""
    group = next(g for g in root.iter(f"{SVG}g") if g.get("id") == gid)
    return [(float(u.get("x", "nan")), float(u.get("y", "nan"))) for u in group.iter(f"{SVG}use")]


def fill(root: ET.Element, gid: str) -> str:
    group = next(g for g in root.iter(f"{SVG}g") if g.get("id") == gid)
    style = dict(part.split(":") for part in next(group.iter(f"{SVG}path")).get("style", "").split(";"))
    return style["fill"].strip()


def test_every_kind_of_row_has_its_plot(rows: list[PerfRow], tmp_path: Path) -> None:
    names = {"lookup-ratio.svg", "request-ratio.svg", "request-ratio-to-uncached.svg", "external-tokens.svg", "break-even.svg"}
    assert set(draw(rows, tmp_path)) == names


def test_two_renders_are_the_same_bytes(rows: list[PerfRow], tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "two"):
        draw(rows, tmp_path / name)
        drawn.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert len(drawn[0]) == 5
    assert drawn[0] == drawn[1]
    assert not any(b"<dc:date>" in text for text in drawn[0].values())


def test_the_ground_is_opaque_and_text_is_text(rows: list[PerfRow], tmp_path: Path) -> None:
    for root in draw(rows, tmp_path).values():
        patch = next(g for g in root.iter(f"{SVG}g") if g.get("id") == "patch_1")
        style = next(patch.iter(f"{SVG}path")).get("style", "")
        assert "fill: #fbfbfb" in style
        assert "opacity" not in style
        assert len(texts(root)) > 3


def test_ratios_stand_where_they_belong(rows: list[PerfRow], tmp_path: Path) -> None:
    root = draw(rows, tmp_path)["lookup-ratio.svg"]
    name = "8,193 / 4,096, 2 groups, hit"
    [(fix, fix_y)], [(other, other_y)] = marks(root, f"ratio {name} fix"), marks(root, f"ratio {name} other")
    assert other < fix
    assert other_y != fix_y
    assert f"noise {name}" in ids(root)
    shown = texts(root)
    assert {name, "fix", "other", "stock against itself (A/A)", "time of a lookup, to stock's"} <= set(shown)
    assert not any("131,073" in text for text in shown)  # stock's answer is unsound there: nothing to be drawn against


def test_stock_again_is_a_band_and_no_point(rows: list[PerfRow], tmp_path: Path) -> None:
    for root in draw(rows, tmp_path).values():
        assert not any(AGAIN in i or i.endswith(" stock") for i in ids(root) if i.startswith("ratio "))


def test_where_stock_is_wrong_the_plot_is_to_cold(rows: list[PerfRow], tmp_path: Path) -> None:
    drawn = draw(rows, tmp_path)
    uncached, to_stock = drawn["request-ratio-to-uncached.svg"], drawn["request-ratio.svg"]
    assert "mixed-misaligned, to cold" in texts(uncached)
    assert marks(uncached, "ratio mixed-misaligned, to cold fix") < marks(uncached, "ratio mixed-misaligned, to cold other")
    assert not any("mixed-misaligned" in text for text in texts(to_stock))
    assert "mixed-aligned" in texts(to_stock)


def test_tokens_of_a_wrong_output_are_told_from_right_ones(rows: list[PerfRow], tmp_path: Path) -> None:
    root = draw(rows, tmp_path)["external-tokens.svg"]
    shown = texts(root)
    assert shown.count("1,216 (wrong output)") == 1
    assert shown.count("1,216") == 5
    for workload in ("mixed-aligned", "mixed-misaligned"):
        filled = [fill(root, f"tokens {workload} {arm}") for arm in ("stock", "fix", "other")]
        assert [f == "none" for f in filled] == [workload == "mixed-misaligned", False, False]


def test_the_break_even_curve(rows: list[PerfRow], tmp_path: Path) -> None:
    root = draw(rows, tmp_path)["break-even.svg"]
    load, recompute = marks(root, "break-even small load"), marks(root, "break-even small recompute")
    assert [x for x, _ in load] == [x for x, _ in recompute]
    assert len(load) == 3
    above = [a[1] < b[1] for a, b in zip(load, recompute, strict=True)]  # y grows downward
    assert above == [True, False, False]
    assert {"predicted: 400", "measured: 512", "256", "512", "1,024"} <= set(texts(root))


def test_what_was_not_measured_has_no_plot(tmp_path: Path) -> None:
    void = generate_row(status="INFRA", reason="void: …")
    assert draw([void, lookup_row(status="NOT_RUN", seconds={}), perf_row("ceiling", "machine")], tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
