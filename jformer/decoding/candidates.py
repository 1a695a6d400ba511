"""How the beams of a sentence go on: the continuations worth a look, and the choice among them. No loop, no endings."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jformer.decoding.constraints import Progress, add_wanted, advance, allocate, banks
from jformer.decoding.rules import Weighed


class Grown(NamedTuple):
    """Hypotheses with one more token: candidates [b n x] of n beams, or the [b n] of them that were chosen."""

    scores: Float[Array, "b n *x"]  # summed log-probabilities; -inf in an empty place
    tokens: Int[Array, "b n *x"]  # the token that was added
    parents: Int[Array, "b n *x"]  # the beam it was added to
    progress: Progress | None  # with the phrases, if some are asked for


def take(grown: Grown, places: Int[Array, "b n"]) -> Grown:
    """Return [b n …] of [b x …]."""

    def pick(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, places.reshape(*places.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(pick, grown)


def propose(live: Grown, weighed: Weighed, phrases: Int[Array, "b c l"] | None, eos: int, pad: int) -> Grown:
    """Return the continuations that matter: the n + 1 likeliest of every beam, and what its phrases ask for.

    At most one continuation of a beam is its end, so n + 1 of each are enough to find the n best that go on. They are
    enough for groups, too: fewer than n tokens cost something there, one for every beam of the groups before.
    """
    sentences, beam_size = live.scores.shape
    values, tokens = weighed.best(min(beam_size + 1, weighed.scores.shape[1]))
    values, tokens = (x.reshape(sentences, beam_size, -1) for x in (values, tokens))
    progress = live.progress
    if phrases is not None and progress is not None:
        every = weighed.all().reshape(sentences, beam_size, -1)
        values, tokens = add_wanted(phrases, progress, every, values, tokens, pad)
        lacking = ~progress.met.all(axis=2, keepdims=True)
        values = jnp.where((tokens == eos) & lacking, -jnp.inf, values)
        progress = advance(phrases, progress, tokens, pad)
    parents = jnp.broadcast_to(jnp.arange(beam_size)[:, None], tokens.shape)
    return Grown(live.scores[..., None] + values, tokens, parents, progress)


def choose(
    candidates: Grown, groups: int, diversity: float, phrases: Int[Array, "b c l"] | None, eos: int, pad: int
) -> tuple[Grown, Grown]:
    """Return for every group of m beams its m first candidates, and its m first that do not end.

    Where a group chooses, a token costs `diversity` for each beam of the groups before that goes on with it.
    """
    beam_size = candidates.scores.shape[1]
    size = beam_size // groups
    first: list[Grown] = []
    others: list[Grown] = []
    for start in range(0, beam_size, size):
        mine = _group(candidates, start, size)
        ranks = mine.scores
        for group in others:
            taken = jnp.where(group.scores > -jnp.inf, group.tokens, -1)
            ranks -= diversity * (mine.tokens[..., None] == taken[:, None]).sum(axis=2)
        first.append(take(mine, _order(ranks, mine, phrases, size, pad)))
        ends = mine.tokens == eos
        mine, ranks = mine._replace(scores=jnp.where(ends, -jnp.inf, mine.scores)), jnp.where(ends, -jnp.inf, ranks)
        others.append(take(mine, _order(ranks, mine, phrases, size, pad)))
    return _join(first), _join(others)


def held(grown: Grown, phrases: Int[Array, "b c l"] | None, pad: int) -> Int[Array, "b n"]:
    """Count the tokens that phrases ask for in each hypothesis; 0 if none do."""
    if phrases is None or grown.progress is None:
        return jnp.zeros_like(grown.tokens)
    return banks(phrases, grown.progress, pad)


def _group(candidates: Grown, start: int, size: int) -> Grown:
    """Return the candidates of some beams [b m x …] as one list [b m·x …]."""
    sentences = candidates.scores.shape[0]
    return jax.tree.map(lambda x: x[:, start : start + size].reshape(sentences, -1, *x.shape[3:]), candidates)


def _join(groups: list[Grown]) -> Grown:
    return groups[0] if len(groups) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *groups)


def _order(
    ranks: Float[Array, "b x"], candidates: Grown, phrases: Int[Array, "b c l"] | None, size: int, pad: int
) -> Int[Array, "b size"]:
    """Return the places of the `size` first candidates: the best, or as the phrases share them out."""
    if phrases is None:
        return lax.top_k(ranks, size)[1]
    return allocate(ranks, held(candidates, phrases, pad), (phrases != pad).sum(axis=(1, 2)), size)
