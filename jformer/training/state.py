"""The content of a checkpoint: the state on the devices, and the progress of the run, which is plain JSON.

`step` updates a state, `initial_state` makes or restores one, checkpoints/ writes it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jformer.errors import UserError
from jformer.models.parts import overlaid
from jformer.parallel.sharding import parameter_names

APART = ("params", "ema")  # fields of a state that are checkpoint items of their own


class TrainState(flax.struct.PyTreeNode):
    """Everything that the next update depends on, apart from config and data."""

    step: jax.Array  # updates tried, which is also the number of the next batch
    params: PyTree
    opt_state: optax.OptState
    ema: PyTree  # exponential moving average of all parameters but the base's, or None
    skipped: jax.Array  # updates not applied because they were not finite
    skipped_in_row: jax.Array
    # Names of the parameters that checkpoints leave out
    base: tuple[str, ...] = flax.struct.field(pytree_node=False, default=(), kw_only=True)


@dataclasses.dataclass
class Progress:
    """The content of a checkpoint apart from its arrays."""

    step: int = 0
    seconds: float = 0.0  # over all restarts, up to this checkpoint
    rows: int = 0  # in metrics.jsonl, up to this checkpoint
    best: float | None = None  # the best validation so far: a loss, or the score that train.best_by names
    best_step: int = 0  # its update; 0 while no validation was finite
    since_best: int = 0  # validations
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)  # options with which the best was measured
    data: list[str] = dataclasses.field(default_factory=list)  # fingerprints of the token arrays trained on
    valid: list[str] = dataclasses.field(default_factory=list)  # and of those for validation
    tokenizers: list[str] = dataclasses.field(default_factory=list)  # fingerprints of source and target
    base: str = ""  # the digest of the parameters that adapters leave to train.init_from
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the run, in case its file is lost

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> Self:
        """Read the progress of the checkpoint `where`; raise UserError if a newer version wrote it."""
        unknown = content.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise UserError(f"{where}: a newer version of jformer wrote it ({names}): upgrade jformer")
        return cls(**content)


def create_state(params: PyTree, tx: optax.GradientTransformation, ema: bool, base: tuple[str, ...] = ()) -> TrainState:
    """Return the state before the first update; `base` names the parameters that its checkpoints leave out."""
    zero, names = jnp.zeros((), jnp.int32), parameter_names(params)
    average = jax.tree.map(lambda name, leaf: None if name in base else leaf, names, params) if ema else None
    state = TrainState(
        step=zero,
        params=params,
        opt_state=tx.init(params),
        ema=average,
        skipped=zero,
        skipped_in_row=zero,
        base=base,
    )
    met = set[int]()

    def alone(leaf: Any) -> Any:
        """Return a leaf, or a copy of one met before: a donated state shares none, and some optimizers keep params."""
        again = id(leaf) in met
        met.add(id(leaf))
        return jnp.copy(leaf) if again else leaf

    return jax.tree.map(alone, state)


def as_items(state: TrainState) -> dict[str, PyTree]:
    """Return the state as checkpoint items: all arrays but the base's, with parameters as separately readable items."""
    rest = {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "base"}
    apart = {name: _without(rest.pop(name), state.base) for name in APART}
    return {"rest": rest} | {name: tree for name, tree in apart.items() if tree is not None}


def from_items(state: TrainState, items: Mapping[str, PyTree]) -> TrainState:
    """Return the state with the restored items of `as_items`."""
    apart = {name: overlaid(getattr(state, name), items[name]) for name in APART if name in items}
    return state.replace(**apart, **items["rest"])


def _without(tree: PyTree, names: tuple[str, ...]) -> PyTree:
    if tree is None or not names:
        return tree
    flat = flatten_dict(tree, sep="/")
    return unflatten_dict({name: leaf for name, leaf in flat.items() if name not in names}, sep="/")
