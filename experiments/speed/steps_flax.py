"""The side of Flax: the models.py of examples/wmt or lm1b of a checkout, or else the same shapes in plain Flax.

Nothing is copied. Its train.py needs TensorFlow, so the step is written here in its manner: a one-hot target
distribution, the accuracy as a metric, Adam with 0.9 and 0.98, and JAX's default random numbers.
"""

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from experiments.speed.steps_worker import Step, Told, compiled

SMOOTHING = 0.1
ARRAYS = {"inputs": "source", "targets": "target_out"}
PACKED_ARRAYS = {
    "inputs_positions": "source_positions",
    "targets_positions": "target_positions",
    "inputs_segmentation": "source_segments",
    "targets_segmentation": "target_segments",
}


class Block(nn.Module):
    """A layer as one writes it with Flax's own parts; `c`: fields of a ModelConfig."""

    c: Mapping[str, Any]

    @nn.compact
    def __call__(self, x: Any, mask: Any, bias: Any = None, memory: Any = None, memory_mask: Any = None) -> Any:
        """Return x [b t d] after the layer, whose attentions see what the masks allow."""
        c = self.c
        dense = functools.partial(nn.Dense, use_bias=c["bias"], dtype=c["dtype"])

        def attend(x: Any, y: Any, mask: Any, bias: Any = None) -> Any:
            def fused(query: Any, key: Any, value: Any, mask: Any = None, **_: Any) -> Any:
                return jax.nn.dot_product_attention(query, key, value, bias, mask)

            rate = c["attention_dropout"]
            given = {"dtype": c["dtype"], "use_bias": c["bias"], "dropout_rate": rate, "broadcast_dropout": False}
            function = functools.partial(nn.dot_product_attention, bias=bias) if rate else fused
            attention = nn.MultiHeadDotProductAttention(
                c["num_heads"], deterministic=False, attention_fn=function, **given
            )
            return attention(x, y, mask=mask)

        def feed_forward(x: Any) -> Any:
            hidden = {"relu": nn.relu}.get(c["activation"], nn.gelu)(dense(c["d_ff"])(x))
            return dense(c["d_model"])(nn.Dropout(c["activation_dropout"], deterministic=False)(hidden))

        def sublayer(x: Any, function: Callable[[Any], Any]) -> Any:
            norm, drop = make_norm(c), nn.Dropout(c["dropout"], deterministic=False)
            return x + drop(function(norm(x))) if c["norm"] == "pre" else norm(x + drop(function(x)))

        x = sublayer(x, lambda x: attend(x, x, mask, bias))
        if memory is not None:
            x = sublayer(x, lambda x: attend(x, memory, memory_mask))
        return sublayer(x, feed_forward)


class Plain(nn.Module):
    """An encoder-decoder, or a decoder, with tied embeddings, as one writes it with Flax's own parts.

    What does not change the time is left out: scales, published initial values, the rounding of relative distances.
    """

    c: Mapping[str, Any]

    @nn.compact
    def __call__(self, targets: Any, inputs: Any = None) -> Any:
        """Return the logits [b t v] of targets [b t], float32; a decoder has no inputs [b s]."""
        c, memory, memory_mask = self.c, None, None
        table = nn.Embed(c["vocab_size"], c["d_model"], dtype=c["dtype"])

        def stack(tokens: Any, layers: int, mask: Any, *others: Any) -> Any:
            x, bias, length = table(tokens), None, tokens.shape[1]
            if c["positions"] == "relative":
                distances = jnp.clip(jnp.arange(length) - jnp.arange(length)[:, None], -16, 15) + 16
                places = jax.nn.one_hot(distances, 32)  # a lookup's gradient would scatter into 32 rows
                bias = nn.Dense(c["num_heads"], use_bias=False, dtype=c["dtype"])(places).transpose(2, 0, 1)[None]
            else:
                x += nn.Embed(c["max_length"], c["d_model"], dtype=c["dtype"])(jnp.arange(length))
            x = nn.Dropout(c["dropout"], deterministic=False)(x)
            for _ in range(layers):
                x = Block(c)(x, mask, bias, *others)
            return make_norm(c)(x) if c["norm"] == "pre" else x

        if inputs is not None:
            memory_mask = nn.make_attention_mask(targets > 0, inputs > 0, dtype=bool)
            mask = nn.make_attention_mask(inputs > 0, inputs > 0, dtype=bool)
            memory = stack(inputs, c["num_layers"], mask)
        before = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        layers, mask = c["num_decoder_layers"] or c["num_layers"], nn.make_causal_mask(targets, dtype=bool)
        hidden = stack(before, layers, mask, memory, memory_mask)
        return table.attend(hidden).astype(jnp.float32)


