"""Apply a function to a few positions at a time, to keep its intermediate arrays small.

Letters in shapes: n chunks, b rows, t positions, c positions of a chunk, ... any further axes.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def map_chunks(
    function: Callable[[dict[str, Array], Int[Array, ""]], Float[Array, "b c ..."]],
    arrays: Mapping[str, tuple[Array, int]],
    size: int,
) -> Float[Array, "b t ..."]:
    """Apply a function to chunks of arrays, one after the other, and join its results along the second axis.

    A chunk is recomputed in the backward pass, which therefore holds the intermediate arrays of one chunk only.

    Args:
        function: (the chunk of every array, the index of its first position) → its result.
        arrays: name → the array and its axis of t positions. The last chunk is padded with zeros.
        size: positions of a chunk.
    """
    first, axis = next(iter(arrays.values()))
    chunks = {name: cut(x, axis, size) for name, (x, axis) in arrays.items()}
    starts = jnp.arange(0, first.shape[axis], size)
    return join(lax.map(lambda part: jax.checkpoint(function)(*part), (chunks, starts)), first.shape[axis])


def cut(x: Array, axis: int, size: int) -> Array:
    """Return the chunks [n ... c ...] of x [... t ...], the last padded with zeros."""
    count = -(-x.shape[axis] // size)
    x = jnp.pad(x, [(0, (count * size - x.shape[axis]) * (i == axis)) for i in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def join(chunks: Shaped[Array, "n b c ..."], length: int) -> Shaped[Array, "b t ..."]:
    """Return the first `length` positions of chunks along the second axis."""
    count, b, size, *rest = chunks.shape
    return jnp.moveaxis(chunks, 0, 1).reshape(b, count * size, *rest)[:, :length]


def even_size(length: int, largest: int) -> int:
    """Return the size of chunks, more than half of the largest, that needs the least padding."""
    return min(range(largest, largest // 2, -1), key=lambda size: -length % size)
