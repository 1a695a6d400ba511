"""Activations by name: what is read is what is computed, and what is replaced counts everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.errors import UserError
from jformer.models import build_model
from jformer.models.interventions import activations, at_layer, intervene
from jformer.models.lora import merged
from tests.conftest import draw_params, make_batch, run
from tests.models.contracts import check_cache
from tests.models.test_contracts import architectures, batch_for, built
from tests.models.test_lora import EVERYWHERE, drawn

SIZES = [7, 5, 4], [6, 4, 5]
EVERY = list(architectures())
LAYERS = [{}, {"shared_layers": True}, {"family": "decoder", "norm": "pre"}]


def recorded(model, params, batch, *names):
    return jax.jit(lambda params, batch: activations(model, params, batch, names or ("*",)))(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("config", EVERY, ids=[architectures()[c][0] for c in EVERY])
def test_an_activation_replaced_by_its_own_value_changes_no_bit(config):
    model, params = built(config)
    batch = batch_for(config, *SIZES)
    seen, expected = recorded(model, params, batch), run(model, params, batch)
    np.testing.assert_array_equal(seen["logits"], expected)
    assert {*jax.eval_shape(lambda batch: activations(model, params, batch, "logits"), batch)} == {"logits"}
    own = {"*": lambda value, layer: value}
    own |= {name: lambda value, layer, name=name: seen[name][layer] for name in seen if name.endswith("block/output")}
    own |= {name: lambda value, layer, name=name: seen[name][layer] for name in seen if name.endswith("attn/heads")}
    np.testing.assert_array_equal(run(intervene(model, own), params, batch), expected)
    assert config.recurrent.cell or len(own) > 2


@pytest.mark.slow
@pytest.mark.parametrize("fields", LAYERS, ids=str)
def test_zeroed_heads_of_a_layer_are_an_output_projection_of_zeros(tiny, fields):
    model, params = tiny(**fields)
    stack, layer = "decoder", 0 if fields.get("shared_layers") else 1
    batch = make_batch(*SIZES)
    zeroed = intervene(model, {f"{stack}/block/self_attn/heads": at_layer(layer, lambda heads, _: 0 * heads)})
    block = dict(params[stack]["block"])
    if not fields.get("shared_layers"):  # brute force: the layer's kernel is zero
        attention = block["self_attn"]
        o = {**attention["o"], "kernel": attention["o"]["kernel"].at[layer].set(0.0)}
        block["self_attn"] = {**attention, "o": o}
        without = {**params, stack: {**params[stack], "block": block}}
        np.testing.assert_array_equal(run(zeroed, params, batch), run(model, without, batch))
    assert np.abs(run(zeroed, params, batch) - run(model, params, batch)).max() > 1e-3
    check_cache(zeroed, params, make_batch([7, 5], [6, 6]), atol=5e-5)


@pytest.mark.slow
def test_vectors_steer_with_a_cache_as_in_a_whole_pass(tiny):
    model, params = tiny(norm="pre")
    vector = jax.random.normal(jax.random.key(1), (32,))
    steered = intervene(
        model,
        {
            "decoder/block/output": at_layer(0, lambda x, _: x + vector),
            "*/cross_attn/k/output": lambda x, layer: x * (1 + layer),
            "decoder/block/feed_forward/units": at_layer(1, lambda x, _: x.at[..., 3].set(2.0)),
            "decoder/block/self_attn/output": lambda x, layer: x + layer,
            "logits": lambda x, _: x.at[..., 5].set(99.0),
        },
    )
    check_cache(steered, params, make_batch([7, 5], [6, 6]), atol=5e-5)
    logits = run(steered, params, make_batch(*SIZES))
    assert (logits[..., 5] == 99.0).all()
    assert np.abs(logits - run(model, params, make_batch(*SIZES)))[..., :5].max() > 1e-2


@pytest.mark.slow
def test_activations_are_those_with_adapters_and_after_interventions(tiny):
    model, params = tiny()
    adapted = build_model(dataclasses.replace(model.config, lora=EVERYWHERE))
    changed, batch = drawn(EVERYWHERE, draw_params(adapted)), make_batch(*SIZES)
    seen, of_merged = recorded(adapted, changed, batch), recorded(model, merged(EVERYWHERE, changed), batch)
    assert seen.keys() == of_merged.keys()
    for name, value in seen.items():
        np.testing.assert_allclose(value, of_merged[name], atol=2e-5, err_msg=name)
    doubled = intervene(model, {"encoder/block/output": at_layer(1, lambda x, _: 2 * x)})
    after = recorded(doubled, params, batch, "encoder/*output")
    np.testing.assert_array_equal(after["encoder/block/output"][1], after["encoder/output"])
    read = "*/self_attn/heads", "*/feed_forward/units"  # what projections read
    ones = intervene(model, dict.fromkeys(read, lambda x, _: 0 * x + 1.0))
    assert all((value == 1).all() for value in recorded(ones, params, batch, *read).values())


@pytest.mark.parametrize("name", ["encoder/block/output", "encoder/block/self_attn/heads"])
def test_interventions_after_others_see_what_those_made(tiny, name):
    model, params = tiny()
    twice = intervene(intervene(model, {name: lambda x, _: 0 * x}), {name: lambda x, _: x + 1.0})
    once = intervene(model, {name: lambda x, _: 0 * x + 1.0})
    np.testing.assert_array_equal(run(twice, params, make_batch(*SIZES)), run(once, params, make_batch(*SIZES)))


def test_unknown_names_layers_and_other_shapes_are_refused(tiny):
    model, params = tiny()
    for number, name, last in ((-1, "*/block/output", 1), (2, "encoder/block/*/heads", 1), (1, "encoder/output", 0)):
        with pytest.raises(UserError, match=rf"at_layer\({number}\) in '.*': its layers are 0 to {last}"):
            intervene(model, {name: at_layer(number, lambda x, _: 0 * x)})
    for unknown in ("encoder/block/self_attn/weights", "encoder/blocks/output"):
        with pytest.raises(UserError, match=f"no activation is named '{unknown}' here; there are decoder/block"):
            intervene(model, {unknown: lambda x, _: x})
    with pytest.raises(UserError, match="no activation is named 'x/'"):
        recorded(model, params, make_batch(*SIZES), "x/")
    flat = intervene(model, {"encoder/output": lambda x, _: jnp.sum(x, axis=-1)})
    with pytest.raises(UserError, match=r"intervention in 'encoder/output': \(3, 7, 32\) became \(3, 7\)"):
        run(flat, params, make_batch(*SIZES))
