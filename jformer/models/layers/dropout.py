"""Dropout whose mask does not depend on the devices: a counter hash of an element's identity, not of its place.

Axes: b rows, a axes within a row, f features.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jformer.parallel.activations import own_positions, parts
from jformer.parallel.backend import target
from jformer.parallel.mesh import TENSOR

HALF = 0xFFFF  # of the bits of a word


class Site(enum.IntEnum):
    """Where in a layer a mask is drawn."""

    SELF_ATTN = 0
    CROSS_ATTN = 1
    FEED_FORWARD = 2
    INPUT = 3
    ACTIVATION = 4
    SELF_WEIGHTS = 5
    CROSS_WEIGHTS = 6
    POOLED = 7
    LAYER = 8  # between recurrent layers
    READOUT = 9  # the output of a recurrent stack
    OUTPUT = 10  # the output of a stack of blocks


class DropoutKey(NamedTuple):
    """The source of the masks: a seed for one pass over one stack, and the row's number within the whole update."""

    seed: UInt32[Array, ""]
    rows: Int[Array, " b"]

    def at_layer(self, layer: Int[Array, ""]) -> "DropoutKey":
        """Return the key of one layer."""
        return DropoutKey(mix(self.seed + layer.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)), self.rows)


def make_dropout_key(key: Array, rows: Int[Array, " b"]) -> DropoutKey:
    """Draw the seed of one pass from a PRNG key that already depends on the run's seed and the step."""
    return DropoutKey(jax.random.bits(key, dtype=jnp.uint32), rows)


def mix(x: Array) -> Array:
    """Scramble 32-bit words so that each input bit flips each output bit with probability near one half.

    Two rounds of xor-shift and multiply with the low-bias constants of Wellons 2018 ("hash prospector").
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def dropout(
    x: Float[Array, "b *a f"],
    rate: float,
    key: DropoutKey | None,
    site: Site,
    places: Sequence[Int[Array, " _"]] | None = None,
    part: tuple[int, int] | None = None,
) -> Float[Array, "b *a f"]:
    """Zero each element with probability `rate` and scale the rest (Srivastava et al. 2014).

    The mask is a function of (seed, site, row of the update, index within the row), so any split of the rows over
    devices or microbatches draws the same one. Each hashed 32-bit word serves two features with 16 bits each.

    Args:
        x: elements of some rows.
        rate: rounded to a multiple of 1/65,536.
        key: None = nothing is dropped.
        site: where in a layer this is, so that no two places draw the same mask.
        places: the positions, in their rows, of the elements of x, for each axis between rows and features; None = all
            those that this device holds.
        part: the index of x's first feature and the number of all features, if x has only some of them.
    """
    if key is None or rate == 0.0:
        return x
    *inner, size = x.shape[1:]
    first, features = part or (0, size)
    words = place_words(key, site, [own_positions(size) for size in inner] if places is None else places)

    def drop(x: Array, words: Array) -> Array:
        return dropped(x, _mask(words, rate, first, size, features), rate)

    if target().platform == "tpu":  # hash again for gradients rather than write and read masks
        drop = jax.checkpoint(drop, prevent_cse=False)
    return drop(x, words)


def place_words(key: DropoutKey, site: Site, places: Sequence[Int[Array, " _"]]) -> UInt32[Array, " b *a"]:
    """Return the words of places along the axes of rows; with those of features they are hashed to bits."""
    words = mix(key.seed + jnp.uint32((site + 1) * 0x85EBCA6B % 2**32))
    words = mix(words ^ key.rows.astype(jnp.uint32) * jnp.uint32(0xC2B2AE35))  # [b]
    for place in places:
        words = mix(words[..., None] + place.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F))  # → [b … size]
    return words


def kept(bits: UInt32[Array, "*a"], rate: float) -> Bool[Array, "*a"]:
    """Return which elements are kept, from 16 random bits of each."""
    return bits >= round(rate * 2**16)


def dropped(x: Float[Array, "*a"], keep: Bool[Array, "*a"], rate: float) -> Float[Array, "*a"]:
    """Zero the elements that are not kept, and scale the others."""
    return jnp.where(keep, x * jnp.asarray(2**16 / (2**16 - round(rate * 2**16)), x.dtype), 0)


def _mask(words: UInt32[Array, "*a"], rate: float, first: int, size: int, features: int) -> Bool[Array, "*a f"]:
    """Draw which features are kept, `size` of a row's `features` from `first` on, from the words of positions.

    There are two ways to compute the same mask. Joining halves takes half the hashes, but one more fusion on GPUs, and
    an exchange between devices that share the features.
    """
    half = (features + 1) // 2
    if target().platform == "gpu" or parts(TENSOR) > 1:
        place = jnp.arange(first, first + size, dtype=jnp.uint32)
        bits = hash_places(words[..., None], place % half) >> jnp.where(place < half, 0, 16).astype(jnp.uint32)
        return kept(bits & HALF, rate)
    words = hash_places(words[..., None], jnp.arange(min(half, first + size), dtype=jnp.uint32))
    mask = jnp.concatenate([kept(words & HALF, rate), kept(words >> 16, rate)], axis=-1)
    return mask[..., first : first + size]


def hash_places(words: UInt32[Array, "*#a"], places: UInt32[Array, "*#a"]) -> UInt32[Array, "*a"]:
    """Hash the words of positions with places among their features."""
    return mix(words ^ places * jnp.uint32(0x165667B1))
