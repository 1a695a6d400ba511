"""Scenes: pictures of shapes, the names that they are drawn from, and their captions. `sources.scenes` has a corpus.

A scene is written as its shapes, each with its centre in pixels from the left and from the top:

    scene:large red circle 6 5, small blue square 16 27

and its caption is "a large red circle above a small blue square". Shapes stand in different cells of a grid of three by
three. The first one told of is the largest, or of equals the one that is read first, row by row; how it stands to each
of the others is told by their rows where these differ, else by their columns. So a scene has one caption.

Axes: h and w pixels, c channels.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from jformer.errors import UserError

PREFIX = "scene:"
EXAMPLE = f"{PREFIX}large red circle 6 5, small blue square 16 27"
SIDE = 32  # pixels
CELLS = 3  # in a row, and in a column

SIZES = {"small": 3.0, "large": 4.5}  # half a side, in pixels
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 240),
    "yellow": (240, 220, 40),
    "purple": (160, 50, 200),
    "white": (245, 245, 245),
}
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray, float], Bool[np.ndarray, "h w"]]] = {  # of x, y, half a side
    "circle": lambda x, y, half: x**2 + y**2 <= half**2,
    "square": lambda x, y, half: (abs(x) <= half) & (abs(y) <= half),
    "triangle": lambda x, y, half: (abs(y) <= half) & (abs(x) <= (y + half) / 2),
    "cross": lambda x, y, half: (np.minimum(abs(x), abs(y)) <= half / 3) & (np.maximum(abs(x), abs(y)) <= half),
}


class Shape(NamedTuple):
    """One shape of a scene."""

    size: str
    colour: str
    form: str
    x: int  # of its centre, from the left
    y: int  # from the top

    @property
    def cell(self) -> tuple[int, int]:
        """Row and column of the grid."""
        return self.y * CELLS // SIDE, self.x * CELLS // SIDE

    def __str__(self) -> str:
        return f"{self.size} {self.colour} {self.form}"


def name_of(shapes: tuple[Shape, ...]) -> str:
    """Return how a scene is written."""
    return PREFIX + ", ".join(f"{shape} {shape.x} {shape.y}" for shape in shapes)


def caption_of(shapes: tuple[Shape, ...]) -> str:
    """Return what is said of a scene."""
    first, *others = sorted(shapes, key=lambda shape: (-SIZES[shape.size], shape.cell))
    return f"a {first} " + " and ".join(f"{_relation(first.cell, other.cell)} a {other}" for other in others)


def draw(name: str) -> UInt8[np.ndarray, "h w c"]:
    """Draw the scene of a name: RGB, black where no shape is. Raise UserError for a name that is none."""
    y, x = np.mgrid[:SIDE, :SIDE]
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    for shape in _parse(name):
        image[SHAPES[shape.form](x - shape.x, y - shape.y, SIZES[shape.size])] = COLOURS[shape.colour]
    return image


@functools.cache
def digest() -> str:
    """Return the SHA-256 of every shape as it is drawn."""
    names = (f"{PREFIX}{size} {colour} {form} 16 16" for size in SIZES for colour in COLOURS for form in SHAPES)
    return hashlib.sha256(b"".join(draw(name).tobytes() for name in names)).hexdigest()


@functools.cache
def _pattern() -> re.Pattern[str]:
    words = ("|".join(each) for each in (SIZES, COLOURS, SHAPES))
    return re.compile(" ".join(f"({each})" for each in words) + r" (\d{1,2}) (\d{1,2})")


def _parse(name: str) -> list[Shape]:
    found = [_pattern().fullmatch(part.strip()) for part in name.removeprefix(PREFIX).split(",")]
    shapes = [
        Shape(size=each[1], colour=each[2], form=each[3], x=int(each[4]), y=int(each[5])) for each in found if each
    ]
    if len(shapes) < len(found) or any(max(shape.x, shape.y) >= SIDE for shape in shapes):
        raise UserError(f"{name!r:.80} is no scene of {SIDE} x {SIDE} pixels; write it as {EXAMPLE!r}")
    return shapes


def _relation(one: tuple[int, int], other: tuple[int, int]) -> str:
    if one[0] != other[0]:
        return "above" if one[0] < other[0] else "below"
    return "left of" if one[1] < other[1] else "right of"
