"""Numbers to pictures (PNG) and a page of its own (HTML). Knows no model, no run and no sweep.

Pictures are made to be shown 640 pixels wide, small as files, and in colours that the colour-blind tell apart
(Okabe and Ito 2008). Of many things the first few are in colour and named, the others grey: give the best first.
"""

import base64
import html
import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from etils.epath import Path

from jformer.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6BB1")
MARKERS = "osD^vPX*"
REST = "#B8B8B8"  # what is not among the first
WIDTH, DPI = 6.4, 125  # inches, and pixels of one
RANKED = 40  # lines of a plot of intervals, and of parallel coordinates in colour
CHARACTERS = 30  # of a line of a label


class Line(NamedTuple):
    """Points with a name: y over x, and the half width of an interval of each y (None where there is none)."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    margins: Sequence[float | None]


def curves(lines: Sequence[Line], xlabel: str, ylabel: str) -> bytes:
    """Draw lines, with their intervals as bands around the first few."""
    figure, axes = _figure(3.6)
    for line in lines[len(PALETTE) :]:
        axes.plot(line.x, _finite(line.y), color=REST, linewidth=0.6, zorder=1)
    for colour, line in zip(PALETTE, lines, strict=False):
        y, margins = _finite(line.y), _finite(line.margins)
        dot = "o" if len(y) == 1 else ""
        axes.plot(line.x, y, color=colour, marker=dot, linewidth=1.6, label=_label(line.label), zorder=3)
        low, high = ([a + sign * b for a, b in zip(y, margins, strict=True)] for sign in (-1, 1))
        axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    return _finished(figure, axes, xlabel, ylabel, others=len(lines) - len(PALETTE))


def lines(lines: Sequence[Line], xlabel: str, ylabel: str, logarithmic: bool = False) -> bytes:
    """Draw points with error bars, joined by lines; x may be on a logarithmic axis, whose ticks are the points."""
    figure, axes = _figure(3.6)
    for line in lines[len(PALETTE) :]:
        axes.plot(line.x, _finite(line.y), color=REST, linewidth=0.6, zorder=1)
    for colour, marker, line in zip(PALETTE, MARKERS, lines, strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "capsize": 3, "linewidth": 1.4}
        axes.errorbar(line.x, _finite(line.y), _finite(line.margins), label=_label(line.label), zorder=3, **style)
    ticks = sorted({x for line in lines for x in line.x})
    if logarithmic:
        axes.set_xscale("log")
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    return _finished(figure, axes, xlabel, ylabel, others=len(lines) - len(PALETTE))


def bars(categories: Sequence[str], groups: Sequence[Line], xlabel: str, ylabel: str) -> bytes:
    """Draw bars from zero, with error bars: one for each category and group. The x of a group are places among them."""
    wrapped = [_label(category, 2 * CHARACTERS // max(len(categories), 2) + 6) for category in categories]
    figure, axes = _figure(3.4 + 0.14 * max(text.count("\n") for text in wrapped))
    shown = groups[: len(PALETTE)]
    width = 0.8 / len(shown)
    for i, (colour, group) in enumerate(zip(PALETTE, shown, strict=False)):
        places = [x + (i - (len(shown) - 1) / 2) * width for x in group.x]
        axes.bar(places, _finite(group.y), 0.92 * width, color=colour, alpha=0.85, label=_label(group.label))
        axes.errorbar(places, _finite(group.y), _finite(group.margins), fmt="none", ecolor="#333333", capsize=3)
    axes.set_xticks(range(len(categories)), wrapped, rotation=90 if len(categories) > 12 else 0)
    return _finished(figure, axes, xlabel, ylabel, others=len(groups) - len(shown))


def intervals(
    labels: Sequence[str], means: Sequence[float], margins: Sequence[float | None], xlabel: str, reference: float
) -> bytes:
    """Draw a mean and its interval on each line, the first at the top, and a rule at the reference, unless that is nan.

    Past RANKED of them, the first few have their names and the others share the room below, all in grey.
    """
    named = len(labels) if len(labels) <= RANKED else len(PALETTE)
    names = [_label(label) for label in labels[:named]]
    places, place = [], 0.0
    for name in names:
        places.append(place + 0.35 * name.count("\n"))
        place += 1 + 0.7 * name.count("\n")
    rest = [place + 10 * i / max(len(labels) - named, 1) for i in range(len(labels) - named)]
    figure, axes = _figure(0.9 + 0.22 * (place + (11 if rest else 0)))
    means, margins = _finite(means), _finite(margins)
    axes.errorbar(means[named:], rest, xerr=margins[named:], fmt=".", color=REST, markersize=3, linewidth=0.4)
    axes.errorbar(means[:named], places, xerr=margins[:named], fmt="o", color=PALETTE[0], markersize=5, capsize=3)
    ticks = [*places, *([rest[len(rest) // 2]] if rest else [])]
    axes.set_yticks(ticks, [*names, *([f"{len(rest)} others"] if rest else [])])
    axes.set_ylim(max([*places, *rest]) + 0.8, -0.8)
    if math.isfinite(reference):
        axes.axvline(reference, color="#555555", linewidth=0.8, linestyle="--", zorder=0)
    return _finished(figure, axes, xlabel, "", others=0)


def parallel(columns: Mapping[str, Sequence[Any]], values: Sequence[float], name: str, descending: bool) -> bytes:
    """Draw a line for each row through an axis for each column, and through its value, whose axis is the last.

    Columns may be numbers, on a logarithmic axis where they span more than a factor of 30, or anything else, which is
    placed by its text; None stands below the axis. Colours go by the value and the best lie on top: the greatest if
    `descending`. Past RANKED rows the others are grey.
    """
    import matplotlib
    from matplotlib.collections import LineCollection

    figure, axes = _figure(4.2)
    order = sorted(range(len(values)), key=lambda row: values[row], reverse=not descending)  # the best last
    axis = {**columns, name: values}
    heights = [_heights(axes, place, column) for place, column in enumerate(axis.values())]
    paths = [[(place, column[row]) for place, column in enumerate(heights)] for row in order]
    ranks = range(min(len(order), RANKED) - 1, -1, -1)  # of those in colour; the best, which is 0, is the last
    colours = matplotlib.colormaps["viridis"]([0.92 * rank / max(len(ranks) - 1, 1) for rank in ranks])
    rest = paths[: len(paths) - len(ranks)]
    axes.add_collection(LineCollection(rest, colors=REST, linewidths=0.3, antialiaseds=False, zorder=2))
    axes.add_collection(
        LineCollection(paths[len(rest) :], colors=colours, linewidths=[*[1.2] * (len(ranks) - 1), 3], zorder=3)
    )
    axes.autoscale()
    axes.set_xticks(range(len(axis)), [_label(key.rpartition(".")[2], 80 // len(axis) + 2) for key in axis])
    axes.set_yticks([])
    axes.set_frame_on(False)
    axes.tick_params(length=0)
    return _finished(figure, axes, "", "", others=0)


def is_number(value: Any) -> bool:
    """Return whether a value has a place on an axis of numbers; True and False have not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def page(title: str, parts: Sequence[str]) -> str:
    """Return a whole HTML file of parts made by the functions below; it asks for nothing and runs nothing."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>
{chr(10).join(parts)}
</body></html>
"""


