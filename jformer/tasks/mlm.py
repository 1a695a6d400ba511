"""Masked language modelling: predict some tokens of a text from their context."""

import functools
from collections.abc import Sequence

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.pipeline import Arrays, Features, Rows
from jformer.data.plan import Shape
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Symbols, Tokenizer
from jformer.data.vocabularies import VocabularySpec
from jformer.tasks.features import OURS, fill_rows, source_arrays
from jformer.tasks.metrics import Scores
from jformer.tasks.noise import mask_tokens, noised
from jformer.tasks.sums import Sums
from jformer.tasks.task import MASKS, NO_TEXTS, NOTHING, Task, refuse, token_loss, token_scores


def mlm(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the chosen tokens (Devlin et al. 2019, section 3.1, without next sentences).

    The text is the target of an example, as in all one-text tasks; the model reads it on its source side.
    """
    refuse("mlm", data, overlong="split", tokenizer="image", source=NO_TEXTS)

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        side = Side(source, data.max_source_length, begin=True)
        return PairEncoder(side, NOTHING, data.overlong, reads=("target", "target"))

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return token_scores(sums, "accuracy")

    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("target",))},
        encoder=encoder,
        features=lambda source, target: masked(data.noise_density, source.vocab_size, source.symbols),
        symbols=1,
        answer=MASKS,
        loss=token_loss(label_smoothing),
        score=score,
    )


def masked(density: float, vocab_size: int, symbols: Symbols = OURS) -> Features:
    """Return source [b s] with masks, and target_out [b s] with weights at the chosen tokens.

    A given source already has masks; its target has the token of each mask, and PAD elsewhere.
    """
    noise = functools.partial(mask_tokens, density=density, vocab_size=vocab_size, symbols=symbols)

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        wanted = fill_rows(target, rows, shape, shape.source_length)["tokens"]
        weights = (wanted > 0).astype(np.float32)
        return {**source_arrays(source, rows, shape), "target_out": wanted, "weights": weights}

    def arrays(rows: Rows, source: Tokens, target: Tokens, shape: Shape, seed: tuple[int, int]) -> Arrays:
        corrupted, chosen, inner = noised(source, rows, noise, seed)
        fill = functools.partial(fill_rows, shape=shape, length=shape.source_length)
        return {
            **source_arrays(corrupted, inner, shape),
            "target_out": fill(source, rows)["tokens"],
            "weights": fill(chosen, inner)["tokens"].astype(np.float32),
        }

    return Features(lambda source, target: (source, target), arrays, given)
