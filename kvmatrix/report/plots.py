"""Plots of the perf suite as SVG, from rows alone; the same rows give the same bytes.

Text stays text, to be searched and to be read aloud, and the ground is opaque, so that a plot is as readable on a dark page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmatrix.cells import STOCK
from kvmatrix.live import AGAIN
from kvmatrix.records import PerfRow
from kvmatrix.report import compare
from kvmatrix.report.compare import Compared, is_measured, of_group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvmatrix",
    "figure.facecolor": "#fbfbfb",
    "axes.facecolor": "#ffffff",
    "savefig.facecolor": "#fbfbfb",
    "text.color": "#1a1a1a",
    "axes.labelcolor": "#1a1a1a",
    "xtick.color": "#1a1a1a",
    "ytick.color": "#1a1a1a",
    "axes.edgecolor": "#808080",
    "font.size": 9.0,
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's: told apart with any eyes, and on white. A mark of its own tells each arm apart without them."""
MARKS = ("o", "s", "D", "^", "v", "P")
GREY = "#707070"
BAND = "#d8d8d8"


def write_plots(rows: Sequence[PerfRow], folder: Path) -> list[Path]:
    """Draw what the rows have into ``folder``, which must exist; the files come back.

    Raises:
        OSError: the folder cannot be written.
    """
    # Slow to import, and most of the commands that import this package draw nothing.
    import matplotlib as mpl

    written = []
    with mpl.rc_context(STYLE):
        for name, draw in _figures(rows):
            # The day and matplotlib's version would make other bytes of the same rows.
            draw().savefig(folder / name, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
            written.append(folder / name)
    return written


def file_names(rows: Sequence[PerfRow]) -> list[str]:
    """Names of the files that :func:`write_plots` makes of these rows."""
    return [name for name, _ in _figures(rows)]


def _figures(rows: Sequence[PerfRow]) -> list[tuple[str, Callable[[], Figure]]]:
    lookups = [(_lookup_name(r), compare.lookups(r)) for r in of_group(rows, "lookup") if is_measured(r)]
    generated = [(r.workload, compare.generation(r)) for r in of_group(rows, "generate") if is_measured(r)]
    to_stock = [c for c in generated if _has_stock(c[1])]
    to_own = [(f"{name}, to {_own(of)}", of) for name, of in generated if not _has_stock(of) and _own(of)]
    colors = {arm: index % len(COLORS) for index, arm in enumerate(compare.patches(rows))}
    figures: list[tuple[str, Callable[[], Figure]]] = []
    for name, classes, label in (
        ("lookup-ratio.svg", [c for c in lookups if _has_stock(c[1])], "time of a lookup, to stock's"),
        ("request-ratio.svg", to_stock, "time to the first token, to stock's"),
        ("request-ratio-to-uncached.svg", to_own, "time to the first token, to that of the same prompt with nothing cached"),
    ):
        if classes:
            figures.append((name, partial(_ratios, classes, label, colors)))
    if kept := [r for r in of_group(rows, "generate") if is_measured(r)]:
        figures.append(("external-tokens.svg", partial(_external_tokens, kept, colors)))
    if measured := [r for r in of_group(rows, "break-even") if is_measured(r)]:
        figures.append(("break-even.svg", partial(_break_even, measured)))
    return figures


def _lookup_name(row: PerfRow) -> str:
    g = row.geometry
    return f"{g['prompt']:,} / {g['prefix']:,}, {g.get('groups', '?')} groups, {'hit' if g.get('hit', True) else 'miss'}"


def _has_stock(compared: Sequence[Compared]) -> bool:
    return any(c.arm == STOCK and c.reference == STOCK for c in compared)


def _own(compared: Sequence[Compared]) -> str:
    return next((c.reference for c in compared if c.ratio), "")


def _blank(lines: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 if columns == 1 else 5.0 * columns, 1.2 + 0.24 * lines))
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _ratios(classes: Sequence[tuple[str, Sequence[Compared]]], label: str, colors: dict[str, int]) -> Figure:
    """A line for each class and arm: its ratio and interval; behind them how far stock reaches from itself."""
    lines = [[c for c in of if c.ratio and c.arm != AGAIN] for _, of in classes]
    figure, (axes,) = _blank(sum(len(of) + 1 for of in lines))
    named, ticks, y = set(), [], 0.0
    for (name, of), shown in zip(classes, lines, strict=True):
        height = max(1, len(shown))
        ticks.append((y + (height - 1) / 2, name))
        if noise := next((c.ratio for c in of if c.arm == AGAIN and c.ratio), None):
            span = (math.exp(-noise.reach), math.exp(noise.reach))
            band = axes.fill_betweenx([y - 0.6, y + height - 0.4], *span, color=BAND, linewidth=0, zorder=0)
            band.set_gid(f"noise {name}")
            if "noise" not in named:
                band.set_label("stock against itself (A/A)")
                named.add("noise")
        for row, one in enumerate(shown):
            assert one.ratio is not None
            color, mark = COLORS[colors.get(one.arm, 0)], MARKS[colors.get(one.arm, 0)]
            axes.plot([one.ratio.low, one.ratio.high], [y + row] * 2, color=color, linewidth=1.6)
            (point,) = axes.plot([one.ratio.estimate], [y + row], color=color, marker=mark, linestyle="none", markersize=5)
            point.set_gid(f"ratio {name} {one.arm}")
            if one.arm not in named:
                point.set_label(one.arm)
                named.add(one.arm)
        y += height + 1
    axes.axvline(1, color=GREY, linewidth=0.8, zorder=0.5)
    _finish(axes, ticks, label)
    axes.margins(x=0.08)
    return figure


