"""Of an update that is skipped the first module that is not finite is named, with its layer and its microbatch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch
from jformer.tasks.task import make_loss
from jformer.training.finiteness import Examination
from jformer.training.machine import Available
from tests.conftest import make_batch
from tests.training.test_step import SMOOTHED, fresh

BATCH = make_batch([1] * 4, [6, 6, 2, 5], vocab_size=48)
HUGE = np.float32(3e38)


EARLIER, NORM = ("decoder", "block", "self_attn_norm"), ("decoder", "block", "feed_forward_norm")
SHARP, STEEP = 3.0, 5.0  # where a scale of a norm of layer 1 has an infinite slope, and a bias an infinite rate


@pytest.fixture(scope="module")
def examined(tiny):
    return examination(tiny)


def examination(tiny, **fields):
    """Return a function: how parameters are changed → what is said of their update in two microbatches."""
    model, params = tiny(family="decoder", dropout=0.2, vocab_size=48, **fields)
    plain, mesh = make_loss(model, SMOOTHED.loss), make_mesh(2)

    def of_layer_1(params, norm, name):
        return functools.reduce(dict.__getitem__, norm, params)[name][0]

    def loss(params, rows, key):
        sums = plain(params, rows, key)
        more = [jnp.sqrt(jnp.abs(of_layer_1(params, norm, "scale") - SHARP)).sum() for norm in (EARLIER, NORM)]
        return {**sums, "loss": sums["loss"]._replace(total=sums["loss"].total + sum(more))}

    def rated(updates, params):
        return jax.tree.map(lambda g: -g / (of_layer_1(params, NORM, "bias")[0] - STEEP), updates)

    tx = optax.stateless(rated)
    examine = Examination(model, loss, tx, mesh, seed=0)

    def say(change=lambda params: None, weight=1.0):
        changed = jax.tree.map(np.array, jax.device_get(params))
        change(changed)
        batch = {name: x.reshape(2, -1, *x.shape[1:]).copy() for name, x in BATCH.items()}
        batch["weights"][1, 1, 0] = weight  # of the last row
        return examine(fresh(changed, tx, mesh), put_batch(mesh, batch), 5)

    return say


def put(value, *path, at=...):
    """Return a function that puts a value into a parameter."""

    def change(params):
        functools.reduce(dict.__getitem__, path, params)[at] = value

    return change


UP = ("decoder", "block", "feed_forward", "up", "kernel")
HALF = slice(0, 16)  # of what a kernel reads; the whole of a normalised output would add up to 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(np.nan, *UP, at=(1, 2)), "the parameter decoder/block/feed_forward/up/kernel in layer 2"),
        (put(np.nan, "embedding", "embedding", at=9), "the parameter embedding/embedding"),
        (put(HUGE, *UP, at=(1, HALF)), "the output of decoder/block/feed_forward/up in layer 2, in microbatch 1 of 2"),
    ],
)
def test_the_first_module_that_is_not_finite_is_named(examined, change, said):
    assert examined(change) == f"the first non-finite value is {said}"


@pytest.mark.slow
def test_a_parameter_of_all_layers_is_in_none_and_an_output_is_in_its_layer(tiny):
    shared = examination(tiny, shared_layers=True)
    said = "the first non-finite value is the parameter decoder/block/feed_forward/up/kernel"
    assert shared(put(np.nan, *UP, at=(0, 2))) == said
    assert "the output of decoder/block/feed_forward/up in layer 1," in shared(put(HUGE, *UP, at=(0, HALF)))


def test_without_memory_for_it_nothing_is_looked_for(tiny, monkeypatch):
    examined = examination(tiny)
    monkeypatch.setattr("jformer.training.finiteness.available", lambda device: Available(2**30, 10, 0))
    assert examined(weight=np.inf).startswith("the first non-finite value is not known: ")

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert examined(weight=np.inf).startswith("the first non-finite value is not known: ")


def test_the_microbatch_is_named(examined):
    assert examined(weight=np.inf).endswith(" is the loss, or its logits, in microbatch 2 of 2")


def test_layers_come_before_modules_within_a_stack(examined):
    def change(params):
        put(HUGE, "decoder", "block", "self_attn", "v", "kernel", at=(1, HALF))(params)
        put(HUGE, *UP, at=(0, HALF))(params)

    assert "decoder/block/feed_forward/up in layer 1" in examined(change)


def test_an_update_that_is_finite_is_said_to_be(examined):
    assert examined() == "the first non-finite value is not reproducible: parameters have changed since"


def test_a_gradient_is_named_where_it_begins_on_its_way_back(examined):
    def change(params):
        put(SHARP, *EARLIER, "scale", at=(0, 3))(params)
        put(SHARP, *NORM, "scale", at=(0, 3))(params)

    said = examined(change)
    assert "the gradient of decoder/block/feed_forward_norm/scale in layer 1, in microbatch 1 of 2" in said


def test_what_an_optimizer_makes_of_finite_gradients_is_named(examined):
    assert examined(put(STEEP, *NORM, "bias", at=(0, 0))).endswith(" is the new value of embedding/embedding")
