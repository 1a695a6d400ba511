"""Greedy search, and the loop that it shares with sampling: one token after another.

Axes: b sentences, v vocabulary, h tokens of history, t tokens; rows = b·n, the n hypotheses of a sentence side by side.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.rules import LogProbs, Rules, append_token, initial_history, next_log_probs
from jformer.decoding.search import Cache, Decoded, SearchLoop, Start, Step

# (log-probabilities under the rules, logits, index of the token) → (what the score gains, the token) of every row
Choose = Callable[[LogProbs, Float[Array, "rows v"], Int[Array, ""]], tuple[Float[Array, " rows"], Int[Array, " rows"]]]


class _State(NamedTuple):
    cur_index: Int[Array, ""]  # of the token to choose, from 0
    cache: Cache
    last: Int[Array, " rows"]  # the token chosen before
    history: Int[Array, "rows h"] | None  # what rules read
    tokens: Int[Array, "t rows"]
    scores: Float[Array, " rows"]
    lengths: Int[Array, " rows"]
    done: Bool[Array, " rows"]


def greedy(step: Step, cache: Cache, start: Start, rules: Rules) -> SearchLoop:
    """Choose the most probable token at every step, until every sentence has ended or reached its limit.

    For use inside jit. The score is the sum of the log-probabilities, without a length penalty; there is one
    hypothesis (n = 1). A sentence for which the rules allow no token has none.

    Args:
        step: (cache, last tokens) → (logits, cache).
        cache: of one row a sentence, with room for `start.room` tokens.
        start: the tokens to continue from, and the limits.
        rules: which tokens may come next.

    >>> probs = jnp.array([[0, 0, 0, 0.6, 0.4], [0, 0, 0.5, 0.5, 0]])  # of the first token, of the second after a 3
    >>> def step(cache, last):
    ...     return jnp.log(probs[cache["position"]]), {**cache, "position": cache["position"] + 1}
    >>> cache = {"position": jnp.zeros(1, jnp.int32), "self": {}}
    >>> start = Start(token=jnp.array([1]), limits=jnp.array([2]), room=2)
    >>> found = greedy(step, cache, start, Rules(eos=2, pad=0)).run()
    >>> found.tokens.tolist(), round(jnp.exp(found.scores).item(), 3)  # 0.6 · 0.5
    ([[[3, 2]]], 0.3)
    """

    def most_probable(
        log_probs: LogProbs, logits: Float[Array, "rows v"], index: Int[Array, ""]
    ) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
        values, tokens = log_probs.top_k(1)
        return values[:, 0], tokens[:, 0]

    return one_by_one(step, cache, start, rules, most_probable, hypotheses=1)


def one_by_one(step: Step, cache: Cache, start: Start, rules: Rules, choose: Choose, hypotheses: int) -> SearchLoop:
    """Append tokens to the hypotheses of every sentence until all have ended or reached their limits.

    Args:
        step: (cache, last tokens) → (logits, cache).
        cache: of one row a hypothesis, with room for `start.room` tokens.
        start: the tokens to continue from, and the limits, of the sentences.
        rules: which tokens may come next.
        choose: picks the next token of every row.
        hypotheses: how many each sentence has.
    """
    limits = jnp.repeat(start.limits, hypotheses)  # [b] → [rows]
    first = jnp.repeat(start.token, hypotheses)

    def append(state: _State) -> _State:
        logits, cache = step(state.cache, state.last)
        log_probs = next_log_probs(rules, logits, state.history, state.cur_index)
        gain, chosen = choose(log_probs, logits, state.cur_index)
        scores = jnp.where(state.done, state.scores, state.scores + gain)
        last = jnp.where(state.done, rules.pad, chosen)
        lengths = state.lengths + ~state.done
        failed = ~(scores > -jnp.inf)  # no token was allowed, or the logits were not finite
        return _State(
            cur_index=state.cur_index + 1,
            cache=cache,
            last=last,
            history=append_token(state.history, last),
            tokens=state.tokens.at[state.cur_index].set(last),
            scores=scores,
            lengths=lengths,
            done=state.done | failed | (last == rules.eos) | (lengths >= limits),
        )

    def stable_prefix(state: _State) -> tuple[Int[Array, "b t"], Int[Array, " b"]]:
        """No token is ever revised; of several hypotheses, the first counts."""
        return state.tokens[:, ::hypotheses].T, state.lengths[::hypotheses]

    return SearchLoop(
        init=_initial_state(cache, start, rules, first, limits),
        cond=start.goes_on,
        body=append,
        result=lambda state: _result(start, rules, state),
        stable_prefix=stable_prefix,
    )


def _result(start: Start, rules: Rules, state: _State) -> Decoded:
    exists = state.scores > -jnp.inf
    tokens = jnp.where(exists, state.tokens, rules.pad).T  # [t rows] → [rows t]
    lengths = jnp.where(exists, state.lengths, 0)
    shape = start.limits.shape[0], state.lengths.shape[0] // start.limits.shape[0]
    return Decoded(
        tokens=tokens.reshape(*shape, start.room),  # → [b n t]
        scores=state.scores.reshape(shape),
        lengths=lengths.reshape(shape),
        done=state.done.reshape(shape).all(axis=1),
    )


def _initial_state(
    cache: Cache, start: Start, rules: Rules, first: Int[Array, " rows"], limits: Int[Array, " rows"]
) -> _State:
    sentences, rows = start.limits.shape[0], limits.shape[0]
    zeros = jnp.zeros(rows, jnp.int32)
    return _State(
        cur_index=jnp.int32(0),
        cache=cache,
        last=first,
        history=initial_history(rules, sentences, rows // sentences, start.room),
        tokens=jnp.full((start.room, rows), rules.pad, jnp.int32),
        scores=zeros.astype(jnp.float32),
        lengths=zeros,
        done=limits <= 0,
    )
