"""Scenes that are drawn at random, split and captioned: the corpus of pictures. How they look is said in `drawings`."""

import numpy as np

from jformer.data.drawings import CELLS, COLOURS, SHAPES, SIZES, Shape, caption_of, name_of
from jformer.data.sources.split import Pair

CENTRES = (5, 16, 27)  # of the cells, in pixels; a shape stands up to WIGGLE beside it in either direction
WIGGLE = 1
HELD_OUT = 1_000  # scenes of "valid", and of "test"


def build(num_pairs: int) -> dict[str, list[Pair]]:
    """Return the scenes of train, valid and test with their captions; none of a split shows what one of another does.

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
