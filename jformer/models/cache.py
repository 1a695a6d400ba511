"""The decode cache as a value: the keys and values of all tokens so far, and which of them each row has seen.

The beams of a sentence share its entries. A step appends one entry for each new token of each beam, at the same place
in every sentence, and nothing is ever moved: when a row goes on from another beam's history, only the list of entries
that it has seen changes. So a prompt, too, is kept once for all beams.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jformer.models.config import ModelConfig

Memory = dict[str, Any]
"""{'hidden': [m s d], 'segments': i32 [m s]}: the encoded source; empty for a model without one."""

Cache = dict[str, Any]
"""For b rows, the beams of m sentences side by side, and e entries a sentence:

    position  i32 [b], of each row's next token
    self      {'seen': bool [b e]}: what follows a beam
    memory    {'layers': for each layer {'k' [m g k s], 'v' [m g s u]}, 'mask': bool [m s]}, or {} without a source
    blocks    for each layer the parameters of its block
    entries   {'layers': for each layer {'k' [m g k e], 'v' [m g e u]}, 'position': i32 [m e], 'used': i32 []}

Keys lie with their features before their positions, as scores are read from them. Rotary keys lie turned."""


class Next(NamedTuple):
    """Where new tokens go and what they see."""

    positions: Int[Array, "b t"]  # of the new tokens; those that are not valid get some position
    mask: Bool[Array, "m n e"]  # the entries that each of a sentence's n tokens may look at, its own among them
    keys: Int[Array, "b e"]  # the position of every entry
    at: Int[Array, ""]  # the first of their entries


def empty_cache(
    config: ModelConfig, blocks: tuple[Any, ...], memory: dict[str, Any], sentences: int, length: int
) -> Cache:
    """Return a cache for `sentences` rows, one beam each, of up to `length` entries."""
    heads = (sentences, config.kv_heads)
    shapes = {"k": (*heads, config.key_size, length), "v": (*heads, length, config.value_size)}
    layers = [{name: jnp.zeros(shape, config.dtype) for name, shape in shapes.items()}] * config.decoder_layers
    places = jnp.zeros((sentences, length), jnp.int32)
    return {
        "position": places[:, 0],
        "self": {"seen": places > 0},
        "memory": memory,
        "blocks": blocks,
        "entries": {"layers": tuple(layers), "position": places, "used": jnp.int32(0)},
    }


def advance(cache: Cache, valid: Bool[Array, "b t"]) -> tuple[Next, Cache]:
    """Return where the next tokens go, and the cache with them in it, but for their keys and values.

    Each row advances by the count of its valid tokens; every token takes an entry.
    """
    rows, width = valid.shape
    entries, seen = cache["entries"], cache["self"]["seen"]
    sentences, length = entries["position"].shape
    beams = rows // sentences
    positions = cache["position"][:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    own = entries["used"] + jnp.arange(width) * beams + jnp.arange(rows)[:, None] % beams
    new = (jnp.arange(length) == own[..., None]) & valid[..., None]
    mask = seen[:, None] | (new if width == 1 else lax.cummax(new.astype(jnp.int8), axis=1) > 0)
    places = positions.reshape(sentences, beams, width).swapaxes(1, 2).reshape(sentences, -1)
    placed = lax.dynamic_update_slice_in_dim(entries["position"], places, entries["used"], axis=1)
    after = {**entries, "position": placed, "used": entries["used"] + width * beams}
    to = Next(positions, mask.reshape(sentences, -1, length), jnp.repeat(placed, beams, axis=0), entries["used"])
    position = cache["position"] + valid.sum(axis=1, dtype=jnp.int32)
    own = {**cache["self"], "seen": mask[:, -1]}
    return to, {**cache, "position": position, "self": own, "entries": after}
