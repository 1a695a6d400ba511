"""Losses as sums and counts, never means: the one division comes after summing over devices and microbatches.

Letters in shapes: b rows of a batch, t positions, s those of a source, d d_model, v entries of the vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.data.spans import END, MAY_END, MAY_START, START
from jformer.models.layers.dot_product import join_exponentials
from jformer.models.layers.linear import rounded_logits
from jformer.models.layers.matmul import apart, gradient_by_hand
from jformer.parallel.activations import parts
from jformer.parallel.backend import target
from jformer.parallel.chunks import cut, even_size, join
from jformer.parallel.mesh import FSDP, TENSOR
from jformer.parallel.sharding import data_part, gather_over_data
from jformer.tasks.sums import Scalar, Sum, Sums

Project = Callable[[Array], Array]
"""The projection of hidden states [b t d] to logits [b t v]."""

Values = dict[str, Array]
"""Name of a loss or metric → its value at each position."""

CHUNK = {  # logits that a device computes at a time
    "cpu": 2**21,  # small enough for the cache of a core
    "tpu": 2**29,  # because each chunk reads and writes the gradient of the whole table
}
LARGE_CHUNK = 2**26  # for other accelerators: large enough to keep them busy
NOWHERE = -1e30  # the logit of a non-candidate; finite, as a microbatch may have no candidate at all


def cross_entropy(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"], smoothing: float = 0.0
) -> Sums:
    """Return `loss` (label-smoothed cross-entropy), `nll` (without smoothing) and `correct`, summed over tokens.

    The smoothed target distribution gives 1 - ε to the target and spreads ε evenly over all v entries (Szegedy et
    al. 2016, section 7), so the loss has a closed form: logsumexp(z) - (1 - ε)·z_target - ε·mean(z). No distribution
    over the vocabulary is built. Weights are 0 for padding, else 1; a sum over no tokens is 0.
    """
    return _weighted_sums(_values_and_slope(logits, targets, weights, smoothing)[0], weights)


def binary_cross_entropy(
    logits: Float[Array, "b v"], there: Int[Array, "b v"], weights: Float[Array, "b v"], smoothing: float = 0.0
) -> Sums:
    """Return the sums of `cross_entropy` for v independent labels that are present (1) or absent (0).

    Smoothing ε turns the target 1 into 1 - ε/2 and 0 into ε/2.
    """
    z = logits.astype(jnp.float32)
    yes, no = -jax.nn.log_sigmoid(z), -jax.nn.log_sigmoid(-z)
    given = there * (1 - smoothing) + smoothing / 2
    values = {
        "loss": given * yes + (1 - given) * no,
        "nll": jnp.where(there > 0, yes, no),
        "correct": (z > 0) == (there > 0),
    }
    return _weighted_sums(values, weights)


def squared_error(found: Float[Array, "b t"], wanted: Float[Array, "b t"], weights: Float[Array, "b t"]) -> Sums:
    """Return the sum of squared differences as `loss`."""
    return {"loss": Sum(jnp.sum((found.astype(jnp.float32) - wanted) ** 2 * weights), weights.sum())}


def contrastive(
    vectors: Float[Array, "b 2 d"], weights: Float[Array, " b"], temperature: float, smoothing: float = 0.0
) -> Sums:
    """Return `loss`, `nll` and `correct` for finding the second vector of every pair among those of all pairs.

    "All pairs" includes all devices: a microbatch of the whole update. The probability of a second vector is the
    softmax of its cosines with a first vector, divided by the temperature (van den Oord et al. 2018, equation 4, with
    the pairs of the batch as in Henderson et al. 2017, section 4.2). Smoothing spreads over all of them.

    Args:
        vectors: of each pair; normalized to unit length.
        weights: 0 for a row without a pair, which is not a candidate either, else 1.
        temperature: above 0.
        smoothing: as in `cross_entropy`.
    """
    unit = normalized(vectors.astype(jnp.float32))
    others, there = gather_over_data(unit[:, 1]), gather_over_data(weights) > 0  # [n d], [n]
    cosines = jnp.einsum("bd,nd->bn", unit[:, 0], others, precision="highest")
    log_probs = jax.nn.log_softmax(jnp.where(there, cosines / temperature, NOWHERE))
    first = 0 if (part := data_part()) is None else part * len(unit)
    own = first + jnp.arange(len(unit))
    nll = -jnp.take_along_axis(log_probs, own[:, None], axis=1)[:, 0]
    spread = -jnp.where(there, log_probs, 0.0).sum(axis=1) / there.sum().clip(1)
    values = {
        "loss": (1 - smoothing) * nll + smoothing * spread,
        "nll": nll,
        "correct": log_probs.argmax(axis=1) == own,
    }
    return _weighted_sums(values, weights)


def normalized(vectors: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Normalize vectors to unit Euclidean length; a zero vector stays zero."""
    return vectors / jnp.sqrt((vectors**2).sum(axis=-1, keepdims=True).clip(1e-24))


