"""Beam search with the length penalty of GNMT. Knows a step function and a cache, and no model.

The live hypotheses of a sentence fill its n beams; those that have ended wait in n places of their own. A hypothesis
ends where its end symbol is among the n likeliest continuations of the sentence, and the beams go on with the n
likeliest others, so the beam never narrows. What every beam chose is kept as (token, parent) for each step: only
these two numbers move, and the token sequences are read off once at the end.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.cache import Cache, Step, reorder
from jformer.decoding.greedy import Decoded, greedy, token_log_probs


class _Ended(NamedTuple):
    scores: Float[Array, "b n"]  # divided by the length penalty, best first; -inf in an empty place
    lengths: Int[Array, "b n"]  # tokens before the end symbol
    beams: Int[Array, "b n"]  # the beam that held those tokens


class _Search(NamedTuple):
    now: Int[Array, ""]  # the place of the token to choose, counted from 0
    cache: Cache
    last: Int[Array, "b n"]  # the token chosen before
    live: Float[Array, "b n"]  # summed log-probabilities, best first; -inf in an empty beam
    ended: _Ended
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
) -> Decoded:
    """Search for the n hypotheses whose log-probability, divided by ((5 + length) / 6) ** length_penalty, is largest.

    For use inside jit. `cache` has b · beam_size rows, the beams of a sentence side by side, and room for `length`
    tokens; `first` is the token to go on from, `max_lengths` (at most `length`) are the sentences' own limits of what
    is chosen, 0 for a sentence that is only there to fill the batch. Hypotheses that were cut at the limit follow after
    all that ended. Padding is never chosen. With one beam there is nothing to weigh an end against, so it is final:
    the tokens are those of greedy search. `length_penalty` must not be negative. Equal scores: the hypothesis found
    first, then the better beam, comes first.

    Source: Wu et al. 2016 (GNMT), equation 14; search and limits as in Vaswani et al. 2017, section 6.1.
    """
    if beam_size == 1:
        best = greedy(step, cache, max_lengths=max_lengths, length=length, first=first, eos=eos, pad=pad)
        return best._replace(scores=best.scores / _penalty(best.lengths, length_penalty))

    def advance(search: _Search) -> _Search:
        logits, cache = step(search.cache, search.last.reshape(-1))
        log_probs, tokens = token_log_probs(logits, beam_size + 1, pad)
        broken = jnp.isnan(log_probs).reshape(search.done.shape[0], -1).any(axis=1, keepdims=True)
        scores, tokens, parents = _candidates(search.live, log_probs, tokens)
        is_end = tokens == eos
        ended = _collect(search, scores, is_end, parents, length_penalty)
        live, chosen = lax.top_k(jnp.where(is_end, -jnp.inf, scores), beam_size)
        tokens, parents = (jnp.take_along_axis(x, chosen, axis=1) for x in (tokens, parents))
        live = jnp.where(search.done[:, None], search.live, jnp.where(broken, jnp.nan, live))
        # Safe to stop: log-probabilities are never positive, so the sum of a live hypothesis can only fall, and with
        # a length penalty of 0 or more nothing divides it by more than the penalty of the limit. No ending of any
        # beam can therefore beat this bound of the best beam; once n ended hypotheses reach it, they stay the best.
        hopeless = ended.scores[:, -1] >= live[:, 0] / _penalty(max_lengths, length_penalty)
        done = search.done | hopeless | (search.now + 1 >= max_lengths)
        return _Search(
            search.now + 1,
            reorder(cache, parents),
            tokens,
            live,
            ended,
            search.tokens.at[search.now].set(tokens),
            search.parents.at[search.now].set(parents),
            done,
        )

    start = _start(cache, first, max_lengths, beam_size, length)
    end = lax.while_loop(lambda search: (search.now < length) & ~search.done.all(), advance, start)
    return _read_off(end, max_lengths, length_penalty, eos, pad)


def _penalty(lengths: Int[Array, "*b"], alpha: float) -> Float[Array, "*b"]:
    return ((5.0 + lengths) / 6.0) ** alpha


def _start(cache: Cache, first: Int[Array, "b"], max_lengths: Int[Array, "b"], beam_size: int, length: int) -> _Search:
    """Begin with one live hypothesis, the empty one, in the first beam of every sentence."""
    shape = max_lengths.shape[0], beam_size
    none = jnp.full(shape, -jnp.inf)
    zeros = jnp.zeros(shape, jnp.int32)
    history = jnp.zeros((length, *shape), jnp.int32)
    ended = _Ended(none, zeros, zeros)
    live = none.at[:, 0].set(0.0)
    return _Search(jnp.int32(0), cache, zeros + first[:, None], live, ended, history, history, max_lengths <= 0)


def _candidates(
    live: Float[Array, "b n"], log_probs: Float[Array, "rows k"], tokens: Int[Array, "rows k"]
) -> tuple[Float[Array, "b c"], Int[Array, "b c"], Int[Array, "b c"]]:
    """Rank the 2n best continuations of every sentence: their summed log-probabilities, tokens and parent beams.

    At most one continuation of a beam is its end, so at least n of them go on. For the same reason the n + 1
    likeliest tokens of each beam are enough to choose from.
    """
    sentences, beam_size = live.shape
    scores = (live.reshape(-1, 1) + log_probs).reshape(sentences, -1)
    scores, order = lax.top_k(scores, 2 * beam_size)
    tokens = jnp.take_along_axis(tokens.reshape(sentences, -1), order, axis=1)
    return scores, tokens, order // log_probs.shape[1]


def _collect(
    search: _Search,
    scores: Float[Array, "b c"],
    is_end: Bool[Array, "b c"],
    parents: Int[Array, "b c"],
    length_penalty: float,
) -> _Ended:
    """Keep the n best of the hypotheses that ended before and the ends among the n best continuations."""
    beam_size = search.live.shape[1]
    counts = is_end & (jnp.arange(2 * beam_size) < beam_size) & ~search.done[:, None]
    found = jnp.where(counts, scores / _penalty(search.now + 1, length_penalty), -jnp.inf)
    best, order = lax.top_k(jnp.concatenate([search.ended.scores, found], axis=1), beam_size)
    lengths = jnp.concatenate([search.ended.lengths, jnp.full_like(parents, search.now)], axis=1)
    beams = jnp.concatenate([search.ended.beams, parents], axis=1)
    return _Ended(best, *(jnp.take_along_axis(x, order, axis=1) for x in (lengths, beams)))


def _read_off(search: _Search, max_lengths: Int[Array, "b"], length_penalty: float, eos: int, pad: int) -> Decoded:
    """Follow the parents of the ended hypotheses, then of those cut at the limit, back to the first token."""
    places = jnp.arange(search.live.shape[1])
    beams = places - (search.ended.scores > -jnp.inf).sum(1, keepdims=True)  # of a cut hypothesis; < 0: ended
    ended = beams < 0
    cut = jnp.take_along_axis(search.live, jnp.maximum(beams, 0), axis=1)
    cut = cut / _penalty(max_lengths, length_penalty)[:, None]
    scores = jnp.where(ended, search.ended.scores, cut)
    scores = jnp.where(jnp.isnan(search.live), jnp.nan, scores)
    lengths = jnp.where(ended, search.ended.lengths, max_lengths[:, None])
    exists = scores > -jnp.inf

    def back(beams: Int[Array, "b n"], one: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        index, tokens, parents = one
        inside = exists & (index < lengths)
        tokens, parents = (jnp.take_along_axis(x, beams, axis=1) for x in (tokens, parents))
        return jnp.where(inside, parents, beams), jnp.where(inside, tokens, pad)

    steps = jnp.arange(search.tokens.shape[0])
    beams = jnp.where(ended, search.ended.beams, beams)
    _, tokens = lax.scan(back, beams, (steps, search.tokens, search.parents), reverse=True)
    tokens = jnp.moveaxis(tokens, 0, -1)
    tokens = jnp.where((ended & exists)[..., None] & (steps == lengths[..., None]), eos, tokens)
    return Decoded(tokens, scores, jnp.where(exists, lengths + ended, 0))
