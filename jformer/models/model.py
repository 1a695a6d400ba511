"""The interface of models for other packages: a config, and methods applied to parameters. Does not import JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from jformer.models.model_config import ModelConfig

if TYPE_CHECKING:
    import jaxtyping


@runtime_checkable
class Model(Protocol):
    """A Linen module of this room."""

    def __hash__(self) -> int:
        """Equal for models of equal configs, whose programs are the same."""

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""

    def init(self, rngs: "jaxtyping.Array", *args: "jaxtyping.PyTree") -> "jaxtyping.PyTree":
        """Return variables for inputs like these, drawn from a key."""

    def apply(self, variables: "jaxtyping.PyTree", *args: "jaxtyping.PyTree", **options: object) -> "jaxtyping.PyTree":
        """Apply a method, `__call__` unless another is named, with these variables."""


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A model that changes what another one computes, or adds to its parameters; the rest is the base's."""

    base: Model

    @property
    def config(self) -> ModelConfig:
        """The config of the base."""
        return self.base.config

    def init(self, rngs: "jaxtyping.Array", *args: "jaxtyping.PyTree") -> "jaxtyping.PyTree":
        """Return the parameters of the base."""
        return self.base.init(rngs, *args)

    def cross_weights(self, intermediates: "jaxtyping.PyTree") -> "jaxtyping.Array":
        """Return the weights of the attention to the source, which the base reads from its intermediates."""
        return cast(Any, self.base).cross_weights(intermediates)
