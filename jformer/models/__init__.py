"""Pure Flax Linen modules. Nothing in this room imports data, optax, orbax or ml_collections.

The protocol of every model: `hidden(batch, train)` → [b t d], `logits(hidden)` → [b t v] (of a CRF [b t v+1 v+1]),
`__call__` is their composition. Models that generate also have `encode(batch)` → memory, `start(memory, batch_size,
length)` → cache and `extend(cache, tokens, valid)` → (hidden, cache). Modules are imported on first use, so that
reading a config needs no jax.
"""

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jformer import plugins
from jformer.errors import UserError
from jformer.models.model import Model
from jformer.models.model_config import ExecutionConfig, ModelConfig

if TYPE_CHECKING:
    import jaxtyping

MODULES = {
    "Adapted": "lora",
    "Attention": "layers.attention",
    "Block": "layers.transformer",
    "Decoder": "decoder",
    "Encoder": "encoder",
    "EncoderDecoder": "encdec",
    "FeedForward": "layers.feed_forward",
    "RecurrentEncoder": "recurrent",
    "RecurrentEncoderDecoder": "recurrent",
    "RecurrentLanguageModel": "recurrent",
    "Stack": "layers.transformer",
    "TextVectors": "text_vectors",
    "VisionTransformer": "vision",
}
FAMILIES = {"encdec": "EncoderDecoder", "encoder": "Encoder", "decoder": "Decoder", "vit": "VisionTransformer"}
RECURRENT = {"encdec": "RecurrentEncoderDecoder", "encoder": "RecurrentEncoder", "decoder": "RecurrentLanguageModel"}

__all__ = ["FAMILIES", "MODULES", "ExecutionConfig", "ModelConfig", "build_model", "init_params", "param_shapes"]


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(f"jformer.models.{MODULES[name]}"), name)
    raise AttributeError(f"module 'jformer.models' has no attribute {name!r}")


def build_model(config: ModelConfig) -> Model:
    """Build the model of a config whose vocabulary, or number of classes, is known.

    Raises UserError for a config that no model can be built from, as the command does.
    """
    config.check()
    if config.dtype == "auto":
        raise UserError("model.dtype='auto' is resolved when a run starts: build a model with 'float32' or 'bfloat16'")
    if config.family == "vit" and not config.head.num_classes:
        raise UserError("model.head.num_classes=0: a vision model needs its number of classes")
    if config.family != "vit" and not config.vocab_size:
        raise UserError("model.vocab_size=0: a model of texts needs its number of tokens")
    if config.head.crf and not config.head.num_classes:
        raise UserError("model.head.crf=True: a chain of classes needs their number, model.head.num_classes")
    if config.family != "encdec" and config.target_vocab_size not in (0, config.vocab_size):
        raise UserError(
            f"model.target_vocab_size={config.target_vocab_size} is read by family='encdec' only: others have one "
            f"vocabulary, of model.vocab_size={config.vocab_size}"
        )
    families = RECURRENT if config.recurrent.cell else FAMILIES
    model: Model = __getattr__(families[config.family])(config)
    model = __getattr__("TextVectors")(model) if config.head.vectors else model
    return __getattr__("Adapted")(model) if config.lora.rank else model


def init_params(model: Model, key: "jaxtyping.Array") -> "jaxtyping.PyTree":
    """Draw a model's parameters; under `jax.eval_shape` only their shapes."""
    return _draw()(model, key)


def param_shapes(model: Model) -> "jaxtyping.PyTree":
    """Return the shapes and dtypes of a model's parameters, without drawing any."""
    import jax

    return jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))


@plugins.cached(1)
def _draw() -> "Callable[[Model, jaxtyping.Array], jaxtyping.PyTree]":
    """Return (model, key) → parameters as one program, traced only once for equal models.

    Tracing takes a fifth of a second, and a run needs shapes, their shardings and values.
    """
    import jax

    from jformer.models.batch import example_batch

    return jax.jit(lambda model, key: model.init(key, example_batch(model.config))["params"], static_argnums=0)
