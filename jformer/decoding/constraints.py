"""Phrases that an output must contain, and a beam that makes room for hypotheses that do not have them yet.

Axes: b sentences, p phrases of a sentence, s spellings of a phrase, l tokens of the longest (m one more), n beams, c
candidates of a beam, k before phrases add theirs, v vocabulary.

A plain beam search drops improbable words before they can be rewarded. So beams are divided among banks, one for each
number of constraint tokens that hypotheses have met, and the next token of every unmet phrase is a candidate whatever
its probability. A phrase has one or more spellings, as token sequences of one text, and is met where the tokens of any
of them are adjacent; phrases may overlap, and one that is required twice is met by one occurrence.

Source: Post and Vilar 2018 (dynamic beam allocation).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Constraints(NamedTuple):
    """The phrases that outputs must contain; empty ones require nothing."""

    phrases: Int[Array, "b p s l"]  # filled with padding
    lengths: Int[Array, "b p s"]  # 0 where a phrase has no more spellings
    borders: Bool[Array, "b p s m l"]  # [m, i]: whether the first m tokens of a spelling end with its first i
    pad: int

    @property
    def needed(self) -> Int[Array, "b p"]:
        """The tokens of the shortest spelling of every phrase."""
        return self.fewest(self.lengths)

    def fewest(self, tokens: Int[Array, "*b p s"]) -> Int[Array, "*b p"]:
        """Return the smallest of the numbers of tokens of all spellings; 0 for an empty phrase."""
        lengths = self.lengths.reshape(self.lengths.shape[0], *[1] * (tokens.ndim - 3), *self.lengths.shape[1:])
        fewest = jnp.where(lengths > 0, tokens, self.phrases.shape[3]).min(axis=-1)
        return jnp.where((lengths > 0).any(axis=-1), fewest, 0)


def make_constraints(phrases: Int[Array, "b p s l"], pad: int) -> Constraints:
    """Build the constraints of a search from phrases filled with padding.

    >>> make_constraints(jnp.array([[[[5, 6], [8, 0]], [[7, 0], [0, 0]]]]), pad=0).lengths.tolist()
    [[[2, 1], [1, 0]]]
    """
    return Constraints(phrases, (phrases != pad).sum(axis=3), _borders(phrases), pad)


def _borders(phrases: Int[Array, "b p s l"]) -> Bool[Array, "b p s m l"]:
    """Return what an interrupted spelling can fall back to: the failure function of Knuth et al. 1977.

    >>> _borders(jnp.array([[[[5, 5, 6]]]]))[0, 0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    """
    nothing = jnp.arange(phrases.shape[3]) == 0  # [l]: every beginning ends with the empty one

    def lengthen(before: Bool[Array, "b p s l"], token: Int[Array, "b p s"]) -> tuple[Array, Array]:
        longer = before[..., :-1] & (phrases[..., :-1] == token[..., None])
        after = jnp.concatenate([jnp.ones_like(before[..., :1]), longer], axis=-1)
        return after, after

    first = jnp.broadcast_to(nothing, phrases.shape)
    _, others = lax.scan(lengthen, first, jnp.moveaxis(phrases, 3, 0))
    return jnp.moveaxis(jnp.concatenate([first[None], others]), 0, 3)


def has_phrases(phrases: Int[Array, "b p s l"], pad: int) -> Bool[Array, " b"]:
    """Return which sentences have a phrase: a batch may mix both kinds.

    >>> has_phrases(jnp.array([[[[5, 6]], [[0, 0]]], [[[0, 0]], [[0, 0]]]]), pad=0).tolist()
    [True, False]
    """
    return (phrases != pad).any(axis=(1, 2, 3))


class ConstraintProgress(NamedTuple):
    """How much of each phrase every hypothesis has."""

    met: Bool[Array, "b *n p"]
    matched: Int[Array, "b *n p s"]  # tokens of the longest prefix of the spelling that the hypothesis ends with


def initial_progress(constraints: Constraints, beams: int) -> ConstraintProgress:
    """Return the progress of empty hypotheses, which have met nothing but empty phrases.

    >>> initial_progress(make_constraints(jnp.array([[[[5, 6]], [[0, 0]]]]), pad=0), beams=1).met.tolist()
    [[[False, True]]]
    """
    b, p, s, _ = constraints.phrases.shape
    met = jnp.repeat((constraints.needed == 0)[:, None], beams, axis=1)  # [b p] → [b n p]
    return ConstraintProgress(met, jnp.zeros((b, beams, p, s), jnp.int32))


def add_constraint_tokens(
    constraints: Constraints,
    progress: ConstraintProgress,
    log_probs: Float[Array, "b n v"],
    values: Float[Array, "b n k"],
    tokens: Int[Array, "b n k"],
) -> tuple[Float[Array, "b n c"], Int[Array, "b n c"]]:
    """Add the next token of every spelling of every unmet phrase to the k candidates of each beam.

    A token that is a candidate already is added with -inf.

    Args:
        constraints: the phrases of every sentence.
        progress: how much of them each beam has met.
        log_probs: of every token after each beam; that of padding must be -inf, if it is one of them.
        values: those of `log_probs` for the candidates.
        tokens: the candidates.

    >>> constraints = make_constraints(jnp.array([[[[3]]]]), pad=0)
    >>> log_probs = jnp.array([[[-jnp.inf, -0.1, -3.0, -4.0]]])
    >>> best = jnp.array([[[-0.1]]]), jnp.array([[[1]]])
    >>> add_constraint_tokens(constraints, initial_progress(constraints, 1), log_probs, *best)[1].tolist()
    [[[1, 3]]]
    """
    phrases = constraints.phrases[:, None]  # [b 1 p s l]
    wanted = jnp.take_along_axis(phrases, progress.matched[..., None], axis=4, mode="clip")[..., 0]  # [b n p s]
    wanted = jnp.where(progress.met[..., None], constraints.pad, wanted)
    wanted = wanted.reshape(*wanted.shape[:2], -1)  # → [b n w], of all phrases and spellings

    earlier = jnp.tril(jnp.ones((wanted.shape[2],) * 2, bool), -1)  # [w w]
    is_repeated = ((wanted[..., None] == wanted[..., None, :]) & earlier).any(axis=3)  # [b n w w] → [b n w]
    is_candidate = (wanted[..., None] == tokens[..., None, :]).any(axis=3)  # [b n w k] → [b n w]
    wanted_values = jnp.take_along_axis(log_probs, wanted, axis=2, mode="fill", fill_value=-jnp.inf)
    wanted_values = jnp.where(is_repeated | is_candidate, -jnp.inf, wanted_values)
    values = jnp.concatenate([values, wanted_values], axis=2)
    tokens = jnp.concatenate([tokens, wanted], axis=2)
    return values, tokens


def advance_progress(
    constraints: Constraints, progress: ConstraintProgress, tokens: Int[Array, "b n c"]
) -> ConstraintProgress:
    """Return the progress [b n c ·] of every hypothesis after each of its candidates.

    An interrupted spelling falls back to whatever beginning of it the hypothesis still ends with.

    >>> constraints = make_constraints(jnp.array([[[[5, 6]]]]), pad=0)
    >>> after = advance_progress(constraints, initial_progress(constraints, 1), jnp.array([[[5, 6]]]))
    >>> after.matched.tolist()  # a first 5 is half of the phrase, a first 6 is nothing
    [[[[[1]], [[0]]]]]
    """
    before = progress.matched[..., None, None]  # [b n p s 1 1]
    ends_with = jnp.take_along_axis(constraints.borders[:, None], before, axis=4)[..., 0, :]  # → [b n p s l]
    fits = constraints.phrases[:, None, None] == tokens[..., None, None, None]  # [b n c p s l]
    sizes = jnp.arange(1, constraints.phrases.shape[3] + 1)  # with the token
    # Padding after a spelling fits no token with a finite score.
    matched = jnp.where(ends_with[:, :, None] & fits, sizes, 0).max(axis=5)  # [b n c p s]
    lengths = constraints.lengths[:, None, None]
    met = progress.met[:, :, None] | ((matched == lengths) & (lengths > 0)).any(axis=4)
    return ConstraintProgress(met, matched)


def tokens_met(constraints: Constraints, progress: ConstraintProgress) -> Int[Array, " b *n"]:
    """Return the bank of each hypothesis: the constraint tokens required, less those still to be written.

    Of several spellings, the one with the fewest remaining tokens counts.

    >>> constraints = make_constraints(jnp.array([[[[5, 6]], [[7, 0]]]]), pad=0)
    >>> after = advance_progress(constraints, initial_progress(constraints, 1), jnp.array([[[5, 7, 8]]]))
    >>> tokens_met(constraints, after).tolist()
    [[[1, 1, 0]]]
    """
    b, *_, p, s = progress.matched.shape
    lengths = constraints.lengths.reshape(b, *[1] * (progress.met.ndim - 2), p, s)  # [b p s] → [b 1… p s]
    to_come = jnp.where(progress.met, 0, constraints.fewest(lengths - progress.matched))
    return (constraints.fewest(lengths) - to_come).sum(axis=-1)


def allocate(
    ranks: Float[Array, "b c"], bank: Int[Array, "b c"], last: Int[Array, " b"], size: int
) -> Int[Array, "b size"]:
    """Choose `size` candidates: equally many from each bank, those with the highest ranks.

    Beams that cannot be divided equally, or that a bank cannot fill, go to the highest banks that can fill them.

    Args:
        ranks: the order within a bank; a candidate of rank -inf is only taken when nothing else is left.
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
