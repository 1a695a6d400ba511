"""Where a beam search stands between two steps, and what is read from there: its outputs, and what they have in common.

Axes: b sentences, n beams of a sentence, k hypotheses asked for, h tokens of history, t tokens; rows = b·n, the beams
of a sentence side by side.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jformer.decoding.cache_rows import Cache
from jformer.decoding.candidates import Continuations
from jformer.decoding.constraints import Constraints, has_phrases, initial_progress, tokens_met
from jformer.decoding.decode_config import Beams
from jformer.decoding.finished import Finished, length_penalty
from jformer.decoding.rules import Rules, initial_history
from jformer.decoding.search import Decoded, Start


class State(NamedTuple):
    """A beam search between two steps."""

    cur_index: Int[Array, ""]  # of the token to choose, from 0
    cache: Cache
    history: Int[Array, "rows h"] | None  # what rules read
    live: Continuations
    finished: Finished
    num_finished: Int[Array, " b"]  # all that have ended, also those that were too bad for a slot of `finished`
    tokens: Int[Array, "t b n"]  # what each beam chose in each step
    parents: Int[Array, "t b n"]  # and the beam it came from
    done: Bool[Array, " b"]  # no step changes these: complete (`finished.is_complete`), at the limit, or failed (nan)
    cut: Bool[Array, " b"]  # searched up to the limit, so that live hypotheses count as outputs, if the worst


def initial_state(cache: Cache, start: Start, rules: Rules, beams: Beams, constraints: Constraints | None) -> State:
    """Begin with one live hypothesis, the empty one, in the first beam of every group.

    Args:
        cache: of n rows a sentence, before the first step.
        start: the tokens to go on from, and the limits.
        rules: whose history begins with a prompt.
        beams: how many there are, and of how many groups.
        constraints: phrases that a hypothesis must contain to end, none of them met yet.
    """
    sentences = start.limits.shape[0]
    shape = sentences, beams.size
    zeros = jnp.zeros(shape, jnp.int32)
    empty = jnp.full(shape, -jnp.inf)
    per_step = jnp.zeros((start.room, *shape), jnp.int32)
    live = Continuations(
        scores=empty.at[:, :: beams.size // beams.groups].set(0.0),
        tokens=zeros + start.token[:, None],
        parents=zeros,
        progress=None if constraints is None else initial_progress(constraints, beams.size),
    )
    return State(
        cur_index=jnp.int32(0),
        cache=cache,
        history=initial_history(rules, *shape, start.room),
        live=live,
        finished=Finished(empty, zeros, zeros),
        num_finished=zeros[:, 0],
        tokens=per_step,
        parents=per_step,
        done=start.limits <= 0,
        cut=jnp.zeros_like(start.limits, bool),
    )


def ranked(
    state: State, limits: Int[Array, " b"], rules: Rules, beams: Beams, constraints: Constraints | None
) -> Decoded:
    """Rank the finished hypotheses and those cut at the limit, and follow their parents back to the first token.

    Those cut come last, or among the others by their scores. Where a sentence has constraints they come last always,
    first of them the ones that have met more tokens.

    Args:
        state: after the last step.
        limits: the length of what was cut in each sentence.
        rules: the ids of the end and of padding.
        beams: how many there are, how many are asked for, and whether those that ended come first.
        constraints: phrases of the sentences; None where the search had none.
    """
    ended, order = lax.top_k(state.finished.scores, beams.size)  # [b n]
    cut = _rank_live(state.live, constraints)  # [b n], beams
    live = jnp.take_along_axis(state.live.scores, cut, axis=1) / length_penalty(limits, beams)[:, None]
    scores = jnp.concatenate([ended, live], axis=1)  # → [b 2n]
    is_ended = jnp.arange(2 * beams.size) < beams.size
    ranks = jnp.where(is_ended, jnp.where(scores > -jnp.inf, 0.0, 2.0), 1.0)
    if not beams.ended_first:
        by_score = -jnp.where(is_ended | state.cut[:, None], scores, -jnp.inf)
        asked = jnp.zeros_like(state.cut) if constraints is None else has_phrases(constraints.phrases, constraints.pad)
        ranks = jnp.where(asked[:, None], ranks, by_score)
    best = jnp.argsort(ranks, axis=1, stable=True)[:, : beams.n_best]  # [b 2n] → [b k]

    def choose(of_ended: Int[Array, "b n"], of_cut: Int[Array, "b n"]) -> Int[Array, "b k"]:
        every = jnp.concatenate([jnp.take_along_axis(of_ended, order, axis=1), of_cut], axis=1)
        return jnp.take_along_axis(every, best, axis=1)

    is_finished = best < beams.size
    has_nan = jnp.isnan(state.live.scores).any(axis=1, keepdims=True)
    scores = jnp.where(has_nan, jnp.nan, jnp.take_along_axis(scores, best, axis=1))
    exists = scores > -jnp.inf
    lengths = choose(state.finished.lengths, jnp.broadcast_to(limits[:, None], cut.shape))
    tokens = _follow(state, choose(state.finished.beams, cut), jnp.where(exists, lengths, 0), rules.pad)
    is_end = (is_finished & exists)[..., None] & (jnp.arange(tokens.shape[-1]) == lengths[..., None])
    tokens = jnp.where(is_end, rules.eos, tokens)
    return Decoded(tokens, scores, jnp.where(exists, lengths + is_finished, 0), state.done)


def stable_prefix(
    state: State, limits: Int[Array, " b"], rules: Rules, beams: Beams
) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
    """Return the tokens that all hypotheses begin with which can still become the best output, and how many these are.

    Such hypotheses are the best one that has ended, and those live ones that may yet beat it, by the bound of
    `finished.is_complete`.
    """
    ended = state.finished.scores.argmax(axis=1)[:, None]  # [b 1]
    best = jnp.take_along_axis(state.finished.scores, ended, axis=1)
    may_win = state.live.scores / length_penalty(limits, beams)[:, None] > best  # [b n]
    exists = jnp.concatenate([best > -jnp.inf, may_win & ~state.done[:, None]], axis=1)  # [b 1+n]

    def both(of_ended: Int[Array, "b n"], of_live: Int[Array, " #n"]) -> Int[Array, "b 1+n"]:
        one = jnp.take_along_axis(of_ended, ended, axis=1)
        return jnp.concatenate([one, jnp.broadcast_to(of_live, may_win.shape)], axis=1)

    lengths = jnp.where(exists, both(state.finished.lengths, state.cur_index[None]), 0)
    tokens = _follow(state, both(state.finished.beams, jnp.arange(beams.size)), lengths, rules.pad)
    first = jnp.take_along_axis(tokens, exists.argmax(axis=1)[:, None, None], axis=1)  # [b 1 t], of one that exists
    inside = jnp.arange(tokens.shape[-1]) < lengths[..., None]  # [b 1+n t]
    agreed = (((tokens == first) & inside) | ~exists[..., None]).all(axis=1) & exists.any(axis=1)[:, None]  # [b t]
    return first[:, 0], jnp.cumprod(agreed, axis=1, dtype=jnp.int32).sum(axis=1)


def _follow(state: State, beams: Int[Array, "b k"], lengths: Int[Array, "b k"], pad: int) -> Int[Array, "b k t"]:
    """Return the tokens of hypotheses of given lengths that end in given beams, with padding after them."""

    def back(beam: Int[Array, "b k"], at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        index, tokens, parents = at
        inside = index < lengths
        tokens = jnp.take_along_axis(tokens, beam, axis=1)  # [b n] → [b k]
        parents = jnp.take_along_axis(parents, beam, axis=1)
        return jnp.where(inside, parents, beam), jnp.where(inside, tokens, pad)

    steps = jnp.arange(state.tokens.shape[0])
    _, tokens = lax.scan(back, beams, (steps, state.tokens, state.parents), reverse=True)
    return jnp.moveaxis(tokens, 0, -1)  # [t b k] → [b k t]


def _rank_live(live: Continuations, constraints: Constraints | None) -> Int[Array, "b n"]:
    """Return the beams of every sentence, best first: by the constraint tokens they have met, then by their scores."""
    met = jnp.zeros_like(live.tokens)
    if constraints is not None and live.progress is not None:
        met = tokens_met(constraints, live.progress)
    met = jnp.where(live.scores > -jnp.inf, met, -1)
    return jnp.lexsort((-live.scores, -met), axis=1)
