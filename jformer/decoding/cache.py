"""What a search knows of a model: a step function and the cache that it hands from step to step. No model here.

The rows of a cache are sentences × beams, the beams of a sentence side by side. `position` and every leaf of `self`
have one entry a row and follow their beam; `memory` has one entry a sentence, is the same for all its beams, and is
never touched.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Cache = dict[str, Any]  # {'position': i32[rows], 'self': pytree of [rows …], 'memory': pytree of [b …]}
Step = Callable[[Cache, Int[Array, "rows"]], tuple[Float[Array, "rows v"], Cache]]


def reorder(cache: Cache, beams: Int[Array, "b n"]) -> Cache:
    """Let every row go on from the history of that beam of its own sentence which `beams` names.

    On CPU a plain gather moves the rows as fast as memory copies them; one-hot products, selects and loops do not.
    """
    sentences, beam_size = beams.shape
    rows = (jnp.arange(sentences)[:, None] * beam_size + beams).reshape(-1)
    moved = {key: cache[key] for key in ("position", "self")}
    return {**cache, **jax.tree.map(lambda leaf: leaf[rows], moved)}
