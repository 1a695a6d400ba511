"""The norms of sublayers, stacks and embeddings: layer norm and RMSNorm, with float32 statistics.

Axes: d features.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jformer import plugins
from jformer.models.layers.layer_scan import recomputed
from jformer.models.layers.matmul import apart, gradient_by_hand
from jformer.models.model_config import ModelConfig
from jformer.parallel.backend import target


class Kind(NamedTuple):
    """Which norm."""

    centred: bool  # layer norm (Ba et al. 2016), not RMSNorm (Zhang and Sennrich 2019)
    epsilon: float
    dtype: str  # of the result


def make_norm(config: ModelConfig) -> nn.Module:
    """Build a norm with float32 statistics and an output in the compute dtype, or call a user-defined function."""
    norm: nn.Module = plugins.find("model.norm_type", config.norm_type, NORMS)(config)
    return norm


class Norm(nn.Module):
    """A norm with a learned float32 scale [d] and, maybe, bias [d]."""

    kind: Kind
    use_bias: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Normalize the last axis."""
        scale = self.param("scale", nn.initializers.ones_init(), x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros_init(), x.shape[-1:]) if self.use_bias else None
        if target().platform == "gpu":
            return normalize(x, scale, bias, self.kind)
        return recomputed(lambda x, scale, bias: _normalize(x, scale, bias, self.kind))(x, scale, bias)


NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "layernorm": lambda c: Norm(Kind(True, c.norm_epsilon, c.dtype), c.bias),
    "rmsnorm": lambda c: Norm(Kind(False, c.norm_epsilon, c.dtype), use_bias=False),
}


def _normalize(x: Array, scale: Array, bias: Array | None, kind: Kind) -> Array:
    z = x.astype(jnp.float32)
    mean = z.mean(-1, keepdims=True) if kind.centred else 0.0
    centred = z - mean
    variance = jnp.square(centred).mean(-1, keepdims=True)
    if target().platform == "cpu":  # slower, but rounds gradients like Flax, so earlier runs can be reproduced
        centred = z - mean
    y = centred * (lax.rsqrt(variance + kind.epsilon) * scale)
    return (y if bias is None else y + bias).astype(kind.dtype)


def _forward(x: Array, scale: Array, bias: Array | None, kind: Kind) -> tuple[Array, tuple[Array | None, ...]]:
    return _normalize(x, scale, bias, kind), (x, scale, bias)


def _backward(kind: Kind, saved: tuple[Array, Array, Array | None], g: Array) -> tuple[Array, Array, Array | None]:
    x, scale, bias = apart(saved)
    (dx,) = jax.vjp(lambda x: _normalize(x, scale, bias, kind), x)[1](g)
    mean, squares = _moments(x, kind.centred)
    z, g = x.astype(jnp.float32), g.astype(jnp.float32)
    rows = tuple(range(x.ndim - 1))
    d_scale = (g * (z - mean) * lax.rsqrt(squares / x.shape[-1] + kind.epsilon)).sum(rows)
    return dx, d_scale, None if bias is None else g.sum(rows)


@gradient_by_hand(_forward, _backward, static=(3,))
def normalize(
    x: Float[Array, "*b d"], scale: Float[Array, " d"], bias: Float[Array, " d"] | None, kind: Kind
) -> Float[Array, "*b d"]:
    """Normalize the last axis, for GPUs: keep only x for the gradients; one kernel sums those of scale and bias.

    To sum the scale's gradient, XLA would write the normalized x times g in float32. Given the moments of x, which a
    kernel recomputes, it multiplies while summing.
    """
    return _normalize(x, scale, bias, kind)


def _moments(x: Float[Array, "*b d"], centred: bool) -> tuple[Float[Array, "*b 1"] | float, Float[Array, "*b 1"]]:
    """Return means, or 0, and sums of squared differences from them, in one pass (Chan et al. 1983, section 2)."""
    z = x.astype(jnp.float32)
    if not centred:
        return 0.0, apart((z * z).sum(-1, keepdims=True))

    def join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        n, difference = a[0] + b[0], b[1] - a[1]
        share = b[0] / jnp.maximum(n, 1)
        return n, a[1] + difference * share, a[2] + b[2] + difference**2 * a[0] * share

    each = jnp.ones_like(z), z, jnp.zeros_like(z)  # counts, means and sums
    _, mean, squares = lax.reduce(each, (jnp.float32(0),) * 3, join, (z.ndim - 1,))
    return apart((mean[..., None], squares[..., None]))
