"""Relative positions of Transformer-XL: scores of queries and distances, a part of self-attention.

Axes: b rows, t query positions, h query heads, k size of a query and key, r distances, e entries of a cache, x = h·k.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jformer.models.layers.initializers import kernel_init
from jformer.models.layers.matmul import query_key_scores
from jformer.models.layers.positions import sinusoids
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import constrain_sharding
from jformer.parallel.mesh import TENSOR


class Distances(nn.Module):
    """Scores of distances (Dai et al. 2019, section 3.3): u and v are added to all queries, and sinusoids are keys.

    score(i, j) = (q_i + u) · k_j + (q_i + v) · R_{i-j} W, of which the first term is ordinary attention. Here u is
    `content_bias`, v `distance_bias`, and W the kernel [d h·k]; each layer has its own.
    """

    config: ModelConfig
    layers: int = 1  # of the stack, for the initial kernel

    def setup(self) -> None:
        """Make the projection of sinusoids and the two biases; neighbouring features belong to one head."""
        c = self.config
        size = c.num_heads * c.key_size
        self.kernel = self.param("kernel", kernel_init(c, "key", self.layers), (c.d_model, size))
        self.content_bias = self.param("content_bias", nn.initializers.zeros_init(), (size,))
        self.distance_bias = self.param("distance_bias", nn.initializers.zeros_init(), (size,))

    def __call__(self, q: Float[Array, "b t h k"]) -> tuple[Float[Array, "b t h k"], Float[Array, "b h t t"]]:
        """Return the queries that keys are multiplied by, and the scores of all pairs of their own positions."""
        b, t, h, _ = q.shape
        scores = self.scores(q, 2 * t, 1 - t)  # [b h t r], of the distances -t … t - 1 from a query to its key
        # Row i starts t - i distances too late. Reading rows of 2t - 1 instead of 2t corrects that without a gather.
        scores = scores.reshape(b, h, 2 * t * t)[..., t:]
        scores = scores.reshape(b, h, t, 2 * t - 1)[..., :t]
        return self.add(q, self.content_bias), scores

    def of_entries(
        self, q: Float[Array, "b t h k"], distance: Int[Array, "b t e"]
    ) -> tuple[Float[Array, "b t h k"], Float[Array, "b h t e"]]:
        """Do the same for the entries of a cache at these distances from their queries; the mask hides later ones."""
        e = distance.shape[-1]  # a row has at most as many tokens as entries, so no two are further apart
        scores = self.scores(q, e, 0)
        return self.add(q, self.content_bias), jnp.take_along_axis(
            scores, (distance + e - 1)[:, None].clip(0, e - 1), -1
        )

    def scores(self, q: Float[Array, "b t h k"], count: int, first: int) -> Float[Array, "b h t r"]:
        """Return the float32 scores of `count` distances i - j between query and key, falling down to `first`."""
        c = self.config
        b, t, h, k = q.shape
        table = jnp.asarray(sinusoids(count, c.d_model, first)[::-1])  # [r d]
        keys = constrain_sharding(table @ constrain_sharding(self.kernel, None, TENSOR), None, TENSOR)
        keys = keys.astype(q.dtype).reshape(1, count, h, k)  # [r h·k] → [1 r h k]
        q = self.add(q, self.distance_bias) * c.query_scale
        scores = query_key_scores(q.reshape(1, b * t, h, 1, k), keys)  # [1 h 1 b·t r]: all rows have the same keys
        return scores.reshape(h, b, t, count).swapaxes(0, 1)

    def add(self, q: Float[Array, "b t h k"], bias: Float[Array, " x"]) -> Float[Array, "b t h k"]:
        """Add a bias to the queries of all positions."""
        return q + bias.astype(q.dtype).reshape(q.shape[2:])
