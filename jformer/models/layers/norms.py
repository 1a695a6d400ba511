"""The norms of sublayers, stacks and embeddings: layer norm and RMSNorm, with float32 statistics."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jformer.models.model_config import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """Build a norm with float32 statistics and an output in the compute dtype."""
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": jnp.dtype(config.dtype)}
    if config.norm_type == "rmsnorm":
        return nn.RMSNorm(**options)
    return nn.LayerNorm(**options, use_bias=config.bias, use_fast_variance=False)
