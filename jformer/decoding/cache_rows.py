"""The interface of a search to models: a step function, and the cache passed from step to step.

Axes: b sentences, n beams of a sentence, v vocabulary; rows = b·n, the beams of a sentence side by side.

`position` and every leaf of `self` in a cache have one entry a row, and follow the row's beam. Everything else in it
belongs to a sentence, is shared by its beams, and is left alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

Cache = dict[str, PyTree]  # {'position': i32[rows], 'self': pytree of [rows …], and what belongs to sentences}
Step = Callable[[Cache, Int[Array, " rows"]], tuple[Float[Array, "rows v"], Cache]]
FOLLOW_BEAMS = ("position", "self")


def reorder(cache: Cache, beams: Int[Array, "b n"]) -> Cache:
    """Let every row continue the history of another beam of its sentence.

    >>> cache = {"position": jnp.array([5, 6, 7, 8]), "self": {}, "memory": "of sentences"}
    >>> reorder(cache, jnp.array([[1, 1], [0, 1]]))["position"].tolist()
    [6, 6, 7, 8]
    """
    sentences, beam_size = beams.shape
    offsets = jnp.arange(sentences)[:, None] * beam_size  # [b 1], of each sentence's rows
    rows = (offsets + beams).reshape(-1)  # [b n] → [rows]
    return _map_rows(cache, lambda leaf: leaf[rows])


def repeat_rows(cache: Cache, beam_size: int) -> Cache:
    """Turn a cache with one row a sentence into one with `beam_size` equal rows a sentence.

    >>> repeat_rows({"position": jnp.array([5, 7]), "self": {}}, 2)["position"].tolist()
    [5, 5, 7, 7]
    """
    return _map_rows(cache, lambda leaf: jnp.repeat(leaf, beam_size, axis=0))


def _map_rows(cache: Cache, function: Callable[[Array], Array]) -> Cache:
    return {**cache, **jax.tree.map(function, {key: cache[key] for key in FOLLOW_BEAMS})}
