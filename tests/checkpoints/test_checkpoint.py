import contextlib
import doctest
import errno
import json
import math
import re
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jformer.checkpoints import checkpoint, folders, weights
from jformer.checkpoints.checkpoint import Checkpoints, kept_steps, open_run
from jformer.checkpoints.folders import remove_failed
from jformer.checkpoints.manifest import DamagedError, Manifest
from jformer.checkpoints.reading import KINDS, on_host
from jformer.config import resolve
from jformer.errors import LOST, MISTAKE, UnavailableError, UserError
from jformer.integrity import with_digest
from jformer.parallel import processes
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import abstract_like, replicated
from tests.faults.full_disk import no_file_above


def kept(every, count, *steps, **costs):
    """Return what is kept of some steps; s20=1.5 is the selection cost of step 20."""
    return sorted(kept_steps({step: costs.get(f"s{step}") for step in steps}, every, count))


def test_the_last_regular_checkpoints_are_kept():
    assert kept(10, 2, 10, 20, 30, 40) == [30, 40]
    assert kept(10, 9, 10, 20) == [10, 20]


def test_one_written_on_a_signal_pushes_out_none_that_averaging_needs():
    assert kept(10, 2, 10, 20, 30, 33) == [20, 30, 33]
    assert kept(10, 2, 20, 30, 33, 40) == [30, 40]


def test_the_best_of_those_scored_is_kept():
    assert kept(10, 1, 10, 20, 30, 40, s10=2.0, s20=1.5, s30=1.7) == [20, 40]
    assert kept(10, 1, 10, 20, 30, s10=1.5, s20=1.5, s30=1.7) == [10, 30]  # the first of equals


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_whose_cost_is_not_finite_is_saved(tmp_path, bad):
    with Checkpoints(tmp_path / "checkpoints", every=10, keep_last=1) as checkpoints:
        checkpoints.save(10, state(10), {}, 2.0)
        checkpoints.save(20, state(20), {}, bad)
        checkpoints.save(30, state(30), {}, 3.0)
    assert open_run(tmp_path).steps() == [10, 30]


def test_the_example_of_kept_steps_holds():
    assert doctest.testmod(checkpoint) == (0, 1)


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
    """Write a run whose selection costs are 3, 1, 2 at updates 10, 20, 30, stopped at 33."""
    workdir = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(workdir / "checkpoints", every=10, keep_last=1)
    for step, cost in ((10, 3.0), (20, 1.0), (30, 2.0), (33, None)):
        checkpoints.save(step, state(step), {"step": step, "data": ["ab", "cd"]}, cost)
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


def test_a_step_that_is_saved_again_is_what_was_saved_last(tmp_path):
    """Also where the first one was read: a run may go back to an older step and come by again."""
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for value in (1, 2):
            checkpoints.save(10, state(value), {"step": value}, None)
            checkpoints.wait()
            assert checkpoints.manifest(10).progress == {"step": value}
            same_bits(checkpoints.restore(10, abstract()), state(value))


def test_keys_of_random_numbers_are_read_back_and_restored(tmp_path):
    """Optimizers that add noise have them in their states."""
    keys = {"one": jax.random.key(3), "several": jax.random.split(jax.random.key(1, impl="rbg"), 2)}
    saved = {"params": state(1)["params"], "rest": {"keys": keys}}
    wanted = placed(saved, SingleDeviceSharding(jax.devices()[0]))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (10, 20):  # to delete the first, the second is read back
            checkpoints.save(step, saved, {}, None)
        checkpoints.wait()
        assert checkpoints.steps() == [20]
        found = checkpoints.restore(20, wanted)["rest"]["keys"]
    assert jax.tree.map(jnp.array_equal, found, keys) == {"one": True, "several": True}
    assert [key.dtype for key in found.values()] == [key.dtype for key in keys.values()]


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
    assert run.manifest(33).progress == run.newest_manifest().progress == {"step": 33, "data": ["ab", "cd"]}
    run.close()
    file = finished / "checkpoints" / "33" / "manifest" / "metadata"
    assert json.loads(file.read_text())["progress"]["step"] == 33


