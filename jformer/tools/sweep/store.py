"""Where a sweep's trials are kept: a study of Optuna, in a file of the workdir or behind a URL. Knows no trial."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import secrets
import sqlite3
import time
import warnings
from collections.abc import Iterator
from typing import IO

import optuna
import sqlalchemy
from etils.epath import Path
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import SQLAlchemyError

from jformer.config import resolve
from jformer.config.resume import differences
from jformer.errors import UserError
from jformer.storage import in_bucket, parse_object, replace_content
from jformer.tools.sweep.experiment import JOURNAL, Experiment

OWN = {"experiment", "metric", "study", "id"}  # keys of sweep.json
PATIENCE = 60.0  # seconds that a file may stay locked
MAY_DIFFER = ("data.dir", "data.cache_dir", "mesh.", "train.peak_flops")  # between workers of one sweep


class StorageError(UserError):
    """The storage cannot be used now; it may be there again in a moment."""


class FileLock(JournalFileOpenLock):
    """Held by one process at a time, and by none that has died: Optuna's own locks outlive a killed process.

    Whoever gets it removes what another left of a line when the disk was full or the machine went down: Optuna would
    write on behind it, and nobody could read on from there.
    """

    def __init__(self, path: Path) -> None:
        """Lock this file, which is made if need be."""
        super().__init__(str(path))
        self._path = pathlib.Path(path)
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Wait for the lock; raise UserError if it does not come."""
        deadline = time.monotonic() + PATIENCE
        file = self._path.open("ab+")
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    file.close()
                    raise UserError(
                        f"{self._path}: locked by another process for {PATIENCE:.0f} seconds; is a worker stopped?"
                    ) from error
                time.sleep(0.005)
            else:
                self._file = file
                _mend(file)
                return True

    def release(self) -> None:
        """Let the next one in."""
        if self._file:
            self._file.close()
        self._file = None


def _mend(journal: IO[bytes]) -> None:
    """Cut off a last line that was not written to its end."""
    journal.seek(max(journal.seek(0, os.SEEK_END) - 1, 0))
    if journal.read(1) not in (b"", b"\n"):
        journal.seek(0)
        journal.truncate(journal.read().rfind(b"\n") + 1)


@contextlib.contextmanager
def reaching(name: str) -> Iterator[None]:
    """Turn what a storage raises when it cannot be reached, read or written into one line."""
    try:
        yield
    except UserError:
        raise
    except (SQLAlchemyError, StorageInternalError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise StorageError(
            f"{_shown(name)}: the trials cannot be reached ({reason}); is it there, and may we write?"
        ) from error


@contextlib.contextmanager
def one_at_a_time(workdir: Path) -> Iterator[None]:
    """Let no two processes of a workdir open its study at once: both would be the first."""
    if in_bucket(workdir):
        yield
        return
    lock = FileLock(workdir / "sweep.lock")
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def open_study(experiment: Experiment, workdir: Path, storage: str, name: str) -> optuna.Study:
    """Return the study of an experiment in a workdir, new or as it was left.

    Raises UserError if the workdir or the study belongs to another experiment, or if what all trials share has
    changed since the first of them.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with reaching(str(workdir)):
        workdir.mkdir(parents=True, exist_ok=True)
    with reaching(storage or str(workdir / JOURNAL)), one_at_a_time(workdir):
        study = optuna.create_study(
            storage=open_storage(workdir, storage),
            study_name=name,
            direction="minimize" if experiment.goal == "min" else "maximize",
            sampler=make_sampler(experiment),
            pruner=make_pruner(experiment),
            load_if_exists=True,
        )
        _agree(study, experiment, workdir)
    return study


def open_storage(workdir: Path, storage: str) -> BaseStorage:
    """Return the storage of a URL, or the journal of the workdir."""
    if not storage:
        return _open_journal(workdir / JOURNAL)
    if "://" not in storage:
        raise UserError(f"--storage={storage} must be a URL of SQLAlchemy's, such as postgresql://USER@HOST/DATABASE")
    try:
        database = RDBStorage(storage)
    except ImportError as error:
        raise UserError(f"--storage={_shown(storage)} needs a driver: {error.__cause__ or error}") from error
    if database.engine.name == "sqlite":
        _lock_rows(database.engine)
    return database


def _open_journal(path: Path) -> BaseStorage:
    """Return the journal as a storage; raise UserError for a line that is no row of it."""
    *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(whole, start=1):
        try:
            if not {"op_code", "worker_id"} <= parse_object(line).keys():
                raise ValueError("it has no op_code or worker_id")
        except ValueError as error:
            raise UserError(f"{path}:{number} is no row of a journal of trials ({error}); restore the file") from error
    try:
        return JournalStorage(JournalFileBackend(str(path), FileLock(path)))
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: a row is of no use to Optuna ({error!r}); restore the file") from error


def _lock_rows(sqlite: sqlalchemy.Engine) -> None:
    """Lock what a transaction reads for it to change, as Optuna asks of databases, but SQLite does only like this.

    Otherwise two workers may take the same trial.
    """

    @sqlalchemy.event.listens_for(sqlite, "connect")
    def leave_transactions_to_us(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {1000 * PATIENCE:.0f}")

    @sqlalchemy.event.listens_for(sqlite, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sqlite.dispose()  # connections from before


def _shown(storage: str) -> str:
    """Return a URL without its password."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:…@", storage)


