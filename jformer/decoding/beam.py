"""Beam search with the penalties of GNMT, in groups if asked for. Knows a step function and a cache, and no model.

Axes: b sentences, n beams of a sentence, k hypotheses asked for, p phrases, l of a phrase, h tokens of history,
t tokens; rows = b·n, the beams of a sentence side by side.

A sentence has n live hypotheses, one in each beam, and slots for n finished ones. A hypothesis finishes when its end
is among the n best continuations of the sentence; the beams go on with the n best continuations that do not end, so
the search never narrows. What a beam chose in a step is stored as (token, parent beam): only these two numbers move,
and the tokens of the results are traced back once, at the end. A search that is recorded runs the same steps, and keeps
what the others forget: what each step weighed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.cache import Cache, Step, reorder
from jformer.decoding.candidates import Hypotheses, expand, select
from jformer.decoding.config import Beams
from jformer.decoding.constraints import Constraints, initial_progress, make_constraints, tokens_met
from jformer.decoding.finished import Finished, is_complete, keep_best, length_penalty
from jformer.decoding.greedy import greedy
from jformer.decoding.rules import Rules, append_token, initial_history, next_log_probs
from jformer.decoding.search import Decoded, Start, Trace

Coverage = Callable[[Cache], Float[Array, " rows"]]
"""The cache after the step that ends a hypothesis → what is added to its score: a number that is not positive."""


class _State(NamedTuple):
    cur_index: Int[Array, ""]  # of the token to choose, from 0
    cache: Cache
    history: Int[Array, "rows h"] | None  # what rules read
    live: Hypotheses
    finished: Finished
    num_finished: Int[Array, " b"]  # also those that were too bad to keep
    tokens: Int[Array, "t b n"]  # what each beam chose in each step
    parents: Int[Array, "t b n"]  # and the beam it came from
    done: Bool[Array, " b"]
    cut: Bool[Array, " b"]  # those that went on until their limit


def beam_search(
    step: Step,
    cache: Cache,
    start: Start,
    rules: Rules,
    beams: Beams,
    constraints: Int[Array, "b p l"] | None = None,
    coverage: Coverage | None = None,
) -> Decoded:
    """Search for the hypotheses whose log-probability, divided by the length penalty, is largest.

    For use inside jit. Hypotheses that were cut at the limit follow after all that ended. Equal scores: the one found
    first, then the better beam, comes first. One beam without constraints is greedy search.

    Args:
        step: (cache, last tokens) → (logits, cache).
        cache: of n rows a sentence, with room for `start.room` tokens.
        start: the tokens to go on from, and the limits.
        rules: which tokens may come next.
        beams: how many there are, how they are ranked, and when a sentence is done.
        constraints: phrases, filled with padding, that a hypothesis must contain to end (Post and Vilar 2018).
        coverage: what is added to the score of a hypothesis that ends (Wu et al. 2016, equation 14).

    >>> probs = jnp.zeros((5, 5)).at[[1, 1, 3, 3, 4], [3, 4, 2, 3, 2]].set(jnp.array([0.6, 0.4, 0.5, 0.5, 1]))
    >>> def step(cache, last):  # greedy search would take 3 (0.6), and at best 0.6 · 0.5
    ...     return jnp.log(probs[last]), {**cache, "position": cache["position"] + 1}
    >>> cache = {"position": jnp.zeros(2, jnp.int32), "self": {}}
    >>> start = Start(token=jnp.array([1]), limits=jnp.array([3]), room=3)
    >>> found = beam_search(step, cache, start, Rules(eos=2, pad=0), Beams(size=2))
    >>> found.tokens.tolist(), round(jnp.exp(found.scores).item(), 3)
    ([[[4, 2, 0]]], 0.4)
    """
    if beams.size == 1 and constraints is None:
        best = greedy(step, cache, start, rules)
        return best._replace(scores=best.scores / length_penalty(best.lengths, beams))

    required = None if constraints is None else make_constraints(constraints, rules.pad)

    def extend(state: _State) -> _State:
        return _extend(state, step, start.limits, rules, beams, required, coverage)[0]

    state = _initial_state(cache, start, rules, beams, required)
    state = lax.while_loop(functools.partial(_goes_on, start), extend, state)
    return _trace_back(state, start.limits, rules, beams, required)


def record_beams(
    step: Step,
    cache: Cache,
    start: Start,
    rules: Rules,
    beams: Beams,
    constraints: Int[Array, "b p l"] | None = None,
    coverage: Coverage | None = None,
) -> tuple[Decoded, Trace]:
    """Search as `beam_search` does, with the same arguments, and also return what each of `start.room` steps weighed.

    For use inside jit. One beam is searched as any other number, and so may end otherwise than greedy search.

    >>> probs = jnp.zeros((5, 5)).at[[1, 1, 3, 3, 4], [3, 4, 2, 3, 2]].set(jnp.array([0.6, 0.4, 0.5, 0.5, 1]))
    >>> def step(cache, last):  # as in the example of beam_search
    ...     return jnp.log(probs[last]), {**cache, "position": cache["position"] + 1}
    >>> cache = {"position": jnp.zeros(2, jnp.int32), "self": {}}
    >>> start = Start(token=jnp.array([1]), limits=jnp.array([3]), room=3)
    >>> found, trace = record_beams(step, cache, start, Rules(eos=2, pad=0), Beams(size=2))
    >>> found.tokens.tolist(), trace.live_tokens[0, 0].tolist()  # the answer; what went on after the first step
    ([[[4, 2, 0]]], [3, 4])
    >>> [round(probability, 2) for probability in jnp.exp(trace.live_sums[0, 0]).tolist()]
    [0.6, 0.4]
    """
    required = None if constraints is None else make_constraints(constraints, rules.pad)
    extend = functools.partial(
        _extend, step=step, limits=start.limits, rules=rules, beams=beams, constraints=required, coverage=coverage
    )

    def record(both: tuple[_State, Trace]) -> tuple[_State, Trace]:
        state, trace = both
        after, weighed = extend(state)
        return after, jax.tree.map(lambda every, one: every.at[:, state.cur_index].set(one), trace, weighed)

    state = _initial_state(cache, start, rules, beams, required)
    of_step = jax.eval_shape(lambda state: extend(state)[1], state)
    trace = jax.tree.map(lambda x: jnp.zeros((x.shape[0], start.room, *x.shape[1:]), x.dtype), of_step)
    state, trace = lax.while_loop(lambda both: _goes_on(start, both[0]), record, (state, trace))
    return _trace_back(state, start.limits, rules, beams, required), trace


def _goes_on(start: Start, state: _State) -> Bool[Array, ""]:
    return (state.cur_index < start.room) & ((~state.done).sum() > start.max_unfinished)


def _initial_state(cache: Cache, start: Start, rules: Rules, beams: Beams, constraints: Constraints | None) -> _State:
    """Begin with one live hypothesis, the empty one, in the first beam of every group."""
    sentences = start.limits.shape[0]
    shape = sentences, beams.size
    zeros = jnp.zeros(shape, jnp.int32)
    empty = jnp.full(shape, -jnp.inf)
    per_step = jnp.zeros((start.room, *shape), jnp.int32)
    live = Hypotheses(
        scores=empty.at[:, :: beams.size // beams.groups].set(0.0),
        tokens=zeros + start.token[:, None],
        parents=zeros,
        progress=None if constraints is None else initial_progress(constraints, beams.size),
    )
    return _State(
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


def _extend(
    state: _State,
    step: Step,
    limits: Int[Array, " b"],
    rules: Rules,
    beams: Beams,
    constraints: Constraints | None,
    coverage: Coverage | None,
) -> tuple[_State, Trace]:
    """Append one token to every live hypothesis, and store those that end; also return what was weighed."""
    shape = state.live.tokens.shape
    logits, cache = step(state.cache, state.live.tokens.reshape(-1))  # [b n] → [rows]
    log_probs = next_log_probs(rules, logits, state.history, state.cur_index)
    candidates = expand(state.live, log_probs, rules.eos, constraints)
    has_nan = jnp.isnan(candidates.scores).any(axis=(1, 2))
    best, live = select(candidates, rules.eos, beams, constraints)

    bonus = jnp.zeros(shape) if coverage is None else coverage(cache).reshape(shape)  # [rows] → [b n]
    ends = _ends(state, best, bonus, beams, rules.eos)
    finished = keep_best(state.finished, ends, beams.groups)
    num_finished = state.num_finished + ((best.tokens == rules.eos) & (best.scores > -jnp.inf)).sum(axis=1)
    live = live._replace(scores=jnp.where(has_nan[:, None], jnp.nan, live.scores))
    live = _keep_done(state, live)

    largest_penalty = length_penalty(limits, beams)
    complete = is_complete(finished, num_finished, live.scores, largest_penalty, beams)
    at_limit = state.cur_index + 1 >= limits
    weighed = Trace(
        searched=~state.done,
        tokens=candidates.tokens,
        sums=candidates.scores,
        live_sums=live.scores,
        live_tokens=live.tokens,
        live_parents=live.parents,
        end_parents=best.parents,
        end_scores=ends.scores,
    )
    after = _State(
        cur_index=state.cur_index + 1,
        cache=reorder(cache, live.parents),
        history=_append_tokens(state.history, live),
        live=live,
        finished=finished,
        num_finished=num_finished,
        tokens=state.tokens.at[state.cur_index].set(live.tokens),
        parents=state.parents.at[state.cur_index].set(live.parents),
        done=state.done | has_nan | complete | at_limit,
        cut=state.cut | (at_limit & ~state.done),
    )
    return after, weighed


def _ends(state: _State, best: Hypotheses, bonus: Float[Array, "b n"], beams: Beams, eos: int) -> Finished:
    """Return the ends among the best candidates; all else has the score -inf."""
    ends = (best.tokens == eos) & ~state.done[:, None]
    scores = best.scores / length_penalty(state.cur_index + 1, beams)
    scores += jnp.take_along_axis(bonus, best.parents, axis=1)
    scores = jnp.where(ends, scores, -jnp.inf)
    lengths = jnp.full_like(best.parents, state.cur_index)
    return Finished(scores, lengths, best.parents)


def _keep_done(state: _State, live: Hypotheses) -> Hypotheses:
    """Leave the hypotheses of sentences that are done as they were."""

    def keep(old: Array, new: Array) -> Array:
        return jnp.where(state.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return jax.tree.map(keep, state.live, live)


def _append_tokens(history: Int[Array, "rows h"] | None, live: Hypotheses) -> Int[Array, "rows h"] | None:
    """Append to the history of every beam's parent what the beam chose."""
    if history is None:
        return None
    by_beam = history.reshape(*live.parents.shape, -1)  # [rows h] → [b n h]
    of_parents = jnp.take_along_axis(by_beam, live.parents[..., None], axis=1)
    return append_token(of_parents.reshape(history.shape), live.tokens.reshape(-1))