def heading(text: str) -> str:
    """Return a heading within a page."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return text, whose line breaks are kept."""
    return f"<p>{html.escape(text)}</p>"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first row is its head; the first `left` columns are texts, the others numbers."""
    kinds = [' class="text"' if i < left else "" for i in range(len(rows[0]))]

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{k}>{html.escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True))

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[1:])
    return (
        f'<div class="wide"><table><thead><tr>{line(rows[0], "th")}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def image(png: bytes, description: str) -> str:
    """Return a picture that is part of the page."""
    data = base64.b64encode(png).decode()
    return f'<img width="640" alt="{html.escape(description)}" src="data:image/png;base64,{data}">'


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files, name → content, into a folder that need not be there; raise UserError where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror or error}); name another folder") from error


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em }
p { white-space: pre-wrap }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; margin: .5em .5em .5em 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .8em; border-bottom: 1px solid #8885; text-align: right; vertical-align: top }
.text { text-align: left; overflow-wrap: anywhere; min-width: 8em }
"""


def _figure(height: float) -> "tuple[Figure, Axes]":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('plots need matplotlib: pip install -e ".[sweep]" -c constraints.txt') from error
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def _finished(figure: "Figure", axes: "Axes", xlabel: str, ylabel: str, others: int) -> bytes:
    """Return the picture with its labels, and a legend below if it has more than one name."""
    from PIL import Image  # matplotlib brings it

    axes.set_xlabel(_label(xlabel, 80), fontsize=9)
    axes.set_ylabel(_label(ylabel, 40), fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    if others > 0:
        handles += axes.plot([], [], color=REST)
        labels.append(f"{others} others")
    if len(labels) > 1:
        longest = max(len(part) for label in labels for part in label.split("\n"))
        columns = max(1, min(len(labels), 95 // (longest + 7)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(sum(t.count("\n") + 1 for t in labels) / columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a font has not all scripts; tables beside it have
        figure.savefig(picture, format="png", bbox_inches="tight", pad_inches=0.08)
    smaller = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(96, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        smaller, "png", optimize=True
    )
    return smaller.getvalue()


def _heights(axes: "Axes", place: int, column: Sequence[Any]) -> list[float]:
    """Return where the values of a column lie on its axis, 0 to 1 and None below, and write its ticks beside it."""
    present = [value for value in column if value is not None]
    numbers = all(map(is_number, present))
    if numbers and len(set(present)) > 1:
        low, high = min(present), max(present)
        scale = math.log if low > 0 and high > 30 * low else float
        span = scale(high) - scale(low)
        found = {value: (scale(value) - scale(low)) / span for value in present}
        ticks = {min(found, key=lambda v: abs(found[v] - quarter / 4)) for quarter in range(5)}
    else:
        texts = sorted({str(value) for value in present})
        found = {value: (texts.index(str(value)) + 0.5) / len(texts) for value in present}
        ticks = set(list(dict.fromkeys(present))[:12])
    axes.axvline(place, color="#777777", linewidth=0.8, zorder=1)
    marks = [(found[tick], f"{tick:.3g}" if numbers else _label(str(tick), 18)) for tick in ticks]
    for height, text in [*marks, *([(-0.1, "–")] if len(present) < len(column) else [])]:
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
        axes.text(place + 0.03, height, text, fontsize=7, va="center", zorder=5, bbox=box)
    return [-0.1 if value is None else found[value] for value in column]


def _finite(values: Sequence[float | None]) -> list[float]:
    """Return the values with nan, which is not drawn, for what is missing or infinite."""
    return [math.nan if value is None or not math.isfinite(value) else value for value in values]


def _label(text: str, characters: int = CHARACTERS) -> str:
    """Return a text as matplotlib shows it as it is, in lines that are not too long; of more than four, the ends."""
    lines = textwrap.wrap(text, characters)
    if len(lines) > 4:
        lines = [*lines[:2], "…", lines[-1]]
    return "\n".join(lines).replace("$", r"\$")
