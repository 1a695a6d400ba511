"""Beam search with the penalties of GNMT, optionally in groups. Depends on a step function and a cache, not on models.

Axes: b sentences, n beams of a sentence, k hypotheses returned, p phrases, s spellings of a phrase, l of a spelling,
h tokens of history, t tokens; rows = b·n, the beams of a sentence side by side.

A sentence has n live hypotheses, one in each beam, and slots for n finished ones. A hypothesis finishes when its end
symbol is among the n best continuations of the sentence; the beams continue with the n best that do not end, so the
search never narrows. What a beam chose in a step is stored as (token, parent beam): only these two numbers move, and
the tokens of the results are traced back once, at the end.

`_extend` is one step, in its order, and `SearchLoop` (search.py) the loop around it. hypotheses.py chooses among
continuations and ends; `_ranked` and `_stable_prefix` read the outputs from a state.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.constraints import (
    Constraints,
    has_phrases,
    initial_progress,
    make_constraints,
    tokens_met,
)
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.greedy import greedy
from jformer.decoding.hypotheses import (
    Continuations,
    Finished,
    expand,
    is_complete,
    keep_best,
    length_penalty,
    select,
)
from jformer.decoding.rules import Rules, append_token, initial_history, next_log_probs
from jformer.decoding.search import Cache, Decoded, SearchLoop, Start, Step, Trace, reorder

Coverage = Callable[[Cache], Float[Array, " rows"]]
"""The cache after the step that ends a hypothesis → what is added to its score, never positive."""


class State(NamedTuple):
    """A beam search between two steps."""

    cur_index: Int[Array, ""]  # of the token to choose, from 0
    cache: Cache
    history: Int[Array, "rows h"] | None  # what rules read
    live: Continuations
    finished: Finished
    num_finished: Int[Array, " b"]  # all that have ended, including those too bad for a slot of `finished`
    tokens: Int[Array, "t b n"]  # what each beam chose in each step
    parents: Int[Array, "t b n"]  # and the beam that it continues
    done: Bool[Array, " b"]  # no step changes these: complete (`is_complete`), at the limit, or failed (nan)
    cut: Bool[Array, " b"]  # searched up to the limit: live hypotheses become outputs too, by default the last ones


def beam_search(
    step: Step,
    cache: Cache,
    start: Start,
    rules: Rules,
    options: DecodeConfig,
    constraints: Int[Array, "b p s l"] | None = None,
    coverage: Coverage | None = None,
) -> SearchLoop:
    """Search for the hypotheses whose log-probability, divided by the length penalty, is largest.

    For use inside jit; the result's `run()` is `result(lax.while_loop(cond, body, init))`. Those cut at the limit
    follow all that ended, unless `ended_first` is False. Of equal scores, the one found first comes first, then the
    better beam. One beam without constraints is greedy search, which has nothing to rank: its score has no coverage.

    Args:
        step: (cache, last tokens) → (logits, cache).
        cache: of n rows a sentence, with room for `start.room` tokens.
        start: the tokens to continue from, and the limits.
        rules: which tokens may come next.
        options: how many beams there are, how they are ranked, and when a sentence is done.
        constraints: phrases, filled with padding, that a hypothesis must contain to end, each in one of its spellings
            (Post and Vilar 2018).
        coverage: what is added to the score of a hypothesis that ends (Wu et al. 2016, equation 14).

    >>> probs = jnp.zeros((5, 5)).at[[1, 1, 3, 3, 4], [3, 4, 2, 3, 2]].set(jnp.array([0.6, 0.4, 0.5, 0.5, 1]))
    >>> def step(cache, last):  # greedy search would take 3 (0.6), and at best 0.6 · 0.5
    ...     return jnp.log(probs[last]), {**cache, "position": cache["position"] + 1}
    >>> cache = {"position": jnp.zeros(2, jnp.int32), "self": {}}
    >>> start = Start(token=jnp.array([1]), limits=jnp.array([3]), room=3)
    >>> options = DecodeConfig(beam_size=2, length_penalty=0.0)
    >>> search = beam_search(step, cache, start, Rules(eos=2, pad=0), options)
    >>> found, trace = search.record(3)  # as search.run(), which does without the trace
    >>> found.tokens.tolist(), round(jnp.exp(found.scores).item(), 3)
    ([[[4, 2, 0]]], 0.4)
    >>> trace.live_tokens[0, 0].tolist()  # what went on after the first step
    [3, 4]
    """
    if options.beam_size == 1 and constraints is None:
        loop = greedy(step, cache, start, rules)

        def result(state: Any) -> Decoded:
            found = loop.result(state)
            return found._replace(scores=found.scores / length_penalty(found.lengths, options))

        return loop._replace(result=result)

    phrases = None if constraints is None else make_constraints(constraints, rules.pad)
    search = _Search(step, start, rules, options, phrases, coverage)
    return SearchLoop(
        init=_initial_state(search, cache),
        cond=start.goes_on,
        body=lambda state: _extend(search, state)[0],
        result=functools.partial(_ranked, search),
        stable_prefix=functools.partial(_stable_prefix, search),
        traced=functools.partial(_extend, search),
    )


class _Search(NamedTuple):
    """What all steps of a beam search share."""

    step: Step
    start: Start
    rules: Rules
    options: DecodeConfig
    constraints: Constraints | None
    coverage: Coverage | None


def _extend(search: _Search, state: State) -> tuple[State, Trace]:
    """Append one token to every live hypothesis, and store those that end; also return the candidates and choices."""
    step, start, rules, options, constraints, coverage = search
    # 1. The model scores every next token of each live hypothesis, and the rules forbid some of them.
    logits, cache = step(state.cache, state.live.tokens.reshape(-1))  # [b n] → [rows]
    log_probs = next_log_probs(rules, logits, state.history, state.cur_index)

    # 2. The n best continuations, ends among them, and the n best that do not end, which become the live ones.
    candidates = expand(state.live, log_probs, rules.eos, constraints)
    best, chosen = select(candidates, rules.eos, options, constraints)
    has_nan = jnp.isnan(candidates.scores).any(axis=(1, 2))
    live = _next_live(state, chosen, has_nan)

    # 3. Ends among the best compete with the hypotheses that ended before.
    coverages = None if coverage is None else coverage(cache).reshape(live.scores.shape)  # [rows] → [b n]
    ends = _ends(state, best, coverages, options, rules.eos)
    finished = keep_best(state.finished, ends, options.beam_groups)
    num_finished = state.num_finished + ((best.tokens == rules.eos) & (best.scores > -jnp.inf)).sum(axis=1)

    # 4. A sentence is done when nothing better can come, at its limit, or when its scores are NaN.
    complete = is_complete(finished, num_finished, live.scores, length_penalty(start.limits, options), options)
    at_limit = state.cur_index + 1 >= start.limits

    # 5. The cache and history of a beam are those of the hypothesis that it continues.
    after = State(
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
    return after, Trace(
        searched=~state.done,
        tokens=candidates.tokens,
        sums=candidates.scores,
        live_sums=live.scores,
        live_tokens=live.tokens,
        live_parents=live.parents,
        end_parents=best.parents,
        end_scores=ends.scores,
    )


def _next_live(state: State, chosen: Continuations, has_nan: Bool[Array, " b"]) -> Continuations:
    """Return the new live hypotheses, with the score nan if one was; those of done sentences do not change."""

    def keep_done(old: Array, new: Array) -> Array:
        return jnp.where(state.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    scores = jnp.where(has_nan[:, None], jnp.nan, chosen.scores)
    return jax.tree.map(keep_done, state.live, chosen._replace(scores=scores))


def _ends(
    state: State, best: Continuations, coverages: Float[Array, "b n"] | None, options: DecodeConfig, eos: int
) -> Finished:
    """Return the ends among the best candidates, with their final scores; others score -inf.

    `cur_index` tokens precede the end symbol, which counts as one more in the length.
    """
    scores = best.scores / length_penalty(state.cur_index + 1, options)
    if coverages is not None:
        scores += jnp.take_along_axis(coverages, best.parents, axis=1)
    is_end = (best.tokens == eos) & ~state.done[:, None]
    return Finished(
        scores=jnp.where(is_end, scores, -jnp.inf),
        lengths=jnp.full_like(best.parents, state.cur_index),
        beams=best.parents,
    )


def _append_tokens(history: Int[Array, "rows h"] | None, live: Continuations) -> Int[Array, "rows h"] | None:
    """Return the history of every beam: its parent's, and the token that the beam chose."""
    if history is None:
        return None
    by_beam = history.reshape(*live.parents.shape, -1)  # [rows h] → [b n h]
    of_parents = jnp.take_along_axis(by_beam, live.parents[..., None], axis=1)
    return append_token(of_parents.reshape(history.shape), live.tokens.reshape(-1))


