"""The decode cache as a value: a position for each row, and the keys and values of all tokens so far."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jformer.models.config import ModelConfig

Memory = dict[str, Any]
"""{'hidden': [b s d], 'segments': i32 [b s]}: the encoded source; empty for a model without one."""

Cache = dict[str, Any]
"""{'position': i32 [b], 'self': {'k', 'v'} [b l t g ·], 'memory': {'k', 'v'} [m l s g ·] and 'mask' [m s]}; the m
rows of the memory each serve b / m consecutive rows. Without a source, memory is empty. Rotary keys lie turned."""


class Next(NamedTuple):
    """Where new tokens go."""

    positions: Int[Array, "b t"]  # of the new tokens; those that are not valid get some position within the buffer
    at: Int[Array, "b t"]  # where their keys are written; past the end for those that are not valid
    mask: Bool[Array, "b 1 t s"]  # the places of the buffer that each may look at
    after: Int[Array, "b"]  # each row's position after them


def empty_cache(config: ModelConfig, memory: dict[str, Any], rows: int, length: int) -> Cache:
    """Return a cache for `rows` rows of up to `length` tokens."""
    shape = (rows, config.decoder_layers, length, config.kv_heads)
    sizes = {"k": config.key_size, "v": config.value_size}
    buffer = {name: jnp.zeros((*shape, size), config.dtype) for name, size in sizes.items()}
    return {"position": jnp.zeros((rows,), jnp.int32), "self": buffer, "memory": memory}


def advance(cache: Cache, valid: Bool[Array, "b t"]) -> Next:
    """Return where the valid ones of the next tokens go; each row advances by its own count."""
    length = cache["self"]["k"].shape[2]
    positions = cache["position"][:, None] + jnp.cumsum(valid, axis=1) - 1
    at = jnp.where(valid, positions, length)
    mask = (jnp.arange(length) <= positions[..., None])[:, None]
    after = cache["position"] + valid.sum(axis=1, dtype=jnp.int32)
    return Next(jnp.clip(positions, 0, length - 1), at, mask, after)