def test_reading_a_run_deletes_nothing_of_it(finished):
    open_run(finished).close()
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["20", "30", "33"]


def test_a_run_opened_again_still_knows_its_best(tmp_path):
    first = Checkpoints(tmp_path / "checkpoints", every=10, keep_last=1)
    for step, cost in ((10, 1.0), (20, 2.0)):
        first.save(step, state(step), {}, cost)
    first.close()
    second = Checkpoints(tmp_path / "checkpoints", every=10, keep_last=1)
    second.save(30, state(30), {}, 3.0)
    second.close()
    run = open_run(tmp_path)
    assert run.steps() == [10, 30]
    run.close()


def test_best_of_other_rules_is_not_kept_for_its_lower_cost(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", every=10, keep_last=1) as checkpoints:
        for step, cost, best in ((10, -80.0, 10), (20, -50.0, 20), (30, -40.0, 20)):
            checkpoints.save(step, state(step), {"best_step": best}, cost)
    run = open_run(tmp_path)
    assert run.steps() == [20, 30]
    run.close()


def test_average_leaves_out_the_best_of_long_ago_and_says_so(tmp_path, capsys):
    with Checkpoints(tmp_path / "checkpoints", every=10, keep_last=3) as checkpoints:
        for step in (20, 470, 480, 490, 500):
            checkpoints.save(step, state(step), {"best_step": 20}, 0.0 if step == 20 else None)
    settings = resolve({"train": {"checkpoint_every": 10}, "evaluate": {"weights": "average", "average_last": 4}})
    found = weights.load_weights(tmp_path, settings, None, make_mesh(data=1, devices=jax.devices()[:1]))
    assert found.steps == (480, 490, 500)
    np.testing.assert_allclose(found.params["w"], state(490)["params"]["w"], rtol=1e-6)
    assert "has 3 checkpoints in a row to average, from step 480 on: step 20 is further back" in capsys.readouterr().err


def test_what_all_averaged_checkpoints_share_is_not_rounded():
    frozen, moving = np.float32(np.random.default_rng(0).standard_normal((2, 1_000)))
    for count in (3, 5, 7):
        trees = [{"frozen": jax.numpy.array(frozen), "moving": jax.numpy.array(moving * i)} for i in range(count)]
        mean = weights.average(trees)
        np.testing.assert_array_equal(mean["frozen"], frozen)
        np.testing.assert_allclose(mean["moving"], moving * (count - 1) / 2, rtol=1e-6)


def test_manifests_of_deleted_steps_are_forgotten(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state(step), {}, None)
        checkpoints.wait()
        assert checkpoints._manifests.keys() == set(checkpoints.steps()) == {30}


def test_half_written_checkpoints_are_removed_and_not_found(tmp_path):
    halves = [tmp_path / "checkpoints" / name for name in ("10.orbax-checkpoint-tmp", "deleted-5")]
    for half in halves:
        half.mkdir(parents=True)
        (half / "file").touch()
    reader = Checkpoints(tmp_path / "checkpoints", clean=False)
    assert reader.steps() == []
    assert all(half.exists() for half in halves)
    Checkpoints(tmp_path / "checkpoints").close()
    assert not any(half.exists() for half in halves)


@pytest.mark.parametrize(("pause", "module"), [(0.0, "elsewhere"), (0.7, "elsewhere"), (2.0, "orbax.checkpoint")])
def test_what_threads_of_a_failed_save_write_later_is_removed_too(tmp_path, pause, module):
    half = tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp" / "params"

    def write():
        time.sleep(pause)
        for number in range(30):
            with contextlib.suppress(OSError):  # its folder was removed just now
                half.mkdir(parents=True, exist_ok=True)
                (half / str(number)).touch()
            time.sleep(0.005)

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        late = type("Committing", (threading.Thread,), {"__module__": module})(target=write)
        late.start()
        remove_failed(checkpoints.directory)
        late.join()
    assert not half.parent.exists()


class HttpError(Exception):
    """An error of a bucket, as gcsfs raises it: no OSError."""


def test_what_cannot_be_listed_does_not_hide_why_a_save_failed(tmp_path, monkeypatch):
    def refuse(_):
        raise HttpError("503 Service Unavailable")

    monkeypatch.setattr(folders, "_paths", refuse)
    monkeypatch.setattr(folders, "REMOVALS", 2)
    remove_failed(tmp_path)


@pytest.mark.parametrize("kind", [OSError, HttpError])
def test_a_save_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("jformer.checkpoints.checkpoint.in_bucket", lambda _: kind is HttpError)

    def begin(path, **_):
        path.with_name(f"{path.name}.orbax-checkpoint-tmp").mkdir()
        raise kind("no space")

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        monkeypatch.setattr(checkpoints._orbax, "save", begin)
        with pytest.raises(UserError, match=r"10: could not be written \(.*no space.*\); no step is saved"):
            checkpoints.save(10, state(10), {}, None)
    assert [*(tmp_path / "checkpoints").iterdir()] == []


def test_reading_a_run_leaves_what_its_training_is_just_writing(tmp_path):
    writer = Checkpoints(tmp_path / "checkpoints")
    writer.save(10, state(10), {}, None)
    writer.close()
    half = tmp_path / "checkpoints" / "20.orbax-checkpoint-tmp"
    half.mkdir()
    run = open_run(tmp_path)
    run.close()
    assert half.exists()


@pytest.mark.parametrize("folder", [None, "checkpoints"])
def test_a_workdir_without_a_checkpoint_is_refused(tmp_path, folder, monkeypatch):
    closed, close = [], Checkpoints.close
    monkeypatch.setattr(Checkpoints, "close", lambda self: closed.append(close(self)))
    if folder:
        (tmp_path / folder).mkdir()
    with pytest.raises(UserError, match=r": holds no checkpoint; train there first, or give another --workdir$"):
        open_run(tmp_path)
    assert len(closed) == 1  # it leaves no thread behind
    assert [path.name for path in tmp_path.iterdir()] == [folder] * bool(folder)


def test_shapes_and_dtypes_are_those_of_the_tree():
    shapes = abstract(["rest"])["rest"]["opt_state"][0]["m"]
    assert (shapes.shape, shapes.dtype) == ((3,), ml_dtypes.bfloat16)


@pytest.fixture
def copied(finished, tmp_path):
    """Return a copy of the finished run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def change_progress(step):
    """Write another manifest that is valid JSON: only its own digest can tell."""
    file = step / "manifest" / "metadata"
    before = file.read_text()
    file.write_text(before.replace('"step": 33', '"step": 32'))
    assert file.read_text() != before


def newest(workdir, clean=False):
    with Checkpoints(workdir / "checkpoints", every=10, clean=clean) as run:
        return run.restore_newest(abstract())


def damage_bits(step):
    """Write other parameters where those of the step were, as valid files: only the digest can tell."""
    shutil.rmtree(step / "params")
    shutil.copytree(step.parent / "20" / "params", step / "params")


DAMAGES = {
    "other bits": (damage_bits, "/33/params: the bits of w are not those that were saved"),
    "an item is missing": (lambda step: shutil.rmtree(step / "rest"), "/33: "),
    "all is empty": (lambda step: [file.write_bytes(b"") for file in step.rglob("*") if file.is_file()], "/33: "),
    "no manifest": (lambda step: shutil.rmtree(step / "manifest"), "/33: "),
    "another manifest": (change_progress, "/33/manifest: has changed since it was written"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_the_newest_intact_step_is_restored_and_what_is_skipped_is_said(copied, case):
    damage, said = DAMAGES[case]
    damage(copied / "checkpoints" / "33")
    found = newest(copied)
    assert found.step == 30
    same_bits(found.items, state(30))
    assert found.progress["step"] == 30
    (note,) = found.skipped
    assert note.startswith("skipped a damaged checkpoint: ")
    assert said in note
    assert (copied / "checkpoints" / "33").exists()  # who reads changes nothing


def test_a_manifest_of_a_newer_version_is_refused_not_taken_for_damaged():
    written = Manifest({}, 1.0, {}).to_json()
    assert Manifest.from_json(dict(written), "run") == Manifest({}, 1.0, {})
    older = with_digest({key: value for key, value in written.items() if key not in ("schema", "digest")})
    assert Manifest.from_json(older, "run") == Manifest({}, 1.0, {})
    newer = {key: value for key, value in written.items() if key != "digest"} | {"schema": 2}
    with pytest.raises(UserError, match=r"^run: schema=2, and this version of jformer reads up to 1: upgrade") as error:
        Manifest.from_json(with_digest(newer), "run")
    assert not isinstance(error.value, DamagedError)


def test_training_sets_damaged_steps_aside_and_saves_in_their_place(copied):
    damage_bits(copied / "checkpoints" / "33")
    with Checkpoints(copied / "checkpoints", every=10) as run:
        assert run.restore_newest(abstract()).step == 30
        assert run.steps() == [20, 30]
        run.save(33, state(33), {}, None)
    assert newest(copied).step == 33
    assert (copied / "checkpoints" / "broken-33").exists()


def test_without_an_intact_step_each_is_named(copied):
    for step in (20, 30, 33):
        shutil.rmtree(copied / "checkpoints" / str(step) / "params")
    with pytest.raises(UserError, match=r"no checkpoint is intact; .*/33: .*/30: .*/20: "):
        newest(copied)


@pytest.mark.parametrize("name", ["99999999", "0099", "099"])
def test_a_folder_of_another_program_is_no_step(copied, name):
    (copied / "checkpoints" / name).mkdir()
    if name != "99999999":
        (copied / "checkpoints" / name / "file").touch()
    found = newest(copied)
    assert (found.step, found.skipped) == (33, [])


def test_a_step_that_cannot_be_read_never_pushes_out_one_that_can(copied):
    shutil.rmtree(copied / "checkpoints" / "33")
    shutil.rmtree(copied / "checkpoints" / "30" / "manifest")
    with Checkpoints(copied / "checkpoints", every=10, keep_last=2) as run:
        run.save(41, state(41), {}, None)
        run.wait()
        assert run.steps() == [20, 41]


@pytest.mark.parametrize("item", ["params", "rest", "manifest"])
def test_a_new_step_that_is_damaged_on_disk_pushes_out_none(copied, monkeypatch, item):
    """With keep_last=1 the newest step was all that was left, unread."""
    with Checkpoints(copied / "checkpoints", every=10, keep_last=1) as run:
        written = run._orbax.wait_until_finished

        def damaged():
            written()
            if (copied / "checkpoints" / "40").exists():  # not the wait at the beginning
                for path in (copied / "checkpoints" / "40" / item).rglob("*"):
                    if path.is_file() and ("/d/" in str(path) or item == "manifest"):
                        path.write_bytes(bytes(byte ^ 4 for byte in path.read_bytes()))

        monkeypatch.setattr(run._orbax, "wait_until_finished", damaged)
        run.save(40, state(40), {}, None)
        with pytest.raises(UserError, match=r"/40: could not be written \(.*\); step 33 is the last that is saved"):
            run.wait()
        assert run.steps() == [20, 30, 33]
    assert newest(copied).step == 33


def test_where_a_new_step_is_not_read_back_one_more_is_kept(copied, monkeypatch):
    """Several processes, or a bucket: with keep_last=1 a damaged newest step was all that was left."""
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    with Checkpoints(copied / "checkpoints", every=10, keep_last=1) as run:
        for step in (40, 50):
            run.save(step, state(step), {}, None)
        run.wait()
        assert run.steps() == [20, 40, 50]
    damage_bits(copied / "checkpoints" / "50")
    assert newest(copied).step == 40


def test_arrays_of_another_model_are_refused_by_path_with_both_sides(finished):
    wrong = {
        "shape": (jnp.zeros((2, 4)), r"/33/params: has float32\[2 3\] for w, this model needs float32\[2 4\]"),
        "kind": (jnp.zeros((2, 3), jnp.int32), r"has float32\[2 3\] for w, this model needs int32\[2 3\]"),
        "width": (jnp.zeros((2, 3), jnp.bfloat16), r"has float32\[2 3\] for w, this model needs bfloat16\[2 3\]"),
    }
    here = SingleDeviceSharding(jax.devices()[0])
    with open_run(finished) as run:
        for array, said in wrong.values():
            with pytest.raises(UserError, match=said):
                run.restore_newest(placed({"params": {"w": array}}, here))
        with pytest.raises(UserError, match=r"has nothing for v, this model needs float32\[\]"):
            run.restore(33, placed({"params": {"w": jnp.zeros((2, 3)), "v": jnp.zeros(())}}, here))
        with pytest.raises(UserError, match=r"has float32.* for w, this model needs nothing"):
            run.restore(33, placed({"params": {}}, here))
        with pytest.raises(UserError, match="/33: has no ema, only params, rest"):
            run.restore(33, placed({"ema": {"w": jnp.zeros((2, 3))}}, here))


def test_a_disk_that_is_full_is_one_line_and_old_steps_stay_valid(copied, caplog):
    with Checkpoints(copied / "checkpoints", every=10) as run:
        large = {"params": {"w": jnp.arange(1 << 18, dtype=jnp.float32)}}
        failed = r"/40: could not be written \(.*\); step 33 is the last that is saved"
        with no_file_above(1 << 16), pytest.raises(UserError, match=failed) as caught:
            run.save(40, large, {}, None)
            for _ in range(3_000):  # as a loop over updates
                run.check_save()
                time.sleep(0.01)
        assert caught.value.code == MISTAKE
        assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["20", "30", "33"]
        run.save(40, state(40), {}, None)
    assert newest(copied).step == 40
    assert not [record for record in caplog.records if record.exc_info]  # no traceback of Orbax's


def link_to_itself(file):
    """Let the system refuse to open a file, also to root, with an OSError that does not say that it is missing."""
    file.unlink()
    file.symlink_to(file)


REFUSED = {"manifest": "manifest/metadata", "descriptions of the arrays": "params/[_m]*", "data": "params/d/*"}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_just_now_is_said_and_nothing_is_set_aside(copied, case):
    for file in (copied / "checkpoints" / "33").glob(REFUSED[case]):
        link_to_itself(file)
    with pytest.raises(UnavailableError, match=r"/33: cannot be read now \(.*\); try again") as caught:
        newest(copied, clean=True)
    assert caught.value.code == LOST
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["20", "30", "33"]


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        TimeoutError("timed out"),
        ValueError("UNAVAILABLE: Error reading w/.zarray"),
        RuntimeError("Connection reset"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_storage_is_no_damage(copied, monkeypatch, error):
    with Checkpoints(copied / "checkpoints", every=10) as run:

        def refuse(*_, **__):
            raise error

        monkeypatch.setattr(run._orbax.handler, "restore", refuse)
        with pytest.raises(UnavailableError, match=r"/33: cannot be read now \(.*\); try again"):
            run.restore_newest(abstract())
        assert run.steps() == [20, 30, 33]


@pytest.mark.parametrize(("status", "kind"), [("DATA_LOSS", DamagedError), ("UNAVAILABLE", UnavailableError)])
def test_an_error_that_orbax_wraps_is_judged_by_its_cause(copied, monkeypatch, status, kind):
    def refuse(*_, **__):
        try:
            raise ValueError(f"{status}: Error reading w/0.0")
        except ValueError as error:
            raise Exception("Encountered error while reading array index") from error

    with Checkpoints(copied / "checkpoints", every=10) as run:
        monkeypatch.setattr(run._orbax.handler, "restore", refuse)
        with pytest.raises(UserError, match=f"/33: .*{status}: Error reading") as caught:
            run.restore(33, abstract())
    assert type(caught.value) is kind


def test_old_steps_that_cannot_be_read_or_deleted_do_not_fail_a_save(copied, capfd):
    link_to_itself(copied / "checkpoints" / "30" / "manifest" / "metadata")
    with Checkpoints(copied / "checkpoints", every=10) as run:
        run.save(40, state(40), {}, None)
        run.wait()
        assert run.steps() == [20, 30, 33, 40]
    said = capfd.readouterr().err
    assert re.fullmatch(r"jformer: .*/checkpoints: old checkpoints could not be deleted \(.*/30: .*\n", said)


def test_a_save_is_proved_where_jax_has_no_cpu_devices(copied, monkeypatch):
    """As under JAX_PLATFORMS=cuda: whoever asks for a device of the CPU gets an error."""

    def local_devices(*_, backend=None, **__):
        raise RuntimeError(f"Unknown backend {backend}")

    with Checkpoints(copied / "checkpoints", every=10) as run, monkeypatch.context() as without:
        without.setattr(jax, "local_devices", local_devices)
        run.save(40, state(40), {}, None)
        run.wait()
        assert run.steps()[-1] == 40


def test_a_save_that_fails_where_nothing_can_be_listed_is_one_line(copied, monkeypatch):
    with Checkpoints(copied / "checkpoints", every=10) as run:
        run.save(40, state(40), {}, None)
        run.wait()

        def refuse(*_):
            raise OSError("stale file handle")

        with monkeypatch.context() as broken:
            broken.setattr(run._orbax, "wait_until_finished", refuse)
            broken.setattr(folders, "_paths", refuse)
            with pytest.raises(
                UserError, match=r"/50: could not be written \(stale file handle\); the saved steps"
            ) as at:
                run._finish(50, run.manifest(40), on_host(state(50)))
            assert at.value.code == LOST


@pytest.mark.parametrize(("error", "code"), [
    (OSError(errno.ENOSPC, "full"), MISTAKE), (ValueError("RESOURCE_EXHAUSTED: No space left on device [x]"), MISTAKE),
    (OSError(errno.ESTALE, "stale"), LOST), (RuntimeError("503 Service Unavailable"), LOST),
    (RuntimeError("403 Forbidden"), MISTAKE),
])  # fmt: skip
def test_a_save_that_fails_for_a_moment_is_no_mistake_of_the_user(tmp_path, monkeypatch, error, code):
    def begin(path, **_):
        raise RuntimeError("the write failed") from error

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        monkeypatch.setattr(checkpoints._orbax, "save", begin)
        with pytest.raises(UserError) as caught:
            checkpoints.save(10, state(10), {}, None)
    assert caught.value.code == code


def with_another_process(monkeypatch, answer):
    """Let `agree` join this process's value with what another one has for it."""
    monkeypatch.setattr(processes, "agree", lambda value, join: join([value, answer(value)]))


def test_a_step_that_another_process_does_not_see_is_none(finished, monkeypatch):
    with_another_process(monkeypatch, lambda own: [20, 30] if isinstance(own, list) else None)
    assert newest(finished).step == 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_that_another_process_cannot_read_fails_here_too(finished, monkeypatch, kind):
    with open_run(finished) as run:
        with_another_process(monkeypatch, lambda _: [KINDS.index(kind), "theirs"])
        with pytest.raises(UserError, match=r"^theirs$") as caught:
            run.manifest(33)
    assert type(caught.value) is kind


def test_of_damage_here_and_a_refusal_elsewhere_the_refusal_counts(copied, monkeypatch):
    shutil.rmtree(copied / "checkpoints" / "33" / "manifest")
    with open_run(copied) as run:
        with_another_process(monkeypatch, lambda _: [KINDS.index(UnavailableError), "theirs"])
        with pytest.raises(UnavailableError, match=r"^theirs$"):
            run.manifest(33)


@pytest.mark.parametrize("turn", [1, 2, 3], ids=["reading", "params", "rest"])
def test_arrays_that_are_damaged_for_another_process_are_skipped_here_too(finished, monkeypatch, turn):
    """Each agreement after the steps and the manifest, of the newest step, is refused by another process in turn."""
    turns = []

    def theirs(own):
        turns.append(own)
        return own if isinstance(own, list) else [KINDS.index(DamagedError), "theirs"] if len(turns) == at else None

    at = 4 + turn - 1
    with_another_process(monkeypatch, theirs)
    found = newest(finished)
    assert (found.step, found.skipped) == (30, ["skipped a damaged checkpoint: theirs"])


def test_reading_arrays_waits_for_no_other_process_beside_those_agreements(finished, monkeypatch):
    """Of Orbax's own waiting the process that fails would know nothing."""
    monkeypatch.setattr("orbax.checkpoint._src.multihost.multihost.sync_global_processes", pytest.fail)
    assert newest(finished).step == 33
