"""Phrases that an output must contain, and a beam that makes room for hypotheses that do not have them yet.

Axes: b sentences, p phrases of a sentence, l tokens of the longest, n beams, c candidates of a beam, k before phrases
add theirs, v vocabulary.

Left to itself a beam drops improbable words before they can be rewarded. So its beams are shared out between banks,
one for each number of constraint tokens that hypotheses have met, and the next token of every unmet phrase is a
candidate whatever its probability. A phrase is met where its tokens stand side by side; phrases may overlap, and one
that is asked for twice is met by one occurrence.

Source: Post and Vilar 2018 (dynamic beam allocation).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Constraints(NamedTuple):
    """The phrases that outputs must contain; empty ones ask for nothing."""

    phrases: Int[Array, "b p l"]  # filled with padding
    lengths: Int[Array, "b p"]
    pad: int


def make_constraints(phrases: Int[Array, "b p l"], pad: int) -> Constraints:
    """Build the constraints of a search from phrases filled with padding.

    >>> make_constraints(jnp.array([[[5, 6], [7, 0]]]), pad=0).lengths.tolist()
    [[2, 1]]
    """
    return Constraints(phrases, (phrases != pad).sum(axis=2), pad)


def has_phrases(phrases: Int[Array, "b p l"], pad: int) -> Bool[Array, " b"]:
    """Return which sentences have a phrase: a batch may mix both kinds.

    >>> has_phrases(jnp.array([[[5, 6], [0, 0]], [[0, 0], [0, 0]]]), pad=0).tolist()
    [True, False]
    """
    return (phrases != pad).any(axis=(1, 2))


class ConstraintProgress(NamedTuple):
    """How much of each phrase every hypothesis has."""

    met: Bool[Array, "b *n p"]
    matched: Int[Array, "b *n p"]  # tokens of the longest beginning of the phrase that the hypothesis ends with
    tail: Int[Array, "b *n l"]  # the last tokens of the hypothesis, as many as the longest phrase has


def initial_progress(constraints: Constraints, beams: int) -> ConstraintProgress:
    """Return the progress of empty hypotheses, which have met nothing but empty phrases.

    >>> initial_progress(make_constraints(jnp.array([[[5, 6], [0, 0]]]), pad=0), beams=1).met.tolist()
    [[[False, True]]]
    """
    is_empty = (constraints.phrases == constraints.pad).all(axis=2)  # [b p]
    met = jnp.repeat(is_empty[:, None], beams, axis=1)  # → [b n p]
    tail = jnp.full((*met.shape[:2], constraints.phrases.shape[2]), constraints.pad, jnp.int32)
    return ConstraintProgress(met, jnp.zeros(met.shape, jnp.int32), tail)


def add_constraint_tokens(
    constraints: Constraints,
    progress: ConstraintProgress,
    log_probs: Float[Array, "b n v"],
    values: Float[Array, "b n k"],
    tokens: Int[Array, "b n k"],
) -> tuple[Float[Array, "b n c"], Int[Array, "b n c"]]:
    """Add the next token of every unmet phrase to the k candidates of each beam.

    A token that is a candidate already is added with -inf.

    Args:
        constraints: the phrases of every sentence.
        progress: how far each beam has come with them.
        log_probs: of every token after each beam; that of padding must be -inf.
        values: what `log_probs` has for the candidates.
        tokens: the candidates.

    >>> constraints = make_constraints(jnp.array([[[3]]]), pad=0)
    >>> log_probs = jnp.array([[[-jnp.inf, -0.1, -3.0, -4.0]]])
    >>> best = jnp.array([[[-0.1]]]), jnp.array([[[1]]])
    >>> add_constraint_tokens(constraints, initial_progress(constraints, 1), log_probs, *best)[1].tolist()
    [[[1, 3]]]
    """
    phrases = constraints.phrases[:, None]  # [b 1 p l]
    wanted = jnp.take_along_axis(phrases, progress.matched[..., None], axis=3, mode="clip")[..., 0]  # [b n p]
    wanted = jnp.where(progress.met, constraints.pad, wanted)

    earlier = jnp.tril(jnp.ones((wanted.shape[2],) * 2, bool), -1)  # [p p]
    of_earlier_phrase = ((wanted[..., None] == wanted[..., None, :]) & earlier).any(axis=3)  # [b n p p] → [b n p]
    is_candidate = (wanted[..., None] == tokens[..., None, :]).any(axis=3)  # [b n p k] → [b n p]
    wanted_values = jnp.take_along_axis(log_probs, wanted, axis=2)
    wanted_values = jnp.where(of_earlier_phrase | is_candidate, -jnp.inf, wanted_values)
    values = jnp.concatenate([values, wanted_values], axis=2)
    tokens = jnp.concatenate([tokens, wanted], axis=2)
    return values, tokens


def advance_progress(
    constraints: Constraints, progress: ConstraintProgress, tokens: Int[Array, "b n c"]
) -> ConstraintProgress:
    """Return the progress [b n c ·] of every hypothesis after each of its candidates.

    An interrupted phrase falls back to whatever beginning of it the hypothesis still ends with.

    >>> constraints = make_constraints(jnp.array([[[5, 6]]]), pad=0)
    >>> after = advance_progress(constraints, initial_progress(constraints, 1), jnp.array([[[5, 6]]]))
    >>> after.matched.tolist()  # a first 5 is half of the phrase, a first 6 is nothing
    [[[[1], [0]]]]
    """
    longest = constraints.phrases.shape[2]
    past = progress.tail[:, :, None, 1:]  # [b n 1 l-1]
    past = jnp.broadcast_to(past, (*tokens.shape, longest - 1))  # → [b n c l-1]
    tail = jnp.concatenate([past, tokens[..., None]], axis=3)  # → [b n c l]

    # The last `size` tokens of the tail beside the first `size` tokens of every phrase, for all sizes at once.
    offsets = jnp.arange(longest)  # [l]
    sizes = jnp.arange(1, longest + 1)  # [size]
    beyond = offsets >= sizes[:, None]  # [size l]
    indices = jnp.minimum(longest - sizes[:, None] + offsets, longest - 1)  # [size l]
    suffixes = tail[:, :, :, None, indices]  # [b n c 1 size l]
    prefixes = constraints.phrases[:, None, None, :, None]  # [b 1 1 p 1 l]
    equal = ((prefixes == suffixes) | beyond).all(axis=5)  # [b n c p size]
    matched = jnp.where(equal, sizes, 0).max(axis=4)  # [b n c p]; at most the phrase, as padding is never written
    met = progress.met[:, :, None] | (matched == constraints.lengths[:, None, None])
    return ConstraintProgress(met, matched, tail)


def tokens_met(constraints: Constraints, progress: ConstraintProgress) -> Int[Array, " b *n"]:
    """Count the constraint tokens of each hypothesis, its bank: all of a met phrase, of others those it ends with.

    >>> constraints = make_constraints(jnp.array([[[5, 6], [7, 0]]]), pad=0)
    >>> after = advance_progress(constraints, initial_progress(constraints, 1), jnp.array([[[5, 7, 8]]]))
    >>> tokens_met(constraints, after).tolist()
    [[[1, 1, 0]]]
    """
    lengths = constraints.lengths
    lengths = lengths.reshape(lengths.shape[0], *[1] * (progress.met.ndim - 2), -1)  # [b p] → [b 1… p]
    return jnp.where(progress.met, lengths, progress.matched).sum(axis=-1)


def allocate(
    ranks: Float[Array, "b c"], bank: Int[Array, "b c"], last: Int[Array, " b"], size: int
) -> Int[Array, "b size"]:
    """Choose `size` candidates: equally many from each bank, those with the highest ranks.

    Beams that cannot be shared out equally, or that a bank cannot fill, go to the highest banks that can fill them.

    Args:
        ranks: what decides within a bank; a candidate of rank -inf is only taken when nothing else is left.
        bank: of every candidate, from 0.
        last: the bank of hypotheses that have met everything.
        size: the number of candidates to choose.

    >>> ranks = jnp.array([[-1.0, -2.0, -3.0, -4.0]])
    >>> allocate(ranks, bank=jnp.array([[0, 0, 0, 1]]), last=jnp.array([1]), size=2).tolist()
    [[3, 0]]
    """
    bank = jnp.where(ranks > -jnp.inf, bank, -1)
    order = jnp.lexsort((-ranks, -bank), axis=1)  # by bank, highest first, then by rank
    bank = jnp.take_along_axis(bank, order, axis=1)
    index = jnp.broadcast_to(jnp.arange(bank.shape[1]), bank.shape)
    is_first = jnp.concatenate([jnp.ones_like(bank[:, :1], bool), bank[:, 1:] != bank[:, :-1]], axis=1)
    index_in_bank = index - lax.cummax(jnp.where(is_first, index, 0), axis=1)
    share = size // (last[:, None] + 1)
    in_share = (index_in_bank < share) & (bank >= 0)
    chosen = jnp.argsort(~in_share, axis=1, stable=True)  # those within their bank's share first
    return jnp.take_along_axis(order, chosen, axis=1)[:, :size]
