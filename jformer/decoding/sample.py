"""Samples from a model, with the filters that keep them from unlikely tokens. Knows a step function, and no model.

A row draws one uniform number for each token, from its own key and the place of the token, and reads the token off
the cumulative distribution. So a sample depends on nothing but its key and its logits, whatever else is in the batch.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jformer.decoding.cache import Cache, Step
from jformer.decoding.greedy import NO_RULES, go_on
from jformer.decoding.rules import Rules, Weighed
from jformer.decoding.tokens import CHUNK, Decoded


def sample(
    step: Step,
    cache: Cache,
    *,
    first: Int[Array, "b"],
    keys: Key[Array, "rows"],
    max_lengths: Int[Array, "b"],
    length: int,
    eos: int,
    pad: int,
    spare: int | Int[Array, ""] = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    epsilon: float = 0.0,
    typical: float = 1.0,
    rules: Rules = NO_RULES,
) -> Decoded:
    """Draw one sample for every key; the rows of a sentence, as many for each, lie side by side.

    For use inside jit; `first`, `max_lengths`, `length`, `spare` and the room of `cache` are as for greedy search.
    Rules come first, then what `narrow` does. The score is the summed log-probability of the tokens under the model
    itself, not under what was left to draw from. Not a number in its logits ends a single row.
    """

    def draw(
        weighed: Weighed, logits: Float[Array, "rows v"], now: Int[Array, ""]
    ) -> tuple[Float[Array, "rows"], Int[Array, "rows"]]:
        log_probs = weighed.all()
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, now)))(keys)
        kept = narrow(
            log_probs,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            epsilon=epsilon,
            typical=typical,
        )
        tokens = pick(jnp.exp(kept), uniform)
        gain = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        return jnp.where(jnp.isneginf(log_probs).all(axis=1), -jnp.inf, gain), tokens

    rows = keys.shape[0] // max_lengths.shape[0]
    return go_on(
        step, cache, draw, rows,
        first=first, max_lengths=max_lengths, length=length, eos=eos, pad=pad, spare=spare, rules=rules,
    )  # fmt: skip


def narrow(
    log_probs: Float[Array, "rows v"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    epsilon: float,
    typical: float,
) -> Float[Array, "rows v"]:
    """Return the log-probabilities to draw from, -inf for a token that a filter drops.

    The filters follow each other in the order of their arguments, each on what the one before has left, normalised
    again. Tokens that are equally likely stay or go together, and the likeliest (of `typical`: the most typical) stay.

    Source: top_k Fan et al. 2018, section 5.1 · top_p Holtzman et al. 2020, section 3.1 · min_p Nguyen et al. 2024,
    section 3 · epsilon Hewitt et al. 2022, section 3 · typical Meister et al. 2023, section 4.
    """
    best = log_probs.max(axis=1, keepdims=True)
    log_probs = jax.nn.log_softmax((log_probs - best) / temperature)
    if top_k:
        surprise = _surprise(log_probs)
        log_probs = _keep(log_probs, surprise <= least(surprise, jnp.ones_like(surprise), float(top_k)))
    if top_p < 1:
        surprise = _surprise(log_probs)
        log_probs = _keep(log_probs, surprise <= least(surprise, jnp.exp(log_probs), top_p))
    if min_p > 0:
        log_probs = _keep(log_probs, log_probs >= log_probs.max(axis=1, keepdims=True) + jnp.log(min_p))
    if epsilon > 0:
        likeliest = log_probs == log_probs.max(axis=1, keepdims=True)
        log_probs = _keep(log_probs, (log_probs >= jnp.log(epsilon)) | likeliest)
    if typical < 1:
        surprise, probs = _surprise(log_probs), jnp.exp(log_probs)
        entropy = jnp.where(probs > 0, probs * surprise, 0).sum(axis=1, keepdims=True)
        distance = jnp.abs(surprise - entropy)
        log_probs = _keep(log_probs, distance <= least(distance, probs, typical))
    return log_probs


def _surprise(log_probs: Float[Array, "rows v"]) -> Float[Array, "rows v"]:
    return jnp.maximum(-log_probs, 0)  # rounding puts the log-probability of a sure token above 0


def _keep(log_probs: Float[Array, "rows v"], kept: Bool[Array, "rows v"]) -> Float[Array, "rows v"]:
    return jax.nn.log_softmax(jnp.where(kept, log_probs, -jnp.inf))


def least(costs: Float[Array, "rows v"], weights: Float[Array, "rows v"], mass: float) -> Float[Array, "rows 1"]:
    """Return the least bound of every row such that the costs up to it weigh at least `mass`; infinity if none does.

    Costs must not be negative: such floats are ordered as their bits are, so halving the range of the bits finds the
    bound to the last of them. 31 sums take a fraction of the time of sorting a vocabulary on CPU.
    """
    bits = lax.bitcast_convert_type(costs, jnp.int32)
    infinity = lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # too little weighs up to `low`, enough (or all there is) up to `high`
        middle = low + (high - low) // 2
        enough = jnp.where(bits <= middle, weights, 0).sum(axis=1, keepdims=True) >= mass
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    shape = costs.shape[0], 1
    bounds = jnp.full(shape, -1), jnp.full(shape, infinity)
    return lax.bitcast_convert_type(lax.fori_loop(0, 31, halve, bounds)[1], jnp.float32)


def pick(weights: Float[Array, "rows v"], uniform: Float[Array, "rows"]) -> Int[Array, "rows"]:
    """Return the first token of every row up to which more than that share (in [0, 1)) of the weights lies.

    The weights are summed in chunks, then within the chunk that is hit: quicker and more exact than one long sum.
    A token without weight is never returned, however the sums are rounded.
    """
    window = ((1, CHUNK), (1, CHUNK), ((0, 0), (0, -weights.shape[1] % CHUNK)))
    chunks = lax.reduce_window(weights, 0.0, lax.add, *window)
    target = uniform * chunks.sum(axis=1)
    chunk = _first_above(chunks, target)[:, None]
    before = jnp.where(jnp.arange(chunks.shape[1]) < chunk, chunks, 0).sum(axis=1)
    tokens = chunk * CHUNK + jnp.arange(CHUNK)
    inside = jnp.take_along_axis(weights, tokens, axis=1, mode="fill", fill_value=0)
    return chunk[:, 0] * CHUNK + _first_above(inside, target - before)


def _first_above(weights: Float[Array, "rows w"], target: Float[Array, "rows"]) -> Int[Array, "rows"]:
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=1), -jnp.inf)
    last = sums == sums.max(axis=1, keepdims=True)  # for a target that rounding has put beyond all sums
    return jnp.argmax((sums > target[:, None]) | last, axis=1).astype(jnp.int32)
