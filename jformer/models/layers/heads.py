"""Heads: hidden states to logits over a vocabulary, and pooling for classifiers.

Logits are float32, whatever the layers compute in.

Axes: b rows, t and s positions (t of what a head reads), d d_model, v vocabulary or classes.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.feed_forward import activation_of
from jformer.models.layers.initializers import kernel_init
from jformer.models.layers.linear import Dense, Embedding, logits_dtype
from jformer.models.layers.norms import make_norm
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import COLUMN


class TokenHead(nn.Module):
    """Hidden states to logits, through the token table or a projection of its own."""

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Make the projection where it is not tied, BERT's transform, and the bias."""
        c = self.config
        if not c.tied_output:
            self.output = Dense(self.vocab_size, kernel_init(c, "head"), False, split=COLUMN, dtype=logits_dtype())
        if c.head.transform:
            self.transform = Dense(c.d_model, kernel_init(c, "pooler"), c.bias)
            self.norm = make_norm(c)
        if c.head.transform or c.head.bias:
            self.bias = self.param("bias", nn.initializers.zeros_init(), (self.vocab_size,))

    def __call__(self, hidden: Float[Array, "b t d"], table: Embedding) -> Float[Array, "b t v"]:
        """Project to the vocabulary."""
        c = self.config
        if c.head.transform:  # Devlin et al. 2019, as published in code
            hidden = activation_of(c)(self.transform(hidden))
            hidden = self.norm(hidden)
        if c.tied_output and c.embedding_scale == "output":
            hidden = hidden * c.scale_width**-0.5
        if c.tied_output and c.parametrization == "mup":
            hidden = hidden / c.mup_width_ratio  # an untied projection has its learning rate divided instead
        logits = table.attend(hidden) if c.tied_output else self.output(hidden)
        return logits + self.bias if c.head.transform or c.head.bias else logits


class Pooler(nn.Module):
    """Pool all positions to one vector, or keep each of them."""

    config: ModelConfig

    def setup(self) -> None:
        """Make BERT's projection."""
        if self.config.head.pooler:
            self.dense = Dense(self.config.d_model, kernel_init(self.config, "pooler"), self.config.bias)

    def __call__(
        self, x: Float[Array, "b s d"], real: Bool[Array, "b s"], dropout_key: DropoutKey | None
    ) -> Float[Array, "b t p"]:
        """Take the first or last real position, the final states, or a mean (t = 1), or all; project, and drop out.

        The real positions of a row are contiguous, after those of other texts or padding.
        """
        c = self.config
        if c.head.pooling == "mean":
            count = real.sum(axis=1)[:, None, None].clip(1)  # [b 1 1]
            x = (x * real[..., None]).sum(axis=1, keepdims=True) / count  # [b s d] → [b 1 d]
        elif c.head.pooling in ("last", "final"):
            last = (real.argmax(axis=1) + real.sum(axis=1))[:, None, None] - 1  # [b 1 1]
            first, x = x, jnp.take_along_axis(x, last.clip(0), axis=1)  # [b s d] → [b 1 d]
            if c.head.pooling == "final" and c.recurrent.bidirectional:  # the other direction ends at the first token
                x = jnp.concatenate([x[..., : c.d_model], first[:, :1, c.d_model :]], axis=-1)
        elif c.head.vectors or (c.head.pooling == "first" and c.execution.rows != "one_text"):
            # Texts may share a row, or have padding in front.
            x = jnp.take_along_axis(x, real.argmax(axis=1)[:, None, None], axis=1)
        x = (x if c.head.pooling == "none" else x[:, :1]).astype(c.dtype)
        if c.head.pooler:
            x = {"tanh": nn.tanh, "relu": nn.relu}[c.head.pooler_activation](self.dense(x))
        return dropout(x, c.dropout, dropout_key, Site.POOLED)


def class_head(config: ModelConfig) -> Dense:
    """Build the projection from pooled vectors to logits over classes."""
    return Dense(config.head.num_classes, kernel_init(config, "head"), dtype="float32")
