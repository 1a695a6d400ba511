"""Beam search with the penalties of GNMT, optionally in groups. Depends on a step function and a cache, not on models.

Axes: b sentences, n beams of a sentence, k hypotheses asked for, p phrases, l of a phrase, h tokens of history,
t tokens; rows = b·n, the beams of a sentence side by side.

A sentence has n live hypotheses, one in each beam, and slots for n finished ones. A hypothesis finishes when its end
is among the n best continuations of the sentence; the beams go on with the n best continuations that do not end, so
the search never narrows. What a beam chose in a step is stored as (token, parent beam): only these two numbers move,
and the tokens of the results are traced back once, at the end.

`_extend` is one step, in its order, and `SearchLoop` (search.py) the loop around it. `expand` and `select`
(candidates.py) choose the continuations, finished.py ranks the ends, beam_state.py reads the outputs from a state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.beam_state import State, initial_state, ranked, stable_prefix
from jformer.decoding.cache_rows import Cache, Step, reorder
from jformer.decoding.candidates import Continuations, expand, select
from jformer.decoding.constraints import Constraints, make_constraints
from jformer.decoding.decode_config import Beams
from jformer.decoding.finished import Finished, is_complete, keep_best, length_penalty
from jformer.decoding.greedy import greedy
from jformer.decoding.rules import Rules, append_token, next_log_probs
from jformer.decoding.search import Decoded, SearchLoop, Start, Trace

Coverage = Callable[[Cache], Float[Array, " rows"]]
"""The cache after the step that ends a hypothesis → what is added to its score: a number that is not positive."""


def beam_search(
    step: Step,
    cache: Cache,
    start: Start,
    rules: Rules,
    beams: Beams,
    constraints: Int[Array, "b p l"] | None = None,
    coverage: Coverage | None = None,
) -> SearchLoop:
    """Search for the hypotheses whose log-probability, divided by the length penalty, is largest.

    For use inside jit; the result's `run()` is `result(lax.while_loop(cond, body, init))`. Those that were cut at
    the limit follow after all that ended. Equal scores: the one found first, then the better beam, comes first.
    One beam without constraints is greedy search, which has nothing to rank: its score has no coverage.

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
    >>> found = beam_search(step, cache, start, Rules(eos=2, pad=0), Beams(size=2)).run()
    >>> found.tokens.tolist(), round(jnp.exp(found.scores).item(), 3)
    ([[[4, 2, 0]]], 0.4)
    """
    if beams.size == 1 and constraints is None:
        loop = greedy(step, cache, start, rules)

        def result(state: Any) -> Decoded:
            found = loop.result(state)
            return found._replace(scores=found.scores / length_penalty(found.lengths, beams))

        return loop._replace(result=result)

    required = None if constraints is None else make_constraints(constraints, rules.pad)

    def body(state: State) -> State:
        after, _ = _extend(state, step, start.limits, rules, beams, required, coverage)
        return after

    return SearchLoop(
        init=initial_state(cache, start, rules, beams, required),
        cond=start.goes_on,
        body=body,
        result=lambda state: ranked(state, start.limits, rules, beams, required),
        stable_prefix=lambda state: stable_prefix(state, start.limits, rules, beams),
    )


def record_beams(
    step: Step,
    cache: Cache,
    start: Start,
    rules: Rules,
    beams: Beams,
    constraints: Int[Array, "b p l"] | None = None,
    coverage: Coverage | None = None,
) -> tuple[Decoded, Trace]:
    """Search as `beam_search` does, and also return what each of `start.room` steps weighed.

    For use inside jit. One beam is searched as any other number, and so may end otherwise than greedy search.

    Args:
        step: (cache, last tokens) → (logits, cache).
        cache: of n rows a sentence, with room for `start.room` tokens.
        start, rules, beams, constraints, coverage: those of `beam_search`.

    >>> probs = jnp.zeros((5, 5)).at[[1, 1, 3, 3, 4], [3, 4, 2, 3, 2]].set(jnp.array([0.6, 0.4, 0.5, 0.5, 1]))
    >>> def step(cache, last):  # as in the example of beam_search
    ...     return jnp.log(probs[last]), {**cache, "position": cache["position"] + 1}
    >>> cache = {"position": jnp.zeros(2, jnp.int32), "self": {}}
    >>> start = Start(token=jnp.array([1]), limits=jnp.array([3]), room=3)
    >>> found, trace = record_beams(step, cache, start, Rules(eos=2, pad=0), Beams(size=2))
    >>> found.tokens.tolist(), trace.live_tokens[0, 0].tolist()  # the answer; what went on after the first step
    ([[[4, 2, 0]]], [3, 4])
    """
    required = None if constraints is None else make_constraints(constraints, rules.pad)

    def extend(state: State) -> tuple[State, Trace]:
        return _extend(state, step, start.limits, rules, beams, required, coverage)

    def cond(both: tuple[State, Trace]) -> Bool[Array, ""]:
        return start.goes_on(both[0])

    def body(both: tuple[State, Trace]) -> tuple[State, Trace]:
        state, trace = both
        after, of_step = extend(state)
        return after, jax.tree.map(lambda every, one: every.at[:, state.cur_index].set(one), trace, of_step)

    init = initial_state(cache, start, rules, beams, required)
    of_step = jax.eval_shape(lambda state: extend(state)[1], init)
    trace = jax.tree.map(lambda x: jnp.zeros((x.shape[0], start.room, *x.shape[1:]), x.dtype), of_step)
    state, trace = lax.while_loop(cond, body, (init, trace))
    return ranked(state, start.limits, rules, beams, required), trace


def _extend(
    state: State,
    step: Step,
    limits: Int[Array, " b"],
    rules: Rules,
    beams: Beams,
    constraints: Constraints | None,
    coverage: Coverage | None,
) -> tuple[State, Trace]:
    """Append one token to every live hypothesis, and store those that end; also return what was chosen from what."""
    # 1. The model tells how probable each token is after each live hypothesis, and the rules forbid some of them.
    logits, cache = step(state.cache, state.live.tokens.reshape(-1))  # [b n] → [rows]
    log_probs = next_log_probs(rules, logits, state.history, state.cur_index)

    # 2. The n best continuations, ends among them, and the n best that do not end: these go on.
    candidates = expand(state.live, log_probs, rules.eos, constraints)
    best, chosen = select(candidates, rules.eos, beams, constraints)
    has_nan = jnp.isnan(candidates.scores).any(axis=(1, 2))
    live = _next_live(state, chosen, has_nan)

    # 3. Those of the best that end compete with the ones that have ended before.
    coverages = None if coverage is None else coverage(cache).reshape(live.scores.shape)  # [rows] → [b n]
    ends = _ends(state, best, coverages, beams, rules.eos)
    finished = keep_best(state.finished, ends, beams.groups)
    num_finished = state.num_finished + ((best.tokens == rules.eos) & (best.scores > -jnp.inf)).sum(axis=1)

    # 4. A sentence is done when nothing better can come, at its limit, or when its scores are no numbers.
    complete = is_complete(finished, num_finished, live.scores, length_penalty(limits, beams), beams)
    at_limit = state.cur_index + 1 >= limits

    # 5. What belongs to a beam, its cache and its history, follows the hypothesis that the beam went on from.
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
    """Return the hypotheses that go on, with the score nan if one was; those of done sentences stay as they are."""

    def keep_done(old: Array, new: Array) -> Array:
        return jnp.where(state.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    scores = jnp.where(has_nan[:, None], jnp.nan, chosen.scores)
    return jax.tree.map(keep_done, state.live, chosen._replace(scores=scores))


def _ends(state: State, best: Continuations, coverages: Float[Array, "b n"] | None, beams: Beams, eos: int) -> Finished:
    """Return the ends among the best candidates, with their final scores; others score -inf.

    `cur_index` tokens precede the end symbol, which counts as one more in the length.
    """
    scores = best.scores / length_penalty(state.cur_index + 1, beams)
    if coverages is not None:
        scores += jnp.take_along_axis(coverages, best.parents, axis=1)
    is_end = (best.tokens == eos) & ~state.done[:, None]
    return Finished(
        scores=jnp.where(is_end, scores, -jnp.inf),
        lengths=jnp.full_like(best.parents, state.cur_index),
        beams=best.parents,
    )


def _append_tokens(history: Int[Array, "rows h"] | None, live: Continuations) -> Int[Array, "rows h"] | None:
    """Append to the history of every beam's parent what the beam chose."""
    if history is None:
        return None
    by_beam = history.reshape(*live.parents.shape, -1)  # [rows h] → [b n h]
    of_parents = jnp.take_along_axis(by_beam, live.parents[..., None], axis=1)
    return append_token(of_parents.reshape(history.shape), live.tokens.reshape(-1))
