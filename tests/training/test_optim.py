import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jformer.checkpoints.weights import average
from jformer.config import default_config, options, resolve
from jformer.errors import UserError
from jformer.parallel.sharding import parameter_names
from jformer.tasks.build import TASKS
from jformer.training import optim
from jformer.training.optim import (  # fmt: skip
    ScheduleParams,
    frozen_parameters,
    keeps_finite,
    make_optimizer,
    make_schedule,
    per_layer,
    schedule_line,
    weight_decay_mask,
)

ADAM = {"b1": 0.9, "b2": 0.98, "epsilon": 1e-9, "weight_decay": 0.0, "clip_norm": 0.0}
PARAMS = {
    "encoder": {"block": {"q": {"kernel": jnp.full((2, 3, 4), 0.5), "bias": jnp.full((2, 4), 0.5)}}},
    "source_embedding": {"embedding": jnp.full((5, 3), 0.5)},
    "norm": {"scale": jnp.full((3,), 0.5), "bias": jnp.full((3,), 0.5)},
}


def gradients(params, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * scale, jnp.float32), params)


def constant(rate):
    return make_schedule("constant", rate, ScheduleParams(0, 100, 512))


def optimizer(name, schedule, params, freeze=(), **values):
    return make_optimizer(options.OptimConfig(optimizer=name, **values), schedule, frozen_parameters(params, freeze))


def updated(tx, params, count=1, scale=1.0):
    """Return the parameters after a few updates with random gradients."""
    state, step = tx.init(params), jax.jit(tx.update)
    for seed in range(count):
        updates, state = step(gradients(params, seed, scale), state, params)
        params = optax.apply_updates(params, updates)
    return params


def same(a, b, **tolerances):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerances), a, b)


def rates(name, rate, warmup, num_steps, updates, **course):
    """Return the rates of updates numbered from 1, as papers count them."""
    schedule = make_schedule(name, rate, ScheduleParams(warmup, num_steps, **{"d_model": 512, **course}))
    return [float(schedule(update - 1)) for update in updates]


