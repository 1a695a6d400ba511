"""What a loss adds up, and the means taken of it once everything is added."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Array

Scalar = Array | float
"""A float32 scalar on devices, or a number on the host."""


class Sum(NamedTuple):
    """A weighted sum over tokens, and the weight of these tokens."""

    total: Scalar
    count: Scalar  # type: ignore[assignment]  # hides tuple.count


Sums = dict[str, Sum]
"""Name of a loss or metric → its sum. Sums of other rows, devices and batches are added, never averaged."""


def add_up(batches: Iterable[Sums]) -> Sums:
    """Return the sums of several batches as one, in float64."""
    added: Sums = {}
    for sums in batches:
        for name, (total, count) in sums.items():
            before = added.get(name, Sum(0.0, 0.0))
            added[name] = Sum(before.total + float(total), before.count + float(count))
    return added


def summarize(sums: Sums) -> dict[str, float]:
    """Divide every sum by its count; `correct` becomes accuracy, and `nll` (nats) is given as perplexity too.

    The mean of nothing is nan, which is never better than any loss. A perplexity beyond floats is inf.
    """
    means = {name: float(total / count) if count else math.nan for name, (total, count) in sums.items()}
    if "correct" in means:
        means["accuracy"] = means.pop("correct")
    if "nll" in means:
        means["perplexity"] = math.inf if means["nll"] > 700 else math.exp(means["nll"])
    return means
