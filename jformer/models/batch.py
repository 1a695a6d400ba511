"""What a model reads, and the masks made from it once for all layers."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jformer.models.config import ModelConfig

Batch = Mapping[str, Any]
"""i32 [b s]: source, source_segments, source_positions, and source_types where there are segment embeddings; i32
[b t]: target_in, target_segments, target_positions; u8 [b h w c]: image; i32 [b]: row, the row's number in the whole
update (training only). Segment 0 is padding; texts that share a row have segments 1, 2, … on both sides. A family
reads its own side only: encoders the source, decoders the target, encoder-decoders both, vision models the image."""


def example_batch(config: ModelConfig) -> Batch:
    """Return the smallest batch for every family, one token a side, to initialise parameters with."""
    ones = jnp.ones((1, 1), jnp.int32)
    sides = dict.fromkeys(("source", "source_segments", "target_in", "target_segments"), ones)
    zeros = dict.fromkeys(("source_positions", "source_types", "target_positions"), 0 * ones)
    size = config.vision.image_size
    return {**sides, **zeros, "image": jnp.zeros((1, size, size, config.vision.channels), jnp.uint8)}


def same_segment(query: Int[Array, "b t"], key: Int[Array, "b s"]) -> Bool[Array, "b 1 t s"]:
    """Let positions look at their own text only; padding looks at nothing and is seen by nothing."""
    return ((query[:, :, None] == key[:, None, :]) & (key[:, None, :] > 0))[:, None]


def causal(segments: Int[Array, "b t"]) -> Bool[Array, "b 1 t t"]:
    """Let positions look at their own text up to themselves."""
    return same_segment(segments, segments) & jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
