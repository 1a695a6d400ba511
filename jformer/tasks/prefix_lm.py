"""Prefix language modelling: a decoder reads a source text, which all positions see, and continues with the target."""

from collections.abc import Sequence

from jformer.data import features
from jformer.data.data_config import DataConfig
from jformer.errors import UserError
from jformer.tasks.task import Task, refuse
from jformer.tasks.translate import translate


def prefix_lm(
    data: DataConfig, *, label_smoothing: float, scores: Sequence[str], tokenize: str, lowercase: bool, **_: object
) -> Task:
    """Return the task: `translate` in one stack (Liu et al. 2018; Raffel et al. 2020, section 3.2.1).

    Args:
        data, label_smoothing, scores, tokenize, lowercase: those of `translate`.

    Raises:
        UserError: as there, and for two vocabularies, as a decoder has one table.
    """
    refuse("prefix_lm", data, overlong="split", tokenizer="image", source=("images", "captions"))
    if not data.vocab_shared:
        raise UserError("task='prefix_lm' reads both texts by one table: it needs data.vocab_shared=True")
    task = translate(data, label_smoothing=label_smoothing, scores=scores, tokenize=tokenize, lowercase=lowercase)
    return task._replace(features=lambda source, target: features.prefixed(target.symbols))
