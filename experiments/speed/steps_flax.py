"""The side of flax examples/wmt in steps.py: its models.py, imported from a checkout; nothing is copied.

Its train.py needs TensorFlow, so the step is written here in its manner: a one-hot target distribution, the accuracy
as a metric, Adam with 0.9 and 0.98, and JAX's default random numbers.
"""

import sys
import time
from collections.abc import Callable
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


def load(told: Told) -> tuple[Step, Told]:
    """Build and compile the step for one batch."""
    c, config = told["model"], make_config(told)
    sys.path.insert(0, told["flax_wmt"])
    from models import Transformer, TransformerConfig  # type: ignore[import-not-found]

    names = ARRAYS | (PACKED_ARRAYS if told["packed"] else {})
    with np.load(told["batch"]) as arrays:
        batch = {key: jnp.asarray(arrays[name]) for key, name in names.items()}
    init = jax.jit(Transformer(TransformerConfig(**config, deterministic=True)).init)
    params = init(jax.random.key(0), batch["inputs"], batch["targets"])["params"]
    adam = optax.adam(lambda step: c["d_model"] ** -0.5 * (step + 1) * told["warmup"] ** -1.5, 0.9, 0.98, 1e-9)
    state = TrainState.create(apply_fn=Transformer(TransformerConfig(**config)).apply, params=params, tx=adam)
    key = jax.random.key(1)
    train_step = jax.jit(make_train_step(bool(c["activation_dropout"])), donate_argnums=0)
    step, seconds, size = compiled(train_step, state, batch, key)

    def run() -> tuple[float, float]:
        nonlocal state
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch, key))
        return time.perf_counter() - began, float(metrics["loss"])

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
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
