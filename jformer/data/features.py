"""How the examples of a batch become the arrays a task learns from. Which examples they are is the plan's to say.

A row of a batch holds one example, or several with segments 1, 2, …; 0 is padding, and so is a row that holds none.
Every array is a pure function of the examples and of `seed`, which is (seed, step): some rows of a batch alone are
those rows of all of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jformer.data import corrupt
from jformer.data.corpus import Tokens
from jformer.data.plan import Shape
from jformer.data.tokenizers import BOS, EOS, NUM_SYMBOLS

Arrays = dict[str, np.ndarray]
Lengths = tuple[np.ndarray, np.ndarray]
Noise = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
"""(ids, generator) → two arrays, such as a noised source and its target."""


class Rows(NamedTuple):
    """Which example stands where; those that share a row are neighbours here, and numbered from 1."""

    examples: np.ndarray  # [n]
    rows: np.ndarray  # of the arrays that are made
    segments: np.ndarray
    numbers: np.ndarray  # of these rows in the whole batch, of which the arrays may be a part


class Features(NamedTuple):
    """What a batch must have room for, and what it holds."""

    lengths: Callable[[np.ndarray, np.ndarray], Lengths]  # source and target lengths [n] → the lengths to plan for
    arrays: Callable[[Rows, Tokens, Tokens, Shape, tuple[int, int]], Arrays]


def sequence_to_sequence() -> Features:
    """Return source [b s] and target [b t]: what an encoder reads and what a decoder says."""

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        return {**_source(_lay(source, rows, shape, shape.source_length)), **_target(target, rows, shape)}

    return Features(_as_they_are, arrays)


def next_token() -> Features:
    """Return target [b t] alone: what a decoder says without being asked."""
    return Features(_as_they_are, lambda rows, source, target, shape, seed: _target(target, rows, shape))


def masked(density: float, vocab_size: int) -> Features:
    """Return source [b s] with masks (id `vocab_size`), and target_out [b s] that weighs where they fell."""
    noise = functools.partial(corrupt.mask_tokens, density=density, vocab_size=vocab_size)

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        corrupted, chosen, inner = _noised(source, rows, noise, seed)
        lay = functools.partial(_lay, shape=shape, length=shape.source_length)
        return {
            **_source(lay(corrupted, inner)),
            "target_out": lay(source, rows)["tokens"],
            "weights": lay(chosen, inner)["tokens"].astype(np.float32),
        }

    return Features(_as_they_are, arrays)


def corrupted_spans(density: float, mean_span: float, vocab_size: int) -> Features:
    """Return source and target of T5's denoising: the target spells out what sentinels stand for in the source."""
    noise = functools.partial(corrupt.corrupt_spans, density=density, mean_span=mean_span, vocab_size=vocab_size)
    lengths = functools.partial(corrupt.span_lengths, density=density, mean_span=mean_span)
    return _denoise(noise, lengths)


def infilled(density: float, mean_span: float, vocab_size: int) -> Features:
    """Return source and target of BART's denoising: the target is the text, some spans of which the source masks."""
    noise = functools.partial(corrupt.infill, density=density, mean_span=mean_span, vocab_size=vocab_size)
    return _denoise(noise, lambda n: (n + 1, n + 1))


def labelled_texts() -> Features:
    """Return source [b s] with source_types (0 first text, 1 second), and the class as target_out [b 1]."""

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        laid = _lay(source, rows, shape, shape.source_length)
        ends = (laid["tokens"] == EOS).astype(np.int32)
        second = (np.cumsum(ends, axis=1) > ends) & (laid["segments"] > 0)
        return {**_source(laid), "source_types": second.astype(np.int32), **_classes(target, rows, shape)}

    return Features(_as_they_are, arrays)


def labelled_images(height: int, width: int, channels: int) -> Features:
    """Return image u8 [b height width channels] and the class as target_out [b 1]; a pixel is a position."""

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        image = np.zeros((shape.rows, height, width, channels), np.uint8)
        image[rows.rows] = source.values.reshape(-1, height, width, channels)[rows.examples]
        return {"image": image, **_classes(target, rows, shape)}

    return Features(lambda source, target: (source // channels, target), arrays)


def ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0..n-1 for each n of lengths, joined."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _as_they_are(source: np.ndarray, target: np.ndarray) -> Lengths:
    return source, target


def _denoise(noise: Noise, lengths: Callable[[np.ndarray], Lengths]) -> Features:
    """Return features that make both sides from the text of the target side."""

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        noised, spoken, inner = _noised(target, rows, noise, seed)
        return {**_source(_lay(noised, inner, shape, shape.source_length)), **_target(spoken, inner, shape)}

    return Features(lambda source, target: lengths(target), arrays)


def _noised(tokens: Tokens, rows: Rows, noise: Noise, seed: tuple[int, int]) -> tuple[Tokens, Tokens, Rows]:
    """Return both results of the noise for the examples of a batch, and where they stand now that they are apart.

    An example's noise depends on (seed, step, number of the row, segment), so on nothing else in the batch.
    """
    results = []
    for example, _, segment, number in zip(*rows, strict=True):
        ids = tokens.values[tokens.offsets[example] : tokens.offsets[example + 1]]
        results.append(noise(ids, np.random.default_rng([*seed, number, segment])))
    first, second = (_joined([result[i] for result in results]) for i in range(2))
    return first, second, rows._replace(examples=np.arange(len(results)))


def _joined(sequences: Sequence[np.ndarray]) -> Tokens:
    values = np.concatenate(sequences) if sequences else np.zeros(0, np.int32)  # a part of a batch may be empty
    return Tokens(values, np.cumsum([0, *map(len, sequences)]))


def _lay(tokens: Tokens, rows: Rows, shape: Shape, length: int) -> Arrays:
    """Lay the examples' tokens side by side into rows of a length."""
    lengths = tokens.offsets[rows.examples + 1] - tokens.offsets[rows.examples]
    within = ranges(lengths)
    before = np.cumsum(lengths) - lengths
    start = before - before[np.searchsorted(rows.rows, rows.rows)]  # tokens already in the row
    cell = np.repeat(rows.rows * length + start, lengths) + within
    out = {name: np.zeros((shape.rows, length), np.int32) for name in ("tokens", "segments", "positions")}
    out["tokens"].flat[cell] = tokens.values[np.repeat(tokens.offsets[rows.examples], lengths) + within]
    out["segments"].flat[cell] = np.repeat(rows.segments, lengths)
    out["positions"].flat[cell] = within
    return out


def _source(laid: Arrays) -> Arrays:
    return {"source": laid["tokens"], "source_segments": laid["segments"], "source_positions": laid["positions"]}


def _target(tokens: Tokens, rows: Rows, shape: Shape) -> Arrays:
    laid = _lay(tokens, rows, shape, shape.target_length)
    return {
        "target_in": _shift_right(laid["tokens"], laid["positions"]),
        "target_out": laid["tokens"],
        "target_segments": laid["segments"],
        "target_positions": laid["positions"],
        "weights": (laid["segments"] > 0).astype(np.float32),
    }


def _shift_right(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return what the decoder reads: BOS where a sequence begins (and in padding), else the token before."""
    shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return np.where(positions == 0, BOS, shifted).astype(np.int32)


def _classes(labels: Tokens, rows: Rows, shape: Shape) -> Arrays:
    """Return the classes 0, 1, … of the examples, one a row."""
    laid = _lay(labels, rows, shape, 1)
    real = laid["segments"] > 0
    return {"target_out": np.where(real, laid["tokens"] - NUM_SYMBOLS, 0), "weights": real.astype(np.float32)}
