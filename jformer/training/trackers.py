"""Experiment trackers that receive a run's rows: Weights & Biases, MLflow. Each is imported only if configured.

Environment variables of the services set where rows are sent: WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME and others. A resumed run continues its run there, whose id is stored in WORKDIR/trackers.json.
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
from jformer.errors import UnavailableError, UserError
from jformer.integrity import parse_object
from jformer.storage import in_bucket, is_outage, replace_content

PROJECT = "jformer"  # the default
PATIENCE = {"MAX_RETRIES": "1", "TIMEOUT": "10"}  # of requests to an MLflow server; seconds
LONGEST_PARAMETER = 500  # characters, MLflow's limit


class Tracker(Protocol):
    """A service that receives the rows of a run."""

    def write(self, row: Mapping[str, object]) -> None:
        """Send a row, which has `step` and `split`."""

    def keep(self) -> None:
        """Flush; does nothing if each row is sent at once."""

    def close(self, failed: bool) -> None:
        """Send the remaining rows, and mark the run as finished or failed."""


def open_tracker(name: str, workdir: Path, config: Config) -> Tracker:
    """Start or resume the run of a workdir at a service.

    Raises UserError if that fails, and UnavailableError if the service cannot be reached now.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"train.trackers: {name} is not installed: pip install 'jformer[{name}]' ({error})") from error
    try:
        return TRACKERS[name](module, workdir, config)
    except UserError:
        raise
    except Exception as error:  # services raise errors of any type
        kind = UnavailableError if is_outage(error) else UserError
        raise kind(
            f"train.trackers: {name} cannot start: {error}; fix that, or remove it from train.trackers"
        ) from error


class WeightsAndBiases(Tracker):
    """A run of wandb."""

    def __init__(self, wandb: ModuleType, workdir: Path, config: Config) -> None:
        """Start or resume it; its files are in WORKDIR/wandb, or in a temporary folder if the workdir is a bucket."""
        own = run_ids(workdir).get("wandb") or _store_id(workdir, "wandb", uuid.uuid4().hex[:12])
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
        """Send a row; wandb drops rows that a restart repeats."""
        self._run.log(_numbers(row), step=row["step"])

    def close(self, failed: bool) -> None:
        """Send the remaining rows, and mark the run as finished or failed."""
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """A run of MLflow."""

    def __init__(self, mlflow: ModuleType, workdir: Path, config: Config) -> None:
        """Start or resume it in the experiment MLFLOW_EXPERIMENT_NAME."""
        for name, value in PATIENCE.items():  # the defaults would block training for minutes
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        own = run_ids(workdir).get("mlflow")
        if own is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            own = self._client.create_run(experiment, run_name=workdir.name).info.run_id
            values = {key: str(value)[:LONGEST_PARAMETER] for key, (value, _) in changed(config).items()}
            self._client.log_batch(own, params=[self._entities.Param(key, value) for key, value in values.items()])
            _store_id(workdir, "mlflow", own)
        self._client.update_run(own, status="RUNNING")
        self._own = own

    def write(self, row: Mapping[str, object]) -> None:
        """Send a row; MLflow keeps both copies of a row that a restart repeats."""
        numbers = _numbers(row).items()
        self._client.log_batch(
            self._own, metrics=[self._entities.Metric(name, value, 0, row["step"]) for name, value in numbers]
        )

    def close(self, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._own, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[WeightsAndBiases] | type[MLflow]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of a row as `split/name`."""
    return {
        f"{row['split']}/{name}": value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def run_ids(workdir: Path) -> dict[str, str]:
    """Return the id of the run at each service."""
    path = workdir / "trackers.json"
    if not path.exists():
        return {}
    try:
        known = parse_object(path.read_bytes())
        if not all(isinstance(own, str) for own in known.values()):
            raise ValueError("an id must be a string")
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it to start a new run at each service") from error
    return known


def _store_id(workdir: Path, name: str, own: str) -> str:
    """Store the id of the run at a service, and return it."""
    workdir.mkdir(parents=True, exist_ok=True)
    replace_content(workdir / "trackers.json", json.dumps({**run_ids(workdir), name: own}).encode() + b"\n")
    return own
