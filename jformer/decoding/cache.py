"""What a search knows of a model: a step function and the cache that it hands from step to step. No model here.

The rows of a cache are sentences × beams, the beams of a sentence side by side. `position` and every leaf of `self`
have one entry a row and follow their beam. Whatever else there is belongs to a sentence, is shared by its beams, and
is never touched.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Cache = dict[str, Any]  # {'position': i32[rows], 'self': pytree of [rows …], and what belongs to sentences}
Step = Callable[[Cache, Int[Array, "rows"]], tuple[Float[Array, "rows v"], Cache]]


def reorder(cache: Cache, beams: Int[Array, "b n"]) -> Cache:
    """Let every row go on from the history of that beam of its own sentence which `beams` names."""
    sentences, beam_size = beams.shape
    rows = (jnp.arange(sentences)[:, None] * beam_size + beams).reshape(-1)
    return _follow(cache, lambda leaf: leaf[rows])


def spread(cache: Cache, beam_size: int) -> Cache:
    """Give every sentence of a cache that has one row for each so many rows, all with that row's history."""
    return _follow(cache, lambda leaf: jnp.repeat(leaf, beam_size, axis=0))


def _follow(cache: Cache, move: Callable[[Array], Array]) -> Cache:
    return {**cache, **jax.tree.map(move, {key: cache[key] for key in ("position", "self")})}
