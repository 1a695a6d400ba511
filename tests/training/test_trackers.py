"""Trackers receive the rows of a run: the real packages where installed, without a network."""

import json
import sys

import pytest
from etils.epath import Path

from jformer.config import options, resolve
from jformer.errors import UnavailableError, UserError
from jformer.training import trackers
from jformer.training.record import Record
from tests.faults.full_disk import no_file_above
from tests.watching import wait_until

ROWS = [
    {"step": 10, "split": "train", "loss": 2.5, "skipped": 0, "perplexity": float("nan")},
    {"step": 10, "split": "valid", "loss": 2.0},
    {"step": 20, "split": "train", "loss": 1.5, "skipped": 0, "late": 1.0},
]


def record(folder, *names, step=0, said=print):
    config = resolve({"train": {"trackers": names, "num_steps": 7}, "optim": {"warmup": 1}, "seed": 3})
    return Record(Path(folder), config, step, said)


def test_every_service_that_may_be_named_is_there():
    assert tuple(trackers.TRACKERS) == options.TRACKERS
    with pytest.raises(UserError, match=r"train\.trackers='tensorboard'"):
        resolve({"train": {"trackers": ("tensorboard",)}})


def test_a_service_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb is not installed: pip install 'jformer\[wandb\]'"):
        record(tmp_path, "wandb")


class Failing:
    """A service that takes one row."""

    def __init__(self, module, workdir, config):
        self.rows = 0

    def write(self, row):
        self.rows += 1
        if self.rows > 1:
            raise ConnectionError("gone")

    def keep(self):
        pass

    def close(self, failed):
        raise AssertionError


def test_a_service_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    monkeypatch.setitem(sys.modules, "wandb", sys)
    said = []
    kept = record(tmp_path, "wandb", said=said.append)
    for row in ROWS:
        kept.write(row)
    kept.close()
    assert said == ["wandb failed and gets no further rows; metrics.jsonl has all of them: gone"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(ROWS)


def test_a_run_continues_without_the_curves_and_the_text_that_have_no_room(tmp_path):
    (tmp_path / "training.log").write_text("x" * 60_000)
    said = []
    kept = record(tmp_path, said=said.append)
    with no_file_above(60_000):
        for step in range(200):
            kept.write({"step": step, "split": "train"} | {f"number {i}": 0.5 for i in range(8)})
        kept.write_line("hello")
        kept.close()
    assert [line.partition(":")[0] for line in said] == [
        "TensorBoard failed and gets no further rows; metrics.jsonl has all of them",
        "training.log gets no further lines",
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 200


def test_a_service_that_cannot_begin_is_one_line(tmp_path, monkeypatch):
    class Refusing:
        def __init__(self, module, workdir, config):
            raise RuntimeError("no key")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Refusing)
    monkeypatch.setitem(sys.modules, "wandb", sys)
    with pytest.raises(UserError, match="wandb cannot start: no key; fix that, or remove it from train"):
        record(tmp_path, "wandb")


def test_an_outage_of_a_service_ends_a_new_run_for_now_and_not_one_that_resumes(tmp_path, monkeypatch):
    class Away:
        def __init__(self, module, workdir, config):
            raise RuntimeError("Run initialization has timed out after 90.0 sec.")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Away)
    monkeypatch.setitem(sys.modules, "wandb", sys)
    with pytest.raises(UnavailableError, match="wandb cannot start: Run initialization has timed out"):
        record(tmp_path, "wandb")
    kept = record(tmp_path, "wandb", step=10)
    kept.write(ROWS[0])
    kept.close()
    (line,) = kept.missing
    assert line.startswith("wandb gets no rows; metrics.jsonl has all of them: train.trackers: wandb cannot start: Run")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, of SQLAlchemy
def test_mlflow_has_the_rows_and_the_settings_of_a_run_that_was_resumed(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'jformer[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for step, rows in ((0, ROWS[:2]), (10, ROWS[2:])):  # the second part after a restart
        kept = record(tmp_path / "run", "mlflow", step=step)
        for row in rows:
            kept.write(row)
        kept.close()
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'jformer'")
    (run,) = client.search_runs([experiment.experiment_id])
    history = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert (run.info.run_name, run.info.status, history) == ("run", "FINISHED", [(10, 2.5), (20, 1.5)])
    assert run.data.metrics["valid/loss"] == 2.0
    assert "train/perplexity" not in run.data.metrics
    settings = {"seed": "3", "train.num_steps": "7", "optim.warmup": "1.0", "train.trackers": "('mlflow',)"}
    assert run.data.params == settings


def test_wandb_keeps_the_rows_of_a_run_that_was_resumed_without_any_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'jformer[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step, rows in ((0, ROWS[:2]), (10, ROWS[2:])):
        kept = record(tmp_path / "run", "wandb", step=step)
        for row in rows:
            kept.write(row)
        kept.close()
    own = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{own}*/run-{own}.wandb"))
    assert len(files) == 2  # of the same run
    names = (b"train/loss", b"valid/loss", b"train/late", b"train.num_steps")

    def all_are_there():  # wandb's own process writes, which may be slower than this one
        contents = b"".join(file.read_bytes() for file in files)
        return all(name in contents for name in names)

    wait_until(all_are_there)


def test_a_damaged_file_of_names_is_one_line_and_a_failed_run_is_marked_as_failed(tmp_path, monkeypatch):
    class Closing(Failing):
        def close(self, failed):
            closed.append((trackers._store_id(Path(tmp_path), "wandb", "name"), failed))

    closed = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Closing)
    monkeypatch.setitem(sys.modules, "wandb", sys)
    record(tmp_path, "wandb").close(failed=True)
    assert closed == [("name", True)]
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(
        UserError, match=r"trackers\.json: cannot be read \(.*\); delete it to start a new run at each service"
    ):
        trackers.run_ids(Path(tmp_path))