@pytest.mark.parametrize(
    ("name", "expected"),  # of updates 1, 5, 10 (the end of the warmup), 20, 40, 100, 110 (one after the last)
    [
        ("inverse_square_root", [0.2, 1.0, 2.0, 2.0 * 0.5**0.5, 1.0, 2.0 * 0.1**0.5, 2.0 * (1 / 11) ** 0.5]),
        ("cosine", [0.2, 1.0, 2.0, 1 + np.cos(0.1 * np.pi), 1 + np.cos(0.3 * np.pi), 1 + np.cos(0.9 * np.pi), 0.0]),
        ("linear", [0.2, 1.0, 2.0, 1.8, 1.4, 0.2, 0.0]),
        ("constant", [0.2, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("t5", [2.0, 2.0, 2.0, 2.0 * 0.5**0.5, 1.0, 2.0 * 0.1**0.5, 2.0 * (1 / 11) ** 0.5]),
        ("warmup_stable_decay", [0.2, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0]),  # with a decay of 19 updates
    ],
)
def test_schedule_at_points_worked_out_by_hand(name, expected):
    np.testing.assert_allclose(
        rates(name, 2.0, 10, 109, [1, 5, 10, 20, 40, 100, 110], decay=19), expected, rtol=1e-5, atol=1e-6
    )


def test_noam_is_the_papers_equation_with_its_peak_at_the_warmup():
    steps = [1, 100, 3_999, 4_000, 4_001, 16_000, 100_000]
    paper = [512**-0.5 * min(step**-0.5, step * 4_000**-1.5) for step in steps]
    np.testing.assert_allclose(rates("noam", 1.0, 4_000, 100_000, steps), paper, rtol=1e-5)
    np.testing.assert_allclose(rates("noam", 2.0, 4_000, 100_000, steps), np.multiply(paper, 2), rtol=1e-5)
    assert np.argmax(paper) == 3
    assert max(paper) == pytest.approx(6.9877e-4, rel=1e-4)


@pytest.mark.parametrize("name", options.SCHEDULES)
def test_every_schedule_peaks_at_the_end_of_its_warmup_and_never_rises_again(name):
    found = rates(name, 0.5, 10, 60, range(1, 70), decay=20)
    assert max(found) == pytest.approx(found[9], rel=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))
    if name == "t5":  # which begins at its peak
        assert found[0] == found[9]
        return
    assert all(a < b for a, b in itertools.pairwise(found[:10]))
    assert found[0] == pytest.approx(found[9] / 10, rel=1e-5)


@pytest.mark.parametrize("name", options.ENDING_SCHEDULES)
def test_a_schedule_that_ends_arrives_at_its_final_rate_just_after_the_last_update(name):
    found = rates(name, 0.5, 10, 60, [10, 60, 61], decay=20, final_rate=0.1)
    assert found[0] == pytest.approx(0.5)
    assert 0.05 < found[1] < 0.08
    assert found[2] == pytest.approx(0.05)


def line(**changes):
    config = default_config()
    config.optim.update(changes.pop("optim", {}))
    config.train.update(changes)
    settings = resolve(config)
    return schedule_line(settings.optim, settings.train.num_steps, settings.model.scale_width)


def test_a_schedule_is_told_by_its_peak_and_its_end():
    assert line() == "learning rate: noam, 0.000699 at update 4,000, 0.00014 at update 100,000"
    share = {"schedule": "cosine", "learning_rate": 1e-3, "warmup": 0.25}
    assert line(optim=share, num_steps=200).startswith("learning rate: cosine, 0.001 at update 50, ")
    assert line(num_steps=100).endswith("; the warm-up of 4,000 updates does not end within the run")


def test_a_peak_beyond_what_is_usual_is_called_high():
    assert "is high" not in line()
    high = line(optim={"warmup": 100.0})
    assert high.endswith("; that peak is high: up to 0.0027 is usual for adam at this width")


@pytest.mark.parametrize("name", options.SCHEDULES)
def test_the_last_update_still_moves(name):
    assert rates(name, 0.5, 10, 60, [60])[0] > 0
    assert rates(name, 0.5, 10, 10, [10])[0] > 0  # all of it warmup


@pytest.mark.parametrize("name", options.SCHEDULES)
def test_no_warmup_starts_at_the_peak(name):
    found = rates(name, 0.5, 0, 60, range(1, 60))
    assert np.isfinite(found).all()
    assert found[0] == max(found) > 0.9 * (512**-0.5 if name == "noam" else 1) * 0.5


def test_configs_offer_what_there_is():
    assert set(options.SCHEDULES) == set(optim.SCHEDULES)
    assert set(options.OPTIMIZERS) == set(optim.OPTIMIZERS)
    assert set(options.TASKS) == set(TASKS)


@pytest.mark.parametrize("name", options.SCHEDULES)
def test_only_decaying_schedules_depend_on_the_number_of_steps(name):
    short, long = (rates(name, 0.5, 10, num_steps, range(1, 60), decay=20) for num_steps in (60, 600))
    assert (short != long) == (name in options.ENDING_SCHEDULES)


def test_adam_is_the_algorithm_of_the_paper():
    schedule = make_schedule("linear", 0.01, ScheduleParams(2, 10, 512))
    params, m, v = 0.5, 0.0, 0.0
    tx = optimizer("adam", schedule, {"w": 0.0}, **ADAM)
    state, found = tx.init({"w": jnp.float32(0.5)}), {"w": jnp.float32(0.5)}
    for t, g in enumerate([0.3, -0.2, 0.7], start=1):
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        rate = 0.01 * min(t / 2, 1) * (1 - max(t - 2, 0) / 9)
        params -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.98**t)) + 1e-9)
        updates, state = tx.update({"w": jnp.float32(g)}, state, found)
        found = optax.apply_updates(found, updates)
        assert float(found["w"]) == pytest.approx(params, rel=1e-6)


