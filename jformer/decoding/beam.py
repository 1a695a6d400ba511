"""Beam search with the penalties of GNMT, in groups if asked for. Knows a step function and a cache, and no model.

The live hypotheses of a sentence fill its n beams; those that have ended wait in n places of their own. A hypothesis
ends where its end symbol is among the n likeliest continuations of the sentence, and the beams go on with the n
likeliest others, so the beam never narrows. What every beam chose is kept as (token, parent) for each step: only
these two numbers move, and the token sequences are read off once at the end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.cache import Cache, Step, reorder
from jformer.decoding.candidates import Grown, choose, held, propose
from jformer.decoding.constraints import start_progress
from jformer.decoding.greedy import NO_RULES, greedy
from jformer.decoding.rules import Rules, say, start_history, weigh
from jformer.decoding.tokens import Decoded

Coverage = Callable[[Cache], Float[Array, "rows"]]


class _Ended(NamedTuple):
    scores: Float[Array, "b n"]  # divided by the length penalty, best first in each group; -inf in an empty place
    lengths: Int[Array, "b n"]  # tokens before the end symbol
    beams: Int[Array, "b n"]  # the beam that held those tokens


class _Search(NamedTuple):
    now: Int[Array, ""]  # the place of the token to choose, counted from 0
    cache: Cache
    history: Int[Array, "rows h"] | None  # what rules read
    live: Grown
    ended: _Ended
    endings: Int[Array, "b"]  # how many have ended, also those that found no place
    tokens: Int[Array, "t b n"]  # what each beam chose at each step
    parents: Int[Array, "t b n"]  # and the beam it came from
    done: Bool[Array, "b"]


def beam_search(
    step: Step,
    cache: Cache,
    *,
    first: Int[Array, "b"],
    beam_size: int,
    length_penalty: float,
    max_lengths: Int[Array, "b"],
    length: int,
    eos: int,
    pad: int,
    spare: int | Int[Array, ""] = 0,
    n_best: int = 1,
    patience: float = 0.0,
    groups: int = 1,
    diversity: float = 0.0,
    coverage: Coverage | None = None,
    constraints: Int[Array, "b c l"] | None = None,
    rules: Rules = NO_RULES,
) -> Decoded:
    """Search for the hypotheses whose log-probability, divided by ((5 + length) / 6) ** length_penalty, is largest.

    For use inside jit. `cache` has b · beam_size rows, the beams of a sentence side by side, and room for `length`
    tokens; `first` is the token to go on from, `max_lengths` are the sentences' own limits of what is chosen, 0 for a
    sentence that is only there to fill the batch; one that is above `length` may be left undone, and so are the last
    `spare` sentences to end. The `n_best` (at most beam_size) best are returned. Hypotheses that were cut at the limit
    follow after all that ended. Padding is never chosen. With one beam there is nothing to weigh an end against, so it
    is final: the tokens are those of greedy search. `length_penalty` must not be negative. Equal scores: the hypothesis
    found first, then the better beam, comes first.

    A sentence is done when no better hypothesis can come, or, where `patience` is above 0, when that times beam_size
    have ended: sooner, and not safe. `coverage` gives, after the step that ends a hypothesis, what is added to its
    score: a number that is not positive. `groups` share the beams out; where a group chooses, a token costs `diversity`
    for every beam of an earlier group that goes on with it in the same step. Scores do not keep that cost.
    `constraints` are phrases, filled with padding, that a hypothesis must contain to end; empty ones ask for nothing.

    Source: Wu et al. 2016 (GNMT), equation 14; search and limits as in Vaswani et al. 2017, section 6.1; groups
    Vijayakumar et al. 2018 (Hamming diversity); constraints Post and Vilar 2018; patience Kasai et al. 2022.
    """
    if beam_size == 1 and constraints is None:
        limits: dict[str, Any] = {"max_lengths": max_lengths, "length": length, "spare": spare}
        best = greedy(step, cache, first=first, eos=eos, pad=pad, rules=rules, **limits)
        return best._replace(scores=best.scores / _penalty(best.lengths, length_penalty))

    shape = max_lengths.shape[0], beam_size

    def grow(search: _Search) -> _Search:
        logits, cache = step(search.cache, search.live.tokens.reshape(-1))
        weighed = weigh(rules, logits, search.history, search.now, eos, pad)
        candidates = propose(search.live, weighed, constraints, eos, pad)
        broken = jnp.isnan(candidates.scores).any(axis=(1, 2))
        first, others = choose(candidates, groups, diversity, constraints, eos, pad)
        extra = jnp.zeros(shape) if coverage is None else coverage(cache).reshape(shape)
        ended = _collect(search, first, extra, groups, length_penalty, eos)
        endings = search.endings + ((first.tokens == eos) & (first.scores > -jnp.inf)).sum(axis=1)
        live = _freeze(search, others._replace(scores=jnp.where(broken[:, None], jnp.nan, others.scores)))
        enough = _enough(live, ended, endings, _penalty(max_lengths, length_penalty), n_best, patience)
        return _Search(
            search.now + 1,
            reorder(cache, others.parents),
            _say(search.history, others),
            live,
            ended,
            endings,
            search.tokens.at[search.now].set(others.tokens),
            search.parents.at[search.now].set(others.parents),
            search.done | broken | enough | (search.now + 1 >= max_lengths),
        )

    start = _start(cache, first, max_lengths, beam_size, length, groups)
    progress = None if constraints is None else start_progress(constraints, beam_size, pad)
    start = start._replace(
        history=start_history(rules, *shape, length, pad), live=start.live._replace(progress=progress)
    )
    end = lax.while_loop(lambda search: (search.now < length) & ((~search.done).sum() > spare), grow, start)
    return _read_off(end, held(end.live, constraints, pad), max_lengths, n_best, length_penalty, eos, pad)


def _penalty(lengths: Int[Array, "*b"], alpha: float) -> Float[Array, "*b"]:
    return ((5.0 + lengths) / 6.0) ** alpha


def _start(
    cache: Cache, first: Int[Array, "b"], max_lengths: Int[Array, "b"], beam_size: int, length: int, groups: int
) -> _Search:
    """Begin with one live hypothesis, the empty one, in the first beam of every group."""
    shape = max_lengths.shape[0], beam_size
    none = jnp.full(shape, -jnp.inf)
    zeros = jnp.zeros(shape, jnp.int32)
    written = jnp.zeros((length, *shape), jnp.int32)
    live = Grown(none.at[:, :: beam_size // groups].set(0.0), zeros + first[:, None], zeros, None)
    ended = _Ended(none, zeros, zeros)
    return _Search(jnp.int32(0), cache, None, live, ended, zeros[:, 0], written, written, max_lengths <= 0)


def _collect(
    search: _Search, first: Grown, extra: Float[Array, "b n"], groups: int, length_penalty: float, eos: int
) -> _Ended:
    """Keep, in each group of m beams, the m best of those that ended before and the ends among its first candidates."""
    sentences, beam_size = first.scores.shape
    counts = (first.tokens == eos) & ~search.done[:, None]
    scores = first.scores / _penalty(search.now + 1, length_penalty)
    scores += jnp.take_along_axis(extra, first.parents, axis=1)
    found = _Ended(jnp.where(counts, scores, -jnp.inf), jnp.full_like(first.parents, search.now), first.parents)
    shape = sentences, groups, -1
    both = [
        jnp.concatenate([a.reshape(shape), b.reshape(shape)], axis=2) for a, b in zip(search.ended, found, strict=True)
    ]
    order = lax.top_k(both[0], beam_size // groups)[1]
    return _Ended(*(jnp.take_along_axis(x, order, axis=2).reshape(sentences, beam_size) for x in both))


def _enough(
    live: Grown, ended: _Ended, endings: Int[Array, "b"], largest: Float[Array, "b"], n_best: int, patience: float
) -> Bool[Array, "b"]:
    """Tell which sentences need no further search; `largest` is the length penalty at their limits.

    Safe to stop: log-probabilities are never positive, so the sum of a live hypothesis can only fall, and with a length
    penalty of 0 or more nothing divides it by more than the penalty of the limit; what coverage adds is not positive
    either. No ending of any beam can therefore beat the bound of the best beam; once n_best ended hypotheses reach it,
    they stay the best.
    """
    worst = lax.top_k(ended.scores, n_best)[0][:, -1]
    enough = worst >= live.scores.max(axis=1) / largest
    if patience:  # nothing is cut before the limit, so all that is asked for must have ended
        enough |= (endings >= patience * ended.scores.shape[1]) & (worst > -jnp.inf)
    return enough


def _freeze(search: _Search, live: Grown) -> Grown:
    """Leave the hypotheses of sentences that are done as they were."""

    def keep(old: Array, new: Array) -> Array:
        return jnp.where(search.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return jax.tree.map(keep, search.live, live)


def _say(history: Int[Array, "rows h"] | None, live: Grown) -> Int[Array, "rows h"] | None:
    """Let every beam go on from what its parent has said."""
    if history is None:
        return None
    beams = live.parents.shape
    mine = jnp.take_along_axis(history.reshape(*beams, -1), live.parents[..., None], axis=1)
    return say(mine.reshape(history.shape), live.tokens.reshape(-1))


def _read_off(
    search: _Search,
    held: Int[Array, "b n"],
    max_lengths: Int[Array, "b"],
    n_best: int,
    length_penalty: float,
    eos: int,
    pad: int,
) -> Decoded:
    """Follow the parents of the ended hypotheses, then of those cut at the limit, back to the first token.

    Of those cut, the ones that hold more of what phrases ask for come first.
    """
    scores, order = lax.top_k(search.ended.scores, n_best)
    places = jnp.arange(n_best) - (scores > -jnp.inf).sum(axis=1, keepdims=True)  # of a cut hypothesis; < 0: ended
    ended, live = places < 0, search.live.scores
    rank = jnp.lexsort((-live, -jnp.where(live > -jnp.inf, held, -1)), axis=1)
    rank = jnp.take_along_axis(rank, jnp.maximum(places, 0), axis=1)
    cut = jnp.take_along_axis(live, rank, axis=1) / _penalty(max_lengths, length_penalty)[:, None]
    scores = jnp.where(jnp.isnan(live).any(axis=1, keepdims=True), jnp.nan, jnp.where(ended, scores, cut))
    exists = scores > -jnp.inf
    lengths, beams = (jnp.take_along_axis(x, order, axis=1) for x in search.ended[1:])
    lengths, beams = jnp.where(ended, lengths, max_lengths[:, None]), jnp.where(ended, beams, rank)

    def back(beams: Int[Array, "b n"], one: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        index, tokens, parents = one
        inside = exists & (index < lengths)
        tokens, parents = (jnp.take_along_axis(x, beams, axis=1) for x in (tokens, parents))
        return jnp.where(inside, parents, beams), jnp.where(inside, tokens, pad)

    steps = jnp.arange(search.tokens.shape[0])
    _, tokens = lax.scan(back, beams, (steps, search.tokens, search.parents), reverse=True)
    tokens = jnp.moveaxis(tokens, 0, -1)
    tokens = jnp.where((ended & exists)[..., None] & (steps == lengths[..., None]), eos, tokens)
    return Decoded(tokens, scores, jnp.where(exists, lengths + ended, 0), search.done)
