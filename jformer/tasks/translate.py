"""Translation: a source sentence in, a target sentence out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Array, Float

from jformer.losses import Sums, cross_entropy
from jformer.metrics import check_scores, exact_match, text_scores
from jformer.tasks.task import Task


def translate(*, label_smoothing: float, scores: Sequence[str], tokenize: str, lowercase: bool) -> Task:
    """Return the task: label-smoothed cross-entropy (Vaswani et al. 2017, section 5.4), scored by sacreBLEU.

    Raises UserError for scores or a tokenization that sacreBLEU has not.
    """
    check_scores(scores, tokenize, lowercase)

    def loss(hidden: Float[Array, "b t d"], project: Callable, batch: Mapping[str, Any]) -> Sums:
        return cross_entropy(project(hidden), batch["target_out"], batch["weights"], label_smoothing)

    def score(outputs: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> dict[str, Any]:
        texts = list(outputs), list(references)
        found = text_scores(*texts, tokenize=tokenize, lowercase=lowercase, names=scores)
        return {**found, "exact_match": exact_match(*texts, groups=list(groups) if any(groups) else None)}

    return Task(loss, score)
