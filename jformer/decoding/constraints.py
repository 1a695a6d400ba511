"""Phrases that an output must contain: which a hypothesis has, and a beam that makes room for those that lack some.

Left to itself a beam drops unlikely words before they can be rewarded. So its places are shared out between banks, one
for each number of required tokens that hypotheses hold, and the next token of every phrase not yet met is a candidate
whatever its probability. A phrase is met where its tokens stand side by side; phrases may overlap, and one that is
asked for twice is met by one occurrence.

Source: Post and Vilar 2018 (dynamic beam allocation).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Progress(NamedTuple):
    """How far each hypothesis is with each phrase."""

    met: Bool[Array, "b *n c"]
    matched: Int[Array, "b *n c"]  # the longest beginning of the phrase that the hypothesis ends with, in tokens
    tail: Int[Array, "b *n l"]  # the last tokens of the hypothesis, as many as the longest phrase may have


def start_progress(phrases: Int[Array, "b c l"], beams: int, pad: int) -> Progress:
    """Begin with nothing but the empty phrases met."""
    empty = jnp.repeat((phrases == pad).all(axis=2)[:, None], beams, axis=1)
    tail = jnp.full((*empty.shape[:2], phrases.shape[2]), pad, jnp.int32)
    return Progress(empty, jnp.zeros(empty.shape, jnp.int32), tail)


def add_wanted(
    phrases: Int[Array, "b c l"],
    progress: Progress,
    log_probs: Float[Array, "b n v"],
    values: Float[Array, "b n k"],
    tokens: Int[Array, "b n k"],
    pad: int,
) -> tuple[Float[Array, "b n x"], Int[Array, "b n x"]]:
    """Add the next token of every unmet phrase to the k candidates of each beam; `pad` must be forbidden there."""
    wanted = jnp.take_along_axis(phrases[:, None], progress.matched[..., None], axis=3, mode="clip")[..., 0]
    wanted = jnp.where(progress.met, pad, wanted)
    before = jnp.tril(jnp.ones((wanted.shape[2],) * 2, bool), -1)
    twice = ((wanted[..., None] == wanted[..., None, :]) & before).any(axis=3)
    twice |= (wanted[..., None] == tokens[..., None, :]).any(axis=3)
    counts = jnp.where(twice, -jnp.inf, jnp.take_along_axis(log_probs, wanted, axis=2))
    return jnp.concatenate([values, counts], axis=2), jnp.concatenate([tokens, wanted], axis=2)


def advance(phrases: Int[Array, "b c l"], progress: Progress, tokens: Int[Array, "b n x"], pad: int) -> Progress:
    """Return how far every hypothesis is with each of its candidates, [b n x c].

    An interrupted phrase falls back to whatever beginning of it the hypothesis still ends with.
    """
    longest = phrases.shape[2]
    past = jnp.broadcast_to(progress.tail[:, :, None, 1:], (*tokens.shape, longest - 1))
    tail = jnp.concatenate([past, tokens[..., None]], axis=3)
    sizes, places = jnp.arange(1, longest + 1), jnp.arange(longest)
    starts = longest - sizes[:, None]
    suffixes = tail[:, :, :, None, jnp.minimum(starts + places, longest - 1)]  # [b n x 1 sizes places]
    same = (phrases[:, None, None, :, None] == suffixes) | (places >= sizes[:, None])
    wholes = (phrases != pad).sum(axis=2)[:, None, None]
    matched = jnp.where(same.all(axis=5), sizes, 0).max(axis=4)  # what fills a phrase up is never said
    return Progress(progress.met[:, :, None] | (matched == wholes), matched, tail)


def banks(phrases: Int[Array, "b c l"], progress: Progress, pad: int) -> Int[Array, "b *n"]:
    """Count the required tokens that each hypothesis holds: of phrases met all, of the others those just written."""
    wholes = (phrases != pad).sum(axis=2)
    wholes = wholes.reshape(wholes.shape[0], *[1] * (progress.met.ndim - 2), -1)
    return jnp.where(progress.met, wholes, progress.matched).sum(axis=-1)


def allocate(
    ranks: Float[Array, "b x"], bank: Int[Array, "b x"], last: Int[Array, "b"], size: int
) -> Int[Array, "b size"]:
    """Choose `size` candidates: as many from each bank, those with the highest ranks.

    `last` is the bank of complete hypotheses. What cannot be shared out evenly, or what a bank cannot fill, goes to the
    highest banks that can fill it. Candidates of rank -inf are only taken when nothing else is left.
    """
    bank = jnp.where(ranks > -jnp.inf, bank, -1)
    order = jnp.lexsort((-ranks, -bank), axis=1)
    bank = jnp.take_along_axis(bank, order, axis=1)
    place = jnp.broadcast_to(jnp.arange(bank.shape[1]), bank.shape)
    starts = jnp.concatenate([jnp.ones_like(bank[:, :1], bool), bank[:, 1:] != bank[:, :-1]], axis=1)
    inside = place - lax.cummax(jnp.where(starts, place, 0), axis=1)
    sure = (inside < size // (last[:, None] + 1)) & (bank >= 0)
    return jnp.take_along_axis(order, jnp.argsort(~sure, axis=1, stable=True), axis=1)[:, :size]