@pytest.mark.parametrize("norm", [0.5, 3.0])
def test_clipping_scales_all_gradients_to_the_global_norm(norm):
    grads = gradients(PARAMS)
    size = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads)))
    assert size > 3
    plain = {**ADAM, "b1": 0.0, "b2": 0.0, "epsilon": 1e6}  # so the update is close to -rate / 1e6 * gradient
    updates = {}
    for clip in (0.0, norm):
        tx = optimizer("adam", constant(1e6), PARAMS, **{**plain, "clip_norm": clip})
        updates[clip], _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    same(updates[0.0], jax.tree.map(lambda g: -g, grads), rtol=1e-4)
    same(updates[norm], jax.tree.map(lambda g: -g * norm / size, grads), rtol=1e-4)


def test_gradients_within_the_norm_are_left_alone():
    grads = gradients(PARAMS, scale=1e-3)
    found = []
    for clip in (0.0, 1.0):
        tx = optimizer("adam", constant(0.1), PARAMS, **{**ADAM, "clip_norm": clip})
        found.append(jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)[0])
    same(*found, rtol=0)


def test_parameters_are_named_by_their_path():
    assert parameter_names(PARAMS) == {
        "encoder": {"block": {"q": {"kernel": "encoder/block/q/kernel", "bias": "encoder/block/q/bias"}}},
        "source_embedding": {"embedding": "source_embedding/embedding"},
        "norm": {"scale": "norm/scale", "bias": "norm/bias"},
    }


def test_weight_decay_pulls_on_matrices_only():
    assert weight_decay_mask(PARAMS) == {
        "encoder": {"block": {"q": {"kernel": True, "bias": False}}},
        "source_embedding": {"embedding": True},
        "norm": {"scale": False, "bias": False},
    }
    plain, pulled = (
        updated(optimizer("adamw", constant(0.1), PARAMS, **{**ADAM, "weight_decay": decay}), PARAMS)
        for decay in (0.0, 0.2)
    )
    expected = jax.tree.map(lambda p, old, d: p - 0.1 * 0.2 * old * d, plain, PARAMS, weight_decay_mask(PARAMS))
    same(pulled, expected, rtol=1e-6)


