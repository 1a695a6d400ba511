"""Arrays lie where the table says, and a batch's rows where their device is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jformer.config.options import OptimConfig
from jformer.errors import UserError
from jformer.parallel.activations import COLUMN, ROW, kernel_axes
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import (
    local_rows,
    over_rows,
    parameter_names,
    parameter_shardings,
    parameter_specs,
    put_batch,
    state_shardings,
)
from jformer.training.optim import frozen_parameters, make_optimizer, per_layer
from jformer.training.state import create_state

SHAPES = {  # of a piece of a model, two layers
    "encoder": {
        "block": {
            "self_attn": {"q": {"kernel": (2, 8, 16), "bias": (2, 16)}, "o": {"kernel": (2, 16, 8), "bias": (2, 8)}},
            "self_attn_norm": {"scale": (2, 8)},
        }
    },
    "source_embedding": {"embedding": (12, 8)},
}
PARAMS = jax.tree.map(jnp.ones, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def by_name(tree):
    """Return path → leaf, without the part 'encoder/block'."""
    names = jax.tree.leaves(parameter_names(PARAMS))
    return {name.removeprefix("encoder/block/"): x for name, x in zip(names, jax.tree.leaves(tree), strict=True)}


def test_kernels_are_split_over_tensor_by_their_heads_and_over_fsdp_the_other_way():
    assert by_name(parameter_specs(PARAMS)) == {
        "self_attn/q/kernel": P(None, "fsdp", "tensor"),
        "self_attn/q/bias": P(None, "tensor"),
        "self_attn/o/kernel": P(None, "tensor", "fsdp"),
        "self_attn/o/bias": P(),
        "self_attn_norm/scale": P(),
        "source_embedding/embedding": P("tensor", "fsdp"),
    }


def test_an_adapter_is_whole_on_every_device_whatever_it_adapts():
    factors = {"adapter": {"self_attn": {"q": {"kernel": jnp.ones((4, 8, 2))}}}}
    assert jax.tree.leaves(parameter_specs(factors)) == [P()]


def test_a_parameter_of_ones_own_is_whole_on_every_device():
    assert parameter_specs({"encoder": {"mystery": jnp.ones((3, 2))}}) == {"encoder": {"mystery": P()}}


def test_a_parameter_with_fewer_axes_than_its_row_splits_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^parameter encoder/up/kernel \(4,\) has fewer axes"):
        parameter_specs({"encoder": {"up": {"kernel": jnp.ones(4)}}})


def test_kernels_are_stored_as_they_are_multiplied():
    stored = by_name(parameter_specs(PARAMS))
    assert stored["self_attn/q/kernel"] == P(None, *kernel_axes(COLUMN))
    assert stored["self_attn/o/kernel"] == P(None, *kernel_axes(ROW))


def test_parameter_that_does_not_divide_is_refused_by_name():
    message = r"^mesh.tensor=8 does not divide 12 of parameter source_embedding/embedding \[12 8\]: choose a divisor"
    with pytest.raises(UserError, match=message):
        parameter_shardings(make_mesh(1, 1, 8), PARAMS)


def test_axes_that_answers_do_not_split_are_left_out():
    places = by_name(parameter_shardings(make_mesh(2, 2, 2), PARAMS, whole=["fsdp"]))
    assert places["self_attn/q/kernel"].spec == P(None, None, "tensor")
    assert places["self_attn/o/kernel"].spec == P(None, "tensor")


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adafactor"])
@pytest.mark.parametrize("freeze", [(), ("embedding",)], ids=["all", "frozen"])
def test_moments_and_averages_lie_where_their_parameters_do(optimizer, freeze):
    adam = {"b1": 0.9, "b2": 0.98, "epsilon": 1e-9, "weight_decay": 0.1, "clip_norm": 1.0}
    options = OptimConfig(optimizer=optimizer, **adam)
    tx = make_optimizer(options, lambda step: 0.1, frozen_parameters(PARAMS, freeze))
    state = jax.eval_shape(lambda params: create_state(params, tx, True), PARAMS)
    places = state_shardings(make_mesh(2, 2, 2), state)
    specs = parameter_specs(PARAMS)
    assert jax.tree.map(lambda place: place.spec, places.params) == specs
    assert jax.tree.map(lambda place: place.spec, places.ema) == specs
    split = [place.spec for place in jax.tree.leaves(places.opt_state) if place.spec != P()]
    trained = 4 - bool(freeze)  # of six, that are split at all
    assert len(split) == trained * (1 if optimizer == "adafactor" else 2)  # at these sizes it has no rows and columns


def test_statistics_of_rows_and_columns_are_replicated():
    tx = make_optimizer(OptimConfig(optimizer="adafactor"), lambda step: 0.1, None)
    params = {"self_attn": {"q": {"kernel": jnp.ones((256, 256))}}}
    places = state_shardings(make_mesh(2, 2, 2), jax.eval_shape(lambda params: create_state(params, tx, False), params))
    assert {place.spec for place in jax.tree.leaves(places.params)} != {P()}
    assert {place.spec for place in jax.tree.leaves(places.opt_state)} == {P()}


def test_moments_of_an_optimizer_of_each_parameter_lie_where_it_does():
    tx = per_layer(optax.scale_by_adam())
    state = jax.eval_shape(lambda params: create_state(params, tx, False), PARAMS)
    places = state_shardings(make_mesh(2, 2, 2), state)
    split = [place.spec for place in jax.tree.leaves(places.opt_state) if place.spec != P()]
    assert len(split) == 2 * sum(place.spec != P() for place in jax.tree.leaves(places.params))


def test_mesh_is_filled_up_and_refused_where_it_does_not_fit():
    assert dict(make_mesh().shape) == {"data": 8, "sequence": 1, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(1, -1, 2, sequence=2).shape) == {"data": 1, "sequence": 2, "fsdp": 2, "tensor": 2}
    assert make_mesh(1, 2, 1).size == 2  # some devices stay over
    for sizes, said in {
        (3, -1, 1): "data=3 x mesh.sequence=1 x mesh.fsdp=-1",
        (4, 4, 1): "data=4 x mesh.sequence=1 x mesh.fsdp=4",
    }.items():
        with pytest.raises(UserError, match=f"^mesh.{said} x mesh.tensor=1 does not fit 8 devices"):
            make_mesh(*sizes)


def test_a_batch_put_by_rows_is_the_batch_put_whole():
    mesh, batch = make_mesh(2, 2, 2), {"x": np.arange(2 * 8 * 3).reshape(2, 8, 3), "row": np.arange(16).reshape(2, 8)}
    assert local_rows(mesh, 8).tolist() == list(range(8))
    whole, parts = put_batch(mesh, batch), put_batch(mesh, batch, 8)
    for name, x in batch.items():
        np.testing.assert_array_equal(whole[name], x)
        np.testing.assert_array_equal(parts[name], x)
        assert whole[name].sharding == parts[name].sharding
        assert {shard.data.shape[1] for shard in parts[name].addressable_shards} == {2}


def test_a_process_gives_the_rows_it_holds_and_no_others(monkeypatch):
    mesh, x = make_mesh(2, 2, 2), np.arange(16).reshape(1, 16)
    held = np.r_[4:8, 12:16]
    monkeypatch.setattr("jformer.parallel.sharding.local_rows", lambda mesh, rows: held)
    found = put_batch(mesh, {"x": x[:, held]}, 16)["x"]
    for shard in found.addressable_shards:
        first = shard.index[1].start
        if first in (4, 12):
            np.testing.assert_array_equal(shard.data, x[shard.index])
        else:  # in a run of several processes, another one's
            assert not np.array_equal(shard.data, x[shard.index])


def test_rows_are_worked_on_where_they_lie_each_part_with_its_own_number_of_turns():
    def halve(params, batch):
        turns = jax.lax.while_loop(lambda s: (s[0] > params).any(), lambda s: (s[0] / 2, s[1] + 1), (batch["x"], 0))[1]
        return SimpleNamespace(y=batch["x"] * batch["by"], turns=jnp.full(len(batch["x"]), turns)).__dict__

    batch = {"x": np.array([1.0, 1, 1, 1, 2, 2, 64, 1]), "by": 3}
    found = jax.jit(over_rows(halve, make_mesh(2, 2, 2)))(1.0, batch)
    np.testing.assert_array_equal(found["y"], 3 * batch["x"])
    assert found["turns"].tolist() == [0, 0, 0, 0, 1, 1, 6, 6]
    assert found["turns"].sharding.is_fully_replicated
    assert over_rows(halve, None) is halve
    assert over_rows(halve, make_mesh(1)) is halve


def test_what_has_no_parameters_name_is_everywhere():
    state = jax.eval_shape(lambda params: create_state(params, optax.scale_by_schedule(lambda _: 0.1), False), PARAMS)
    (count,) = jax.tree.leaves(state_shardings(make_mesh(8), state).opt_state)
    assert count.spec == P()
