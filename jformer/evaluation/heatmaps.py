"""Attention as a figure for a paper: every layer and head of one part, token by token, as PNG or SVG."""

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from jformer.errors import UserError
from jformer.evaluation.plots import new_figure
from jformer.inference.attended import Attended, Attention, Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMS = (".png", ".svg")
SHOWN_FIRST = (Part.CROSS, Part.DECODER_SELF, Part.ENCODER_SELF)  # of a model that has several parts
TOKEN, LEAST, MARGIN = 0.16, 1.0, 0.9  # inches of a token, of a panel at least, and of labels
MOST_INCHES = 60.0  # of a side
DPI = 200


def draw(attended: Attended, form: str) -> bytes:
    """Return the figure of one source and its target, of the first of SHOWN_FIRST that the model has.

    Raises UserError where the model attends to nothing, for more tokens than a figure can show, and without matplotlib.
    """
    weights = _chosen(attended)
    layers, heads, rows, columns = weights.weights.shape
    width, height = (MARGIN + many * max(LEAST, TOKEN * tokens) for many, tokens in ((heads, columns), (layers, rows)))
    if max(width, height) > MOST_INCHES:
        raise UserError(
            f"{rows} x {columns} tokens of {layers} layers and {heads} heads are too many for a figure: take a shorter "
            "line, or a page, --output=attention.html"
        )
    figure = new_figure(width, height, DPI)
    figure.suptitle(weights.part.title, fontsize=9)
    grid = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer, head in np.ndindex(layers, heads):
        axes: Any = grid[layer, head]
        axes.imshow(weights.weights[layer, head], vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="nearest")
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=7)
        _label(axes, weights, left=head == 0, below=layer == layers - 1)
    from matplotlib import rc_context

    picture = io.BytesIO()
    with warnings.catch_warnings(), rc_context({"svg.fonttype": "none", "svg.hashsalt": "jformer"}):
        warnings.filterwarnings("ignore", "Glyph")  # a font has not all scripts
        figure.savefig(picture, format=form.removeprefix("."), metadata={"Date": None} if form == ".svg" else None)
    return picture.getvalue()


def _chosen(attended: Attended) -> Attention:
    found = min(attended.parts, key=order, default=None)
    if found is None:
        raise UserError("this model attends to nothing, so there is no figure of it")
    return found


def order(attention: Attention) -> int:
    """Return where a part stands in SHOWN_FIRST."""
    return SHOWN_FIRST.index(attention.part)


def _label(axes: "Axes", weights: Attention, left: bool, below: bool) -> None:
    """Write the tokens at the sides of the grid."""
    columns, rows = ([token.replace("$", r"\$") for token in side] for side in (weights.columns, weights.rows))
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(labelsize=6, length=0, labelleft=left, labelbottom=below)