@pytest.mark.parametrize("name", options.OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_frozen_parameters_keep_their_bits_and_the_rest_is_trained(name, clip):
    values = {**ADAM, "weight_decay": 0.1 if name == "adamw" else 0.0, "clip_norm": clip}
    tx = optimizer(name, constant(0.1), PARAMS, **values, freeze=("^encoder/", "bias$"))
    after = updated(tx, PARAMS, 3)
    names = jax.tree.leaves(parameter_names(PARAMS))
    for path, old, new in zip(names, jax.tree.leaves(PARAMS), jax.tree.leaves(after), strict=True):
        frozen = path.startswith("encoder/") or path.endswith("bias")
        assert np.array_equal(old, new) == frozen, path


def test_frozen_gradients_do_not_count_in_the_norm():
    few = {"norm": PARAMS["norm"]}
    values = {**ADAM, "clip_norm": 0.5, "epsilon": 1.0}
    alone = optimizer("adam", constant(0.1), few, **values)
    frozen = optimizer("adam", constant(0.1), PARAMS, **values, freeze=("encoder", "embedding"))
    grads = gradients(PARAMS)
    found, _ = frozen.update(grads, frozen.init(PARAMS), PARAMS)
    expected, _ = alone.update({"norm": grads["norm"]}, alone.init(few), few)
    same(found["norm"], expected["norm"], rtol=1e-6)


def test_patterns_that_freeze_nothing_or_everything_are_refused():
    with pytest.raises(UserError, match=r"^train\.freeze='decodr' matches no parameter; .*encoder/block/q/bias"):
        optimizer("adam", constant(0.1), PARAMS, **ADAM, freeze=("encoder", "decodr"))
    with pytest.raises(UserError, match=r"freezes every parameter"):
        optimizer("adam", constant(0.1), PARAMS, **ADAM, freeze=(".",))


def large_layers(seed):
    """Return three layers large enough for Adafactor to factor their moments, each ten times the one before."""
    layers = np.random.default_rng(seed).normal(size=(3, 130, 140)) * 10.0 ** np.arange(3)[:, None, None]
    return jnp.asarray(layers, jnp.float32)


def three_updates(tx, params, grads_of):
    state, update = tx.init(params), jax.jit(tx.update)
    for seed in range(3):
        updates, state = update(grads_of(large_layers(seed)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_adafactor_of_stacked_layers_equals_that_of_separate_ones():
    def stacked(layers):
        return {"encoder": {"block": {"up": {"kernel": layers}}}}

    start, whole = large_layers(9), optax.adafactor(constant(0.01))
    ours = optimizer("adafactor", constant(0.01), stacked(start), **ADAM)
    found = three_updates(ours, stacked(start), stacked)["encoder"]["block"]["up"]["kernel"]
    separate = [three_updates(whole, start[i], operator.itemgetter(i)) for i in range(3)]
    same(found, jnp.stack(separate), rtol=1e-5)
    mixed = three_updates(whole, stacked(start), stacked)["encoder"]["block"]["up"]["kernel"]
    assert np.median(np.abs(mixed - found)[0] / np.abs(found - start)[0]) > 0.5  # another optimizer altogether


def test_adafactor_sees_parameters_outside_of_blocks_whole():
    start, whole = {"embedding": large_layers(9)}, optax.adafactor(constant(0.01))
    found, expected = (three_updates(tx, start, lambda g: {"embedding": g}) for tx in (per_layer(whole), whole))
    same(found, expected, rtol=1e-6)


def test_a_transform_that_reads_no_parameters_needs_none_layer_by_layer():
    updates = {"encoder": {"block": {"kernel": jnp.ones((2, 3))}}}
    tx = per_layer(optax.scale(0.5))
    halved, _ = tx.update(updates, jax.tree.map(lambda _: optax.EmptyState(), updates))
    same(halved, jax.tree.map(lambda u: u / 2, updates), rtol=0)


def test_average_is_the_mean_of_every_parameter():
    trees = [gradients(PARAMS, seed) for seed in range(3)]
    expected = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves).astype(np.float64), axis=0), *trees)
    same(average(iter(trees)), expected, rtol=1e-5, atol=1e-7)
    same(average([trees[0]]), trees[0], rtol=0)


def test_average_leaves_its_inputs_as_they_are():
    trees = [gradients(PARAMS, seed) for seed in range(2)]
    before = [jax.tree.map(np.array, tree) for tree in trees]
    average(trees)
    same(trees, before, rtol=0)


WORST = {"epsilon": 1e-10, "learning_rate": 10.0, "b1": 0.99, "b2": 0.0, "weight_decay": 0.1, "clip_norm": 0.0}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_an_optimizer_that_is_said_to_keep_parameters_finite_does(name):
    worst = options.OptimConfig(optimizer=name, **(WORST | {"weight_decay": 0.1 if name == "adamw" else 0.0}))
    assert keeps_finite(worst)
    tx, params = make_optimizer(worst, constant(10.0), mup_width_ratio=1e-6), PARAMS
    state, step = tx.init(params), jax.jit(tx.update)
    for size in 500 * [1.8e19] + [1e-38] + 500 * [0.0]:  # the largest of a finite norm, then no square to divide by
        changes, state = step(jax.tree.map(lambda p, size=size: jnp.full_like(p, size), params), state, params)
        params = optax.apply_updates(params, changes)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "adafactor"},
        {"learning_rate": 11.0},
        {"epsilon": 1e-11},
        {"b1": 0.995},
        {"weight_decay": 0.2},
        {"schedule": "a:b"},
    ],
)
def test_others_are_not_said_to(changed):
    assert not keeps_finite(options.OptimConfig(**{"optimizer": "adamw", **WORST, **changed}))
