"""Load the parameters of a trained run: the last, the best, or an average of several."""

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils.epath import Path
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints import checkpoint
from jformer.config.options import Config
from jformer.data.progress import counted
from jformer.errors import UserError
from jformer.models import init_params
from jformer.models.model import Model
from jformer.parallel import processes
from jformer.parallel.mesh import FSDP
from jformer.parallel.sharding import abstract_like, parameter_shardings


def abstract_params(model: Model, mesh: Mesh, whole: Sequence[str] = (FSDP,)) -> PyTree:
    """Return the shapes of a model's parameters with shardings for inference, not split over `whole` axes."""
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    return abstract_like(shapes, parameter_shardings(mesh, shapes, whole))


class Weights(NamedTuple):
    """Parameters, the steps of their checkpoints, and the fingerprints of the tokenizers of the last one."""

    params: PyTree
    steps: tuple[int, ...]
    tokenizers: tuple[str, ...]  # fingerprints; empty if it was not trained here


def load_weights(workdir: Path, settings: Config, model: Model, mesh: Mesh) -> Weights:
    """Return the parameters that `evaluate.weights` names, sharded for inference.

    The last ones and their moving average come from the newest intact checkpoint; skipped ones are reported on standard
    error. Raises UserError if other checkpoints are needed and damaged.
    """
    abstract = abstract_params(model, mesh)
    with checkpoint.open_run(workdir) as saved:
        params, steps = _params_and_steps(saved, workdir, settings, abstract)
        return Weights(params, steps, tuple(saved.progress(steps[-1]).get("tokenizers", ())))


def _params_and_steps(
    saved: checkpoint.Checkpoints, workdir: Path, settings: Config, abstract: PyTree
) -> tuple[PyTree, tuple[int, ...]]:
    weights = settings.evaluate.weights
    if weights == "average":
        count = settings.evaluate.average_last
        steps = average_steps(saved.steps(), settings.train.checkpoint_every, count)
        if len(steps) < count:
            _say(f"evaluate.average_last={count}, but {workdir} has {counted(len(steps), 'checkpoints')} to average")
        params = average(saved.restore(step, {"params": abstract})["params"] for step in steps)
        return params, tuple(steps)
    if weights == "best":
        step = saved.newest_progress()["best_step"]
        if not step:
            raise UserError(f"evaluate.weights='best' but no validation of {workdir} was finite: take 'last'")
        return saved.restore(step, {"params": abstract})["params"], (step,)
    item = "ema" if weights == "ema" else "params"
    restored = saved.restore_newest({item: abstract})
    for note in restored.skipped:
        _say(note)
    return restored.items[item], (restored.step,)


def _say(text: str) -> None:
    if processes.is_main_process():
        print(f"jformer: {text}", file=sys.stderr)


def average_steps(steps: Sequence[int], every: int, count: int) -> list[int]:
    """Return the last `count` steps at regular intervals, the last step of all among them, or all if they are fewer."""
    regular = [step for step in steps if step % every == 0 or step == steps[-1]]
    return regular[-count:]


def average(trees: Iterable[PyTree]) -> PyTree:
    """Return the mean of several parameter trees, summed in float32 on their devices, one in memory at a time."""
    total, count = None, 0
    for tree in trees:
        total = tree if total is None else jax.tree.map(jnp.add, total, tree)
        count += 1
    return jax.tree.map(lambda x: x / jnp.float32(count), total)
