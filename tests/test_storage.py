"""A run lies in a bucket as it does in a directory."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from jax.sharding import SingleDeviceSharding

import jformer
from jformer import integrity, main, storage
from jformer.checkpoints.checkpoint import Checkpoints, open_run
from jformer.config import resolve
from jformer.data.corpus import open_corpus
from jformer.data.sources.split import Split
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.storage import replace_content
from jformer.tools.hf.write_model import StoredRun
from jformer.tools.supervise import newest_checkpoint
from jformer.training.lock import sole_trainer
from jformer.training.record import JsonlWriter
from tests import bucket
from tests.data.test_corpus import DROPPING as BYTES
from tests.faults.full_disk import no_file_above

CONFIG = Path(__file__).parent / "small_run.py"
RUN = f"gs://mine/runs/{os.getpid()}"  # runs in buckets are locked for the whole machine, where others may test, too
SHORT = ["--config.train.num_steps=20", "--config.train.eval_every=10"]
TRAIN_AND_DIE = """
import os, sys
from jformer import main
from jformer.checkpoints.checkpoint import Checkpoints
from tests import bucket
bucket.pretend(bucket.Path(sys.argv[1]))
save = Checkpoints.save
def save_and_die(checkpoints, step, *rest):
    save(checkpoints, step, *rest)
    checkpoints.wait()
    if step == 10:
        os.kill(os.getpid(), 9)
