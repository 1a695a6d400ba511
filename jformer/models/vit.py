"""The Vision Transformer: an image as a sequence of patches (Dosovitskiy et al. 2021).

Axes: b images, h and w their pixels, c channels, p patches, f = c · pixels of a patch, d d_model, v classes.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jformer.models.batch import Batch
from jformer.models.config import ModelConfig
from jformer.models.layers.dropout import make_dropout_key
from jformer.models.layers.embeddings import InputEmbedding
from jformer.models.layers.heads import Pooler, class_head
from jformer.models.layers.initializers import kernel_init
from jformer.models.layers.linear import Dense
from jformer.models.layers.transformer import AttentionContext, Stack


class VisionTransformer(nn.Module):
    """One stack over the patches of an image, after a learned class token where that is what is pooled."""

    config: ModelConfig

    def setup(self) -> None:
        """Make the projection of patches, the class token, the stack and the classifier."""
        c = self.config
        self.patches = Dense(c.d_model, kernel_init(c, "patches"), c.bias)
        if c.head.pooling == "first":
            self.class_token = self.param("class_token", nn.initializers.zeros_init(), (1, 1, c.d_model))
        self.input = InputEmbedding(c, self.length)
        self.encoder = Stack(c, c.num_layers, cross=False, causal=False)
        self.pooler = Pooler(c)
        self.classifier = class_head(c)

    @property
    def length(self) -> int:
        """Positions of the stack: patches and the class token."""
        return self.config.num_patches + (self.config.head.pooling == "first")

    def __call__(self, batch: Batch, train: bool = False) -> Float[Array, "b 1 v"]:
        """Return the logits of every image's class; training needs `rngs={'dropout': key}`."""
        return self.logits(self.hidden(batch, train))

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b 1 d"]:
        """Return one pooled vector for each image."""
        dropout_key = make_dropout_key(self.make_rng("dropout"), batch["row"]) if train else None
        x = self.patches(to_patches(batch["image"], self.config.vision.patch_size).astype(self.config.dtype))
        rows = x.shape[0]
        if self.config.head.pooling == "first":
            token = jnp.broadcast_to(self.class_token.astype(x.dtype), (rows, 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        positions = jnp.broadcast_to(jnp.arange(self.length), (rows, self.length))
        x = self.input(x, positions, self.length, dropout_key)
        real = jnp.ones((rows, self.length), bool)  # an image has no padding
        hidden = self.encoder(x, None, AttentionContext(positions, real[:, None, None]), dropout_key)
        return self.pooler(hidden, real, dropout_key)

    def logits(self, hidden: Float[Array, "b 1 d"]) -> Float[Array, "b 1 v"]:
        """Project to the classes."""
        return self.classifier(hidden)


def to_patches(image: UInt8[Array, "b h w c"], size: int) -> Float[Array, "b p f"]:
    """Cut images into square patches, row by row, each a vector of its pixels from -1 to 1."""
    b, h, w, c = image.shape
    pixels = image.astype(jnp.float32) / 127.5 - 1
    patches = pixels.reshape(b, h // size, size, w // size, size, c)  # [b h w c] → [b rows size columns size c]
    patches = patches.swapaxes(2, 3)  # → [b rows columns size size c]
    return patches.reshape(b, -1, size * size * c)  # → [b p f]
