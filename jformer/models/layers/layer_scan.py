"""One block as the layers of a stack: each with its own parameters, or all with the same."""

import functools
import operator
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jformer.models.model_config import ModelConfig
from jformer.parallel.backend import target

REMAT: dict[str, Callable[..., bool] | None] = {  # what a block keeps for the backward pass, where not all of it
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the projections, but no attention
    "full": jax.checkpoint_policies.nothing_saveable,  # its input
}
FINITE = "finite"  # the collection in which blocks report outputs that are not finite


def over_layers(block: type[nn.Module], config: ModelConfig, layers: int, init: bool) -> Callable[..., nn.Module]:
    """Return the block's constructor, lifted over a leading axis of layers of its parameters.

    Its first argument is carried from layer to layer, its second is the layer's number; the others are broadcast. With
    `config.shared_layers` (Dehghani et al. 2019; Lan et al. 2020) the axis is there too, with one entry for all layers.
    `init`: whether parameters are being initialised.
    """
    everywhere = nn.broadcast
    shared = config.shared_layers
    policy = REMAT[config.execution.remat]
    lifted = nn.scan(
        nn.remat(block, policy=policy) if policy else block,
        variable_axes={"params": 0, "intermediates": 0, FINITE: 0},
        variable_broadcast="params" if shared else False,  # of the two, this is read first
        split_rngs={"params": not shared},
        length=layers,
        unroll=min(config.execution.unroll or (layers if target().platform == "cpu" else 1), layers),
        in_axes=(0, everywhere, everywhere, everywhere),
    )
    if not shared:
        return lifted
    inside = functools.partial(jax.tree.map, operator.itemgetter(0))
    outside = functools.partial(jax.tree.map, functools.partial(jnp.expand_dims, axis=0))
    return nn.map_variables(lifted, "params", inside, outside, init=init)
