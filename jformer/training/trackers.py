"""Rows of a run for services that collect runs: Weights & Biases, MLflow. Each is imported only if it is asked for.

Where they send to, and whether, is their own business: WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME and whatever else they read. A resumed run is the same run there: what it is called is kept
in WORKDIR/trackers.json.
"""

import importlib
import json
import math
import os
import tempfile
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from etils.epath import Path

from jformer.config.options import Config, changed
from jformer.errors import UserError
from jformer.integrity import parse_object
from jformer.storage import in_bucket, replace_content

PROJECT = "jformer"  # where the environment names none
PATIENCE = {"MAX_RETRIES": "1", "TIMEOUT": "10"}  # seconds, with a server of MLflow
LONGEST_PARAMETER = 500  # characters, MLflow's limit


class Tracker(Protocol):
    """A service."""

    def write(self, row: Mapping[str, object]) -> None:
        """Send a row; `step` and `split` are among it."""

    def keep(self) -> None:
        """Send what is left."""

    def close(self, failed: bool) -> None:
        """Send what is left, and say that the run is over, or that it failed."""


def open_tracker(name: str, workdir: Path, config: Config) -> Tracker:
    """Start, or resume, the run of a workdir at a service; raise UserError where that cannot be done."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"train.trackers: {name} is not installed: pip install 'jformer[{name}]' ({error})") from error
    try:
        return TRACKERS[name](module, workdir, config)
    except UserError:
        raise
    except Exception as error:  # they raise of many kinds
        raise UserError(f"train.trackers: {name} cannot begin: {error}; mend that, or leave it out") from error


class WeightsAndBiases:
    """A run of wandb."""

    def __init__(self, wandb: ModuleType, workdir: Path, config: Config) -> None:
        """Begin it; its files lie in WORKDIR/wandb, of a run in a bucket in a temporary folder."""
        own = known_names(workdir).get("wandb") or _note(workdir, "wandb", uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=own,
            resume="allow",
            name=workdir.name,
            dir=tempfile.gettempdir() if in_bucket(workdir) else str(workdir),
            config={key: value for key, (value, _) in changed(config).items()},
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, row: Mapping[str, object]) -> None:
        """Send a row; rows that a restart repeats are dropped there."""
        self._run.log(_numbers(row), step=row["step"])

    def keep(self) -> None:
        """Nothing: wandb sends from a process of its own."""

    def close(self, failed: bool) -> None:
        """Send what is left, and say that the run is over, or that it failed."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow."""

    def __init__(self, mlflow: ModuleType, workdir: Path, config: Config) -> None:
        """Begin it in the experiment that the environment names."""
        for name, value in PATIENCE.items():  # its own would hold up training for minutes
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        own = known_names(workdir).get("mlflow")
        if own is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            own = self._client.create_run(experiment, run_name=workdir.name).info.run_id
            values = {key: str(value)[:LONGEST_PARAMETER] for key, (value, _) in changed(config).items()}
            self._client.log_batch(own, params=[self._entities.Param(key, value) for key, value in values.items()])
            _note(workdir, "mlflow", own)
        self._client.update_run(own, status="RUNNING")
        self._own = own

    def write(self, row: Mapping[str, object]) -> None:
        """Send a row; of one that a restart repeats MLflow keeps both, which are the same."""
        numbers = _numbers(row).items()
        self._client.log_batch(
            self._own, metrics=[self._entities.Metric(name, value, 0, row["step"]) for name, value in numbers]
        )

    def keep(self) -> None:
        """Nothing: each row is sent as it comes."""

    def close(self, failed: bool) -> None:
        """Say that the run is over, or that it failed."""
        self._client.set_terminated(self._own, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[WeightsAndBiases] | type[MLflow]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of a row as `split/name`."""
    return {
        f"{row['split']}/{name}": value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def known_names(workdir: Path) -> dict[str, str]:
    """Return what the run is called at each service."""
    path = workdir / "trackers.json"
    if not path.exists():
        return {}
    try:
        known = parse_object(path.read_bytes())
        if not all(isinstance(own, str) for own in known.values()):
            raise ValueError("a name must be a text")
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it, and the services begin a new run") from error
    return known


def _note(workdir: Path, name: str, own: str) -> str:
    """Keep what the run is called at a service, and return it."""
    workdir.mkdir(parents=True, exist_ok=True)
    replace_content(workdir / "trackers.json", json.dumps({**known_names(workdir), name: own}).encode() + b"\n")
    return own
