"""The precision of float32 products: a model sets it for everything it computes, and hand-written gradients keep it."""

import contextlib
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
from jaxtyping import Array, Float, PyTree

from jformer.errors import UserError
from jformer.models.batch import Batch
from jformer.models.layers.dropout import DropoutKey, make_dropout_key
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import manual_parts
from jformer.parallel.mesh import SEQUENCE


class Network(nn.Module):
    """A model whose products have the precision of its config, in whatever program its methods are traced."""

    config: ModelConfig

    def __call__(self, batch: Batch, train: bool = False) -> Float[Array, "b t *v"]:
        """Return the logits of every position, or of the classes; training needs `rngs={'dropout': key}`."""
        return self.logits(self.hidden(batch, train))

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t r"]:
        """Return what the head reads, before the projection to logits."""
        raise NotImplementedError

    def logits(self, hidden: Float[Array, "b t r"]) -> Float[Array, "b t *v"]:
        """Project to the vocabulary or the classes."""
        raise NotImplementedError

    def dropout_key(self, batch: Batch, train: bool) -> DropoutKey | None:
        """Draw a stack's dropout seed in training; every call draws another."""
        return make_dropout_key(self.make_rng("dropout"), batch["row"]) if train else None

    @nn.nowrap
    def apply(self, *args: PyTree, **options: PyTree) -> PyTree:
        """Apply a method as Linen does, at the precision of the config; `default` leaves it to JAX's own setting.

        Raises UserError if devices share the positions of rows that the model needs whole.
        """
        if manual_parts(SEQUENCE) > 1 and (option := self.config.needs_whole_rows):
            raise UserError(f"mesh.sequence={manual_parts(SEQUENCE)}: {option} needs whole rows: set mesh.sequence=1")
        with at_precision(self.config.precision):
            return super().apply(*args, **options)


def at_precision(precision: str) -> contextlib.AbstractContextManager[None]:
    """Return the context in which products get a precision of `model.precision`; JAX caches programs by it."""
    return contextlib.nullcontext() if precision == "default" else jax.default_matmul_precision(precision)


def keeping(precision: str | None, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return a function that is always traced at this precision setting of JAX, wherever it is called.

    A product keeps the precision in effect when it was traced, and so do the gradients that JAX derives from it. A
    gradient written by hand is traced later, where the model's setting no longer holds.
    """

    @functools.wraps(function)
    def traced(*args: PyTree) -> PyTree:
        with jax.default_matmul_precision(precision):
            return function(*args)

    return traced