Checkpoints.save = save_and_die
sys.exit(main.main(["jformer", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buckets")
    bucket.pretend(folder)
    return folder


def arguments(workdir, cache, *more):
    return [f"--config={CONFIG}", f"--workdir={workdir}", f"--config.data.cache_dir={cache}", *SHORT, *more]


def losses(text):
    return [json.loads(line)["loss"] for line in text.splitlines()]


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Return the workdirs of one run in a directory, and of one in a bucket that was killed and went on."""
    cache, directory = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("run")
    assert main.main(["jformer", *arguments(directory, cache)]) == 0
    inside = arguments(RUN, cache)
    killed = subprocess.run([sys.executable, "-c", TRAIN_AND_DIE, str(folder), *inside], cwd=CONFIG.parents[1])
    assert killed.returncode == -9
    assert len((folder / RUN.removeprefix("gs://") / "metrics.jsonl").read_text().splitlines()) == 3
    assert main.main(["jformer", *inside]) == 0
    return directory, epath.Path(RUN)


def test_a_lock_that_may_not_be_created_says_so(tmp_path, monkeypatch):
    def refuse(path, flags, mode=0o777):
        raise (PermissionError if flags & os.O_CREAT else FileNotFoundError)(path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        storage.open_lock(tmp_path / "training.lock", fcntl.LOCK_EX)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_that_in_a_directory(runs, folder):
    directory, inside = runs
    assert losses((inside / "metrics.jsonl").read_text()) == losses((directory / "metrics.jsonl").read_text())
    assert (inside / "outputs/test.txt").read_text() == (directory / "outputs/test.txt").read_text()
    own = {str(path.relative_to(directory)) for path in directory.glob("[!tc]*")}
    assert own - {"training.lock"} <= {path.name for path in (folder / RUN.removeprefix("gs://")).iterdir()}
    assert newest_checkpoint([f"--workdir={RUN}"]) == newest_checkpoint(["--workdir", RUN, "--distributed"]) == 20


@pytest.mark.slow
def test_a_run_in_a_bucket_is_opened_from_anywhere(runs):
    directory, inside = runs
    questions = ["a b c", "d e"]
    assert jformer.load(str(inside)).predict(questions) == jformer.load(directory).predict(questions)


@pytest.mark.slow
def test_a_run_may_begin_with_one_in_a_bucket(runs, tmp_path):
    _, inside = runs
    options = [f"--config.train.init_from={inside}", "--config.train.num_steps=5", "--config.train.eval_every=0"]
    assert main.main(["jformer", *arguments(tmp_path / "child", tmp_path, *options)]) == 0


@pytest.mark.slow
def test_half_written_checkpoints_in_a_bucket_are_none(runs, folder):
    (folder / RUN.removeprefix("gs://") / "checkpoints/50").mkdir()
    (folder / RUN.removeprefix("gs://") / "checkpoints/50/params").touch()
    saved = open_run(runs[1])
    assert saved.steps()[-1] == 20
    saved.close()


def test_a_damaged_checkpoint_in_a_bucket_and_old_ones_are_deleted(folder):
    here = SingleDeviceSharding(jax.devices()[0])
    items = {"params": {"w": jnp.arange(6.0)}}
    abstract = {"params": {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=here)}}
    inside, path = folder / "mine/damaged", epath.Path("gs://mine/damaged")
    with Checkpoints(path, keep_last=2) as run:
        for step in (1, 2, 3):
            run.save(step, items, {}, None)
        run.wait()
        assert run.steps() == [2, 3]
    for file in (inside / "3" / "params").rglob("d/*"):
        file.write_bytes(b"")
    with Checkpoints(path) as run:
        found = run.restore_newest(abstract)
        assert (found.step, len(found.skipped), run.steps()) == (2, 1, [2])
    assert not (inside / "3" / "params").exists()


def test_rows_in_a_bucket_are_there_once_they_are_kept(folder):
    path = epath.Path("gs://mine/rows/metrics.jsonl")
    for step in (1, 2):
        writer = JsonlWriter(path)
        writer.write({"step": step, "split": "train"})
        assert (path.read_text() if path.exists() else "").count("\n") == step - 1
        writer.keep()
        assert path.read_text().count("\n") == step
        writer.close()
    JsonlWriter.truncate_after(path, 1)
    assert [row["step"] for row in records.rows(path.parent)] == [1]


def test_a_second_trainer_is_refused_on_this_machine(folder):
    inside = epath.Path(f"{RUN}b")
    refused = pytest.raises(UserError, match="another process is training here")
    with sole_trainer(inside), refused, sole_trainer(inside):
        pass
    with sole_trainer(inside):
        pass


def test_an_imported_run_in_a_bucket_knows_what_it_was_imported_from(folder):
    replace_content(run := epath.Path("gs://mine/imported") / "imported.json", b'{"model_type": "gpt2"}')
    assert StoredRun(run.parent, resolve({}), ()).origin == {"model_type": "gpt2"}


@pytest.mark.parametrize("place", ["s3://mine/a", "hf://mine/a", "http://mine/a"])
def test_other_storage_is_refused(place, capsys):
    assert main.main(["jformer", f"--config={CONFIG}", f"--workdir={place}"]) == 2
    assert f"{place}: a run is a directory or a folder of a Google bucket" in capsys.readouterr().err


def test_a_run_in_the_home_directory_is_found_where_the_shell_leaves_the_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.run_path("~/run") == tmp_path / "run"


def test_a_trace_is_refused_in_a_bucket(folder, tmp_path, capsys):
    options = ["--config.train.profile_steps=2:3", "--config.train.num_steps=10"]
    assert main.main(["jformer", *arguments("gs://mine/traced", tmp_path, *options)]) == 2
    assert "a trace cannot be written to a bucket" in capsys.readouterr().err


def test_content_that_finds_no_room_leaves_what_was_there(tmp_path):
    path = epath.Path(tmp_path) / "file.json"
    path.write_text("old")
    with no_file_above(100), pytest.raises(OSError, match="File too large"):
        storage.replace_content(path, b"x" * 1_000)
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    assert path.read_text() == "old"


def hold_lock(lock):
    with sole_trainer(epath.Path(lock.parent)):
        pass


def tokenize(path):
    """Tokenize a text into a cache where, of all that a corpus can be called, a file or folder is in its way."""
    split, encoder = Split("train", "text 1", lambda counts: iter(())), BYTES
    name = hashlib.sha256(f"{split.fingerprint} {encoder.fingerprint()}".encode()).hexdigest()[:32]
    path.rename(path.with_name(path.name.replace("corpus", name)))
    open_corpus(split, encoder, str(path.parent))


MISPLACED = {  # what reads or writes it; a folder is in its place, where it is no folder itself
    "training.lock": hold_lock,
    "metrics.jsonl": lambda path: records.rows(epath.Path(path.parent)),
    "samples.jsonl": lambda path: records.samples(epath.Path(path.parent)),
    "results.json": lambda path: records.results(epath.Path(path.parent)),
    "rows to go on with.jsonl": lambda path: JsonlWriter.truncate_after(epath.Path(path), 10),
    "digests.json": lambda path: integrity.damaged(epath.Path(path.parent)),
    "corpus.lock": tokenize,
    "corpus": tokenize,
    "checkpoints": lambda path: Checkpoints(epath.Path(path)).steps(),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_folder_in_the_place_of_a_file_or_the_reverse_is_one_line(tmp_path, name):
    path = tmp_path / name
    path.touch() if name in ("corpus", "checkpoints") else path.mkdir()
    with (
        pytest.raises(UserError, match=rf"^{tmp_path}/.*: .*; move it away, or") as told,
        storage.os_errors_as_user_errors(),
    ):
        MISPLACED[name](path)
    assert "\n" not in str(told.value)


def test_a_lock_of_another_user_locks_and_is_left_as_it_is(tmp_path, monkeypatch):
    lock, opened = tmp_path / "training.lock", os.open
    lock.write_text("theirs")

    def refuse_writing(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_writing)
    with sole_trainer(epath.Path(tmp_path)), pytest.raises(UserError, match="another process is training here"):
        hold_lock(lock)
    assert lock.read_text() == "theirs"


def test_where_a_file_system_has_no_locks_this_machine_has(tmp_path, monkeypatch, capsys):
    workdir, machine, flock = epath.Path(tmp_path / "run"), epath.Path(tmp_path / "here"), fcntl.flock
    monkeypatch.setattr(storage, "here", lambda: machine)

    def refuse(file, kind):
        if not Path(f"/proc/self/fd/{file.fileno()}").readlink().is_relative_to(machine):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):  # the lock is released
        with sole_trainer(workdir), pytest.raises(UserError, match="another process is training here"):
            hold_lock(workdir / "training.lock")
    assert "training.lock: this file system has no locks" in capsys.readouterr().err


def test_content_is_replaced_whole(tmp_path):
    path = epath.Path(tmp_path) / "file.json"
    path.write_text("old and long")
    storage.replace_content(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]
    assert path.read_text() == "new"


def test_of_two_writers_at_once_each_replaces_the_whole_file(tmp_path, monkeypatch):
    path = epath.Path(tmp_path) / "file.json"
    with storage.replacing(path, shared=True) as first, monkeypatch.context() as elsewhere:
        first.write_text("first")
        elsewhere.setattr(storage.platform, "node", lambda: "another-machine")
        storage.replace_content(path, b"second", shared=True)
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice in one object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested too deep"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_says_nothing_clear_is_refused(line, reason):
    with pytest.raises(ValueError, match=reason):
        integrity.parse_json(line)


def test_brackets_in_a_text_and_many_beside_each_other_are_no_nesting():
    assert integrity.parse_json('["' + "[" * 200 + '"]') == ["[" * 200]
    assert integrity.parse_json("[" + "[]," * 200 + "[]]") == [[]] * 201
    with pytest.raises(ValueError, match="it must be a JSON object"):
        integrity.parse_object("[]")
