"""The norms of sublayers, stacks and embeddings: layer norm and RMSNorm, with float32 statistics."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jformer import plugins
from jformer.models.layers.layer_scan import recomputed
from jformer.models.model_config import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """Build a norm with float32 statistics and an output in the compute dtype, or call a user-defined function."""
    norm: nn.Module = plugins.find("model.norm_type", config.norm_type, NORMS)(config)
    return norm


def _rms_norm(config: ModelConfig) -> nn.Module:
    return recomputed(nn.RMSNorm)(epsilon=config.norm_epsilon, dtype=jnp.dtype(config.dtype))


def _layer_norm(config: ModelConfig) -> nn.Module:
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": jnp.dtype(config.dtype)}
    return recomputed(nn.LayerNorm)(**options, use_bias=config.bias, use_fast_variance=False)


NORMS = {"layernorm": _layer_norm, "rmsnorm": _rms_norm}
