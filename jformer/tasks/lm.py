"""Language modelling: every token of a text from those before it."""

import math
from collections.abc import Sequence

from jformer.data import features
from jformer.data.config import DataConfig
from jformer.data.corpus import Encoder, Side
from jformer.data.sources import Pair
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import Vocabulary
from jformer.tasks.task import NOTHING, Scores, Task, Totals, refuse, token_loss, token_scores


def lm(data: DataConfig, *, label_smoothing: float, **_: object) -> Task:
    """Return the task: cross-entropy of the next token (Radford et al. 2018, section 3.1), the text being the target.

    `overlong` is for training. In evaluation long texts are always split, so that bits per character speak of all of
    the text; the first tokens of a piece are predicted without those before it, which makes the figure an upper bound.
    """
    refuse("lm", data, tokenizer="image", source="images")

    def encoder(source: Tokenizer, target: Tokenizer, evaluating: bool = False) -> Encoder:
        return Encoder(NOTHING, Side(target, data.max_target_length), "split" if evaluating else data.overlong)

    def score(outputs: Sequence[str], examples: Sequence[Pair], totals: Totals) -> Scores:
        return {"bits_per_character": {"score": bits_per_character(examples, totals)}, **token_scores(totals)}

    return Task(
        vocabularies={"shared": Vocabulary(data.tokenizer, ("target",))},
        encoder=encoder,
        features=lambda source, target: features.next_token(),
        symbols=0,
        answer="continuation",
        loss=token_loss(label_smoothing),
        score=score,
    )


def bits_per_character(examples: Sequence[Pair], totals: Totals) -> float:
    """Return the bits that the model needs for the texts, end symbols included, over their characters.

    Texts of nothing but white space are no examples and count on neither side. An unknown token costs what its symbol
    does, so the figure compares tokenizers only where nothing is unknown.
    """
    characters = sum(len(pair.target) for pair in examples if pair.target.strip())
    return totals["nll"][0] / math.log(2) / characters if characters else math.nan
