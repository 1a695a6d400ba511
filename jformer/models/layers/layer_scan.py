"""Repeat one block as the layers of a stack, each with its own parameters or all with the same."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jformer.models.model_config import ModelConfig
from jformer.parallel.backend import target

F = TypeVar("F", bound=Callable[..., Any])
REMAT: dict[str, Callable[..., bool] | None] = {  # what a block saves for the backward pass, if not everything
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the projections, but no attention
    "full": jax.checkpoint_policies.nothing_saveable,  # only its input
}
MOST_UNROLLED = {"gpu": 24, "tpu": 6}  # layers of a stack by default; more take minutes to compile
FINITE = "finite"  # the collection in which blocks report outputs that are not finite


def over_layers(block: type[nn.Module], config: ModelConfig, layers: int, init: bool) -> Callable[..., nn.Module]:
    """Return the block's constructor, lifted over a leading axis of layers of its parameters.

    Its first argument is carried from layer to layer, its second is the layer's number; the others are broadcast. With
    `config.shared_layers` (Dehghani et al. 2019; Lan et al. 2020) the axis is there too, with one entry for all layers.
    `init`: whether parameters are being initialised: then layers run in a loop, because XLA:GPU would fuse the draws of
    several layers into kernels that take 40 s to compile.
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
        unroll=1 if init else min(config.execution.unroll or _written_out(config, layers), layers),
        in_axes=(0, everywhere, everywhere, everywhere),
    )
    if not shared:
        return lifted
    inside = functools.partial(jax.tree.map, operator.itemgetter(0))
    outside = functools.partial(jax.tree.map, functools.partial(jnp.expand_dims, axis=0))
    return nn.map_variables(lifted, "params", inside, outside, init=init)


def recomputed(function: F) -> F:
    """Return a function of arrays that saves only its arguments for the backward pass, except on CPUs.

    Otherwise accelerators would write and read the residuals of each step, which they recompute for free inside the
    kernel that needs them. If layers are unrolled, as on GPUs, XLA must be kept from merging the two computations.
    """
    platform = target().platform
    if platform == "cpu":
        return function
    return cast(F, jax.checkpoint(function, prevent_cse=platform == "gpu"))


def _written_out(config: ModelConfig, layers: int) -> int:
    """Return how many layers to unroll if the config leaves it open.

    Loops copy a layer's residuals into and out of arrays of all layers, which on GPUs is half of all kernels. On TPUs
    they first fill those arrays with zeros if an encoder and a decoder have arrays of the same shape. But unrolled
    layers compile more slowly and, if rematerialised, take more memory (docs/performance.md).
    """
    platform = target().platform
    if platform == "cpu":
        return layers
    return layers if layers <= MOST_UNROLLED.get(platform, 0) and config.execution.remat == "none" else 1
