"""Turn the examples of a batch into the arrays that a task learns from; `plan` chooses the examples.

A row holds one example, or several with segments 1, 2, …; 0 is padding, and a row may be empty. Every array is a pure
function of the examples and of `seed`, which is (seed, step): computing only some rows gives the same values as
computing the whole batch.

Letters in shapes: b rows, t target positions, s source positions, n examples.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.draws import make_keys, ranges
from jformer.data.noise import corrupt_spans, infill, mask_tokens, span_lengths
from jformer.data.plan import Shape
from jformer.data.tokenizers import NUM_SYMBOLS, Symbols
from jformer.errors import UserError

Arrays = dict[str, np.ndarray]
Lengths = tuple[np.ndarray, np.ndarray]
OURS = Symbols()
Noise = Callable[[Tokens, np.ndarray], tuple[Tokens, Tokens]]
"""(texts, their keys) → two sequences for each text, such as a noised source and its target."""
Labels = Callable[["Rows", Tokens, Shape], Arrays]
"""(the place of each example, labels as ids, the shape) → target_out and weights; see `jformer.data.labels`."""


class Rows(NamedTuple):
    """The placement of examples in rows. Those that share a row are consecutive, with the segments 1, 2, …"""

    examples: np.ndarray  # [n] indices of the examples
    rows: np.ndarray  # [n] the row of each example in the resulting arrays, in any order
    segments: np.ndarray  # [n] its position among the examples of its row: 1, 2, …
    numbers: np.ndarray  # [n] the index of that row in the whole batch, of which the arrays may be a part


class Features(NamedTuple):
    """The lengths and arrays of a batch, in training and for a given source and target.

    Only `arrays` draws noise, from its seed. Answering, and scoring a given target, use `given`, which draws nothing;
    None = there is neither.
    """

    lengths: Callable[[np.ndarray, np.ndarray], Lengths]  # source and target lengths [n] → the lengths to plan for
    arrays: Callable[[Rows, Tokens, Tokens, Shape, tuple[int, int]], Arrays]
    given: Callable[[Rows, Tokens, Tokens, Shape], Arrays] | None = None
    # source → what a decoder reads of it before the target, in the arrays of targets
    prompt: Callable[[Sequence[int]], Sequence[int]] = lambda source: ()


def sequence_to_sequence(symbols: Symbols = OURS) -> Features:
    """Return source [b s] and target [b t]: what an encoder reads and what a decoder predicts."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        filled = fill_rows(source, rows, shape, shape.source_length)
        return {**_source(filled), **_target(target, rows, shape, symbols.bos)}

    return _without_noise(_unchanged, given)


def next_token(symbols: Symbols = OURS, previous: bool = False) -> Features:
    """Return target [b t] alone: what a decoder predicts without a source.

    The decoder reads BOS first. With `previous`, an example that continues the text of the one before it starts with
    the last token of that one instead: a text split into [5 6] and [7 EOS] has the inputs [BOS 5] and [6 7].
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        made = _target(target, rows, shape, symbols.bos)
        if previous:
            starts = (made["target_positions"] == 0) & (made["target_segments"] > 0)
            made["target_in"][starts] = _tokens_before(target, rows.examples, symbols)
        return made

    return _without_noise(_unchanged, given)


def prefixed(symbols: Symbols = OURS) -> Features:
    """Return target [b t] that is each source with its target behind it, and target_prefix [b t]; only targets weigh.

    The prefix is what a decoder reads before the last token of a source. That one is read as the target's beginning:
    a search continues from it, and nothing before it may see it.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        joined, behind, inner = _joined(source, target, rows)
        made = _target(joined, inner, shape, symbols.bos)
        weights = fill_rows(behind, inner, shape, shape.target_length)["tokens"].astype(np.float32)
        return {**made, "weights": weights, "target_prefix": made["weights"] > weights}

    made = _without_noise(lambda source, target: (np.zeros_like(source), source + target), given)
    return made._replace(prompt=lambda source: source)


def masked(density: float, vocab_size: int, symbols: Symbols = OURS) -> Features:
    """Return source [b s] with masks, and target_out [b s] that weighs where they fell.

    A given source has its masks, and its target the token of each of them, and PAD elsewhere.
    """
    noise = functools.partial(mask_tokens, density=density, vocab_size=vocab_size, symbols=symbols)

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        filled, wanted = (fill_rows(tokens, rows, shape, shape.source_length) for tokens in (source, target))
        weights = (wanted["tokens"] > 0).astype(np.float32)
        return {**_source(filled), "target_out": wanted["tokens"], "weights": weights}

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        corrupted, chosen, inner = _noised(source, rows, noise, seed)
        fill = functools.partial(fill_rows, shape=shape, length=shape.source_length)
        return {
            **_source(fill(corrupted, inner)),
            "target_out": fill(source, rows)["tokens"],
            "weights": fill(chosen, inner)["tokens"].astype(np.float32),
        }

    return Features(_unchanged, arrays, given)


