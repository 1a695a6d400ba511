"""Losses as sums and counts, never means: a mean is taken once, after all devices and microbatches are summed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Sums = dict[str, tuple[Array, Array]]
"""Name → (sum, count), both float32 scalars; sums of different rows, devices and batches just add."""


def cross_entropy(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], weights: Float[Array, "b t"], smoothing: float = 0.0
) -> Sums:
    """Return `loss` (label-smoothed cross-entropy), `nll` (without smoothing) and `correct`, summed over tokens.

    The smoothed target distribution gives 1 - ε to the target and spreads ε evenly over all v entries (Szegedy et
    al. 2016, section 7), so the loss has a closed form: logsumexp(z) - (1 - ε)·z_target - ε·mean(z). No distribution
    over the vocabulary is built. Weights are 0 for padding, else 1; a sum over no tokens is 0.
    """
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    # A fused select-and-reduce: unlike a gather, its gradient is no scatter, which CPUs and TPUs run slowly.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    nll = normalizer - target
    loss = nll + smoothing * (target - logits.mean(axis=-1)) if smoothing else nll
    correct = target >= jax.lax.stop_gradient(logits).max(axis=-1)
    tokens = weights.sum()
    sums = {"loss": loss, "nll": nll, "correct": correct}
    return {name: (jnp.sum(value * weights), tokens) for name, value in sums.items()}
