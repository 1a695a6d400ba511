"""The decode cache as a value: the keys and values of all tokens so far, and which of them each row may attend to.

Axes: b rows, m sentences, n = b / m beams of each, t new tokens of a row, e entries of a sentence, s source positions,
g heads of keys and values, k size of a key, u size of a value, d d_model.

The beams of a sentence share its entries. A step appends one entry for each new token of each beam, at the same index
in every sentence, and nothing is ever moved: when a row goes on from another beam's history, only the list of entries
that it may attend to changes. So a prompt, too, is stored once for all beams. Samples, which never go on from each
other, have entries of their own: m = b, and what a step costs does not grow with their number.
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

    In a cache, keys have their features before their entries, as scores are read from them. Rotary keys are rotated.
    """

    k: Array
    v: Array


class Memory(TypedDict, total=False):
    """The encoded source; empty for a model without one."""

    hidden: Float[Array, "m s d"]
    segments: Int[Array, "m s"]


class MemoryKeyValue(TypedDict, total=False):
    """What decoding reads of a memory; empty for a model without one."""

    layers: tuple[KeyValue, ...]
    mask: Bool[Array, "m s"]


class Entries(TypedDict):
    """The tokens so far, of all beams."""

    layers: tuple[KeyValue, ...]
    position: Int[Array, "m e"]
    used: Int[Array, ""]  # how many entries of each sentence hold a token


class BeamState(TypedDict):
    """What follows a beam."""

    visible: Bool[Array, "b e"]  # the entries of its history
    prefix: NotRequired[Int[Array, " b"]]  # how many tokens all of its text sees; set before they come
    coverage: NotRequired[Float[Array, "b s"]]  # the attention that each source position got so far, if asked for


class Cache(TypedDict):
    """The cache of b rows."""

    position: Int[Array, " b"]  # of each row's next token
    self: BeamState
    memory: MemoryKeyValue
    blocks: tuple[PyTree, ...]  # for each layer the parameters of its block
    entries: Entries


class NewTokens(NamedTuple):
    """The positions and entries of the tokens that a step appends, and what they may attend to."""

    positions: Int[Array, "b t"]  # those of tokens that are not valid mean nothing
    mask: Bool[Array, "m n e"]  # the entries that each of a sentence's n·t tokens may attend to, its own among them
    entry_positions: Int[Array, "b e"]
    first: Int[Array, ""]  # of their entries


def empty_cache(
    config: ModelConfig, blocks: tuple[PyTree, ...], memory: MemoryKeyValue, sentences: int, length: int
) -> Cache:
    """Return a cache without entries.

    Args:
        config: the number of layers and heads, their sizes and dtype.
        blocks: from `Stack.blocks`.
        memory: what the layers read of the source; {} without one.
        sentences: how many there are; each has one row, which may become n beams.
        length: how many entries each has room for: one for every token of every beam.
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
    """Return where the next tokens go, and the cache with them in it, but for their keys and values.

    Each row advances by the count of its valid tokens; every token takes an entry, whether it is valid or not. By the
    rule it sees the entries of its row's history, and those of the valid tokens that are new.
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
    new_positions = new_positions.swapaxes(1, 2)  # → [m t n], as entries lie
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
    """Return the entries of a cache with new ones from number `first` on."""
    k = lax.dynamic_update_slice_in_dim(entries["k"], new["k"], first, axis=3)
    v = lax.dynamic_update_slice_in_dim(entries["v"], new["v"], first, axis=2)
    return {"k": k, "v": v}
