"""The decode cache as a value: the keys and values of all tokens so far, and which of them each row may attend to.

Axes: b rows, m sentences, n = b / m beams of each, t new tokens of a row, e entries of a sentence, s source positions,
g heads of keys and values, k size of a key, u size of a value, d d_model.

The beams of a sentence share its entries. A step appends one entry for each new token of each beam, at the same index
in every sentence, and entries never move: when a row continues another beam's history, only the list of its visible
entries changes. A prompt is stored once for all beams. Samples never continue each other, so each has its own entries
(m = b), and the cost per sample does not grow with their number.
"""

import dataclasses
from typing import NamedTuple, NotRequired, TypedDict

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer.models.layers.visibility import Rule, TokenPlaces, may_attend
from jformer.models.model_config import ModelConfig


class KeyValue(TypedDict):
    """Keys and values: of s positions k [b s g k] and v [b s g u], of the entries of a cache [m g k e] and [m g e u].

    In a cache, keys have features before entries, in the order that scores need. Rotary keys are rotated.
    """

    k: Array
    v: Array
    q: NotRequired[Array]  # [b s h k], queries of the same positions, if one product gives all three


class Memory(TypedDict, total=False):
    """The encoded source; empty for a model without one."""

    hidden: Float[Array, "m s d"]
    segments: Int[Array, "m s"]


class MemoryKeyValue(TypedDict, total=False):
    """The memory as decoding reads it; empty for a model without one."""

    layers: tuple[KeyValue, ...]
    mask: Bool[Array, "m s"]


class Entries(TypedDict):
    """The tokens of all beams so far."""

    layers: tuple[KeyValue, ...]
    position: Int[Array, "m e"]
    used: Int[Array, ""]  # entries of each sentence that hold a token


class BeamState(TypedDict):
    """State that follows a beam when beams are reordered."""

    visible: Bool[Array, "b e"]  # the entries of its history
    prefix: NotRequired[Int[Array, " b"]]  # tokens visible to the whole text; set before they arrive
    coverage: NotRequired[Float[Array, "b s"]]  # the attention that each source position received so far, if needed


class Cache(TypedDict):
    """The cache of b rows."""

    position: Int[Array, " b"]  # of each row's next token
    self: BeamState
    memory: MemoryKeyValue
    blocks: tuple[PyTree, ...]  # each layer's parameters
    entries: Entries


class NewTokens(NamedTuple):
    """Positions, entries and visibility of the tokens that a step appends."""

    positions: Int[Array, "b t"]  # undefined for invalid tokens
    mask: Bool[Array, "m n e"]  # the entries that each of a sentence's n·t tokens sees, its own included
    entry_positions: Int[Array, "b e"]
    first: Int[Array, ""]  # of their entries


def empty_cache(
    config: ModelConfig, blocks: tuple[PyTree, ...], memory: MemoryKeyValue, sentences: int, length: int
) -> Cache:
    """Return a cache without entries.

    Args:
        config: the number of layers and heads, their sizes and dtype.
        blocks: from `Stack.blocks`.
        memory: keys and values of the source; {} without one.
        sentences: the number of sentences, one row each, which may become n beams.
        length: entries of a sentence: one for every token of every beam.
    """
    heads = (sentences, config.kv_heads)
    k = jnp.zeros((*heads, config.key_size, length), config.dtype)
    v = jnp.zeros((*heads, length, config.value_size), config.dtype)
    positions = jnp.zeros((sentences, length), jnp.int32)
    return {
        "position": positions[:, 0],
        "self": {"visible": positions > 0},
        "memory": memory,
        "blocks": blocks,
        "entries": {
            "layers": tuple(KeyValue(k=k, v=v) for _ in range(config.decoder_layers)),
            "position": positions,
            "used": jnp.int32(0),
        },
    }


def advance(cache: Cache, valid: Bool[Array, "b t"], rule: Rule) -> tuple[NewTokens, Cache]:
    """Return where the next tokens go, and the cache that includes them except for their keys and values.

    Each row advances by the count of its valid tokens; every token takes an entry, valid or not. It sees those
    entries of its row's history and of the new valid tokens that the rule allows.
    """
    b, t = valid.shape
    entries = cache["entries"]
    m, length = entries["position"].shape
    n = b // m

    positions = cache["position"][:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1  # [b t]
    own_entry = entries["used"] + jnp.arange(t) * n + jnp.arange(b)[:, None] % n  # [b t], token by token
    is_own = (jnp.arange(length) == own_entry[..., None]) & valid[..., None]  # [b t e]
    history = cache["self"]["visible"] | is_own.any(axis=1)  # [b e]

    new_positions = positions.reshape(m, n, t)  # [b t] → [m n t]
    new_positions = new_positions.swapaxes(1, 2)  # → [m t n], the layout of entries
    new_positions = new_positions.reshape(m, -1)  # → [m t·n]
    entry_positions = lax.dynamic_update_slice_in_dim(entries["position"], new_positions, entries["used"], axis=1)
    row_positions = jnp.repeat(entry_positions, n, axis=0)  # [m e] → [b e]
    key = TokenPlaces(history.astype(jnp.int32), row_positions)
    if "prefix" in cache["self"]:
        key = key._replace(prefix=row_positions < cache["self"]["prefix"][:, None])
        rule = dataclasses.replace(rule, prefix=True)
    if t == 1:  # nothing in its history comes later
        rule = dataclasses.replace(rule, causal=False)
    mask = may_attend(TokenPlaces(jnp.ones_like(positions), positions), key, rule)  # [b t e]

    new = NewTokens(
        positions=positions,
        mask=mask.reshape(m, -1, length),  # [b t e] → [m n·t e]
        entry_positions=row_positions,
        first=entries["used"],
    )
    after: Cache = {
        **cache,
        "position": cache["position"] + valid.sum(axis=1, dtype=jnp.int32),
        "self": {**cache["self"], "visible": history},
        "entries": {**entries, "position": entry_positions, "used": entries["used"] + t * n},
    }
    return new, after


def write_entries(entries: KeyValue, new: KeyValue, first: Int[Array, ""]) -> KeyValue:
    """Write new entries at index `first`."""
    k = lax.dynamic_update_slice_in_dim(entries["k"], new["k"], first, axis=3)
    v = lax.dynamic_update_slice_in_dim(entries["v"], new["v"], first, axis=2)
    return {"k": k, "v": v}
