"""Plots of numbers as PNG: curves, lines with error bars, bars, intervals. No runs here.

Pictures are 640 pixels wide, small files, in colours that the colour-blind can distinguish (Okabe and Ito 2008). Only
the first few lines have colours and names, the others are grey: pass the best ones first.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from jformer.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6BB1")
MARKERS = "osD^vPX*"
OTHERS_COLOR = "#B8B8B8"  # of all but the first few
WIDTH, DPI = 6.4, 125  # inches, and pixels of one
MAX_NAMED = 40  # lines of a plot of intervals
LABEL_WIDTH = 30  # characters of a line of a label


class PlottedLine(NamedTuple):
    """A named line: y over x, and the half width of an interval of each y (None = no interval)."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    margins: Sequence[float | None]


def curves(lines: Sequence[PlottedLine], xlabel: str, ylabel: str, logarithmic: bool = False) -> bytes:
    """Draw lines over integers, with intervals as bands around the first few; x may be logarithmic."""
    figure, axes = _of_lines(lines, logarithmic)
    if not logarithmic:
        axes.locator_params(axis="x", integer=True)  # no half updates
    for colour, line in zip(PALETTE, lines, strict=False):
        y, margins = _finite(line.y), _finite(line.margins)
        dot = "o" if len(y) == 1 else ""
        axes.plot(line.x, y, color=colour, marker=dot, linewidth=1.6, label=_label(line.label), zorder=3)
        low, high = ([a + sign * b for a, b in zip(y, margins, strict=True)] for sign in (-1, 1))
        axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    return _finished(figure, axes, xlabel, ylabel, others=len(lines) - len(PALETTE))


def lines(lines: Sequence[PlottedLine], xlabel: str, ylabel: str, logarithmic: bool = False) -> bytes:
    """Draw points with error bars, joined by lines; x may be logarithmic, with the points as ticks."""
    figure, axes = _of_lines(lines, logarithmic)
    for colour, marker, line in zip(PALETTE, MARKERS, lines, strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "capsize": 3, "linewidth": 1.4}
        axes.errorbar(line.x, _finite(line.y), _finite(line.margins), label=_label(line.label), zorder=3, **style)
    ticks = sorted({x for line in lines for x in line.x})
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    return _finished(figure, axes, xlabel, ylabel, others=len(lines) - len(PALETTE))


def bars(categories: Sequence[str], groups: Sequence[PlottedLine], xlabel: str, ylabel: str) -> bytes:
    """Draw bars from zero, with error bars: one for each category and group. The x of a group index the categories."""
    wrapped = [_label(category, 2 * LABEL_WIDTH // max(len(categories), 2) + 6) for category in categories]
    figure, axes = _figure(3.4 + 0.14 * max(text.count("\n") for text in wrapped))
    shown = groups[: len(PALETTE)]
    width = 0.8 / len(shown)
    for i, (colour, group) in enumerate(zip(PALETTE, shown, strict=False)):
        positions = [x + (i - (len(shown) - 1) / 2) * width for x in group.x]
        axes.bar(positions, _finite(group.y), 0.92 * width, color=colour, alpha=0.85, label=_label(group.label))
        axes.errorbar(positions, _finite(group.y), _finite(group.margins), fmt="none", ecolor="#333333", capsize=3)
    axes.set_xticks(range(len(categories)), wrapped, rotation=90 if len(categories) > 12 else 0)
    return _finished(figure, axes, xlabel, ylabel, others=len(groups) - len(shown))


def intervals(rows: Mapping[str, tuple[float, float | None]], xlabel: str, reference: float) -> bytes:
    """Draw the mean and half the width of the interval (None = no interval) of each row, and a reference line.

    The line is drawn unless `reference` is nan. The first row is on top. With more than MAX_NAMED rows, only the first
    few are named; the others share the room below, in grey. Values that are not finite are not drawn.
    """
    labels = [*rows]
    means, margins = (_finite(values) for values in zip(*rows.values(), strict=True))
    named = len(labels) if len(labels) <= MAX_NAMED else len(PALETTE)
    names = [_label(label) for label in labels[:named]]
    heights: list[float] = []
    height = 0.0
    for name in names:
        heights.append(height + 0.35 * name.count("\n"))
        height += 1 + 0.7 * name.count("\n")
    rest = [height + 10 * i / max(len(labels) - named, 1) for i in range(len(labels) - named)]
    figure, axes = _figure(0.9 + 0.22 * (height + (11 if rest else 0)))
    axes.errorbar(means[named:], rest, xerr=margins[named:], fmt=".", color=OTHERS_COLOR, markersize=3, linewidth=0.4)
    axes.errorbar(means[:named], heights, xerr=margins[:named], fmt="o", color=PALETTE[0], markersize=5, capsize=3)
    ticks = [*heights, *([rest[len(rest) // 2]] if rest else [])]
    axes.set_yticks(ticks, [*names, *([f"{len(rest)} others"] if rest else [])])
    axes.set_ylim(max([*heights, *rest]) + 0.8, -0.8)
    if math.isfinite(reference):
        axes.axvline(reference, color="#555555", linewidth=0.8, linestyle="--", zorder=0)
    return _finished(figure, axes, xlabel, "", others=0)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def new_figure(width: float, height: float, dpi: int) -> "Figure":
    """Return an empty figure of a size in inches; raise UserError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('plots need matplotlib: pip install -e ".[sweep]" -c constraints.txt') from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _figure(height: float) -> "tuple[Figure, Axes]":
    figure = new_figure(WIDTH, height, DPI)
    axes = figure.subplots()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def _of_lines(lines: Sequence[PlottedLine], logarithmic: bool) -> "tuple[Figure, Axes]":
    """Return a figure with the lines that have no colour of their own."""
    figure, axes = _figure(3.6)
    if logarithmic:
        axes.set_xscale("log")
    for line in lines[len(PALETTE) :]:
        axes.plot(line.x, _finite(line.y), color=OTHERS_COLOR, linewidth=0.6, zorder=1)
    return figure, axes


def _finished(figure: "Figure", axes: "Axes", xlabel: str, ylabel: str, others: int) -> bytes:
    """Return the PNG with its labels, and a legend below if it has more than one name."""
    axes.set_xlabel(_label(xlabel, 80), fontsize=9)
    axes.set_ylabel(_label(ylabel, 40), fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    if others > 0:
        handles += axes.plot([], [], color=OTHERS_COLOR)
        labels.append(f"{others} others")
    if len(labels) > 1:
        longest = max(len(part) for label in labels for part in label.split("\n"))
        columns = max(1, min(len(labels), 95 // (longest + 7)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(sum(t.count("\n") + 1 for t in labels) / columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return as_png(figure)


def as_png(figure: "Figure") -> bytes:
    """Return a small PNG of a figure."""
    from PIL import Image  # matplotlib brings it

    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # fonts lack some scripts; the tables on the page show them
        figure.savefig(picture, format="png", bbox_inches="tight", pad_inches=0.08)
    smaller = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(96, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        smaller, "png", optimize=True
    )
    return smaller.getvalue()


def _finite(values: Sequence[float | None]) -> list[float]:
    """Return the values with nan, which is not drawn, for missing and infinite ones."""
    return [math.nan if value is None or not math.isfinite(value) else value for value in values]


def _label(text: str, characters: int = LABEL_WIDTH) -> str:
    """Return a text escaped for matplotlib and wrapped; of more than four lines, the first and the last ones."""
    lines = textwrap.wrap(text, characters)
    if len(lines) > 4:
        lines = [*lines[:2], "…", lines[-1]]
    shown = "\n".join(lines).replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown  # legends leave out labels that begin with _
