"""Language modelling: predict every token of a text from the preceding ones."""

import math
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
from jformer.tasks.features import OURS, target_arrays, without_noise
from jformer.tasks.metrics import Scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import NO_TEXTS, NOTHING, Task, refuse, token_loss, token_scores


def lm(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the next token (Radford et al. 2018, section 3.1), the text being the target.

    `overlong` applies to training. In evaluation, long texts are always split, so that bits per character cover the
    whole text. The first tokens of a piece have little context (none with piece_start 'bos', one token with
    'previous'), so the figure is an upper bound. An answer begins with BOS in either case.
    """
    refuse("lm", data, tokenizer="image", source=NO_TEXTS)

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> PairEncoder:
        return PairEncoder(NOTHING, Side(target, data.max_target_length), "split" if evaluating else data.overlong)

    def score(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        return {"bits_per_character": {"score": bits_per_character(examples, sums)}, **token_scores(sums)}

    return Task(
        vocabularies={"shared": VocabularySpec(data.tokenizer, ("target",))},
        encoder=encoder,
        features=lambda source, target: next_token(target.symbols, data.piece_start == "previous"),
        answer="continuation",
        loss=token_loss(label_smoothing),
        score=score,
    )


def bits_per_character(examples: Sequence[Pair], sums: Sums) -> float:
    """Return the bits that the model needs for the texts, end symbols included, per character.

    Texts of only white space are not examples and do not count. An unknown token costs the bits of UNK, so the figure
    compares tokenizers only on texts without unknown tokens.
    """
    characters = sum(len(pair.target) for pair in examples if pair.target.strip())
    return float(sums["nll"].total) / math.log(2) / characters if characters else math.nan


def next_token(symbols: Symbols = OURS, previous: bool = False) -> Features:
    """Return target [b t] alone: what a decoder predicts without a source.

    The decoder reads BOS first. With `previous`, an example that continues the text of the one before it starts with
    the last token of that one instead: a text split into [5 6] and [7 EOS] has the inputs [BOS 5] and [6 7].
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        made = target_arrays(target, rows, shape, symbols.bos)
        if previous:
            starts = (made["target_positions"] == 0) & (made["target_segments"] > 0)
            made["target_in"][starts] = _tokens_before(target, rows.examples, symbols)
        return made

    return without_noise(given)


def _tokens_before(tokens: Tokens, examples: np.ndarray, symbols: Symbols) -> np.ndarray:
    """Return the token [n] before each example in its text, or BOS at the beginning of a text."""
    start = tokens.offsets[examples]
    before = tokens.values[np.maximum(start - 1, 0)]
    ends = (symbols.eos, *symbols.after)[-1]  # the last token of a text; of its pieces, only the last has it
    return np.where((start == 0) | (before == ends), symbols.bos, before)
