"""Sampling, and the filters that exclude improbable tokens. Depends on a step function, not on models.

Axes: b sentences, v vocabulary, w a chunk of it; rows = b·n, the n samples of a sentence side by side.

A row draws one uniform number for each token, from its own key and the index of the token, and inverts the cumulative
distribution with it. So a sample depends on nothing but its key and its logits, whatever else is in the batch.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.greedy import one_by_one
from jformer.decoding.rules import CHUNK, LogProbs, Rules
from jformer.decoding.search import Cache, SearchLoop, Start, Step


def sample(
    step: Step, cache: Cache, start: Start, rules: Rules, options: DecodeConfig, keys: Key[Array, " rows"]
) -> SearchLoop:
    """Draw one sample for every key.

    For use inside jit. The score is the summed log-probability of the tokens under the model itself, not under what the
    filters leave. A row whose logits are not finite ends with the score nan, without affecting other rows.

    Args:
        step: (cache, last tokens) → (logits, cache).
        cache: of one row a key, with room for `start.room` tokens.
        start: the tokens to continue from, and the limits, of the sentences.
        rules: which tokens may come next; they act before the filters.
        options: the temperature, and which tokens are probable enough.
        keys: of every row; a multiple of the number of sentences.

    >>> probs = jnp.array([[0, 0, 0, 0.7, 0.3], [0, 0, 1, 0, 0]])  # of the first token, of the second
    >>> def step(cache, last):
    ...     return jnp.log(probs[cache["position"]]), {**cache, "position": cache["position"] + 1}
    >>> cache = {"position": jnp.zeros(40, jnp.int32), "self": {}}
    >>> start = Start(token=jnp.array([1]), limits=jnp.array([2]), room=2)
    >>> keys = jax.random.split(jax.random.key(0), 40)
    >>> found = sample(step, cache, start, Rules(eos=2, pad=0), DecodeConfig(search="sample"), keys).run()
    >>> sorted({tuple(tokens) for tokens in found.tokens[0].tolist()})
    [(3, 2), (4, 2)]
    """

    def draw(
        log_probs: LogProbs, logits: Float[Array, "rows v"], index: Int[Array, ""]
    ) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
        allowed = log_probs.dense()
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, index)))(keys)
        kept = apply_filters(allowed, options)
        tokens = inverse_cdf(jnp.exp(kept), uniform)
        gain = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        nothing_allowed = jnp.isneginf(allowed).all(axis=1)
        return jnp.where(nothing_allowed, -jnp.inf, gain), tokens

    return one_by_one(step, cache, start, rules, draw, hypotheses=keys.shape[0] // start.limits.shape[0])


def apply_filters(log_probs: Float[Array, "rows v"], options: DecodeConfig) -> Float[Array, "rows v"]:
    """Return the log-probabilities to draw from, -inf for a token that a filter drops.

    The filters apply one after another, each to what the previous one left, renormalised.
    Equally probable tokens stay or go together, and the most probable ones (of `typical`: the most typical) stay.

    >>> import numpy as np
    >>> log_probs = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    >>> kept = apply_filters(log_probs, DecodeConfig(search="sample", top_p=0.6))  # 0.4 and 0.3 hold 0.6 of the mass
    >>> print(np.exp(kept).round(2))
    [[0.57 0.43 0.   0.  ]]
    """
    best = log_probs.max(axis=1, keepdims=True)
    log_probs = jax.nn.log_softmax((log_probs - best) / options.temperature)
    if options.top_k:  # the k most probable (Fan et al. 2018, section 5.1)
        surprise, k = _surprise(log_probs), float(options.top_k)
        log_probs = _keep(log_probs, surprise <= weighted_quantile(surprise, jnp.ones_like(surprise), k))
    if options.top_p < 1:  # the most probable that hold this mass (Holtzman et al. 2020, section 3.1)
        surprise = _surprise(log_probs)
        log_probs = _keep(log_probs, surprise <= weighted_quantile(surprise, jnp.exp(log_probs), options.top_p))
    if options.min_p > 0:  # those with this share of the largest probability (Nguyen et al. 2024, section 3)
        log_probs = _keep(log_probs, log_probs >= log_probs.max(axis=1, keepdims=True) + jnp.log(options.min_p))
    if options.epsilon > 0:  # those with this probability, or the largest one (Hewitt et al. 2022, section 3)
        most_probable = log_probs == log_probs.max(axis=1, keepdims=True)
        log_probs = _keep(log_probs, (log_probs >= jnp.log(options.epsilon)) | most_probable)
    if options.typical < 1:  # those nearest to the entropy that hold this mass (Meister et al. 2023, section 4)
        surprise, probs = _surprise(log_probs), jnp.exp(log_probs)
        entropy = jnp.where(probs > 0, probs * surprise, 0).sum(axis=1, keepdims=True)
        distance = jnp.abs(surprise - entropy)
        log_probs = _keep(log_probs, distance <= weighted_quantile(distance, probs, options.typical))
    return log_probs


def _keep(log_probs: Float[Array, "rows v"], kept: Bool[Array, "rows v"]) -> Float[Array, "rows v"]:
    """Drop all other tokens and renormalise."""
    return jax.nn.log_softmax(jnp.where(kept, log_probs, -jnp.inf))


def _surprise(log_probs: Float[Array, "rows v"]) -> Float[Array, "rows v"]:
    return jnp.maximum(-log_probs, 0)  # rounding may put the log-probability of a certain token above 0


def weighted_quantile(
    costs: Float[Array, "rows v"], weights: Float[Array, "rows v"], mass: float
) -> Float[Array, "rows 1"]:
    """Return the least bound of every row for which the costs up to it weigh at least `mass`; infinity if none does.

    Costs must not be negative: such floats have the order of their bits, so a bisection over the bits finds the exact
    bound. 31 sums take a fraction of the time of sorting a vocabulary on CPU.

    >>> costs = jnp.array([[3.0, 1.0, 2.0]])
    >>> weighted_quantile(costs, weights=jnp.array([[0.5, 0.2, 0.3]]), mass=0.4).tolist()  # 1 and 2 weigh 0.5
    [[2.0]]
    """
    bits = lax.bitcast_convert_type(costs, jnp.int32)
    infinity = lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)

    def bisect(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the costs up to `low` weigh too little, those up to `high` enough (or all there is)
        middle = low + (high - low) // 2
        weight = jnp.where(bits <= middle, weights, 0).sum(axis=1, keepdims=True)
        enough = weight >= mass
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    shape = costs.shape[0], 1
    bounds = jnp.full(shape, -1), jnp.full(shape, infinity)
    _, bound = lax.fori_loop(0, 31, bisect, bounds)
    return lax.bitcast_convert_type(bound, jnp.float32)


def inverse_cdf(weights: Float[Array, "rows v"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Return each row's first token at which the cumulative share of the weights exceeds `uniform`, in [0, 1).

    The weights are summed in chunks, then within the chunk that is hit: faster and more exact than one long sum. A
    token without weight is never returned, however the sums are rounded.

    >>> inverse_cdf(jnp.array([[0.2, 0.0, 0.8]] * 2), jnp.array([0.1, 0.2])).tolist()
    [0, 2]
    """
    padding = (0, -weights.shape[1] % CHUNK)
    chunks = lax.reduce_window(weights, 0.0, lax.add, (1, CHUNK), (1, CHUNK), ((0, 0), padding))  # [rows v] → [rows c]
    target = uniform * chunks.sum(axis=1)
    chunk = _first_above(chunks, target)[:, None]
    before = jnp.where(jnp.arange(chunks.shape[1]) < chunk, chunks, 0).sum(axis=1)
    tokens = chunk * CHUNK + jnp.arange(CHUNK)  # [rows w]
    inside = jnp.take_along_axis(weights, tokens, axis=1, mode="fill", fill_value=0)
    return chunk[:, 0] * CHUNK + _first_above(inside, target - before)


def _first_above(weights: Float[Array, "rows w"], target: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Return the first index, of those with weight, whose cumulative sum is above the target."""
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=1), -jnp.inf)
    last = sums == sums.max(axis=1, keepdims=True)  # for a target that rounding put beyond all sums
    return jnp.argmax((sums > target[:, None]) | last, axis=1).astype(jnp.int32)
