"""Prefix language modelling: a decoder reads a source text, which all positions see, and continues with the target."""

from collections.abc import Sequence

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.data_config import DataConfig
from jformer.data.pipeline import Arrays, Features, Rows
from jformer.data.plan import Shape
from jformer.data.tokenizers import Symbols
from jformer.errors import UserError
from jformer.tasks.features import OURS, fill_rows, side_by_side, target_arrays, without_noise
from jformer.tasks.task import Task, refuse
from jformer.tasks.translate import translate


def prefix_lm(
    data: DataConfig, *, label_smoothing: float, scores: Sequence[str], tokenize: str, lowercase: bool, **_: object
) -> Task:
    """Return the task: `translate` in one stack (Liu et al. 2018; Raffel et al. 2020, section 3.2.1).

    Args:
        data, label_smoothing, scores, tokenize, lowercase: those of `translate`.

    Raises:
        UserError: as there, and for two vocabularies, since a decoder has one table.
    """
    refuse("prefix_lm", data, overlong="split", tokenizer="image", source=("images", "captions"))
    if not data.vocab_shared:
        raise UserError("task='prefix_lm' has one embedding table for both texts: it needs data.vocab_shared=True")
    task = translate(data, label_smoothing=label_smoothing, scores=scores, tokenize=tokenize, lowercase=lowercase)
    return task._replace(features=lambda source, target: prefixed(target.symbols))


def prefixed(symbols: Symbols = OURS) -> Features:
    """Return target [b t], each source followed by its target, and target_prefix [b t]; only targets have weight.

    The prefix ends before the last token of a source. That token counts as the beginning of the target: a search
    continues from it, and no earlier position may attend to it.
    """

    def given(rows: Rows, source: Tokens, target: Tokens, shape: Shape) -> Arrays:
        joined, behind, inner = _joined(source, target, rows)
        made = target_arrays(joined, inner, shape, symbols.bos)
        weights = fill_rows(behind, inner, shape, shape.target_length)["tokens"].astype(np.float32)
        return {**made, "weights": weights, "target_prefix": made["weights"] > weights}

    made = without_noise(given, lambda source, target: (np.zeros_like(source), source + target))
    return made._replace(prompt=lambda source: source)


def _joined(source: Tokens, target: Tokens, rows: Rows) -> tuple[Tokens, Tokens, Rows]:
    """Return each example of a batch as one sequence, which tokens are the target (1, else 0), and its place."""
    apart, _ = side_by_side(source, target, rows)
    behind = np.repeat(np.tile([0, 1], len(rows.examples)), apart.lengths)
    offsets = apart.offsets[::2]
    whole = rows._replace(examples=np.arange(len(rows.examples)))
    return Tokens(apart.values, offsets), Tokens(behind, offsets), whole