def span_log_probs(logits: Float[Array, "b s 2"], marks: Int[Array, "b s"]) -> Float[Array, "b s 2"]:
    """Return the log-probability of every position to be the start of the answer, and to be its end.

    Positions that the marks (`data.spans`) forbid have -inf; a row without an example is uniform.
    """
    allowed = jnp.stack([(marks & MAY_START) > 0, (marks & MAY_END) > 0], axis=-1)  # [b s 2]
    empty = ~jnp.any(marks > 0, axis=1)[:, None, None]  # [b 1 1]
    z = jnp.where(empty, 0.0, jnp.where(allowed, logits.astype(jnp.float32), -jnp.inf))
    return jax.nn.log_softmax(z, axis=1)


def span_cross_entropy(logits: Float[Array, "b s 2"], marks: Int[Array, "b s"], smoothing: float = 0.0) -> Sums:
    """Return `loss`, `nll` and `correct` of the starts and ends of answers, summed over the rows with an example.

    A row's loss and nll are the means over both (Devlin et al. 2019, section 4.2), and it is correct if both are.
    Smoothing spreads over the positions that the marks allow.
    """
    log_probs = span_log_probs(logits, marks)
    real = jnp.any(marks > 0, axis=1)  # [b]
    given = jnp.stack([(marks & START) > 0, (marks & END) > 0], axis=-1)  # [b s 2]
    allowed = jnp.isfinite(log_probs)
    finite = jnp.where(allowed, log_probs, 0.0)
    nll = -(finite * given).sum(axis=1)  # [b s 2] → [b 2]
    loss = (1 - smoothing) * nll - smoothing * finite.sum(axis=1) / allowed.sum(axis=1)
    correct = (log_probs.argmax(axis=1) == given.argmax(axis=1)).all(axis=-1)
    values = {"loss": loss.mean(axis=-1), "nll": nll.mean(axis=-1), "correct": correct}
    return {name: Sum(jnp.sum(value * real), real.sum().astype(jnp.float32)) for name, value in values.items()}


