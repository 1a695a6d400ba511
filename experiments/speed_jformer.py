"""jformer's side of experiments/speed.py: the step that training runs, its metrics and its guard included."""

import time
from typing import Any

import jax
import numpy as np

from experiments.speed_worker import Step, Told, compiled
from jformer import optim
from jformer.data.config import DataConfig
from jformer.models import ModelConfig, build_model, init_params
from jformer.sharding import make_mesh, put_batch, replicated
from jformer.step import TrainState, create_state, make_loss, make_train_step
from jformer.tasks import TASKS


def load(told: Told) -> tuple[Step, Told]:
    """Build and compile the step for one batch."""
    with np.load(told["batch"]) as arrays:
        train_step, state, batch = build_step(ModelConfig(**told["model"]), dict(arrays), told["warmup"])
    step, seconds, size = compiled(train_step, state, batch)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    def run() -> tuple[float, float]:
        nonlocal state
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        seconds = time.perf_counter() - began
        total, tokens = metrics["sums"]["loss"]
        return seconds, float(total / tokens)

    versions = {"jax": jax.__version__}
    return run, {"parameters": count, "compile_seconds": seconds, "temp_bytes": size, "versions": versions}


def build_step(config: ModelConfig, arrays: dict[str, np.ndarray], warmup: int) -> tuple[Any, TrainState, Any]:
    """Return the update, the state before the first one and the batch, one microbatch, as they lie in a run."""
    model, mesh = build_model(config), make_mesh(1)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    schedule = optim.make_schedule("noam", 1.0, warmup, 100_000, config.d_model)
    tx = optim.make_optimizer("adam", schedule, params, b1=0.9, b2=0.98, epsilon=1e-9, weight_decay=0.0, clip_norm=0.0)
    task = TASKS["translate"](DataConfig(), label_smoothing=0.1, scores=(), tokenize="none", lowercase=False)
    state = jax.device_put(create_state(params, tx, ema=False), replicated(mesh))  # as an update leaves it
    batch = put_batch(mesh, {name: array[None] for name, array in arrays.items()})
    return make_train_step(make_loss(model, task), tx, mesh, seed=0), state, batch
