"""Positions: added to embeddings, rotating queries and keys, or biasing attention scores.

    sinusoidal  added to the embeddings (Vaswani et al. 2017, section 3.5)
    learned     a table of max_length rows, added to the embeddings (Gehring et al. 2017)
    relative    a learned bias for each head and bucket of distances, shared by all layers (Raffel et al. 2020)
    rotary      queries and keys rotated by their position (Su et al. 2021)
    alibi       a fixed bias that falls with the distance (Press et al. 2022)
    transformer_xl  sinusoids of the distance as further keys, in each layer (Dai et al. 2019): see that module
    none        no position at all; a causal stack still knows order through its mask (Haviv et al. 2022)

Only self-attention uses positions; between decoder and encoder there is no distance.

Axes: b rows, t query positions, s key positions, h heads, k size of a query and key, a any axes.
"""

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jformer.models.layers.initializers import table_init
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import own_heads


def sinusoids(length: int, d_model: int, first: int = 0) -> np.ndarray | Array:
    """Return the table float32 [length d_model] of Vaswani et al. 2017, section 3.5, from position `first` on.

    Feature 2i of position p is sin(p / 10000^(2i / d_model)), feature 2i + 1 its cosine: sines and cosines
    alternate, unlike implementations that put all sines first. The result is a NumPy array, unless an exported program
    leaves the length symbolic.
    """
    xp: Any = np if isinstance(length, int) else jnp
    rates = 10_000.0 ** (-np.arange(0, d_model, 2) / d_model)
    angles = (xp.arange(length) + first)[:, None] * rates
    return xp.stack([xp.sin(angles), xp.cos(angles)], axis=-1).reshape(length, d_model).astype(np.float32)


def apply_rotary(x: Float[Array, "b t h k"], positions: Int[Array, "b t"]) -> Float[Array, "b t h k"]:
    """Rotate pairs of features by angles proportional to the position (Su et al. 2021, equation 34).

    Feature i is paired with i + k/2, not with its neighbour: the same up to the order of the features.
    """
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * rates  # [b t 1 k/2]
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [b t h k] → two [b t h k/2]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def relative_buckets(
    distance: Int[Array, " *a"], num_buckets: int, max_distance: int, causal: bool
) -> Int[Array, " *a"]:
    """Map distances (key position minus query position) to buckets, as in Raffel et al. 2020, section 2.1.

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`. Causal stacks
    use all buckets for the past; others split them by direction.
    """
    number = jnp.zeros_like(distance)
    if causal:
        distance = jnp.maximum(-distance, 0)
    else:
        num_buckets //= 2
        number = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    exact = num_buckets // 2
    growth = (num_buckets - exact) / math.log(max_distance / exact)
    far = exact + (jnp.log(jnp.maximum(distance, exact) / exact) * growth).astype(jnp.int32)
    return number + jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of each head, float32 [h] (Press et al. 2022, section 3, and their code for other than 2^n)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return np.array([*slopes, *between][:num_heads], np.float32)


class PositionBias(nn.Module):
    """The bias that a stack adds to its attention scores, the same in every layer: a learned table or fixed slopes."""

    config: ModelConfig
    causal: bool

    @nn.compact
    def __call__(self, query: Int[Array, "b t"], key: Int[Array, "b s"]) -> Float[Array, "b h t s"]:
        """Return the bias of every head that this device attends with, for positions of queries and keys."""
        c, own = self.config, own_heads(self.config.num_heads, self.config.kv_heads)
        distance = key[:, None] - query[..., None]  # [b t s]
        if c.positions == "alibi":
            slopes = jnp.asarray(alibi_slopes(c.num_heads))[own, None, None]  # [h 1 1]
            return -jnp.abs(distance)[:, None] * slopes  # [b h t s]
        shape = (c.relative.num_buckets, c.num_heads)
        table = self.param("embedding", table_init(c, "relative"), shape)
        number = relative_buckets(distance, c.relative.num_buckets, c.relative.max_distance, self.causal)
        return jnp.moveaxis(table[:, own][number], -1, 1)  # [b t s h] → [b h t s]