def chunked_cross_entropy(
    hidden: Float[Array, "b t d"],
    project: Project,
    targets: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    smoothing: float = 0.0,
) -> Sums:
    """Return the sums of `cross_entropy(project(hidden), …)` without ever holding all logits [b t v].

    Logits are computed, scored and differentiated for a few positions of all rows at a time. The forward pass also
    computes the gradient of the sum of `loss` with respect to the hidden states and the parameters that `project`
    closes over, so that nothing the size of a vocabulary is kept for the backward pass or computed twice. Gradients of
    other sums, or with respect to the weights, recompute the logits.

    Args:
        hidden: the hidden states of all positions.
        project: (hidden states of some positions) → their logits, position by position.
        targets: the id or class at each position.
        weights: of each position; 0 where nothing is predicted.
        smoothing: the share of a target's probability that is spread over the vocabulary.
    """
    b, t, _ = hidden.shape
    length = _positions_at_once(b, t, jax.eval_shape(project, hidden[:, :1]).shape[-1])
    accelerated = target().platform != "cpu"
    with rounded_logits(accelerated):  # logits go through memory: bfloat16 halves the bytes, as in Flax's wmt example
        # As arguments, the arrays that `project` closes over have gradients too.
        project_with, captured = jax.closure_convert(project, hidden[:, :length])

    def by_jax(hidden: Array, params: list[Array], targets: Any, weights: Any) -> Sums:
        def score(h: Array, y: Any, w: Array) -> tuple[None, Values]:
            return None, _values_and_slope(project_with(h, *params), y, w, smoothing)[0]

        _, values = _over_positions(jax.checkpoint(score), length, hidden, targets, weights)
        return _weighted_sums(values, weights)

    def forward(*primals: Any) -> tuple[Sums, Any]:
        hidden, params, targets, weights = arguments = jax.tree.map(lambda primal: primal.value, primals)

        def differentiate(h: Array, y: Array, w: Array) -> tuple[list[Array], tuple[Values, Array]]:
            logits, pull_back = jax.vjp(project_with, h, *params)
            values, slope = _values_and_slope(logits, y, w, smoothing, one_pass=accelerated)
            dh, *dparams = pull_back(slope.astype(logits.dtype))
            return dparams, (values, dh)

        dparams, (values, dh) = _over_positions(differentiate, length, hidden, targets, weights)
        by_weights = () if primals[3].perturbed else None  # a Python value, known when the gradient is traced
        return _weighted_sums(values, weights), ((dh, dparams), arguments, by_weights)

    def backward(saved: Any, slopes: Sums) -> Any:
        gradient, arguments, by_weights = saved
        slope = slopes["loss"].total
        if by_weights is None and all(x is slope or _is_zero(x) for x in jax.tree.leaves(slopes)):
            return *jax.tree.map(lambda x: (x * slope).astype(x.dtype), gradient), None, None
        _, pull_back = jax.vjp(by_jax, *arguments)
        return pull_back(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x, slopes))

    with jax.named_scope("loss"):
        return gradient_by_hand(forward, backward, zeros=True)(by_jax)(hidden, captured, targets, weights)


def _is_zero(slope: object) -> bool:
    return isinstance(slope, jax.custom_derivatives.SymbolicZero)


def divergence(
    first: Float[Array, "b t d"], second: Float[Array, "b t d"], project: Project, weights: Float[Array, "b t"]
) -> Scalar:
    """Return KL(p‖q) + KL(q‖p) of the predictions p and q of two passes, in nats, summed over weighted positions.

    A few positions of all rows are projected at a time, and again in the backward pass.
    """
    b, t, _ = first.shape
    vocabulary = jax.eval_shape(project, first[:, :1]).shape[-1]

    def of_chunk(both: tuple[Array, Array]) -> Array:
        p, q = (jax.nn.log_softmax(project(hidden).astype(jnp.float32)) for hidden in both)
        return ((jnp.exp(p) - jnp.exp(q)) * (p - q)).sum(axis=-1)

    length = _positions_at_once(b, t, vocabulary)
    chunks = cut(first, 1, length), cut(second, 1, length)
    return jnp.sum(join(lax.map(jax.checkpoint(of_chunk), chunks), t) * weights)