def corrupted_spans(density: float, mean_span: float, vocab_size: int, symbols: Symbols = OURS) -> Features:
    """Return source and target of T5's denoising: the target spells out what sentinels replace in the source."""
    options: dict[str, Any] = {"density": density, "mean_span": mean_span}
    noise = functools.partial(corrupt_spans, **options, vocab_size=vocab_size, symbols=symbols)
    return _denoise(noise, functools.partial(span_lengths, **options), symbols)


def infilled(density: float, mean_span: float, vocab_size: int, symbols: Symbols = OURS) -> Features:
    """Return source and target of BART's denoising: the target is the text, some spans of which the source masks."""
    options: dict[str, Any] = {"density": density, "mean_span": mean_span, "vocab_size": vocab_size}
    return _denoise(functools.partial(infill, **options, symbols=symbols), lambda n: (n + 1, n + 1), symbols)


def labelled_texts(labels: Labels, symbols: Symbols = OURS) -> Features:
    """Return source [b s] with source_types (0 first text, 1 second), and what `labels` makes of the other side."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        filled = fill_rows(source, rows, shape, shape.source_length)
        return {**_source(filled), "source_types": _types(filled, symbols.eos), **labels(rows, target, shape)}

    return _without_noise(lambda source, target: (source, np.ones_like(target)), given)


def paired_texts(side: str, symbols: Symbols = OURS) -> Features:
    """Return the arrays of one side alone, "source" or "target", whose rows hold both texts of a pair.

    They have the segments 1 and 2; `weights` [b 1] is 1 where there is a pair.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        texts, inner = _side_by_side(source, target, rows)
        if side == "source":
            made = _source(fill_rows(texts, inner, shape, shape.source_length))
        else:
            made = _target(texts, inner, shape, symbols.bos)
            del made["target_out"]
        real = made[f"{side}_segments"].max(axis=1, initial=0) > 1
        return {**made, "weights": real[:, None].astype(np.float32)}

    def lengths(source: np.ndarray, target: np.ndarray) -> Lengths:
        both = source + target, np.zeros_like(source)
        return both if side == "source" else both[::-1]

    return _without_noise(lengths, given)


def tagged_texts() -> Features:
    """Return source [b s], source_types of one text, and the class of each word at its first token: target_out [b s].

    The two sequences of an example are of one length; positions whose target is PAD have no weight.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        filled, tags = (fill_rows(tokens, rows, shape, shape.source_length) for tokens in (source, target))
        real = tags["tokens"] > 0
        return {
            **_source(filled),
            "source_types": np.zeros_like(filled["tokens"]),
            "target_out": np.where(real, tags["tokens"] - NUM_SYMBOLS, 0),
            "weights": real.astype(np.float32),
        }

    return _without_noise(_unchanged, given)


def marked_spans(symbols: Symbols = OURS) -> Features:
    """Return source [b s] with source_types, and its marks (`data.spans`) as target_out [b s].

    Weights are 1 where an answer may start or end.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        filled = fill_rows(source, rows, shape, shape.source_length)
        marks = fill_rows(target, rows, shape, shape.source_length)["tokens"]
        weights = (marks > 0).astype(np.float32)
        return {**_source(filled), "source_types": _types(filled, symbols.eos), "target_out": marks, "weights": weights}

    return _without_noise(lambda source, target: (source, np.zeros_like(target)), given)


