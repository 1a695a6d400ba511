"""The hypotheses of a beam search that have ended: their scores, the best of them, and when no more can be better.

Axes: b sentences, n beams of a sentence, m beams of a group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.decode_config import Beams


class Finished(NamedTuple):
    """The n best hypotheses of every sentence that have ended."""

    scores: Float[Array, "b n"]  # with the length penalty, best first in each group; -inf in an empty slot
    lengths: Int[Array, "b n"]  # tokens before the end symbol, which is the index of that symbol
    beams: Int[Array, "b n"]  # the beam that held those tokens


def length_penalty(lengths: Int[Array, " *b"], beams: Beams) -> Float[Array, " *b"]:
    """Return ((k + length) / (k + 1)) ** alpha (Wu et al. 2016, equation 14, where k is 5).

    The end symbol counts as a token of the length; a hypothesis that was cut has none.

    >>> length_penalty(jnp.array([1, 7]), Beams(size=1, length_penalty=1.0)).tolist()
    [1.0, 2.0]
    """
    return ((beams.length_offset + lengths) / (beams.length_offset + 1.0)) ** beams.length_penalty


def keep_best(old: Finished, new: Finished, groups: int) -> Finished:
    """Keep, in each group of m beams, the m best of the old and the new hypotheses; of equals the old ones.

    >>> old = Finished(jnp.array([[-1.0, -3.0]]), jnp.array([[4, 4]]), jnp.array([[0, 1]]))
    >>> new = Finished(jnp.array([[-2.0, -4.0]]), jnp.array([[5, 5]]), jnp.array([[0, 1]]))
    >>> keep_best(old, new, groups=1).lengths.tolist()
    [[4, 5]]
    """
    b, n = old.scores.shape

    def both(old: Array, new: Array) -> Array:
        by_group = b, groups, -1  # [b n] → [b groups m]
        return jnp.concatenate([old.reshape(by_group), new.reshape(by_group)], axis=2)  # → [b groups 2m]

    every = jax.tree.map(both, old, new)
    _, indices = lax.top_k(every.scores, n // groups)  # → [b groups m]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, indices, axis=2).reshape(b, n), every)


def is_complete(
    finished: Finished,
    num_finished: Int[Array, " b"],
    live_scores: Float[Array, "b n"],
    largest_penalty: Float[Array, " b"],
    beams: Beams,
) -> Bool[Array, " b"]:
    """Return which sentences need no further search.

    Log-probabilities are never positive, so the score of a live hypothesis can only fall; a length penalty of 0 or more
    divides it by no more than the penalty of the limit; what coverage adds is not positive either. So no future end can
    beat the best live score over that penalty: once n_best finished hypotheses reach it, they stay the best. Patience
    stops sooner, when that many times n have finished, and may miss a better one.

    Args:
        finished: the best so far.
        num_finished: how many have ended, also those that were not kept.
        live_scores: summed log-probabilities of the others.
        largest_penalty: the length penalty at the limits.
        beams: how many there are, how many are asked for, and the patience.

    >>> finished = Finished(jnp.array([[-1.0, -3.0]]), jnp.array([[4, 4]]), jnp.array([[0, 1]]))
    >>> for best_live in (-1.9, -2.1):  # over a penalty of 2: -0.95 could still win, -1.05 cannot
    ...     is_complete(finished, jnp.array([2]), jnp.array([[best_live, -9.0]]), jnp.array([2.0]), Beams(2)).item()
    False
    True
    """
    worst = lax.top_k(finished.scores, beams.n_best)[0][:, -1]
    bound = live_scores.max(axis=1) / largest_penalty
    complete = worst >= bound
    if beams.patience:  # only finished hypotheses are returned before the limit, so n_best must have finished
        complete |= (num_finished >= beams.patience * beams.size) & (worst > -jnp.inf)
    return complete