def _positions_at_once(rows: int, positions: int, vocabulary: int) -> int:
    chunk = CHUNK.get(target().platform, LARGE_CHUNK) * parts(FSDP, TENSOR)
    return even_size(positions, min(max(chunk // (rows * vocabulary), 1), positions))


def _weighted_sums(values: Values, weights: Array) -> Sums:
    tokens = weights.sum()
    return {name: Sum(jnp.sum(value * weights), tokens) for name, value in values.items()}


def _values_and_slope(
    logits: Array, targets: Array, weights: Array, smoothing: float, one_pass: bool = False
) -> tuple[Values, Array]:
    """Return `loss`, `nll` and `correct` of each position, and the gradient of their weighted loss, float32 [b t v].

    The gradient is with respect to the logits. `one_pass` reduces them in one pass, which JAX cannot differentiate.
    """
    z, v = logits.astype(jnp.float32), logits.shape[-1]
    # XLA fuses a comparison, and devices that share the vocabulary can compute it. Neither holds for a gather; its
    # gradient is a scatter, which is slow on CPUs and TPUs.
    is_target = jnp.arange(v) == targets[..., None]
    reduce = reduce_in_one_pass if one_pass else reduce_in_passes
    highest, predicted, partition, target_logit, total = reduce(z, is_target)
    nll = highest + jnp.log(partition) - target_logit
    loss = nll + smoothing * (target_logit - total / v) if smoothing else nll
    given = jnp.where(is_target, 1 - smoothing + smoothing / v, smoothing / v)
    slope = jnp.exp(z - highest[..., None]) * (weights / partition)[..., None] - given * weights[..., None]
    return {"loss": loss, "nll": nll, "correct": predicted == targets}, slope


class Reduced(NamedTuple):
    """What the loss needs from the logits z [b t v], per position [b t]."""

    highest: Array
    predicted: Array  # the first index of the highest: a tie does not count as correct; v where there is a NaN
    partition: Array  # the sum of exp(z - highest)
    target_logit: Array
    total: Array


def reduce_in_passes(z: Float[Array, "b t v"], is_target: Bool[Array, "b t v"]) -> Reduced:
    """Reduce the logits in a form that JAX can differentiate and that is fast on CPUs."""
    v = z.shape[-1]
    highest = lax.stop_gradient(z.max(axis=-1))
    return Reduced(
        highest=highest,
        predicted=jnp.where(z >= highest[..., None], jnp.arange(v), v).min(axis=-1),  # XLA fuses it, but no argmax
        partition=jnp.exp(z - highest[..., None]).sum(axis=-1),
        target_logit=jnp.where(is_target, z, 0).sum(axis=-1),
        total=z.sum(axis=-1),
    )


def reduce_in_one_pass(z: Float[Array, "b t v"], is_target: Bool[Array, "b t v"]) -> Reduced:
    """Reduce the logits in a single read, where XLA reads them two to four times."""
    v = z.shape[-1]

    def combine(left: Sequence[Array], right: Sequence[Array]) -> Reduced:
        a, b = Reduced(*left), Reduced(*right)
        highest, partition = join_exponentials(a.highest, a.partition, b.highest, b.partition)
        lower, higher = a.highest < b.highest, a.highest > b.highest
        tied = jnp.where(a.highest == b.highest, jnp.minimum(a.predicted, b.predicted), v)
        return Reduced(
            highest=highest,
            predicted=jnp.where(higher, a.predicted, jnp.where(lower, b.predicted, tied)),
            partition=partition,
            target_logit=a.target_logit + b.target_logit,
            total=a.total + b.total,
        )

    places = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    each = (z, places, jnp.ones_like(z), jnp.where(is_target, z, 0), z)
    of_none = (jnp.finfo(z.dtype).min, v, 0, 0, 0)
    start = tuple(jnp.asarray(x, array.dtype) for x, array in zip(of_none, each, strict=True))
    return Reduced(*lax.reduce(each, start, combine, (z.ndim - 1,)))


def _over_positions(visit: Callable[..., Any], length: int, *arrays: Any) -> tuple[Any, Any]:
    """Apply `visit` to arrays [b t ·], `length` positions at a time; the last are padded with zeros.

    A visit returns values to sum over all visits, and values [b length ·] to join along the positions.
    """
    chunks = [cut(x, 1, length) for x in arrays]

    def step(total: Any, chunk: Any) -> tuple[Any, Any]:
        total, chunk = apart((total, chunk))  # in turn, to hold the logits of just one
        summed, joined = visit(*chunk)
        return jax.tree.map(jnp.add, total, summed), joined

    first = [x[0] for x in chunks]
    if target().platform != "gpu":
        summed, _ = jax.eval_shape(visit, *first)
        total, joined = lax.scan(step, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), summed), chunks)
    else:  # whose compiler hoists nothing out of a loop: unrolled, visits share a rounded table
        total, joined = visit(*first)
        joined = jax.tree.map(lambda x: x[None], joined)
        if len(chunks[0]) > 1:
            total, following = lax.scan(step, total, [x[1:] for x in chunks], unroll=8)
            joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), joined, following)
    return total, jax.tree.map(lambda x: join(x, arrays[0].shape[1]), joined)
