"""All of a state is in its checkpoint, also what was added to it later."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jformer.errors import UserError
from jformer.training.state import Progress, TrainState, as_items, create_state, from_items


class Larger(TrainState):
    """A state with a field that no list of names has."""

    loss_scale: jax.Array


def test_every_field_of_a_state_is_saved_and_comes_back():
    state = create_state({"w": jnp.arange(3.0)}, optax.adam(0.1), ema=True)
    fields = {name: getattr(state, name) for name in state.__dataclass_fields__}
    larger = Larger(**fields, loss_scale=jnp.float32(512))
    items = as_items(larger)
    assert set(items) == {"params", "ema", "rest"}
    blank = jax.tree.map(jnp.zeros_like, larger)
    back = from_items(blank, items)
    assert float(back.loss_scale) == 512
    jax.tree.map(np.testing.assert_array_equal, back, larger)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_new_state_can_be_donated_whatever_its_optimizer_keeps(compiled):
    def keep(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return params, zeros, zeros

    tx = optax.GradientTransformation(keep, optax.identity().update)
    create = functools.partial(create_state, tx=tx, ema=True)
    state = (jax.jit(create) if compiled else create)({"w": jnp.arange(3.0)})
    after = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)(state)
    assert after.opt_state[0]["w"].tolist() == after.ema["w"].tolist() == after.params["w"].tolist() == [1, 2, 3]


def test_progress_of_another_version_is_refused_with_the_name_of_its_checkpoint():
    assert Progress.from_json(dataclasses.asdict(Progress(step=3)), "run/checkpoints/3") == Progress(step=3)
    said = r"^run/checkpoints/3: a newer version of jformer wrote it \(best_bleu\): upgrade jformer$"
    with pytest.raises(UserError, match=said):
        Progress.from_json({"step": 3, "best_bleu": 30.0}, "run/checkpoints/3")


def test_a_state_without_an_average_has_no_item_for_it():
    state = create_state({"w": jnp.arange(3.0)}, optax.sgd(0.1), ema=False)
    assert set(as_items(state)) == {"params", "rest"}
    assert from_items(state, as_items(state)).ema is None
