"""What enters a stack: embedded tokens or patches, with positions and segments added, normalised, dropped."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, Site, drop
from jformer.models.initializers import table_init
from jformer.models.linear import Embedding
from jformer.models.positions import sinusoids
from jformer.models.transformer import make_norm


def token_table(config: ModelConfig, rows: int) -> Embedding:
    """Build a vocabulary's table."""
    return Embedding(rows, config.d_model, table_init(config, "tokens"), split=True)


class InputEmbedding(nn.Module):
    """Vectors of tokens or patches to what a stack reads (Vaswani et al. 2017, sections 3.4 and 3.5)."""

    config: ModelConfig
    max_length: int  # rows of learned positions

    def setup(self) -> None:
        """Make what the config asks for: learned positions, segments, a norm."""
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
        noise: Noise | None,
        types: Any = None,
    ) -> Float[Array, "b t d"]:
        """Scale, add positions (all below `length`) and the segments of `types` [b t], normalise and drop."""
        c = self.config
        if c.embedding_scale == "input":
            x = x * c.d_model**0.5
        if c.positions == "learned":
            x = x + self.positions(positions)
        elif c.positions == "sinusoidal":
            x = x + jnp.asarray(sinusoids(length, c.d_model))[positions]
        if c.head.num_segments:
            x = x + self.segments(types)
        x = x.astype(c.dtype)
        return drop(self.norm(x) if c.embedding_norm else x, c.dropout, noise, Site.INPUT)
