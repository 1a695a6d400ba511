"""The Vision Transformer: an image as a sequence of patches (Dosovitskiy et al. 2021).

Axes: b images, d d_model, v classes.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jformer.models.batch import Batch
from jformer.models.layers.embeddings import InputEmbedding
from jformer.models.layers.heads import Pooler, class_head
from jformer.models.layers.patches import patch_projection, to_patches
from jformer.models.layers.precision import Network
from jformer.models.layers.transformer import Stack
from jformer.models.layers.visibility import TokenPlaces


class VisionTransformer(Network):
    """One stack over the patches of an image, after a learned class token if that is pooled."""

    def setup(self) -> None:
        """Make the projection of patches, the class token, the stack and the classifier."""
        c = self.config
        self.patches = patch_projection(c)
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

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b 1 d"]:
        """Return one pooled vector for each image."""
        dropout_key = self.dropout_key(batch, train)
        x = self.patches(to_patches(batch["image"], self.config))
        rows = x.shape[0]
        if self.config.head.pooling == "first":
            token = jnp.broadcast_to(self.class_token.astype(x.dtype), (rows, 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        positions = jnp.broadcast_to(jnp.arange(self.length), (rows, self.length))
        x = self.input(x, positions, self.length, dropout_key)
        segments = jnp.ones((rows, self.length), jnp.int32)  # an image has no padding
        hidden = self.encoder(x, TokenPlaces(segments, positions), dropout_key=dropout_key)
        return self.pooler(hidden, segments > 0, dropout_key)

    def logits(self, hidden: Float[Array, "b 1 d"]) -> Float[Array, "b 1 v"]:
        """Project to the classes."""
        return self.classifier(hidden)
