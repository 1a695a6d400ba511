"""One update is the same update on any devices and in any microbatches, with dropout on and uneven padding."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jformer.errors import UserError
from jformer.models import ExecutionConfig
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_shardings, put_batch, state_shardings
from jformer.tasks.split_loss import make_eval_step
from jformer.tasks.sums import Sum
from jformer.tasks.task import make_loss, token_loss
from jformer.training import step as updates
from jformer.training.state import create_state
from jformer.training.step import all_finite, make_gradient, make_train_step, moving_average
from tests.conftest import make_batch

SMOOTHED = SimpleNamespace(loss=token_loss(0.1))
UNEVEN = make_batch([7, 3, 5, 6, 2, 7, 1, 4], [6, 6, 2, 5, 3, 4, 6, 1], vocab_size=48)
UNEVEN["weights"][6:] = 0  # two rows are empty: the last devices have nothing


# All shapes of a mesh of 1, 2, 4 or 8 devices but that of one; first those that have everything.
MESHES = [(2, 2, 2), (1, 8, 1), (1, 1, 8), (8, 1, 1)]
MESHES += [
    (d, f, t) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) for t in (1, 2, 4, 8)
    if 1 < d * f * t <= 8 and (d, f, t) not in MESHES
]  # fmt: skip


def named(shape):
    return "x".join(map(str, shape)) if isinstance(shape, tuple) else str(shape)


def on(mesh, batch, microbatches=1):
    return put_batch(mesh, {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()})


def fresh(params, tx, mesh, ema=False):
    """Return a new state where it lies, as a run starts with."""
    make = functools.partial(create_state, tx=tx, ema=ema)
    return jax.jit(make, out_shardings=state_shardings(mesh, jax.eval_shape(make, params)))(params)


def distance(a, b):
    """Return ||a - b|| / ||b|| over all leaves, wherever they lie."""
    a, b = jax.device_get((a, b))
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(b))


@pytest.fixture(scope="module")
def noisy(tiny):
    return tiny(dropout=0.2, num_heads=8, vocab_size=48)


@pytest.fixture(scope="module")
def reference(noisy):
    """Return sums and gradients of the whole batch, differentiated plainly: no mesh, no shard_map, no sums."""
    model, params = noisy
    key = jax.random.key(3)

    def mean_loss(params, batch):
        logits = model.apply({"params": params}, batch, True, rngs={"dropout": key})
        log_probs = jax.nn.log_softmax(logits)
        wanted = 0.9 * jax.nn.one_hot(batch["target_out"], 48) + 0.1 / 48
        return -(log_probs * wanted).sum(-1).ravel() @ batch["weights"].ravel() / batch["weights"].sum()

    return key, *jax.jit(jax.value_and_grad(mean_loss))(params, UNEVEN)


@pytest.mark.parametrize(
    ("shape", "microbatches"),
    [
        ((2, 2, 2), 1),
        *(
            pytest.param(shape, number, marks=pytest.mark.slow)
            for shape, number in [((1, 1, 1), 4), ((2, 1, 1), 2), ((1, 2, 2), 2), *((shape, 1) for shape in MESHES[1:])]
        ),
    ],
    ids=named,
)
def test_gradient_is_that_of_the_mean_over_the_whole_batch(noisy, reference, shape, microbatches):
    model, params = noisy
    key, loss, expected = reference
    mesh = make_mesh(*shape)
    params = jax.device_put(params, parameter_shardings(mesh, params))
    gradient = jax.jit(make_gradient(make_loss(model, SMOOTHED.loss), mesh))
    found, sums = gradient(params, on(mesh, UNEVEN, microbatches), key)
    assert float(sums["loss"].count) == UNEVEN["weights"].sum()
    assert abs(float(sums["loss"].total / sums["loss"].count) / float(loss) - 1) < 1e-6
    assert distance(found, expected) < 1e-6
    for gradient, place in zip(jax.tree.leaves(found), jax.tree.leaves(parameter_shardings(mesh, params)), strict=True):
        assert gradient.sharding.is_equivalent_to(place, gradient.ndim)


@pytest.mark.parametrize(
    ("platform", "shape"), [("tpu", (1, 1, 1)), pytest.param("gpu", (1, 2, 2), marks=pytest.mark.slow)], ids=named
)
def test_gradients_that_accelerators_add_in_place_are_those_of_the_whole_batch(noisy, reference, platform, shape):
    model, params = noisy
    key, _, expected = reference
    mesh = make_mesh(*shape)
    params = jax.device_put(params, parameter_shardings(mesh, params))
    with compiling_for(Target(platform)):
        gradient = jax.jit(make_gradient(make_loss(model, SMOOTHED.loss), mesh))
        found, _ = gradient(params, on(mesh, UNEVEN, 2), key)
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize(("platform", "passes"), [("tpu", 0), ("cpu", 2)])  # over kernels up and down
def test_accelerators_add_gradients_of_layers_without_a_pass_over_all_of_them(tiny, platform, passes):
    model, params = tiny(family="decoder", execution=ExecutionConfig(unroll=1))
    with compiling_for(Target(platform)):
        gradient = jax.jit(make_gradient(make_loss(model, SMOOTHED.loss), make_mesh(1)))
        text = gradient.lower(params, on(make_mesh(1), UNEVEN, 2), jax.random.key(0)).as_text()
    shapes = {kernel.shape for kernel in jax.tree.leaves(params["decoder"]["block"]["feed_forward"]) if kernel.ndim > 2}
    adds = [rf"stablehlo.add .*tensor<{'x'.join(map(str, shape))}xf32>" for shape in shapes]
    assert sum(len(re.findall(add, text)) for add in adds) == passes


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "microbatches"), [((1, 1, 1), 4), *((shape, 1) for shape in MESHES[:4])], ids=named)
def test_sgd_update_does_not_depend_on_the_devices(noisy, shape, microbatches):
    model, params = noisy
    states = []
    for s, m in (((1, 1, 1), 1), (shape, microbatches)):
        mesh, tx = make_mesh(*s), optax.sgd(0.1)
        step = make_train_step(make_loss(model, SMOOTHED.loss), tx, mesh, seed=5)
        state = fresh(params, tx, mesh)
        for _ in range(3):
            state, _ = step(state, on(mesh, UNEVEN, m))
        states.append(state)
    assert distance(states[1].params, states[0].params) < 1e-6
    assert states[1].step == 3
    assert step._cache_size() == 1  # an update's state is what the next one was compiled for
    places = state_shardings(mesh, states[1])
    jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim) or pytest.fail("moved"), states[1], places)


@pytest.mark.slow
def test_every_step_drops_something_else(noisy):
    model, params = noisy
    mesh, tx = make_mesh(1), optax.sgd(0.0)
    step = make_train_step(make_loss(model, SMOOTHED.loss), tx, mesh, seed=5)
    state = fresh(params, tx, mesh)
    losses = []
    for _ in range(2):
        state, metrics = step(state, on(mesh, UNEVEN))
        losses.append(float(metrics.sums["loss"].total))
    assert losses[0] != losses[1]


def linear_loss(params, batch, key):
    """Return a loss whose gradient is the batch itself."""
    return {"loss": Sum((params["class_token"] * batch["x"]).sum(), jnp.float32(batch["x"].shape[0]))}


@pytest.mark.parametrize("keeps_finite", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_update_that_is_not_finite_changes_nothing_and_is_counted(platform, keeps_finite):
    mesh, tx = make_mesh(2), optax.adam(0.1)
    state = fresh({"class_token": jnp.ones(3)}, tx, mesh, ema=True)
    good = {"x": np.ones((1, 4, 3), np.float32)}
    with compiling_for(Target(platform)):  # accelerators compute the new state twice, to look at it
        step = make_train_step(linear_loss, tx, mesh, seed=0, ema_decay=0.5, keeps_finite=keeps_finite)
        state, _ = step(state, put_batch(mesh, good))
    before = jax.device_get(state)
    np.testing.assert_allclose(before.params["class_token"], 0.9, rtol=1e-6)
    for poison in (np.nan, np.inf):
        bad = {"x": good["x"].copy()}
        bad["x"][0, 3, 1] = poison  # on one device only
        state, metrics = step(state, put_batch(mesh, bad))
    after = jax.device_get(state)
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.opt_state, after.ema),
        (before.params, before.opt_state, before.ema),
    )
    assert (int(after.step), int(after.skipped), int(metrics.skipped_in_row)) == (3, 2, 2)
    state, metrics = step(state, put_batch(mesh, good))
    assert (int(metrics.skipped), int(metrics.skipped_in_row)) == (2, 0)
    assert not np.array_equal(state.params["class_token"], after.params["class_token"])


def test_update_that_ends_in_parameters_that_are_not_finite_changes_nothing():
    mesh, tx = make_mesh(1), optax.adam(0.1, eps=0.0)  # divides 0 by 0 where the gradient is 0
    step = make_train_step(linear_loss, tx, mesh, seed=0)
    state = fresh({"class_token": jnp.ones(3)}, tx, mesh)
    state, metrics = step(state, put_batch(mesh, {"x": np.zeros((1, 4, 3), np.float32)}))
    assert float(metrics.grad_norm) == 0
    assert int(metrics.skipped_in_row) == 1
    np.testing.assert_array_equal(state.params["class_token"], np.ones(3))


def test_an_optimizer_that_keeps_parameters_finite_saves_looking_at_them():
    mesh, tx = make_mesh(1), optax.adam(0.1)
    state = fresh({"class_token": jnp.ones(3)}, tx, mesh)
    batch = put_batch(mesh, {"x": np.ones((1, 4, 3), np.float32)})
    looks = [
        make_train_step(linear_loss, tx, mesh, seed=0, keeps_finite=keeps)
        .lower(state, batch)
        .as_text()
        .count("is_finite")
        for keeps in (False, True)
    ]
    assert looks == [3, 2]  # the norm, the loss


def test_update_that_ends_in_an_average_that_is_not_finite_changes_nothing():
    mesh, tx = make_mesh(1), optax.sgd(0.1)
    step = make_train_step(linear_loss, tx, mesh, seed=0, ema_decay=0.5)
    state = fresh({"class_token": jnp.full(3, 3e38)}, tx, mesh, ema=True)
    state = state.replace(ema={"class_token": jnp.full(3, -3e38)})  # float32 has no number for the way from here
    state, metrics = step(state, put_batch(mesh, {"x": np.full((1, 4, 3), 1e-38, np.float32)}))
    assert int(metrics.skipped_in_row) == 1
    np.testing.assert_array_equal(state.ema["class_token"], np.full(3, -3e38, np.float32))


def test_accelerators_take_the_sums_of_factored_moments_once():
    mesh, tx, programs = make_mesh(1), optax.adafactor(0.1), []
    state = fresh({"class_token": jnp.ones((128, 128))}, tx, mesh)
    batch = put_batch(mesh, {"x": np.ones((1, 2, 128, 128), np.float32)})
    for platform in ("cpu", "tpu"):
        with compiling_for(Target(platform)):
            programs.append(make_train_step(linear_loss, tx, mesh, seed=0).lower(state, batch).as_text())
    assert programs[0].count("stablehlo.reduce(") == programs[1].count("stablehlo.reduce(") > 0


def test_an_update_is_compiled_with_the_options_of_its_platform(monkeypatch):
    mesh, tx = make_mesh(1), optax.sgd(0.1)
    state = fresh({"class_token": jnp.ones(3)}, tx, mesh)
    batch = put_batch(mesh, {"x": np.ones((1, 2, 3), np.float32)})
    monkeypatch.setitem(updates.XLA_OPTIONS, "elsewhere", {"xla_no_such_option": True})
    with compiling_for(Target("elsewhere")):
        lowered = make_train_step(linear_loss, tx, mesh, seed=0).lower(state, batch)
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_no_such_option'"):
        lowered.compile()


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older XLA drops the barrier before it fuses; .ci/run has a newer"
)
def test_what_is_asked_of_all_arrays_is_computed_once_and_not_for_each_of_them():
    def doubled(arrays):
        finite = all_finite(arrays)
        return [jnp.where(finite, 2 * x, x) for x in arrays]

    count = 16
    lowered = jax.jit(doubled).lower([jnp.ones(3)] * count)
    compiled = lowered.compile({"xla_cpu_opt_preset": "CPU_OPT_PRESET_DEFAULT"}).as_text()  # which fuses
    assert count - 1 <= compiled.count(" and(") < 2 * count  # all pairs would be some 256


def test_gradients_of_frozen_parameters_count_neither_in_the_norm_nor_as_not_finite():
    def loss(params, batch, key):
        infinite_slope = jnp.sqrt(jnp.abs(params["norm"]["scale"] - 1)).sum()
        total = (params["class_token"] * batch["x"]).sum() + infinite_slope
        return {"loss": Sum(total, jnp.float32(1))}

    params = {"class_token": jnp.ones(3), "norm": {"scale": jnp.ones(2)}}
    batch = {"x": np.full((1, 1, 3), 2, np.float32)}
    mesh, tx = make_mesh(1), optax.sgd(0.1)
    found = {}
    for name, frozen in (("all", None), ("few", {"class_token": False, "norm": {"scale": True}})):
        step = make_train_step(loss, tx, mesh, seed=0, frozen=frozen)
        found[name] = step(fresh(params, tx, mesh), put_batch(mesh, batch))[1]
    assert int(found["all"].skipped) == 1
    assert int(found["few"].skipped) == 0
    assert float(found["few"].grad_norm) == pytest.approx(12**0.5)


@pytest.mark.slow
def test_a_model_is_compiled_once_however_many_microbatches_there_are(noisy):
    model, params = noisy
    mesh = make_mesh(1)
    gradient = jax.jit(make_gradient(make_loss(model, SMOOTHED.loss), mesh))
    products = [
        gradient.lower(params, on(mesh, UNEVEN, microbatches), jax.random.key(0)).as_text().count("dot_general")
        for microbatches in (1, 4)
    ]
    assert products[0] == products[1] > 10


def test_batch_without_the_axis_of_microbatches_is_refused(tiny):
    (model, params), tx = tiny(), optax.sgd(1.0)
    step = make_train_step(make_loss(model, SMOOTHED.loss), tx, make_mesh(1), seed=0)
    with pytest.raises(UserError, match=r"axis of microbatches: give array\[None\]"):
        jax.eval_shape(step, create_state(params, tx, ema=False), UNEVEN)


def test_batch_that_devices_do_not_divide_is_refused(tiny):
    (model, params), tx, mesh = tiny(), optax.sgd(1.0), make_mesh(4)
    seven = {name: array[None, :7] for name, array in UNEVEN.items()}
    step = make_train_step(make_loss(model, SMOOTHED.loss), tx, mesh, seed=0)
    with pytest.raises(UserError, match=r"a batch of 7 rows cannot be split over mesh\.data=4: add rows"):
        jax.eval_shape(step, create_state(params, tx, ema=False), seven)


def test_average_without_its_decay_is_refused(tiny):
    (model, params), tx = tiny(), optax.sgd(1.0)
    step = make_train_step(make_loss(model, SMOOTHED.loss), tx, make_mesh(1), seed=0)
    batch = {name: array[None] for name, array in UNEVEN.items()}
    with pytest.raises(UserError, match=r"has a moving average: give make_train_step its ema_decay"):
        jax.eval_shape(step, create_state(params, tx, ema=True), batch)


def test_weights_below_one_in_all_divide_as_others_do(tiny):
    model, params = tiny(family="decoder")
    mesh, found = make_mesh(1), []
    gradient = jax.jit(make_gradient(make_loss(model, SMOOTHED.loss), mesh))
    for scale in (1, 1e-3):  # balanced labels may weigh that little
        batch = {**UNEVEN, "weights": np.float32(scale) * UNEVEN["weights"]}
        found.append(gradient(params, on(mesh, batch), jax.random.key(0)))
    assert float(found[1][1]["loss"].count) < 1
    assert distance(found[1][0], found[0][0]) < 1e-5


def test_batch_without_tokens_has_no_gradient_and_no_nan(tiny):
    model, params = tiny(family="decoder", dropout=0.2)
    mesh = make_mesh(1)
    empty = {**UNEVEN, "weights": np.zeros_like(UNEVEN["weights"])}
    gradient, sums = jax.jit(make_gradient(make_loss(model, SMOOTHED.loss), mesh))(
        params, on(mesh, empty), jax.random.key(0)
    )
    assert float(sums["loss"].total) == float(sums["loss"].count) == 0
    assert float(optax.tree.norm(gradient)) == 0


def test_eval_step_sums_over_devices_and_microbatches_without_dropout(noisy):
    model, params = noisy
    found = [
        make_eval_step(make_loss(model, SMOOTHED.loss), mesh)(params, on(mesh, UNEVEN))
        for mesh in (make_mesh(1), make_mesh(2, 2, 2))
    ]
    found.append(make_eval_step(make_loss(model, SMOOTHED.loss), make_mesh(2))(params, on(make_mesh(2), UNEVEN, 4)))
    for name, (total, count) in found[0].items():
        for other in found[1:]:
            np.testing.assert_allclose(other[name], (total, count), rtol=1e-6)


def test_moving_average_follows_its_formula_with_a_lower_decay_in_the_beginning():
    average = {"w": jnp.zeros(2)}
    young = moving_average(average, {"w": jnp.ones(2)}, 0.99, jnp.int32(0))
    old = moving_average(average, {"w": jnp.ones(2)}, 0.99, jnp.int32(10_000))
    np.testing.assert_allclose(young["w"], 0.9, rtol=1e-6)
    np.testing.assert_allclose(old["w"], 0.01, rtol=1e-5)
