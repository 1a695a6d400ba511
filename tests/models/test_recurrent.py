"""Recurrent models keep the contracts of every model, and are what their papers say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.errors import UserError
from jformer.inference.forced_pass import watched_pass
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.head_config import HeadConfig
from jformer.models.layers import recurrent_stack
from jformer.models.layers.recurrent_cells import CELLS, GATES, STATES, RecurrentLayer, run_cell
from jformer.models.recurrent_config import RecurrentConfig
from tests.conftest import draw_params, make_batch, run
from tests.models.contracts import check_cache, check_causality, check_padding
from tests.slow import slow_but

TINY = {"vocab_size": 50, "num_layers": 2, "d_model": 16, "dropout": 0.1, "tied_output": False}
ENCDEC = {
    "none": RecurrentConfig("lstm", reverse_source=True, bridge="copy"),
    "additive": RecurrentConfig("gru", bidirectional=True, attention="additive", bridge="dense", readout_size=6),
    "dot": RecurrentConfig("rnn", attention="dot", embedding_size=10),
    "general": RecurrentConfig("lstm", bidirectional=True, attention="general", input_feeding=True, bridge="dense"),
    "concat": RecurrentConfig("gru", attention="concat", reverse_source=True, input_feeding=True, bridge="copy"),
}


@functools.cache
def built(recurrent, **fields):
    config = ModelConfig(**{**TINY, **fields}, recurrent=recurrent)
    config.check()
    model = build_model(config)
    return model, draw_params(model)


# What presets have is held to the contracts in test_contracts.py; here is what none of them has.
RARE = ("dot", "concat")
MODELS = {
    **{name: (recurrent, {}) for name, recurrent in ENCDEC.items()},
    "encoder": (RecurrentConfig("gru", bidirectional=True), {"family": "encoder"}),
}


def model_of(name):
    recurrent, fields = MODELS[name]
    return built(recurrent, **fields)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_written_by_hand_are_those_of_autodiff(cell):
    """The hand-written backward pass, against autodiff through a loop of the same cell."""
    t, b, h = 5, 3, 4
    rng = np.random.default_rng(0)
    shapes = {"inputs": (t, b, GATES[cell] * h), "kernel": (h, GATES[cell] * h), "bias": (GATES[cell] * h,)}
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in [*shapes.values(), (b, STATES[cell], h)]]
    real = np.arange(t)[:, None] < [5, 2, 4]
    weights = rng.normal(size=(t, b, STATES[cell], h))

    def loop(inputs, kernel, bias, state):
        inputs, state = jnp.asarray(inputs), jnp.asarray(state)
        states = []
        for now, alive in zip(inputs, real, strict=True):
            after = CELLS[cell](now, state[:, 0] @ kernel + bias, jnp.unstack(state, axis=1))
            state = jnp.where(alive[:, None, None], jnp.stack(after, axis=1), state)
            states.append(state)
        return jnp.stack(states)

    def ours(*arguments):
        return run_cell(cell, 2, *map(jnp.asarray, arguments), jnp.asarray(real))

    @jax.jit
    def states_and_gradients(*arguments):
        found = []
        for function in (ours, loop):
            states, pull_back = jax.vjp(function, *arguments)
            found.append((states, pull_back(jnp.asarray(weights, jnp.float32))))
        return found

    (states, found), (expected_states, expected) = states_and_gradients(*arrays)
    np.testing.assert_allclose(states, expected_states, atol=1e-6)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_cached_step_equals_full_pass(name):
    check_cache(*model_of(name), make_batch([7, 5], [6, 6]), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RARE, "encoder"])
def test_padding_and_neighbours_change_nothing(name):
    alone, wide = make_batch([7], [6]), make_batch([7, 11, 3], [6, 2, 9], source_size=16, target_size=12)
    check_padding(*model_of(name), alone, wide, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_a_position_sees_no_later_target_token(name):
    check_causality(*model_of(name), make_batch([7, 5], [6, 6]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCDEC)
def test_the_source_is_read(name):
    model, params = model_of(name)
    batch = make_batch([7, 5], [6, 6])
    other = {**batch, "source": np.where(batch["source"] == batch["source"][0, 3], 5, batch["source"])}
    assert np.abs(run(model, params, batch)[0] - run(model, params, other)[0]).max() > 1e-4


@pytest.mark.parametrize("name", slow_but(["additive", "concat"], "additive"))
def test_attention_sums_to_one_over_the_source(name):
    model, params = model_of(name)
    batch = make_batch([7, 5], [6, 6])
    _, seen = jax.jit(functools.partial(watched_pass, model))(params, batch)
    weights = np.asarray(model.cross_weights(seen))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert not weights[1, :, 5:].any()


@pytest.mark.slow
def test_a_reversed_source_gives_the_same_as_reading_it_reversed():
    forwards, params = built(RecurrentConfig("lstm", bridge="copy"))
    backwards, _ = built(ENCDEC["none"])
    batch = make_batch([7, 5], [6, 6])
    flipped = {**batch, "source": batch["source"].copy()}
    for row, length in enumerate((7, 5)):
        flipped["source"][row, :length] = batch["source"][row, :length][::-1]
    np.testing.assert_array_equal(run(forwards, params, flipped), run(backwards, params, batch))


def test_the_tokens_of_a_row_are_reversed_wherever_its_padding_is():
    real = jnp.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0] * 5], bool)
    found = recurrent_stack.reverse(jnp.where(real, jnp.arange(5), 9), real)
    assert found.tolist() == [[9, 9, 4, 3, 2], [1, 0, 9, 9, 9], [9, 3, 2, 1, 9], [9] * 5]


@pytest.mark.slow
def test_the_last_position_can_be_what_a_classifier_reads():
    fields = {"family": "encoder", "head": HeadConfig(num_classes=3, pooling="last")}
    model, params = built(RecurrentConfig("gru"), **fields)
    long, short = make_batch([9], [3]), make_batch([5], [3])
    long["source_segments"][:, 5:] = 0
    np.testing.assert_allclose(run(model, params, long), run(model, params, short), atol=1e-6)
    changed = {**short, "source": short["source"].copy()}
    changed["source"][0, 4] = 5
    assert np.abs(run(model, params, changed) - run(model, params, short)).max() > 1e-4


@pytest.mark.parametrize("bidirectional", slow_but([False, True], True))
def test_what_each_direction_ends_with_can_be_what_a_classifier_reads(bidirectional):
    """The states of the loop itself after the last token it reads, whatever padding and neighbours there are."""
    fields = {"family": "encoder", "num_layers": 1, "head": HeadConfig(num_classes=3, pooling="final")}
    model, params = built(RecurrentConfig("lstm", bidirectional=bidirectional), **fields)

    @jax.jit
    def both(params, batch):
        found = model.apply({"params": params}, batch, method="hidden")[:, 0]
        x, real = params["embedding"]["embedding"][batch["source"]], batch["source_segments"] > 0
        ends = []
        for name, reverse in (("forward_0", False), ("backward_0", True))[: 1 + bidirectional]:
            layer = RecurrentLayer("lstm", 16)
            ends.append(layer.apply({"params": params["encoder"][name]}, x, real, reverse=reverse)[1][:, 0])
        return found, jnp.concatenate(ends, axis=-1)

    np.testing.assert_allclose(*both(params, make_batch([7, 5, 2], [3, 3, 3], source_size=12)), atol=1e-6)


@pytest.mark.parametrize(
    ("recurrent", "fields", "message"),
    [
        (RecurrentConfig("lstn"), {}, "model.recurrent.cell='lstn'; choose one of"),
        (RecurrentConfig(attention="dot"), {}, "model.recurrent.attention='dot': a Transformer "),
        (
            RecurrentConfig("lstm"),
            {"norm": "pre"},
            "model.norm='pre': a recurrent model has no such option; use 'post'",
        ),
        (RecurrentConfig("lstm"), {"window": 4}, "model.window=4: a recurrent model has no such option; use 0"),
        (RecurrentConfig("lstm", attention="dot"), {"family": "decoder"}, "are for family='encdec', not for 'decoder'"),
        (RecurrentConfig("lstm", bidirectional=True), {"family": "decoder"}, "reads from one end"),
        (RecurrentConfig("lstm", bidirectional=True, attention="dot"), {}, "vectors of one size: use 'general'"),
        (RecurrentConfig("lstm", bidirectional=True, bridge="copy"), {}, "bridge='copy' needs an encoder of one"),
        (RecurrentConfig("lstm", input_feeding=True), {}, "input_feeding=True needs attention after the step"),
        (RecurrentConfig("lstm", readout_size=9), {}, "readout_size is for decoders with attention"),
        (RecurrentConfig("lstm", embedding_size=9), {"tied_output": True}, "the embedding has 9, the output 16"),
        (RecurrentConfig("lstm", update_bias=3.0), {}, "update_bias=3.0 is for cell='gru', not 'lstm': use 0"),
        (RecurrentConfig("lstm"), {"family": "vit"}, "is for the families encdec, encoder and decoder"),
    ],
)
def test_what_cannot_be_built_is_refused(recurrent, fields, message):
    with pytest.raises(UserError, match=message.replace("'", ".").replace("[", ".")):
        ModelConfig(**{**TINY, **fields}, recurrent=recurrent).check()


def test_a_gru_keeps_its_state_where_the_bias_of_its_update_gate_says_so():
    models = [built(RecurrentConfig("gru", update_bias=bias), family="decoder")[0] for bias in (3.0, 0.0)]
    (model, plain), (params, expected) = models, [init_params(each, jax.random.key(0)) for each in models]
    d = model.config.d_model
    bias = params["decoder"]["forward_1"]["input"]["bias"]
    np.testing.assert_array_equal(bias, [0.0] * d + [3.0] * d + [0.0] * d)
    assert not expected["decoder"]["forward_1"]["input"]["bias"].any()
    assert plain.config.recurrent.update_bias == 0.0
    cache = run(model, params, {}, 1, 0, method="start")
    cache["self"]["layers"] = jnp.ones_like(cache["self"]["layers"])
    _, after = run(model, params, cache, jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1), bool), method="extend")
    assert 0.8 < float(after["self"]["layers"].mean()) < 1.0