def make_norm(c: Mapping[str, Any]) -> nn.Module:
    """Return the norm of a model."""
    return (nn.RMSNorm if c["norm_type"] == "rmsnorm" else nn.LayerNorm)(dtype=c["dtype"])


def make_model(told: Told) -> tuple[nn.Module, nn.Module]:
    """Return the model that draws the parameters, and the one to train."""
    if not told["flax_wmt"]:
        plain = Plain(told["model"])
        return plain, plain
    path = Path(told["flax_wmt"]) / "models.py"
    spec = importlib.util.spec_from_file_location(f"flax_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = models
    spec.loader.exec_module(models)
    build, config = getattr(models, "Transformer", None) or models.TransformerLM, make_config(told)
    settings = models.TransformerConfig
    return build(settings(**config, deterministic=True)), build(settings(**config))


def make_update(told: Told, batch: Mapping[str, Any]) -> tuple[Callable[[], TrainState], Callable[..., Any]]:
    """Return what draws a state, and (state, batch, key) → (state, metrics); neither is compiled."""
    c, (initial, model) = told["model"], make_model(told)
    adam = optax.adam(lambda step: c["d_model"] ** -0.5 * (step + 1) * told["warmup"] ** -1.5, 0.9, 0.98, 1e-9)

    def call(method: Callable[..., Any], first: Any, targets: Any, **others: Any) -> Any:
        if "inputs" in others:
            return method(first, targets=targets, **others)
        return method(first, targets, **others)  # which lm1b calls its inputs

    def create() -> TrainState:
        keys = {name: jax.random.key(0) for name in ("params", "dropout")}
        tokens = {key: jnp.zeros(batch[key].shape, batch[key].dtype) for key in ARRAYS if key in batch}
        params = call(initial.init, keys, **tokens)["params"]
        return TrainState.create(apply_fn=functools.partial(call, model.apply), params=params, tx=adam)

    return create, make_train_step(bool(c["activation_dropout"]))


def load(told: Told) -> tuple[Step, Told]:
    """Build and compile the step for one batch."""
    names = ARRAYS | (PACKED_ARRAYS if told["packed"] else {})
    with np.load(told["batch"]) as arrays:
        batch = {key: jnp.asarray(arrays[name]) for key, name in names.items() if name in arrays}
    create, train_step = make_update(told, batch)
    with jax.default_device(jax.devices("cpu")[0]):  # XLA:GPU compiles the draws of 12 layers for minutes
        state = jax.jit(create)()
    state, key = jax.device_put(state, jax.devices()[0]), jax.random.key(1)
    step, seconds, size = compiled(jax.jit(train_step, donate_argnums=0), state, batch, key)

    def run() -> tuple[float, float]:
        nonlocal state
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch, key))
        return time.perf_counter() - began, float(metrics["loss"])

    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    versions = {"jax": jax.__version__, "flax": flax.__version__}
    return run, {"parameters": count, "compile_seconds": seconds, "temp_bytes": size, "versions": versions}


def make_config(told: Told) -> dict[str, Any]:
    """Return the fields of its TransformerConfig."""
    c = told["model"]
    same = {"emb_dim": "d_model", "qkv_dim": "d_model", "mlp_dim": "d_ff", "vocab_size": "vocab_size"}
    same |= {"output_vocab_size": "vocab_size", "num_heads": "num_heads", "num_layers": "num_layers"}
    same |= {"dropout_rate": "dropout", "attention_dropout_rate": "attention_dropout"}
    tied = {"share_embeddings": True, "logits_via_embedding": True}
    return {key: c[name] for key, name in same.items()} | tied | {"dtype": jnp.dtype(c["dtype"])}


def make_train_step(drop_activations: bool) -> Callable[..., Any]:
    """Return (state, batch, key) → (state, metrics)."""

    def without_inner(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        inner = isinstance(context.module, nn.Dropout) and context.module.path[-2:] == ("MlpBlock_0", "Dropout_0")
        return args[0] if inner and not drop_activations else call(*args, **kwargs)

    def train_step(state: Any, batch: dict[str, Any], key: Any) -> tuple[Any, dict[str, Any]]:
        targets, rngs = batch["targets"], {"dropout": jax.random.fold_in(key, state.step)}
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)

        def loss_fn(params: Any) -> tuple[Any, Any]:
            with nn.intercept_methods(without_inner):
                logits = state.apply_fn({"params": params}, **batch, rngs=rngs)
            rest = SMOOTHING / (logits.shape[-1] - 1)
            wanted = rest + (1 - SMOOTHING - rest) * jax.nn.one_hot(targets, logits.shape[-1])
            loss = -jnp.sum(wanted * nn.log_softmax(logits), axis=-1)
            return (loss * weights).sum() / weights.sum(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        correct = (jnp.argmax(logits, -1) == targets) * weights
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": correct.sum() / weights.sum()}

    return train_step
