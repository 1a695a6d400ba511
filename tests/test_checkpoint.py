import json
import math
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jformer.checkpoint import Checkpoints, Keep, abstract_like, open_run
from jformer.errors import UserError
from jformer.sharding import make_mesh, replicated


class Info:
    """What Orbax tells a policy about a checkpoint."""

    def __init__(self, step, valid_loss=math.inf):
        self.step, self.metrics = step, {"valid_loss": valid_loss}


def kept(policy, *infos):
    return [info.step for info, stays in zip(infos, policy.should_preserve(infos, context=None), strict=True) if stays]


def test_the_last_regular_checkpoints_are_kept():
    assert kept(Keep(10, 2), *map(Info, [10, 20, 30, 40])) == [30, 40]
    assert kept(Keep(10, 9), *map(Info, [10, 20])) == [10, 20]


def test_one_written_on_a_signal_pushes_out_none_that_averaging_needs():
    assert kept(Keep(10, 2), *map(Info, [10, 20, 30, 33])) == [20, 30, 33]
    assert kept(Keep(10, 2), *map(Info, [20, 30, 33, 40])) == [30, 40]


def test_the_best_of_those_scored_is_kept():
    assert kept(Keep(10, 1), Info(10, 2.0), Info(20, 1.5), Info(30, 1.7), Info(40)) == [20, 40]
    assert kept(Keep(10, 1), Info(10, 1.5), Info(20, 1.5), Info(30, 1.7)) == [10, 30]  # the first of equals


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_never_the_best(bad):
    assert kept(Keep(10, 1), Info(10, bad), Info(20, 9.0), Info(30)) == [20, 30]


def state(step):
    return {
        "params": {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) / 7 + step},
        "rest": {"step": jnp.int32(step), "opt_state": ({"m": jnp.full(3, step, jnp.bfloat16)}, jnp.uint32(7))},
    }


def abstract(names=("params", "rest")):
    wanted = {name: tree for name, tree in state(0).items() if name in names}
    return placed(wanted, SingleDeviceSharding(jax.devices()[0]))


def placed(tree, sharding):
    return abstract_like(tree, jax.tree.map(lambda _: sharding, tree))


def same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Write a run whose losses are 3, 1, 2 at updates 10, 20, 30, stopped at 33."""
    workdir = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(workdir / "checkpoints", every=10, keep_last=1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (33, None)):
        checkpoints.save(step, state(step), {"step": step, "best_loss": loss, "data": ["ab", "cd"]}, loss)
    checkpoints.close()
    return workdir


def test_best_regular_and_newest_stay_on_disk(finished):
    run = open_run(finished)
    assert run.steps() == [20, 30, 33]
    run.close()


def test_every_item_comes_back_bit_for_bit(finished):
    run = open_run(finished)
    for step in (20, 33):
        same_bits(run.restore(step, abstract()), state(step))
    run.close()


def test_parameters_are_read_without_the_rest(finished):
    run = open_run(finished)
    same_bits(run.restore(30, abstract(["params"])), {"params": state(30)["params"]})
    run.close()


def test_parameters_are_placed_as_asked(finished):
    everywhere, run = replicated(make_mesh(2)), open_run(finished)
    found = run.restore(20, placed({"params": state(0)["params"]}, everywhere))["params"]["w"]
    run.close()
    assert found.sharding == everywhere
    assert len(found.addressable_shards) == 2


def test_progress_is_plain_json(finished):
    run = open_run(finished)
    assert run.progress(33) == {"step": 33, "best_loss": None, "data": ["ab", "cd"]}
    run.close()
    files = [path for path in (finished / "checkpoints" / "33" / "progress").rglob("*") if path.is_file()]
    assert any(json.loads(path.read_text()).get("step") == 33 for path in files if not path.name.startswith("_"))


def test_reading_a_run_deletes_nothing_of_it(finished):
    open_run(finished).close()
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["20", "30", "33"]


def test_a_run_opened_again_still_knows_its_best(tmp_path):
    first = Checkpoints(tmp_path / "checkpoints", every=10, keep_last=1)
    for step, loss in ((10, 1.0), (20, 2.0)):
        first.save(step, state(step), {}, loss)
    first.close()
    second = Checkpoints(tmp_path / "checkpoints", every=10, keep_last=1)
    second.save(30, state(30), {}, 3.0)
    second.close()
    run = open_run(tmp_path)
    assert run.steps() == [10, 30]
    run.close()


def test_half_written_checkpoints_are_removed_and_not_found(tmp_path):
    Checkpoints(tmp_path / "checkpoints").close()
    half = tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp"
    half.mkdir()
    run = Checkpoints(tmp_path / "checkpoints")
    assert run.steps() == []
    deadline = time.monotonic() + 10  # they are removed in the background
    while half.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not half.exists()
    run.close()


def test_reading_a_run_leaves_what_its_training_is_just_writing(tmp_path):
    writer = Checkpoints(tmp_path / "checkpoints")
    writer.save(10, state(10), {}, None)
    writer.close()
    half = tmp_path / "checkpoints" / "20.orbax-checkpoint-tmp"
    half.mkdir()
    run = open_run(tmp_path)
    time.sleep(0.2)  # what is removed is removed in the background
    run.close()
    assert half.exists()


@pytest.mark.parametrize("folder", [None, "checkpoints"])
def test_a_workdir_without_a_checkpoint_is_refused(tmp_path, folder):
    if folder:
        (tmp_path / folder).mkdir()
    with pytest.raises(UserError, match=r": holds no checkpoint; train there first, or give another --workdir$"):
        open_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder] * bool(folder)


def test_shapes_and_dtypes_are_those_of_the_tree():
    shapes = abstract(["rest"])["rest"]["opt_state"][0]["m"]
    assert (shapes.shape, shapes.dtype) == ((3,), ml_dtypes.bfloat16)
