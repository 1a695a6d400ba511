"""One vector for each text of a row, pooled over the positions of any model of this room (`models.layers.heads`).

Axes: b rows, s positions of the encoder, or of a decoder-only model, n texts of a row, d d_model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jformer.models.layers.heads import Pooler
from jformer.models.layers.precision import at_precision
from jformer.models.model import Wrapped

# Texts of a row: a pair, in segments 1 and 2. For a single text the second vector is undefined, and XLA drops it.
TEXTS = 2


@dataclasses.dataclass(frozen=True)
class TextVectors(Wrapped):
    """A model without its head: `hidden` is the vector of each text, and `logits` returns it unchanged.

    For an encoder-decoder, the encoder's output is pooled; for a decoder, that of its last layer.
    """

    def init(self, rngs: Array, *args: PyTree) -> PyTree:
        """Return the parameters that vectors depend on: no head, and no decoder after an encoder."""
        base: Any = self.base
        found, variables = base.init_with_output(rngs, *args, method=self._method)
        params, (states, segments) = variables["params"], self._states(args[0], found)
        pooler = Pooler(self.config).init(jax.random.fold_in(rngs, 1), states, segments > 0, None)
        return {"params": params | ({"pooler": pooler["params"]} if pooler else {})}

    def apply(
        self,
        variables: PyTree,
        *args: PyTree,
        method: str = "__call__",
        mutable: bool | Sequence[str] = False,
        **options: object,
    ) -> PyTree:
        """Return the vectors [b n d] of a batch, the first of `args`; logits are the vectors themselves.

        Args:
            variables: the parameters.
            method: hidden, logits, or __call__: one after the other, in float32.
            mutable: collections to return beside the vectors, as Linen does.
        """
        if method == "logits":
            return (args[0].astype(jnp.float32), {}) if mutable else args[0].astype(jnp.float32)
        found = self.base.apply(variables, *args, method=self._method, mutable=mutable, **options)
        states, segments = self._states(args[0], found[0] if mutable else found)
        pooler: PyTree = Pooler(self.config)
        params = {"params": variables["params"].get("pooler", {})}
        with at_precision(self.config.precision):
            pooled = [pooler.apply(params, states, segments == 1 + text, None) for text in range(TEXTS)]
        vectors = jnp.concatenate(pooled, axis=1)
        vectors = vectors if method == "hidden" else vectors.astype(jnp.float32)
        return (vectors, found[1]) if mutable else vectors

    @property
    def _method(self) -> str:
        return "hidden" if self.config.family == "decoder" else "encode"

    def _states(self, batch: PyTree, found: PyTree) -> tuple[Float[Array, "b s d"], Int[Array, "b s"]]:
        """Return the states of every position, and the segments of texts, from the base's output."""
        if self.config.family == "decoder":
            return found, batch["target_segments"]
        return found["hidden"], found["segments"]
