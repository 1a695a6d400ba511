"""A trained run opened again: its task, its model and its parameters."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from etils.epath import Path
from jax.sharding import Mesh

from jformer import checkpoint, optim
from jformer.config import Config
from jformer.data.tokenizers import ImageTokenizer, Tokenizer
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model, init_params
from jformer.placement import FSDP, TENSOR
from jformer.sharding import make_mesh, parameter_shardings
from jformer.tasks import TASKS, Task, sized


def build_task(config: Config) -> Task:
    """Return the task the config names."""
    scores = dataclasses.asdict(config.evaluate)
    return TASKS[config.task](
        config.data,
        label_smoothing=config.optim.label_smoothing,
        **{key: scores[key] for key in ("scores", "tokenize", "lowercase")},
    )


def open_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay out the devices as the config says; raise UserError where the model cannot be shared so."""
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    check_heads(config.model, mesh)
    return mesh


def check_heads(model: ModelConfig, mesh: Mesh) -> None:
    """Raise UserError where the heads of a model cannot be dealt evenly over `tensor`."""
    for key, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.kv_heads)):
        if heads % mesh.shape[TENSOR]:
            raise UserError(f"mesh.tensor={mesh.shape[TENSOR]} must divide model.{key}={heads}: devices share heads")


def build_sized(config: Config, task: Task, tokenizers: tuple[Tokenizer, Tokenizer]) -> Any:
    """Return the model with the sizes that the tokenizers and the task give it."""
    source, vision = tokenizers[0], config.model.vision
    if isinstance(source, ImageTokenizer) and source.shape != (vision.image_size, vision.image_size, vision.channels):
        raise UserError(
            f"model.vision.image_size={vision.image_size} and channels={vision.channels} but the images are "
            f"{' x '.join(map(str, source.shape))} (height, width, channels): set them so"
        )
    return build_model(sized(config.model, task, *(tokenizer.vocab_size for tokenizer in tokenizers)))


def abstract_params(model: Any, mesh: Mesh) -> Any:
    """Return the shapes of a model's parameters, split over `tensor` alone: so answers need them."""
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    return checkpoint.abstract_like(shapes, parameter_shardings(mesh, shapes, whole=[FSDP]))


def load_params(workdir: Path, settings: Config, model: Any, mesh: Mesh) -> Any:
    """Return the parameters that `evaluate.weights` names, as answers need them."""
    abstract = abstract_params(model, mesh)
    saved = checkpoint.open_run(workdir)
    weights, steps = settings.evaluate.weights, saved.steps()
    if weights == "average":
        last = average_steps(steps, settings.train.checkpoint_every, settings.evaluate.average_last)
        params = optim.average(saved.restore(step, {"params": abstract})["params"] for step in last)
    elif weights == "ema":
        params = saved.restore(steps[-1], {"ema": abstract})["ema"]
    else:
        step = saved.progress(steps[-1])["best_step"] if weights == "best" else steps[-1]
        params = saved.restore(step, {"params": abstract})["params"]
    saved.close()
    return params


def average_steps(steps: Sequence[int], every: int, count: int) -> list[int]:
    """Return the last `count` steps at regular intervals, the last step of all among them."""
    regular = [step for step in steps if step % every == 0 or step == steps[-1]]
    if len(regular) < count:
        raise UserError(
            f"evaluate.average_last={count} but the run has {len(regular)} checkpoints; lower it or train on"
        )
    return regular[-count:]
