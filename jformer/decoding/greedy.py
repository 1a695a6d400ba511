"""Greedy search, and the loop it shares with sampling: one token after another, and no hypothesis is ever given up."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.cache import Cache, Step
from jformer.decoding.rules import Rules, Weighed, say, start_history, weigh
from jformer.decoding.tokens import Decoded

NO_RULES = Rules()
# (what each token counts under the rules, logits, place) → (what the score gains, the token) of every row
Choose = Callable[[Weighed, Float[Array, "rows v"], Int[Array, ""]], tuple[Float[Array, "rows"], Int[Array, "rows"]]]


class _Search(NamedTuple):
    now: Int[Array, ""]  # the place of the token to choose, counted from 0
    cache: Cache
    last: Int[Array, "rows"]  # the token chosen before
    history: Int[Array, "rows h"] | None  # what rules read
    tokens: Int[Array, "t rows"]
    score: Float[Array, "rows"]
    lengths: Int[Array, "rows"]
    done: Bool[Array, "rows"]


def greedy(
    step: Step,
    cache: Cache,
    *,
    first: Int[Array, "b"],
    max_lengths: Int[Array, "b"],
    length: int,
    eos: int,
    pad: int,
    spare: int | Int[Array, ""] = 0,
    rules: Rules = NO_RULES,
) -> Decoded:
    """Choose the likeliest token again and again until every sentence has ended or reached its limit.

    For use inside jit. `cache` has one row a sentence and room for `length` tokens; `first` is the token to go on from,
    `max_lengths` are the sentences' own limits of what is chosen, 0 for a sentence that is only there to fill the
    batch; one that is above `length` may be left undone, and so are the last `spare` rows to end. Padding is never
    chosen. A sentence whose rules leave no token has no hypothesis.
    The score is the sum of the log-probabilities, without a length penalty; there is one hypothesis (n = 1).
    """

    def likeliest(
        weighed: Weighed, logits: Float[Array, "rows v"], now: Int[Array, ""]
    ) -> tuple[Float[Array, "rows"], Int[Array, "rows"]]:
        values, tokens = weighed.best(1)
        return values[:, 0], tokens[:, 0]

    return go_on(
        step, cache, likeliest, 1,
        first=first, max_lengths=max_lengths, length=length, eos=eos, pad=pad, spare=spare, rules=rules,
    )  # fmt: skip


def go_on(
    step: Step,
    cache: Cache,
    choose: Choose,
    rows: int,
    *,
    first: Int[Array, "b"],
    max_lengths: Int[Array, "b"],
    length: int,
    eos: int,
    pad: int,
    spare: int | Int[Array, ""],
    rules: Rules,
) -> Decoded:
    """Let `choose` add tokens to `rows` hypotheses of every sentence until all have ended or reached their limit."""
    first, max_lengths = jnp.repeat(first, rows), jnp.repeat(max_lengths, rows)

    def grow(search: _Search) -> _Search:
        logits, cache = step(search.cache, search.last)
        weighed = weigh(rules, logits, search.history, search.now, eos, pad)
        gain, tokens = choose(weighed, logits, search.now)
        score = jnp.where(search.done, search.score, search.score + gain)
        last = jnp.where(search.done, pad, tokens)
        lengths = search.lengths + ~search.done
        lost = ~(score > -jnp.inf)  # no token was allowed, or the logits were not finite
        done = search.done | lost | (last == eos) | (lengths >= max_lengths)
        written = search.tokens.at[search.now].set(last)
        return _Search(search.now + 1, cache, last, say(search.history, last), written, score, lengths, done)

    sentences = max_lengths.shape[0] // rows
    zeros = jnp.zeros(max_lengths.shape[0], jnp.int32)
    start = _Search(
        now=jnp.int32(0),
        cache=cache,
        last=first,
        history=start_history(rules, sentences, rows, length, pad),
        tokens=jnp.full((length, *zeros.shape), pad, jnp.int32),
        score=zeros.astype(jnp.float32),
        lengths=zeros,
        done=max_lengths <= 0,
    )
    end = lax.while_loop(lambda search: (search.now < length) & ((~search.done).sum() > spare), grow, start)
    exists = end.score > -jnp.inf
    tokens = jnp.where(exists, end.tokens, pad).T
    shape = sentences, rows
    lengths = jnp.where(exists, end.lengths, 0).reshape(shape)
    done = end.done.reshape(shape).all(axis=1)
    return Decoded(tokens.reshape(*shape, length), end.score.reshape(shape), lengths, done)
