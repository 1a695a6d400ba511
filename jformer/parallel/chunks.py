"""Cut arrays into chunks of a few positions and join the results of each, to keep intermediate arrays small.

Letters in shapes: n chunks, b rows, t positions, c positions of a chunk, ... any further axes.
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


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
