"""The hypotheses of a beam search in one step: the continuations of live ones, and those that have ended.

Axes: b sentences, n beams, m beams of a group, k continuations of a beam, c candidates of a sentence or group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.constraints import (
    ConstraintProgress,
    Constraints,
    add_constraint_tokens,
    advance_progress,
    allocate,
    tokens_met,
)
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.rules import LogProbs


class Continuations(NamedTuple):
    """Beams with one more token: the k continuations [b n k] of every beam, or the [b n] chosen of them."""

    scores: Float[Array, "b n *k"]  # summed log-probabilities; -inf in an empty slot
    tokens: Int[Array, "b n *k"]  # the token that was appended
    parents: Int[Array, "b n *k"]  # the beam it was appended to
    progress: ConstraintProgress | None  # with the constraints, if there are any


def expand(live: Continuations, log_probs: LogProbs, eos: int, constraints: Constraints | None = None) -> Continuations:
    """Return the continuations that matter: the n + 1 most probable of every beam, and those that constraints require.

    At most one continuation of a beam is its end, so n + 1 of each are enough to find the n best that do not end. They
    also suffice for groups: fewer than n tokens are penalised there, one for every beam of earlier groups.

    >>> import numpy as np
    >>> live = Continuations(jnp.log(jnp.array([[0.5]])), jnp.array([[1]]), jnp.array([[0]]), None)
    >>> found = expand(live, LogProbs(jnp.log(jnp.array([[0.1, 0.6, 0.3]]))), eos=2)
    >>> print(found.tokens, np.exp(found.scores).round(2))  # 0.5 · 0.6 and 0.5 · 0.3
    [[[1 2]]] [[[0.3  0.15]]]
    """
    b, n = live.scores.shape
    values, tokens = log_probs.top_k(min(n + 1, log_probs.scores.shape[1]))
    values = values.reshape(b, n, -1)  # [b·n k] → [b n k]
    tokens = tokens.reshape(b, n, -1)
    progress = live.progress
    if constraints is not None and progress is not None:
        every = log_probs.dense().reshape(b, n, -1)  # [b·n v] → [b n v]
        values, tokens = add_constraint_tokens(constraints, progress, every, values, tokens)
        unmet = ~progress.met.all(axis=2, keepdims=True)
        values = jnp.where((tokens == eos) & unmet, -jnp.inf, values)
        progress = advance_progress(constraints, progress, tokens)
    parents = jnp.broadcast_to(jnp.arange(n)[:, None], tokens.shape)
    return Continuations(live.scores[..., None] + values, tokens, parents, progress)


def select(
    candidates: Continuations, eos: int, options: DecodeConfig, constraints: Constraints | None = None
) -> tuple[Continuations, Continuations]:
    """Return, for every group of m beams, the m best candidates and the m best that do not end, side by side: [b n].

    In each group, a token costs `options.diversity` for every beam of earlier groups that chose it.

    >>> scores = jnp.array([[[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]])
    >>> tokens = jnp.array([[[2, 7, 8], [7, 8, 9]]])
    >>> parents = jnp.array([[[0, 0, 0], [1, 1, 1]]])
    >>> best, live = select(Continuations(scores, tokens, parents, None), eos=2, options=DecodeConfig(beam_size=2))
    >>> best.tokens.tolist(), live.tokens.tolist()
    ([[2, 7]], [[7, 8]])
    """
    size = options.beam_size // options.beam_groups
    best: list[Continuations] = []
    live: list[Continuations] = []
    for start in range(0, options.beam_size, size):
        group = _candidates_of(candidates, start, size)
        ranks = group.scores
        for earlier in live:
            used = jnp.where(earlier.scores > -jnp.inf, earlier.tokens, -1)  # [b m]
            times = (group.tokens[..., None] == used[:, None]).sum(axis=2)  # [b c m] → [b c]
            ranks -= options.diversity * times
        best.append(gather(group, _best_indices(ranks, group, size, constraints)))
        ends = group.tokens == eos
        group = group._replace(scores=jnp.where(ends, -jnp.inf, group.scores))
        ranks = jnp.where(ends, -jnp.inf, ranks)
        live.append(gather(group, _best_indices(ranks, group, size, constraints)))
    return _concatenate(best), _concatenate(live)


def gather(hypotheses: Continuations, indices: Int[Array, "b m"]) -> Continuations:
    """Return the hypotheses [b m ·] at these indices of [b c ·].

    >>> zero = jnp.zeros((1, 3), jnp.int32)
    >>> gather(Continuations(1.0 * zero, jnp.array([[7, 8, 9]]), zero, None), jnp.array([[2, 0]])).tokens.tolist()
    [[9, 7]]
    """

    def take(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, indices.reshape(*indices.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(take, hypotheses)


def _candidates_of(candidates: Continuations, start: int, size: int) -> Continuations:
    """Return the candidates of some beams [b m k ·] as one list [b m·k ·]."""
    sentences = candidates.scores.shape[0]
    return jax.tree.map(lambda x: x[:, start : start + size].reshape(sentences, -1, *x.shape[3:]), candidates)


def _concatenate(groups: list[Continuations]) -> Continuations:
    """Lay groups [b m ·] side by side: [b n ·]."""
    return groups[0] if len(groups) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *groups)


def _best_indices(
    ranks: Float[Array, "b c"], candidates: Continuations, size: int, constraints: Constraints | None
) -> Int[Array, "b size"]:
    """Return the indices of the best candidates, or of those that the banks of the constraints take."""
    if constraints is None or candidates.progress is None:
        return lax.top_k(ranks, size)[1]
    bank = tokens_met(constraints, candidates.progress)
    return allocate(ranks, bank, constraints.needed.sum(axis=1), size)


class Finished(NamedTuple):
    """The n best hypotheses of every sentence that have ended."""

    scores: Float[Array, "b n"]  # with the length penalty, best first in each group; -inf in an empty slot
    lengths: Int[Array, "b n"]  # tokens before the end symbol, i.e. its index
    beams: Int[Array, "b n"]  # the beam that held those tokens


def length_penalty(lengths: Int[Array, " *b"], options: DecodeConfig) -> Float[Array, " *b"]:
    """Return ((k + length) / (k + 1)) ** alpha (Wu et al. 2016, equation 14, where k is 5).

    The end symbol counts as a token of the length; a hypothesis that was cut has none.

    >>> length_penalty(jnp.array([1, 7]), DecodeConfig(length_penalty=1.0)).tolist()
    [1.0, 2.0]
    """
    return ((options.length_offset + lengths) / (options.length_offset + 1.0)) ** options.length_penalty


def keep_best(old: Finished, new: Finished, groups: int) -> Finished:
    """Keep, in each group of m beams, the m best of the old and the new hypotheses; ties favour the old ones.

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
    options: DecodeConfig,
) -> Bool[Array, " b"]:
    """Return which sentences need no further search.

    Log-probabilities are never positive, so the score of a live hypothesis can only fall; a length penalty of 0 or more
    divides it by no more than the penalty at the limit; what coverage adds is not positive either. So no future end can
    beat the best live score over that penalty: once n_best finished hypotheses reach it, they stay the best. Patience
    stops sooner, once that many times n have finished, and may miss a better one.

    Args:
        finished: the best so far.
        num_finished: how many have ended, including those that were not kept.
        live_scores: summed log-probabilities of the others.
        largest_penalty: the length penalty at the limits.
        options: how many beams there are, how many outputs are returned, and the patience.

    >>> finished = Finished(jnp.array([[-1.0, -3.0]]), jnp.array([[4, 4]]), jnp.array([[0, 1]]))
    >>> options = DecodeConfig(beam_size=2)
    >>> for best_live in (-1.9, -2.1):  # over a penalty of 2: -0.95 could still win, -1.05 cannot
    ...     is_complete(finished, jnp.array([2]), jnp.array([[best_live, -9.0]]), jnp.array([2.0]), options).item()
    False
    True
    """
    worst = lax.top_k(finished.scores, options.n_best)[0][:, -1]
    bound = live_scores.max(axis=1) / largest_penalty
    complete = worst >= bound
    if options.patience:  # before the limit, only finished hypotheses are returned, so n_best must have finished
        complete |= (num_finished >= options.patience * options.beam_size) & (worst > -jnp.inf)
    return complete
