"""What makes a task: a value with a few functions, no class tree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jformer.losses import Sums


class Task(NamedTuple):
    """How a model learns something and how well it did."""

    loss: Callable[[Any, Callable, Mapping[str, Any]], Sums]  # (hidden states, projection to logits, batch) → sums
    score: Callable[[Sequence[str], Sequence[str], Sequence[str]], dict[str, Any]]  # (outputs, references, groups)
