"""Turn the examples of a batch into arrays; shared by the features of several tasks.

A row holds one example, or several with segments 1, 2, …; 0 is padding, and a row may be empty. Every array is a pure
function of the examples and of `seed`, which is (seed, step): computing only some rows gives the same values as
computing the whole batch.

Letters in shapes: b rows, t target positions, s source positions, n examples.
"""

from collections.abc import Callable

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.draws import ranges
from jformer.data.pipeline import Arrays, Features, Lengths, Rows
from jformer.data.plan import Shape
from jformer.data.tokenizers import Symbols

OURS = Symbols()


def sequence_to_sequence(symbols: Symbols = OURS) -> Features:
    """Return source [b s] and target [b t]: what an encoder reads and what a decoder predicts."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        return {**source_arrays(source, rows, shape), **target_arrays(target, rows, shape, symbols.bos)}

    return without_noise(given)


def without_noise(
    given: Callable[[Rows, Tokens, Tokens, Shape], Arrays],
    lengths: Callable[[np.ndarray, np.ndarray], Lengths] = lambda source, target: (source, target),
) -> Features:
    """Return features that draw nothing; by default an example takes a position for each token."""
    return Features(lengths, lambda rows, source, target, shape, seed: given(rows, source, target, shape), given)


def side_by_side(source: Tokens, target: Tokens, rows: Rows) -> tuple[Tokens, Rows]:
    """Return the source and target of each example as consecutive sequences, and their placement as two segments."""
    sides = chosen(source, rows), chosen(target, rows)
    lengths = np.stack([side.lengths for side in sides], axis=1).ravel()  # [n·2]
    which = np.repeat(np.tile([0, 1], len(rows.examples)), lengths)
    values = np.empty(len(which), np.int32)
    for side, tokens in enumerate(sides):
        values[which == side] = tokens.values
    segments = np.stack([2 * rows.segments - 1, 2 * rows.segments], axis=1).ravel()
    inner = Rows(np.arange(len(lengths)), np.repeat(rows.rows, 2), segments, np.repeat(rows.numbers, 2))
    return Tokens(values, np.concatenate([[0], np.cumsum(lengths)])), inner


def chosen(tokens: Tokens, rows: Rows) -> Tokens:
    """Return only the sequences of the examples of a batch."""
    begins = tokens.offsets[rows.examples]
    lengths = tokens.offsets[rows.examples + 1] - begins
    values = tokens.values[np.repeat(begins, lengths) + ranges(lengths)]
    return Tokens(values, np.concatenate([[0], np.cumsum(lengths)]))


def fill_rows(tokens: Tokens, rows: Rows, shape: Shape, length: int) -> Arrays:
    """Place the examples' tokens in rows of a length: `tokens`, `segments` and `positions` [b length].

    Raises ValueError if the examples of a row are longer: the rest would spill into the next row.
    """
    alone = chosen(tokens, rows)
    lengths, before = alone.lengths, alone.offsets[:-1]  # [n]; tokens of all examples before
    first = np.maximum.accumulate(np.where(rows.segments == 1, np.arange(len(lengths)), 0))  # [n] of the same row
    columns = before - before[first]
    if (columns + lengths > length).any():
        raise ValueError(f"examples of {(columns + lengths).max()} tokens share a row of {length}")
    within = ranges(lengths)  # from here on per token
    places = np.repeat(rows.rows * length + columns, lengths) + within
    out = {name: np.zeros((shape.rows, length), np.int32) for name in ("tokens", "segments", "positions")}
    out["tokens"].flat[places] = alone.values
    out["segments"].flat[places] = np.repeat(rows.segments, lengths)
    out["positions"].flat[places] = within
    return out


def source_arrays(tokens: Tokens, rows: Rows, shape: Shape) -> Arrays:
    """Return the arrays of the source side."""
    filled = fill_rows(tokens, rows, shape, shape.source_length)
    return {"source": filled["tokens"], "source_segments": filled["segments"], "source_positions": filled["positions"]}


def typed_source(tokens: Tokens, rows: Rows, shape: Shape, eos: int) -> Arrays:
    """Return the arrays of the source side, and source_types.

    These are 0 for the first text of a row, up to its end symbol, and for padding, and 1 for the second.
    """
    made = source_arrays(tokens, rows, shape)
    ends = (made["source"] == eos).astype(np.int32)
    second = (np.cumsum(ends, axis=1) > ends) & (made["source_segments"] > 0)
    return {**made, "source_types": second.astype(np.int32)}


def target_arrays(tokens: Tokens, rows: Rows, shape: Shape, bos: int) -> Arrays:
    """Return the arrays of the target side; every token has weight 1."""
    filled = fill_rows(tokens, rows, shape, shape.target_length)
    return {
        # What the decoder reads: BOS where a sequence begins, and in padding, else the token before.
        "target_in": np.where(filled["positions"] == 0, bos, np.roll(filled["tokens"], 1, axis=1)).astype(np.int32),
        "target_out": filled["tokens"],
        "target_segments": filled["segments"],
        "target_positions": filled["positions"],
        "weights": (filled["segments"] > 0).astype(np.float32),
    }


def images_of(source: Tokens, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
    """Return the images of the examples, one a row; rows without one are black."""
    image = np.zeros(shape, np.uint8)
    image[rows.rows] = source.values.reshape(-1, *shape[1:])[rows.examples]
    return image
