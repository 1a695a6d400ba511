"""The input of a stack: embedded tokens or patches with positions and segments, norm and dropout.

Axes: b rows, t positions, d d_model.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jformer import plugins
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.initializers import table_init
from jformer.models.layers.linear import Embedding
from jformer.models.layers.norms import make_norm
from jformer.models.layers.positions import sinusoids
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import manual_parts
from jformer.parallel.mesh import SEQUENCE
from jformer.plugins import is_own


def token_table(config: ModelConfig, rows: int) -> Embedding:
    """Build a vocabulary's table."""
    return Embedding(rows, config.embedding_size, table_init(config, "tokens"), split=True)


class InputEmbedding(nn.Module):
    """Turn vectors of tokens or patches into a stack's input (Vaswani et al. 2017, sections 3.4 and 3.5)."""

    config: ModelConfig
    max_length: int  # rows of learned positions

    def setup(self) -> None:
        """Make the parts that the config names: learned positions, segments, a norm."""
        c = self.config
        if c.positions == "learned":
            self.positions = Embedding(self.max_length, c.d_model, table_init(c, "positions"))
        if c.head.num_segments:
            self.segments = Embedding(c.head.num_segments, c.d_model, table_init(c, "segments"))
        if c.embedding_norm:
            self.norm = make_norm(c)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "#b t"],
        length: int,
        dropout_key: DropoutKey | None,
        types: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Scale, add positions (below `length` of each device) and the segments of `types`, normalise and drop out."""
        c = self.config
        if c.embedding_scale == "input":
            x = x * c.scale_width**0.5
        smaller = c.scale_width**-0.5 if c.embedding_scale == "positions" else 1.0
        if c.positions == "learned":
            x = x + self.positions(positions) * smaller
        elif c.positions == "sinusoidal":
            x = x + jnp.asarray(sinusoids(length * manual_parts(SEQUENCE), c.d_model) * smaller)[positions]
        elif is_own(c.positions):  # (positions [b t], config) → [b t d]
            x = x + plugins.find("model.positions", c.positions, {})(positions, c) * smaller
        if c.head.num_segments and types is not None:
            x = x + self.segments(types if c.head.num_segments > 1 else jnp.zeros_like(types))  # RoBERTa has one row
        x = x.astype(c.dtype)
        x = self.norm(x) if c.embedding_norm else x
        return dropout(x, c.dropout if c.embedding_dropout else 0.0, dropout_key, Site.INPUT)
