"""What leaves a stack: hidden states to logits over a vocabulary, or one pooled vector for a classifier."""

import flax.linen as nn
from jaxtyping import Array, Bool, Float

from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, Site, drop
from jformer.models.initializers import kernel_init
from jformer.models.linear import Dense, Embedding
from jformer.models.transformer import ACTIVATIONS, GATES, make_norm
from jformer.placement import WIDE


class TokenHead(nn.Module):
    """Hidden states to logits, through the token table or a projection of its own."""

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Make the projection where it is not tied, and BERT's transform."""
        c = self.config
        if not c.tied_output:
            self.output = Dense(self.vocab_size, kernel_init(c, "head"), use_bias=False, split=WIDE)
        if c.head.transform:
            self.transform = Dense(c.d_model, kernel_init(c, "pooler"), c.bias)
            self.norm = make_norm(c)
            self.bias = self.param("bias", nn.initializers.zeros_init(), (self.vocab_size,))

    def __call__(self, hidden: Float[Array, "b t d"], table: Embedding) -> Float[Array, "b t v"]:
        """Project to the vocabulary."""
        c = self.config
        if c.head.transform:  # Devlin et al. 2019, as published in code
            hidden = self.norm({**ACTIVATIONS, **GATES}[c.activation](self.transform(hidden)))
        if c.tied_output and c.embedding_scale == "output":
            hidden = hidden * c.d_model**-0.5
        logits = table.attend(hidden) if c.tied_output else self.output(hidden)
        return logits + self.bias.astype(logits.dtype) if c.head.transform else logits


class Pooler(nn.Module):
    """All positions to one vector."""

    config: ModelConfig

    def setup(self) -> None:
        """Make BERT's projection."""
        if self.config.head.pooler:
            self.dense = Dense(self.config.d_model, kernel_init(self.config, "pooler"), self.config.bias)

    def __call__(
        self, x: Float[Array, "b s d"], real: Bool[Array, "b s"], noise: Noise | None
    ) -> Float[Array, "b 1 d"]:
        """Take the first position or the mean of the real ones, project with tanh if there is a pooler, and drop."""
        c = self.config
        if c.head.pooling == "mean":
            x = (x * real[..., None]).sum(axis=1, keepdims=True) / real.sum(axis=1)[:, None, None].clip(1)
        x = x[:, :1].astype(c.dtype)
        return drop(nn.tanh(self.dense(x)) if c.head.pooler else x, c.dropout, noise, Site.POOLED)


def class_head(config: ModelConfig) -> Dense:
    """Build the projection of a pooled vector to logits over classes."""
    return Dense(config.head.num_classes, kernel_init(config, "head"))
