"""What a checkpoint holds of a run: the state on the devices, and the progress that is plain JSON.

How an update changes a state is said in `step`, how checkpoints are written in checkpoints/.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config.options import Config
from jformer.data.tokenizers import Tokenizer
from jformer.errors import UserError
from jformer.inference.restore import restore
from jformer.models import init_params
from jformer.models.model import Model
from jformer.parallel.sharding import abstract_like, device_bytes, state_shardings
from jformer.training.machine import refuse_state
from jformer.training.transfer import adopt, put_vectors

APART = ("params", "ema")  # fields of a state that are checkpoint items of their own


class TrainState(flax.struct.PyTreeNode):
    """All that the next update depends on, beside config and data."""

    step: jax.Array  # updates tried, which is also the number of the next batch
    params: PyTree
    opt_state: optax.OptState
    ema: PyTree  # exponential moving average of the parameters, or None
    skipped: jax.Array  # updates not applied because they were not finite
    skipped_in_row: jax.Array


@dataclasses.dataclass
class Progress:
    """What a checkpoint says beside its arrays."""

    step: int = 0
    seconds: float = 0.0  # over all restarts, up to this checkpoint
    rows: int = 0  # in metrics.jsonl, up to this checkpoint
    best: float | None = None  # the best validation so far: a loss, or the score that train.best_by names
    best_step: int = 0  # its update; 0 while no validation was finite
    since_best: int = 0  # validations
    data: list[str] = dataclasses.field(default_factory=list)  # fingerprints of the token arrays trained on
    valid: list[str] = dataclasses.field(default_factory=list)  # and of those for validation
    tokenizers: list[str] = dataclasses.field(default_factory=list)  # fingerprints of source and target
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the run, should its file be lost

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> Self:
        """Read the progress of the checkpoint `where`; raise UserError if another version wrote it."""
        unknown = content.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise UserError(f"{where}: another version of jformer wrote it ({names}): use that version, or train anew")
        return cls(**content)


def create_state(params: PyTree, tx: optax.GradientTransformation, ema: bool) -> TrainState:
    """Return the state before the first update."""
    zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]  # three buffers: a step that reuses memory needs its own
    copy = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(
        step=zeros[0], params=params, opt_state=tx.init(params), ema=copy, skipped=zeros[1], skipped_in_row=zeros[2]
    )


def open_state(
    config: Config,
    mesh: Mesh,
    model: Model,
    tokenizers: tuple[Tokenizer, Tokenizer],
    make: Callable[[PyTree], TrainState],
    checkpoints: Checkpoints,
) -> tuple[TrainState, Progress, list[str]]:
    """Return the newest checkpoint's state, or a new one, and notes on where it is from.

    A new one is drawn from the seed, or begins with the run or the word vectors that the config names.

    Args:
        config: the seed, and what to begin with.
        mesh: where the state is placed, in parts where parameters are split.
        model: whose parameters it holds.
        tokenizers: of source and target, whose tokens word vectors are looked up for.
        make: parameters → the state before the first update; it is traced.
        checkpoints: the run's; those that are damaged are passed over, and the notes say so.

    Raises:
        UserError: the state is larger than the memory, no checkpoint can be read, or what the config names does not fit
            the model.
    """
    draw = functools.partial(init_params, model)
    key = jax.random.key(config.seed)
    shapes = jax.eval_shape(lambda key: make(draw(key)), key)
    shardings = state_shardings(mesh, shapes)
    abstract = abstract_like(shapes, shardings)
    refuse_state(device_bytes(abstract), mesh)
    if checkpoints.steps():
        restored = checkpoints.restore_newest(as_items(abstract))
        progress = Progress.from_json(restored.progress, str(checkpoints.directory / str(restored.step)))
        return from_items(abstract, restored.items), progress, restored.skipped
    params = jax.jit(draw, out_shardings=shardings.params)(key)
    notes: list[str] = []
    if config.train.init_from:
        params, notes = adopt(restore(config.train.init_from, mesh=mesh).params, params, config.train.init_from)
    params, coverage = put_vectors(config, tokenizers, params)
    params = jax.device_put(params, shardings.params)
    return jax.jit(make, out_shardings=shardings)(params), Progress(), notes + coverage


def as_items(state: TrainState) -> dict[str, PyTree]:
    """Return the state as checkpoint items: all its fields, with parameters apart, to be read without the rest."""
    rest = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    apart = {name: rest.pop(name) for name in APART}
    return {"rest": rest} | {name: tree for name, tree in apart.items() if tree is not None}


def from_items(state: TrainState, items: Mapping[str, PyTree]) -> TrainState:
    """Return the state with what `as_items` made of it, and was restored."""
    return state.replace(**{name: items[name] for name in APART if name in items}, **items["rest"])
