"""Denoising: restore the missing spans of a text (T5) or the whole text (BART)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.pipeline import Arrays, Features, Lengths, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.tasks import features
from jformer.tasks.features import OURS
from jformer.tasks.metrics import Scores
from jformer.tasks.noise import (
    Noise,
    corrupt_spans,
    infill,
    noise_ids,
    noised,
    span_counts,
    span_lengths,
    surrounded,
)
from jformer.tasks.sums import Sums
from jformer.tasks.task import NO_TEXTS, NOTHING, Task, refuse, token_loss, token_scores

BothSymbols = tuple[Symbols, Symbols]
"""The symbols of the source's vocabulary and of the target's."""


def denoise(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the target (Raffel et al. 2020, section 3.1; Lewis et al. 2020).

    The text is the target of an example; the model's source and target are made from it for each batch. It is stored
    without symbols; EOS and those of an imported vocabulary are put around both after the noise, so `max_target_length`
    limits both. In evaluation, long texts are always split, so the scores cover the whole text.

    Raises UserError for unsupported options, and later if the limit leaves no room for a token.
    """
    refuse("denoise", data, tokenizer="image", source=NO_TEXTS)
    longest = data.max_target_length - 1

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        around = max(_around(side.symbols) for side in (source, target))
        if around >= longest:
            full = f"data.max_target_length={data.max_target_length} holds {around + 1} symbols and no token"
            raise UserError(f"{full}: raise it")
        text = Side(target, longest - around, bare=True)
        return PairEncoder(NOTHING, text, "split" if evaluating else data.overlong)

    def make_features(source: Tokenizer, target: Tokenizer) -> Features:
        symbols = source.symbols, target.symbols
        return NOISES[data.noise](data.noise_density, data.mean_span, target.vocab_size, symbols)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return token_scores(sums)

    sentinels = int(span_counts(np.array(longest), data.noise_density, data.mean_span)[1])
    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("target",))},
        encoder=encoder,
        features=make_features,
        symbols=sentinels if data.noise == "t5" else 1,
        answer="",
        loss=token_loss(label_smoothing),
        score=score,
    )


def corrupted_spans(density: float, mean_span: float, vocab_size: int, symbols: BothSymbols = (OURS, OURS)) -> Features:
    """Return source and target of T5's denoising: the target spells out what sentinels replace in the source."""
    options: dict[str, Any] = {"density": density, "mean_span": mean_span}
    noise = functools.partial(corrupt_spans, **options, vocab_size=vocab_size, symbols=symbols[1])

    def lengths(n: np.ndarray) -> Lengths:
        _, spans = span_counts(n, **options)
        noise_ids(symbols[1], vocab_size, int(spans.max(initial=0)))  # refuses a text with more spans than sentinels
        return span_lengths(n, **options)

    return _denoise(noise, lengths, symbols)


def infilled(density: float, mean_span: float, vocab_size: int, symbols: BothSymbols = (OURS, OURS)) -> Features:
    """Return source and target of BART's denoising: the target is the text, the source masks some of its spans."""
    options: dict[str, Any] = {"density": density, "mean_span": mean_span, "vocab_size": vocab_size}
    return _denoise(functools.partial(infill, **options, symbols=symbols[1]), lambda n: (n + 1, n + 1), symbols)


def _denoise(noise: Noise, lengths: Callable[[np.ndarray], Lengths], symbols: BothSymbols) -> Features:
    """Return features that make both sides from the text of the target side."""
    read, written = symbols

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        sources, targets, inner = noised(target, rows, noise, seed)
        made = features.source_arrays(surrounded(sources, read), inner, shape)
        return {**made, **features.target_arrays(surrounded(targets, written), inner, shape, written.bos)}

    def planned(source: np.ndarray, target: np.ndarray) -> Lengths:
        sources, targets = lengths(target)
        return sources + _around(read), targets + _around(written)

    return Features(planned, arrays, features.sequence_to_sequence(written).given)


def _around(symbols: Symbols) -> int:
    """Return how many symbols besides EOS surround a text."""
    return len(symbols.before) + len(symbols.after)


NOISES = {"t5": corrupted_spans, "bart": infilled}
