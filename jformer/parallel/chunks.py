"""Apply a function to a few positions at a time, to keep its intermediate arrays small.

Letters in shapes: b rows, t positions, c positions of a chunk, ... any further axes.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def map_chunks(
    function: Callable[[dict[str, Array], Int[Array, ""]], Float[Array, "b c ..."]],
    arrays: Mapping[str, tuple[Array, int]],
    size: int,
) -> Float[Array, "b t ..."]:
    """Apply a function to chunks of arrays, one after the other, and join what it returns along the second axis.

    A chunk is recomputed in the backward pass, which therefore holds the intermediate arrays of one chunk only.

    Args:
        function: (the chunk of every array, the index of its first position) → its result.
        arrays: name → the array and its axis of t positions. The last chunk is padded with zeros.
        size: positions of a chunk.
    """
    first, axis = next(iter(arrays.values()))
    length = first.shape[axis]
    count = -(-length // size)

    def cut(x: Array, axis: int) -> Array:
        x = jnp.pad(x, [(0, (count * size - length) * (i == axis)) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    chunks = {name: cut(x, axis) for name, (x, axis) in arrays.items()}
    found = lax.map(lambda part: jax.checkpoint(function)(*part), (chunks, jnp.arange(count) * size))
    return jnp.moveaxis(found, 0, 1).reshape(found.shape[1], count * size, *found.shape[3:])[:, :length]