def _finish(axes: Axes, ticks: Sequence[tuple[float, str]], label: str) -> None:
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _external_tokens(rows: Sequence[PerfRow], colors: dict[str, int]) -> Figure:
    """Tokens of a request that the CPU tier served, by workload and arm. A wrong output's bar is empty: nothing was saved."""
    figure, (axes,) = _blank(sum(len(r.requests) + 1 for r in rows))
    named, ticks, y = set(), [], 0.0
    for row in rows:
        arms = [a for a in row.requests if a != AGAIN]
        ticks.append((y + (len(arms) - 1) / 2, row.workload))
        for arm in arms:
            requests = row.requests[arm]
            color = GREY if arm == STOCK else COLORS[colors.get(arm, 0)]
            tokens = statistics.median(r.external_hit_tokens for block in requests for r in block)
            right = compare.is_right(requests)
            (bar,) = axes.barh([y], [tokens], 0.8, facecolor=color if right else "none", edgecolor=color)
            bar.set_gid(f"tokens {row.workload} {arm}")
            axes.text(tokens, y, f" {tokens:,g}{'' if right else ' (wrong output)'}", va="center", fontsize=7.5)
            if arm not in named:
                # A bar of its own for the legend: the first one may be an empty one.
                axes.barh([y], [0], color=color, label=arm)
                named.add(arm)
            y += 1
        y += 1
    _finish(axes, ticks, "external tokens of a request (median)")
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    return figure


def _break_even(rows: Sequence[PerfRow]) -> Figure:
    """Milliseconds of loading and of recomputing by length, with the length from which on loading was predicted to win."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, every = _blank(10, len(rows))
    for axes, row in zip(every, rows, strict=True):
        points = compare.break_even(row)
        tokens = [p.tokens for p in points]
        for arm, seconds, index in (("load", [p.load for p in points], 0), ("recompute", [p.recompute for p in points], 1)):
            milliseconds = [1e3 * s for s in seconds]
            (line,) = axes.plot(tokens, milliseconds, color=COLORS[index], marker=MARKS[index], label=arm, markersize=4)
            line.set_gid(f"break-even {row.workload} {arm}")
        if (predicted := row.answers.get("predicted_tokens")) is not None and 0 < predicted < math.inf:
            axes.axvline(predicted, color=GREY, linestyle="--", linewidth=1, label=f"predicted: {predicted:,.0f}")
        if (found := compare.beats_from(points)) is not None:
            axes.axvline(found, color=COLORS[2], linestyle=":", linewidth=1.2, label=f"measured: {found:,}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(tokens)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", rotation=45)
        axes.set_title(row.workload)
        axes.set_xlabel("tokens")
        axes.set_ylabel("ms")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure
