"""Scenes: pictures of shapes drawn at random, with captions.

A scene is written as its shapes, each with its centre in pixels from the left and from the top:

    large red circle 6 5, small blue square 16 27

and its caption is "a large red circle above a small blue square". Shapes stand in different cells of a grid of three by
three. The first one of a caption is the largest, or of equals the one that is read first, row by row; how it stands to
each of the others follows from their rows where these differ, else from their columns. So a scene has one caption.

Axes: h and w pixels, c channels.
"""

import dataclasses
import functools
import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import own_folder
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split, fingerprint
from jformer.errors import UserError

EXAMPLE = "large red circle 6 5, small blue square 16 27"
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
CENTRES = (5, 16, 27)  # of the cells, in pixels; a shape stands up to WIGGLE beside it in either direction
WIGGLE = 1
HELD_OUT = 1_000  # scenes of "valid", and of "test"


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


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of data.num_pairs training scenes, or of those held out, drawn into one array."""
    written = open_built(config, split, build)

    def read(counts: Counter[str]) -> Iterator[Pair]:
        pairs = list(written.read(counts))
        array = draw_all([pair.source for pair in pairs])
        return (pair._replace(source=f"{array}#{number}") for number, pair in enumerate(pairs))

    return dataclasses.replace(written, fingerprint=fingerprint("scenes", written.fingerprint, digest()), read=read)


def draw_all(scenes: list[str]) -> Path:
    """Return the file of the pictures u8 [n h w c] of some scenes, which are drawn once on a machine."""
    path = (own_folder("scenes") or Path(tempfile.mkdtemp())) / f"{fingerprint(digest(), scenes)}.npy"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as own:  # several processes may draw at once
            np.save(own, np.stack([draw(scene) for scene in scenes]))
        Path(own.name).replace(path)
    return path


def build(num_pairs: int) -> dict[str, list[Pair]]:
    """Return the scenes of train, valid and test with their captions; no two splits share a scene.

    Scenes of different splits differ in a shape, its size, its colour or its cell. The first ones do not depend on how
    many are drawn. A scene's group is how many shapes it has.
    """
    rng, drawn = np.random.default_rng(0), dict[tuple[object, ...], tuple[Shape, ...]]()
    while len(drawn) < 2 * HELD_OUT + num_pairs:
        shapes = _draw_shapes(rng)
        drawn.setdefault(tuple((str(shape), shape.cell) for shape in shapes), shapes)
    pairs = [Pair(name_of(shapes), caption_of(shapes), f"{len(shapes)} shapes") for shapes in drawn.values()]
    return {"train": pairs[2 * HELD_OUT :], "valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT]}


def _draw_shapes(rng: np.random.Generator) -> tuple[Shape, ...]:
    """Draw two or three shapes in cells of their own, in the order in which they are read."""
    cells = np.sort(rng.choice(CELLS**2, size=rng.integers(2, 4), replace=False)).tolist()
    words = [[*each] for each in (SIZES, COLOURS, SHAPES)]
    shapes = []
    for cell in cells:
        size, colour, form = (each[rng.integers(len(each))] for each in words)
        y, x = (CENTRES[place] + int(rng.integers(-WIGGLE, WIGGLE + 1)) for place in divmod(cell, CELLS))
        shapes.append(Shape(size=size, colour=colour, form=form, x=x, y=y))
    return tuple(shapes)


def name_of(shapes: tuple[Shape, ...]) -> str:
    """Return how a scene is written."""
    return ", ".join(f"{shape} {shape.x} {shape.y}" for shape in shapes)


def caption_of(shapes: tuple[Shape, ...]) -> str:
    """Return the caption of a scene."""
    first, *others = sorted(shapes, key=lambda shape: (-SIZES[shape.size], shape.cell))
    return f"a {first} " + " and ".join(f"{_relation(first.cell, other.cell)} a {other}" for other in others)


def draw(name: str) -> UInt8[np.ndarray, "h w c"]:
    """Draw the scene of a name: RGB, black where no shape is. Raise UserError for an invalid name."""
    y, x = np.mgrid[:SIDE, :SIDE]
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    for shape in _parse(name):
        image[SHAPES[shape.form](x - shape.x, y - shape.y, SIZES[shape.size])] = COLOURS[shape.colour]
    return image


@functools.cache
def digest() -> str:
    """Return the SHA-256 of every shape as it is drawn."""
    names = (f"{size} {colour} {form} 16 16" for size in SIZES for colour in COLOURS for form in SHAPES)
    return hashlib.sha256(b"".join(draw(name).tobytes() for name in names)).hexdigest()


@functools.cache
def _pattern() -> re.Pattern[str]:
    words = ("|".join(each) for each in (SIZES, COLOURS, SHAPES))
    return re.compile(" ".join(f"({each})" for each in words) + r" (\d{1,2}) (\d{1,2})")


def _parse(name: str) -> list[Shape]:
    found = [_pattern().fullmatch(part.strip()) for part in name.split(",")]
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