def labelled_images(height: int, width: int, channels: int, labels: Labels) -> Features:
    """Return image u8 [b height width channels] and what `labels` makes of the other side; a pixel is a position."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        image = _images(source, rows, (shape.rows, height, width, channels))
        return {"image": image, **labels(rows, target, shape)}

    return _without_noise(lambda source, target: (source // channels, np.ones_like(target)), given)


def captioned_images(height: int, width: int, channels: int, symbols: Symbols = OURS) -> Features:
    """Return image u8 [b height width channels] and target [b t]; an image and its caption have a row of their own."""

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        image = _images(source, rows, (shape.rows, height, width, channels))
        return {"image": image, **_target(target, rows, shape, symbols.bos)}

    return _without_noise(lambda source, target: (source // channels, target), given)


def refuse_foreign_ids(arrays: Arrays, sizes: dict[str, int], where: str) -> None:
    """Raise UserError for an id outside the vocabulary of its array; `sizes` maps array to vocabulary size.

    A device would silently clamp it to the nearest valid id.
    """
    for name, size in sizes.items():
        ids = arrays.get(name)
        if ids is not None and ids.size and (ids.min() < 0 or ids.max() >= size):
            bad = int(ids[(ids < 0) | (ids >= size)][0])
            raise UserError(
                f"{where}: {name} holds the token id {bad}, the model's vocabulary the ids 0 to {size - 1}: "
                "delete data.cache_dir and restore the run's tokenizer"
            )


def _unchanged(source: np.ndarray, target: np.ndarray) -> Lengths:
    return source, target


def _without_noise(
    lengths: Callable[[np.ndarray, np.ndarray], Lengths], given: Callable[[Rows, Tokens, Tokens, Shape], Arrays]
) -> Features:
    return Features(lengths, lambda rows, source, target, shape, seed: given(rows, source, target, shape), given)


def _denoise(noise: Noise, lengths: Callable[[np.ndarray], Lengths], symbols: Symbols) -> Features:
    """Return features that make both sides from the text of the target side."""

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        noised, spans, inner = _noised(target, rows, noise, seed)
        filled = fill_rows(noised, inner, shape, shape.source_length)
        return {**_source(filled), **_target(spans, inner, shape, symbols.bos)}

    return Features(lambda source, target: lengths(target), arrays, sequence_to_sequence(symbols).given)


def _noised(tokens: Tokens, rows: Rows, noise: Noise, seed: tuple[int, int]) -> tuple[Tokens, Tokens, Rows]:
    """Return both results of the noise for the examples of a batch, and their places now that they are apart.

    An example's noise depends on (seed, step, number of the row, segment), so on nothing else in the batch.
    """
    first, second = noise(chosen(tokens, rows), make_keys(seed, rows.numbers, rows.segments))
    return first, second, rows._replace(examples=np.arange(len(rows.examples)))


def _joined(source: Tokens, target: Tokens, rows: Rows) -> tuple[Tokens, Tokens, Rows]:
    """Return each example of a batch as one sequence, which tokens are the target (1, else 0), and its place."""
    apart, _ = _side_by_side(source, target, rows)
    behind = np.repeat(np.tile([0, 1], len(rows.examples)), apart.lengths)
    offsets = apart.offsets[::2]
    whole = rows._replace(examples=np.arange(len(rows.examples)))
    return Tokens(apart.values, offsets), Tokens(behind, offsets), whole


def _side_by_side(source: Tokens, target: Tokens, rows: Rows) -> tuple[Tokens, Rows]:
    """Return the source and the target of each example of a batch in turn, and where they stand, two to a place."""
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
    """Return the sequences of the examples of a batch alone."""
    begins = tokens.offsets[rows.examples]
    lengths = tokens.offsets[rows.examples + 1] - begins
    values = tokens.values[np.repeat(begins, lengths) + ranges(lengths)]
    return Tokens(values, np.concatenate([[0], np.cumsum(lengths)]))


def fill_rows(tokens: Tokens, rows: Rows, shape: Shape, length: int) -> Arrays:
    """Place the examples' tokens in rows of a length: `tokens`, `segments` and `positions` [b length].

    Raises ValueError if the examples of a row exceed it: the rest would spill into the next row.
    """
    begins = tokens.offsets[rows.examples]  # [n]
    lengths = tokens.offsets[rows.examples + 1] - begins
    before = np.cumsum(lengths) - lengths  # tokens of all examples before
    first = np.maximum.accumulate(np.where(rows.segments == 1, np.arange(len(lengths)), 0))  # [n] of the same row
    columns = before - before[first]
    if (columns + lengths > length).any():
        raise ValueError(f"examples of {(columns + lengths).max()} tokens share a row of {length}")
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)  # from here on token by token
    places = np.repeat(rows.rows * length + columns, lengths) + within
    out = {name: np.zeros((shape.rows, length), np.int32) for name in ("tokens", "segments", "positions")}
    out["tokens"].flat[places] = tokens.values[np.repeat(begins, lengths) + within]
    out["segments"].flat[places] = np.repeat(rows.segments, lengths)
    out["positions"].flat[places] = within
    return out


def _source(filled: Arrays) -> Arrays:
    return {"source": filled["tokens"], "source_segments": filled["segments"], "source_positions": filled["positions"]}


def _target(tokens: Tokens, rows: Rows, shape: Shape, bos: int) -> Arrays:
    filled = fill_rows(tokens, rows, shape, shape.target_length)
    return {
        "target_in": _shift_right(filled["tokens"], filled["positions"], bos),
        "target_out": filled["tokens"],
        "target_segments": filled["segments"],
        "target_positions": filled["positions"],
        "weights": (filled["segments"] > 0).astype(np.float32),
    }


def _shift_right(tokens: np.ndarray, positions: np.ndarray, bos: int) -> np.ndarray:
    """Return what the decoder reads: BOS where a sequence begins (and in padding), else the token before."""
    shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return np.where(positions == 0, bos, shifted).astype(np.int32)


def _tokens_before(tokens: Tokens, examples: np.ndarray, symbols: Symbols) -> np.ndarray:
    """Return the token [n] before each example in its text, or BOS at the beginning of a text."""
    start = tokens.offsets[examples]
    before = tokens.values[np.maximum(start - 1, 0)]
    ends = (symbols.eos, *symbols.after)[-1]  # a text ends in it, and no piece but its last
    return np.where((start == 0) | (before == ends), symbols.bos, before)


def _images(source: Tokens, rows: Rows, shape: tuple[int, ...]) -> np.ndarray:
    """Return the images of the examples, one a row, black where there is none."""
    image = np.zeros(shape, np.uint8)
    image[rows.rows] = source.values.reshape(-1, *shape[1:])[rows.examples]
    return image


def _types(filled: Arrays, eos: int) -> np.ndarray:
    """Return 0 for the first text of a row, up to its end symbol, and for padding, and 1 for the second."""
    ends = (filled["tokens"] == eos).astype(np.int32)
    return ((np.cumsum(ends, axis=1) > ends) & (filled["segments"] > 0)).astype(np.int32)
