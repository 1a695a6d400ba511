"""Untie layers that share their parameters, for formats in which each layer has its own."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jformer.models import ModelConfig
from jformer.models.parts import in_stack


def own_layers(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """Return the same model with separate parameters for every layer; shared ones are repeated without a copy."""
    if not config.shared_layers:
        return config, params
    layers = {"encoder": config.num_layers, "decoder": config.decoder_layers}

    def repeat(path: Any, leaf: Any) -> Any:
        return np.broadcast_to(leaf, (layers[path[0].key], *leaf.shape[1:])) if in_stack(path) else leaf

    return dataclasses.replace(config, shared_layers=False), jax.tree_util.tree_map_with_path(repeat, params)
