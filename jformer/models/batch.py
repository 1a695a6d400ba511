"""The arrays that a model reads. Axes: b rows, t target positions, s source positions."""

from typing import TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from jformer.models.model_config import ModelConfig


class Batch(TypedDict, total=False):
    """The arrays of a batch. A family reads its own side: encoders the source, decoders the target, others both.

    For images, `image` replaces the arrays of the source.

    Segment 0 is padding; texts that share a row have segments 1, 2, … on both sides. Recurrent models read them as one
    text.
    """

    source: Int[Array, "b s"]
    source_segments: Int[Array, "b s"]
    source_positions: Int[Array, "b s"]
    source_types: Int[Array, "b s"]  # first or second text, where there are segment embeddings
    target_in: Int[Array, "b t"]
    target_segments: Int[Array, "b t"]
    target_positions: Int[Array, "b t"]
    target_prefix: Bool[Array, "b t"]  # optional: whether the whole text sees a token, as in a prefix LM
    target_out: Int[Array, "b t"]  # the tokens to predict, and their weights in the loss
    weights: Float[Array, "b t"]
    image: UInt8[Array, "b h w c"]
    row: Int[Array, " b"]  # the row's number in the whole update; training only


def example_batch(config: ModelConfig) -> Batch:
    """Return the smallest batch for every family, one token a side, to initialise parameters with."""
    ones = jnp.ones((1, 1), jnp.int32)
    zeros = jnp.zeros((1, 1), jnp.int32)
    size = config.vision.image_size
    return {
        "source": ones,
        "source_segments": ones,
        "source_positions": zeros,
        "source_types": zeros,
        "target_in": ones,
        "target_segments": ones,
        "target_positions": zeros,
        "image": jnp.zeros((1, size, size, config.vision.channels), jnp.uint8),
    }
