"""The k largest of many scores, several times as fast on CPU as `lax.top_k`. No rules and no search here.

Axes: v vocabulary, c chunks of it, k results; rows are independent.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CHUNK = 80  # tokens a chunk: 40 to 128 took about as long on CPU at a vocabulary of 10,000


def top_k(scores: Float[Array, "rows v"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Return the k largest scores of every row, largest first, and their tokens; of equals the lower token is first.

    The k largest scores lie in the k chunks with the largest maxima, as any other chunk is beaten by k others. So only
    the tokens of those chunks are ranked. The chunks stay in order, to keep equals in order.

    >>> values, tokens = top_k(jnp.array([[0.1, 0.4, 0.3, 0.4]]), 3)
    >>> tokens.tolist()
    [[1, 3, 2]]
    """
    rank = functools.partial(lax.top_k, k=k)
    if scores.shape[1] <= k * _chunk_size(scores.shape[1]):
        values, tokens = rank(scores)
    else:  # XLA:GPU has one kernel for it, where chunks take eight with three sorts
        chunked = functools.partial(_top_k_of_chunks, k=k)
        values, tokens = lax.platform_dependent(scores, cuda=rank, rocm=rank, default=chunked)
    return values, tokens


def _top_k_of_chunks(scores: Float[Array, "rows v"], k: int) -> list[Array]:
    rows, vocabulary = scores.shape
    size = _chunk_size(vocabulary)
    chunks = lax.top_k(_chunk_maxima(scores), k)[1]  # [rows c] → [rows k]
    chunks = jnp.sort(chunks)
    tokens = chunks[:, :, None] * size + jnp.arange(size)  # [rows k size]
    tokens = tokens.reshape(rows, -1)  # → [rows k·size]
    values = jnp.take_along_axis(scores, tokens, axis=-1, mode="fill", fill_value=-jnp.inf)
    values, order = lax.top_k(values, k)
    return [values, jnp.take_along_axis(tokens, order, axis=-1)]


def _chunk_maxima(scores: Float[Array, "rows v"]) -> Float[Array, "rows c"]:
    """Return the largest score of every chunk of tokens."""
    rows, vocabulary = scores.shape
    size = _chunk_size(vocabulary)
    if vocabulary % size == 0:
        return scores.reshape(rows, -1, size).max(axis=2)  # on CPU twice as fast as a window
    padding = (0, -vocabulary % size)
    return lax.reduce_window(scores, -jnp.inf, lax.max, (1, size), (1, size), ((0, 0), padding))


def _chunk_size(vocabulary: int) -> int:
    """Return a size that divides the vocabulary, if one of 80 to 159 does."""
    return next((size for size in range(CHUNK, 2 * CHUNK) if vocabulary % size == 0), CHUNK)
