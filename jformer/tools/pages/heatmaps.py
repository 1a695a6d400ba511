"""Figures of attention for papers, as PNG or SVG: token by token, or as colour over the input image."""

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jformer.errors import UserError
from jformer.inference.answers import Attended, AttentionWeights, Part
from jformer.tools.pages.page import visible
from jformer.tools.pages.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = (".png", ".svg")
SHOWN_FIRST = (Part.CROSS, Part.DECODER_SELF, Part.ENCODER_SELF)  # order of preference
TOKEN, LEAST, MARGIN = 0.16, 1.0, 0.9  # inches of a token, of a panel at least, and of labels
PICTURE = 1.1  # inches of a picture
MOST_INCHES = 60.0  # of a side
LONGEST = 16  # characters of a token
DPI = 200
MASKED: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////"}


def draw(attended: Attended, form: str) -> bytes:
    """Return the figure of one source and its target, for the first of SHOWN_FIRST that the model has.

    A panel is a layer and a head, token by token; masked pairs are hatched. For an image, panels show it with colour
    where the weights are: one for each written token (last layer, mean of heads), or one for each layer and head, with
    the weights of the class token, or the mean of all patches.

    Raises UserError for a model without attention, for more tokens than fit into a figure, and without matplotlib.
    """
    part = min(attended.parts, key=order, default=None)
    if part is None:
        raise UserError("this model has no attention to draw")
    figure = _pictures(attended.image, part) if patches_of(attended, part) else _maps(part)
    from matplotlib import rc_context

    drawn = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.fonttype": "none", "svg.hashsalt": "jformer"}):
        warnings.filterwarnings("ignore", "Glyph")  # a font has not all scripts
        figure.savefig(drawn, format=form.removeprefix("."), metadata={"Date": None} if form == ".svg" else None)
    return drawn.getvalue()


def order(attention: AttentionWeights) -> int:
    """Return a part's place in SHOWN_FIRST."""
    return SHOWN_FIRST.index(attention.part)


def patches_of(attended: Attended, part: AttentionWeights) -> int:
    """Return how many patches a side the image has that a part attends to; 0 where it attends to tokens."""
    return 0 if attended.image is None or part.part is Part.DECODER_SELF else math.isqrt(len(part.columns))


def _new_grid(title: str, layers: int, heads: int, height: float, width: float) -> tuple["Figure", Any]:
    """Return a figure and its panels [layers heads] of a size in inches; raise UserError if it is too large."""
    size = MARGIN + heads * width, MARGIN + layers * height
    if max(size) > MOST_INCHES:
        raise UserError(
            f"{layers} x {heads} panels of {height:.0f} x {width:.0f} inches are too many for a figure: take a shorter "
            "line, or a page, --output=attention.html"
        )
    figure = new_figure(*size, DPI)
    figure.suptitle(title, fontsize=9)
    return figure, figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)


def _maps(part: AttentionWeights) -> "Figure":
    """Return a figure with a panel for every layer and head, rows down and columns across."""
    layers, heads, rows, columns = part.weights.shape
    figure, grid = _new_grid(part.part.value, layers, heads, *(max(LEAST, TOKEN * n) for n in (rows, columns)))
    for layer, head in np.ndindex(layers, heads):
        axes = grid[layer, head]
        axes.patch.set(**MASKED)  # visible where nothing is drawn
        open_ = np.ma.masked_where(~part.mask, part.weights[layer, head])
        axes.imshow(open_, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest")
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=7)
        _label(axes, part, left=head == 0, below=layer == layers - 1)
    if not part.mask.all():
        from matplotlib.patches import Patch

        figure.legend(handles=[Patch(**MASKED, label="masked: may not attend")], loc="outside lower right", fontsize=7)
    return figure


def _label(axes: "Axes", part: AttentionWeights, left: bool, below: bool) -> None:
    """Label the sides of the grid with tokens."""
    columns, rows = (_plain(side) for side in (part.columns, part.rows))
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(labelsize=6, length=0, labelleft=left, labelbottom=below)


def _plain(tokens: Sequence[str]) -> list[str]:
    """Return tokens escaped for matplotlib and shortened, so that panels keep their room."""
    short = [token if len(token) <= LONGEST else f"{token[: LONGEST - 1]}…" for token in map(visible, tokens)]
    return [token.replace("$", r"\$") for token in short]


def _pictures(image: Any, part: AttentionWeights) -> "Figure":
    """Return a figure with a panel for every written token, or for every layer and head."""
    side = math.isqrt(len(part.columns))
    if part.part is Part.CROSS:
        across = min(8, len(part.rows))
        named = list(zip(_plain(part.rows), part.weights[-1].mean(axis=0), strict=True))
        title = f"{part.part.value}, last layer, mean of heads"
    else:
        layers, across = part.weights.shape[:2]
        first = len(part.rows) - side**2
        taken = part.weights[:, :, 0] if first else part.weights.mean(axis=2)  # [l h s]
        named = [(f"layer {i + 1}, head {j + 1}", taken[i, j]) for i, j in np.ndindex(layers, across)]
        title = "what the class token takes" if first else "what all patches take, their mean"
    figure, grid = _new_grid(title, math.ceil(len(named) / across), across, PICTURE * 1.25, PICTURE)
    for axes in grid.flat:
        axes.set_axis_off()
    gray = image.astype(float).mean(axis=-1)
    extent = (0, side, side, 0)
    for axes, (name, weights) in zip(grid.flat, named, strict=False):
        patches = weights[-(side**2) :].reshape(side, side)
        share = patches / max(float(patches.max()), 1e-12)
        axes.imshow(gray, cmap="gray", vmin=-60, vmax=315, extent=extent, interpolation="nearest")
        axes.imshow(np.ones_like(share), cmap="autumn", vmin=-1, vmax=3, alpha=0.85 * share, extent=extent)
        axes.set_title(f"{name}\nmost {patches.max():.2f}", fontsize=7)
    return figure
