"""jformer's side of steps.py: the step that training runs, its metrics and its guard included."""

import time
from typing import Any

import jax
import numpy as np

from experiments.speed.steps_worker import Step, Told, compiled
from jformer.config.options import OptimConfig
from jformer.data.data_config import DataConfig
from jformer.models import ModelConfig, build_model, init_params
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch, replicated
from jformer.tasks.build import TASKS
from jformer.tasks.task import Task, make_loss
from jformer.training import optim
from jformer.training.state import TrainState, create_state
from jformer.training.step import make_train_step


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
        loss = metrics.sums["loss"]
        return seconds, float(loss.total / loss.count)

    versions = {"jax": jax.__version__}
    return run, {"parameters": count, "compile_seconds": seconds, "temp_bytes": size, "versions": versions}


def build_step(
    config: ModelConfig, arrays: dict[str, np.ndarray], warmup: int, task: Task | None = None, microbatches: int = 1
) -> tuple[Any, TrainState, Any]:
    """Return the update, the state before the first one and the batch [a b …], as in a run.

    Without a task, it translates.

    Args:
        config: of the model.
        arrays: the batch [rows …].
        warmup: updates until the rate falls.
        task: the task to learn.
        microbatches: equal parts of the rows.
    """
    model, mesh = build_model(config), make_mesh(1)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    schedule = optim.make_schedule("noam", 1.0, optim.ScheduleParams(warmup, 100_000, config.d_model))
    options = OptimConfig(clip_norm=0.0)
    tx, keeps_finite = optim.make_optimizer(options, schedule), optim.keeps_finite(options)
    task = task or TASKS["translate"](DataConfig(), label_smoothing=0.1, scores=(), tokenize="none", lowercase=False)
    state = jax.device_put(create_state(params, tx, ema=False), replicated(mesh))  # as an update leaves it
    batch = put_batch(mesh, {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in arrays.items()})
    return make_train_step(make_loss(model, task.loss), tx, mesh, seed=0, keeps_finite=keeps_finite), state, batch