def _trace_back(
    state: _State, limits: Int[Array, " b"], rules: Rules, beams: Beams, constraints: Constraints | None
) -> Decoded:
    """Rank the finished hypotheses and those cut at the limit, and follow their parents back to the first token.

    Those cut come last, or among the others by their scores. With constraints they come last always, first of them the
    ones that have met more tokens.
    """
    ended, order = lax.top_k(state.finished.scores, beams.size)  # [b n]
    cut = _rank_live(state.live, constraints)  # [b n], beams
    live = jnp.take_along_axis(state.live.scores, cut, axis=1) / length_penalty(limits, beams)[:, None]
    scores = jnp.concatenate([ended, live], axis=1)  # → [b 2n]
    is_ended = jnp.arange(2 * beams.size) < beams.size
    if beams.ended_first or constraints is not None:
        ranks = jnp.where(is_ended, jnp.where(scores > -jnp.inf, 0, 2), 1)
    else:
        ranks = -jnp.where(is_ended | state.cut[:, None], scores, -jnp.inf)
    best = jnp.argsort(ranks, axis=1, stable=True)[:, : beams.n_best]  # [b 2n] → [b k]

    def choose(of_ended: Int[Array, "b n"], of_cut: Int[Array, "b n"]) -> Int[Array, "b k"]:
        every = jnp.concatenate([jnp.take_along_axis(of_ended, order, axis=1), of_cut], axis=1)
        return jnp.take_along_axis(every, best, axis=1)

    is_finished = best < beams.size
    has_nan = jnp.isnan(state.live.scores).any(axis=1, keepdims=True)
    scores = jnp.where(has_nan, jnp.nan, jnp.take_along_axis(scores, best, axis=1))
    exists = scores > -jnp.inf
    lengths = choose(state.finished.lengths, jnp.broadcast_to(limits[:, None], cut.shape))
    last_beams = choose(state.finished.beams, cut)

    def back(beam: Int[Array, "b k"], at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        index, tokens, parents = at
        inside = exists & (index < lengths)
        tokens = jnp.take_along_axis(tokens, beam, axis=1)  # [b n] → [b k]
        parents = jnp.take_along_axis(parents, beam, axis=1)
        return jnp.where(inside, parents, beam), jnp.where(inside, tokens, rules.pad)

    steps = jnp.arange(state.tokens.shape[0])
    _, tokens = lax.scan(back, last_beams, (steps, state.tokens, state.parents), reverse=True)
    tokens = jnp.moveaxis(tokens, 0, -1)  # [t b k] → [b k t]
    is_end = (is_finished & exists)[..., None] & (steps == lengths[..., None])
    tokens = jnp.where(is_end, rules.eos, tokens)
    return Decoded(tokens, scores, jnp.where(exists, lengths + is_finished, 0), state.done)


def _rank_live(live: Hypotheses, constraints: Constraints | None) -> Int[Array, "b n"]:
    """Return the beams of every sentence, best first: by the constraint tokens they have met, then by their scores."""
    met = jnp.zeros_like(live.tokens)
    if constraints is not None and live.progress is not None:
        met = tokens_met(constraints, live.progress)
    met = jnp.where(live.scores > -jnp.inf, met, -1)
    return jnp.lexsort((-live.scores, -met), axis=1)
