"""A digest of every array of a state, which detects damage but does not depend on the mesh.

The digest of an array is a sum, modulo 2^32, of a hash of each element's index and bits. A sum does not depend on the
order, so every device adds up its own shard and only the sums are exchanged: nothing is gathered. A single flipped bit
always changes the digest; other damage, such as two swapped elements, with probability 1 - 2^-32.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, UInt32

from jformer.parallel.sharding import named_leaves

LARGE = 2**18  # elements
GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio; neighbouring indices times it differ in many bits
Words = TypeVar("Words", Array, np.ndarray)  # uint32 [...], on devices or the host
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the bytes of an element


def digests(tree: PyTree) -> dict[str, str]:
    """Return the path of every array of a tree → its digest, 8 hexadecimal digits.

    Arrays on devices are summed one after the other: XLA on CPUs materializes the hashes of an array.
    """
    named = named_leaves(tree).items()
    return {name: f"{int(_digest_on_host(x) if _is_summed_here(x) else _digest(x)):08x}" for name, x in named}


def _is_summed_here(array: Array | np.ndarray) -> bool:
    """Return whether NumPy sums it: a small array, or a host array that would have to be copied to a GPU or TPU."""
    if isinstance(array, np.ndarray):
        return array.size < LARGE or jax.default_backend() != "cpu"
    return array.size < LARGE and array.is_fully_addressable and jax.default_backend() == "cpu"


def _digest_on_host(array: Array) -> int:
    """Compute the same sum with NumPy, in blocks; for a small array, this is faster than compiling a program."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.ascontiguousarray(array).reshape(-1)
    unsigned = host.view(np.dtype(UNSIGNED[min(host.dtype.itemsize, 4)]))  # two for each 64-bit element
    total = 0
    for start in range(0, unsigned.size, LARGE):
        words = unsigned[start : start + LARGE].astype(np.uint32)
        index = np.arange(start + 1, start + 1 + words.size, dtype=np.uint64).astype(np.uint32)
        total += int(_mix(words ^ (index * np.uint32(GOLDEN))).sum(dtype=np.uint32))
    return total % 2**32


@jax.jit
def _digest(array: Array) -> UInt32[Array, ""]:
    words = _words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):  # row-major, whatever the layout on the devices
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    return _mix(words ^ ((index + 1) * jnp.uint32(GOLDEN))).sum(dtype=jnp.uint32)


def _words(array: Array) -> UInt32[Array, "..."]:
    """Return the bits of every element as an unsigned integer of 32 bits; an element of 64 bits becomes two of them."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    return lax.bitcast_convert_type(array, UNSIGNED[min(array.dtype.itemsize, 4)]).astype(jnp.uint32)


def _mix(x: Words) -> Words:
    """Let every bit of a word depend on all others: the finalizer of MurmurHash3 (Appleby 2011)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
