"""Images as sequences: square patches, each projected to a vector (Dosovitskiy et al. 2021, section 3.1).

Axes: b images, h and w their pixels, c channels, p patches, f = c · pixels of a patch.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jformer.models.layers.initializers import kernel_init
from jformer.models.layers.linear import Dense
from jformer.models.model_config import ModelConfig


def patch_projection(config: ModelConfig) -> Dense:
    """Build the projection of patches [b p f] to the input of a stack [b p d]."""
    return Dense(config.d_model, kernel_init(config, "patches"), config.bias)


def to_patches(image: UInt8[Array, "b h w c"], config: ModelConfig) -> Float[Array, "b p f"]:
    """Cut images into square patches, row by row, each a vector of its pixels, normalised, in the compute dtype."""
    b, h, w, c = image.shape
    vision, size = config.vision, config.vision.patch_size
    pixels = image.astype(jnp.float32) / 127.5 - 1
    if {*vision.mean, *vision.deviation} != {0.5}:
        pixels = (image.astype(jnp.float32) / 255 - jnp.array(vision.mean)) / jnp.array(vision.deviation)
    patches = pixels.reshape(b, h // size, size, w // size, size, c)  # [b h w c] → [b rows size columns size c]
    patches = patches.swapaxes(2, 3)  # → [b rows columns size size c]
    return patches.reshape(b, -1, size * size * c).astype(config.dtype)  # → [b p f]