def make_sampler(experiment: Experiment) -> optuna.samplers.BaseSampler:
    """Return what draws the trials of a search; TPE reckons with those that still run."""
    if experiment.sampler == "random":
        return optuna.samplers.RandomSampler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(constant_liar=True)


def make_pruner(experiment: Experiment) -> optuna.pruners.BasePruner:
    """Return what ends hopeless trials: by the median of the others, or by Hyperband's brackets (Li et al. 2018)."""
    if experiment.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4)
    if experiment.pruner == "hyperband":
        train = experiment.config({}).train
        every = train.eval_every if experiment.metric.startswith("valid/") else train.log_every
        return optuna.pruners.HyperbandPruner(min_resource=every, max_resource=train.num_steps)
    return optuna.pruners.NopPruner()


def read_record(path: Path) -> dict[str, str]:
    """Return what a workdir says of its sweep, {} if it is new; raise UserError for what says nothing."""
    if not path.exists():
        return {}
    try:
        here = parse_object(path.read_bytes())
        if here.keys() != OWN or not all(isinstance(value, str) for value in here.values()):
            raise ValueError(f"it must have {', '.join(sorted(OWN))}, all texts")
    except ValueError as error:
        raise UserError(f"{path}: is no record of a sweep ({error}); restore it, or use another --workdir") from error
    return here


def _agree(study: optuna.Study, experiment: Experiment, workdir: Path) -> None:
    """Let a new study and its workdir remember what they are for; compare them if they were there before.

    The workdir is written first: where that is all that was done, it takes its study when it is opened again.
    """
    shared = experiment.config({})
    mine, path = {"experiment": experiment.path.stem, "metric": experiment.metric}, workdir / "sweep.json"
    here = read_record(path)
    if "sweep" not in study.user_attrs and here.get("study", study.study_name) == study.study_name:
        here = here or {**mine, "study": study.study_name, "id": secrets.token_hex(8)}
        replace_content(path, json.dumps(here).encode())
        study.set_user_attr("sweep", {**here, "shared": dataclasses.asdict(shared)})
    goal = "min" if study.direction == optuna.study.StudyDirection.MINIMIZE else "max"
    saved = study.user_attrs.get("sweep", {}) | {"goal": goal}
    if here.get("id") != saved.get("id"):
        holds = f"holds a sweep of {here['experiment']!r}, not" if here else "is new, and does not belong to"
        raise UserError(
            f"{workdir}: {holds} study {study.study_name!r} of the storage: use another --workdir or --study"
        )
    for key, value in {**mine, "goal": experiment.goal}.items():
        if saved[key] != value:
            raise UserError(f"{workdir}: its {key} is {saved[key]!r}, not {value!r}: use another --workdir")
    for key, (before, now) in differences(resolve(saved["shared"]), shared).items():
        if not key.startswith(MAY_DIFFER):
            raise UserError(
                f"{key}={now!r} but the trials of this sweep have {before!r}: set it back or use a new --workdir"
            )