def _initial_state(search: _Search, cache: Cache) -> State:
    """Return the state before the first step: one live hypothesis, the empty one, in the first beam of every group."""
    start, options, constraints = search.start, search.options, search.constraints
    sentences = start.limits.shape[0]
    shape = sentences, options.beam_size
    zeros = jnp.zeros(shape, jnp.int32)
    empty = jnp.full(shape, -jnp.inf)
    per_step = jnp.zeros((start.room, *shape), jnp.int32)
    live = Continuations(
        scores=empty.at[:, :: options.beam_size // options.beam_groups].set(0.0),
        tokens=zeros + start.token[:, None],
        parents=zeros,
        progress=None if constraints is None else initial_progress(constraints, options.beam_size),
    )
    return State(
        cur_index=jnp.int32(0),
        cache=cache,
        history=initial_history(search.rules, *shape, start.room),
        live=live,
        finished=Finished(empty, zeros, zeros),
        num_finished=zeros[:, 0],
        tokens=per_step,
        parents=per_step,
        done=start.limits <= 0,
        cut=jnp.zeros_like(start.limits, bool),
    )


def _ranked(search: _Search, state: State) -> Decoded:
    """Rank the finished hypotheses and those cut at the limit, and follow their parents back to the first token.

    Those cut come last, or among the others by score. In a sentence with constraints they always come last, ordered by
    how many constraint tokens they have met.
    """
    limits, rules, options, constraints = search.start.limits, search.rules, search.options, search.constraints
    ended, order = lax.top_k(state.finished.scores, options.beam_size)  # [b n]
    cut = _rank_live(state.live, constraints)  # [b n], beams
    live = jnp.take_along_axis(state.live.scores, cut, axis=1) / length_penalty(limits, options)[:, None]
    scores = jnp.concatenate([ended, live], axis=1)  # → [b 2n]
    is_ended = jnp.arange(2 * options.beam_size) < options.beam_size
    # 0: it ended; 1: it was cut at the limit; 2: an empty slot.
    ranks = jnp.where(is_ended, jnp.where(scores > -jnp.inf, 0.0, 2.0), 1.0)
    if not options.ended_first:
        by_score = -jnp.where(is_ended | state.cut[:, None], scores, -jnp.inf)
        asked = jnp.zeros_like(state.cut) if constraints is None else has_phrases(constraints.phrases, constraints.pad)
        ranks = jnp.where(asked[:, None], ranks, by_score)
    best = jnp.argsort(ranks, axis=1, stable=True)[:, : options.n_best]  # [b 2n] → [b k]

    def choose(of_ended: Int[Array, "b n"], of_cut: Int[Array, "b n"]) -> Int[Array, "b k"]:
        every = jnp.concatenate([jnp.take_along_axis(of_ended, order, axis=1), of_cut], axis=1)
        return jnp.take_along_axis(every, best, axis=1)

    is_finished = best < options.beam_size
    has_nan = jnp.isnan(state.live.scores).any(axis=1, keepdims=True)
    scores = jnp.where(has_nan, jnp.nan, jnp.take_along_axis(scores, best, axis=1))
    exists = scores > -jnp.inf
    lengths = choose(state.finished.lengths, jnp.broadcast_to(limits[:, None], cut.shape))
    tokens = _follow(state, choose(state.finished.beams, cut), jnp.where(exists, lengths, 0), rules.pad)
    is_end = (is_finished & exists)[..., None] & (jnp.arange(tokens.shape[-1]) == lengths[..., None])
    tokens = jnp.where(is_end, rules.eos, tokens)
    return Decoded(tokens, scores, jnp.where(exists, lengths + is_finished, 0), state.done)


def _stable_prefix(search: _Search, state: State) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
    """Return the common beginning of all hypotheses that can still become the best output, and its length.

    These are the best one that has ended, and the live ones that may yet beat it, by the bound of `is_complete`.
    """
    rules, options = search.rules, search.options
    ended = state.finished.scores.argmax(axis=1)[:, None]  # [b 1]
    best = jnp.take_along_axis(state.finished.scores, ended, axis=1)
    may_win = state.live.scores / length_penalty(search.start.limits, options)[:, None] > best  # [b n]
    exists = jnp.concatenate([best > -jnp.inf, may_win & ~state.done[:, None]], axis=1)  # [b 1+n]

    def both(of_ended: Int[Array, "b n"], of_live: Int[Array, " #n"]) -> Int[Array, "b 1+n"]:
        one = jnp.take_along_axis(of_ended, ended, axis=1)
        return jnp.concatenate([one, jnp.broadcast_to(of_live, may_win.shape)], axis=1)

    lengths = jnp.where(exists, both(state.finished.lengths, state.cur_index[None]), 0)
    tokens = _follow(state, both(state.finished.beams, jnp.arange(options.beam_size)), lengths, rules.pad)
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
