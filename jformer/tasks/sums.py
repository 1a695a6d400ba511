"""Sums of a loss over rows, microbatches and batches, and the means taken of them at the end."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jformer.models.batch import Batch

T = TypeVar("T")

Scalar = Array | float
"""A float32 scalar on devices, or a number on the host."""


class Sum(NamedTuple):
    """A weighted sum over tokens, and the weight of these tokens."""

    total: Scalar
    count: Scalar  # type: ignore[assignment]  # hides tuple.count


Sums = dict[str, Sum]
"""Name of a loss or metric → its sum. Sums of other rows, devices and batches are added, never averaged."""

LossFn = Callable[[PyTree, Batch, Key[Array, ""] | None], Sums]
"""(parameters, batch of rows, dropout key or None) → sums: a task's loss joined with a model."""


def sum_over_microbatches(function: Callable[[Batch], T], batch: Batch) -> T:
    """Return the sum of function(rows [b …]) over the microbatches of a batch [a b …], computed one after the other.

    The function is compiled once for any number of microbatches, because the sum starts with zeros. The sum has the
    dtypes of the function's results; a loss and its gradient are float32.
    """
    first = jax.tree.map(lambda x: x[0], batch)
    if len(jax.tree.leaves(batch)[0]) == 1:
        return function(first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))

    def add(total: T, rows: Batch) -> tuple[T, None]:
        return jax.tree.map(jnp.add, total, function(rows)), None

    return jax.lax.scan(add, zeros, batch)[0]


def add_up(batches: Iterable[Sums]) -> Sums:
    """Add up the sums of several batches, in float64."""
    added: Sums = {}
    for sums in batches:
        for name, (total, count) in sums.items():
            before = added.get(name, Sum(0.0, 0.0))
            added[name] = Sum(before.total + float(total), before.count + float(count))
    return added


def summarize(sums: Sums) -> dict[str, float]:
    """Divide every sum by its count; `correct` becomes accuracy, and `nll` (nats) also gives perplexity.

    The mean of nothing is nan, which is never better than any loss. A perplexity that overflows is inf.
    """
    means = {name: float(total / count) if count else math.nan for name, (total, count) in sums.items()}
    if "correct" in means:
        means["accuracy"] = means.pop("correct")
    if "nll" in means:
        means["perplexity"] = math.inf if means["nll"] > 700 else math.exp(means["nll"])
    return means
