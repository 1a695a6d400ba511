"""The storage of a sweep: an Optuna study, in a file of the workdir or behind a URL. Knows nothing of trials."""

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
from jformer.config.resume import differences, with_saved_config
from jformer.errors import UnavailableError, UserError
from jformer.integrity import parse_object
from jformer.storage import in_bucket, is_outage, replace_content
from jformer.tools.sweep.experiment import JOURNAL, RECORD, Experiment

OWN = {"experiment", "metric", "study", "id"}  # keys of sweep.json
OPENING = "opening"  # a further one until the study has the same id
PATIENCE = 60.0  # seconds to wait for a lock
UNREACHABLE = (SQLAlchemyError, StorageInternalError, OSError)  # errors of a storage
MAY_DIFFER = ("data.dir", "data.cache_dir", "mesh.", "train.peak_flops")  # between the workers of a sweep


class StorageError(UserError):
    """The storage cannot be used at the moment."""


class StorageAwayError(StorageError, UnavailableError):
    """The storage does not answer now."""


class FileLock(JournalFileOpenLock):
    """A lock that the kernel releases when its holder dies: Optuna's own locks outlive a killed process.

    Acquiring it cuts off an incomplete last line, left by a full disk or a crash of the machine: Optuna would append to
    that line, and no process could read the file from there on.
    """

    def __init__(self, path: Path) -> None:
        """Lock this file, which is created if it does not exist."""
        super().__init__(str(path))
        self._path = pathlib.Path(path)
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Wait for the lock; raise UserError after PATIENCE seconds."""
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
                _cut_incomplete_line(file)
                return True

    def release(self) -> None:
        """Release the lock."""
        if self._file:
            self._file.close()
        self._file = None


def _cut_incomplete_line(journal: IO[bytes]) -> None:
    journal.seek(max(journal.seek(0, os.SEEK_END) - 1, 0))
    if journal.read(1) not in (b"", b"\n"):
        journal.seek(0)
        journal.truncate(journal.read().rfind(b"\n") + 1)


@contextlib.contextmanager
def reaching(name: str) -> Iterator[None]:
    """Turn the errors of a storage that cannot be reached, read or written into a one-line error."""
    try:
        yield
    except UserError:
        raise
    except (*UNREACHABLE, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        where = f"{_shown(name)}: the trials cannot be reached ({reason})"
        if is_outage(error):
            raise StorageAwayError(f"{where}; rerun the same command to resume") from error
        raise StorageError(f"{where}; check that it exists and is writable") from error


@contextlib.contextmanager
def one_at_a_time(workdir: Path) -> Iterator[None]:
    """Open the study of a workdir in one process at a time: two could both create it."""
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
    """Return the study of an experiment in a workdir, new or existing.

    Raises UserError if the workdir or the study belongs to another experiment, if the storage lacks the study that the
    workdir has opened before, or if what all trials share has changed since the first of them.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with reaching(str(workdir)):
        workdir.mkdir(parents=True, exist_ok=True)
    with reaching(storage or str(workdir / JOURNAL)), one_at_a_time(workdir):
        here = read_record(workdir / RECORD)
        is_open = here and OPENING not in here
        if is_open:
            _refuse_missing(workdir, storage)
        database = open_storage(workdir, storage)
        if is_open and name not in optuna.get_all_study_names(database):
            if isinstance(database, RDBStorage):
                database.engine.dispose()
            raise _elsewhere(workdir, f"{_shown(storage) or JOURNAL} has no study {name!r}")
        study = optuna.create_study(
            storage=database,
            study_name=name,
            direction="minimize" if experiment.goal == "min" else "maximize",
            sampler=make_sampler(experiment),
            pruner=make_pruner(experiment),
            load_if_exists=True,
        )
        _agree(study, experiment, workdir, here)
    return study


def _refuse_missing(workdir: Path, storage: str) -> None:
    """Raise UserError for a file of trials that is not there, which opening it would create."""
    url = sqlalchemy.make_url(storage) if "://" in storage else None
    if url and url.get_backend_name() != "sqlite":
        return
    file = Path(url.database or "") if url else workdir / JOURNAL
    if not file.exists() and not str(file).startswith("file:"):
        raise _elsewhere(workdir, f"{file} is not there")


def _elsewhere(workdir: Path, reason: str) -> UserError:
    return UserError(
        f"{workdir}: has a sweep already, and {reason}: check --storage and --study, or use another --workdir"
    )


def open_storage(workdir: Path, storage: str) -> BaseStorage:
    """Return the storage of a URL, or the journal of the workdir."""
    if not storage:
        return _open_journal(workdir / JOURNAL)
    if "://" not in storage:
        raise UserError(f"--storage={storage} must be an SQLAlchemy URL, such as postgresql://USER@HOST/DATABASE")
    try:
        database = RDBStorage(storage)
    except ImportError as error:
        raise UserError(f"--storage={_shown(storage)} needs a driver: {error.__cause__ or error}") from error
    if database.engine.name == "sqlite":
        _lock_rows(database.engine)
    return database


def _open_journal(path: Path) -> BaseStorage:
    """Return the journal as a storage; raise UserError for an invalid line."""
    *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(whole, start=1):
        try:
            if not {"op_code", "worker_id"} <= parse_object(line, constants=True).keys():  # Optuna writes NaN
                raise ValueError("it has no op_code or worker_id")
        except ValueError as error:
            raise UserError(f"{path}:{number} is not a row of a trial journal ({error}); restore the file") from error
    try:
        return JournalStorage(JournalFileBackend(str(path), FileLock(path)))
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: Optuna cannot use a row ({error!r}); restore the file") from error


def _lock_rows(sqlite: sqlalchemy.Engine) -> None:
    """Lock the rows that a transaction reads in order to change them; without this two workers may claim one trial."""

    @sqlalchemy.event.listens_for(sqlite, "connect")
    def disable_implicit_transactions(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {1000 * PATIENCE:.0f}")

    @sqlalchemy.event.listens_for(sqlite, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sqlite.dispose()  # connections opened before


def _shown(storage: str) -> str:
    """Return a URL without its password."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:…@", storage)


def make_sampler(experiment: Experiment) -> optuna.samplers.BaseSampler:
    """Return the sampler of a search; TPE takes running trials into account."""
    if experiment.sampler == "random":
        return optuna.samplers.RandomSampler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(constant_liar=True)


def make_pruner(experiment: Experiment) -> optuna.pruners.BasePruner:
    """Return the pruner: by the median of other trials, or by Hyperband's brackets (Li et al. 2018)."""
    if experiment.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4)
    if experiment.pruner == "hyperband":
        train = experiment.config({}).train
        every = train.log_every if experiment.metric.startswith("train/") else train.eval_every
        return optuna.pruners.HyperbandPruner(min_resource=every, max_resource=train.num_steps)
    return optuna.pruners.NopPruner()


def read_record(path: Path) -> dict[str, str]:
    """Return a workdir's record of its sweep, {} if there is none; raise UserError if it is invalid."""
    if not path.exists():
        return {}
    try:
        here = parse_object(path.read_bytes())
        if here.keys() - {OPENING} != OWN or not all(isinstance(value, str) for value in here.values()):
            raise ValueError(f"it must have {', '.join(sorted(OWN))}, all strings")
    except ValueError as error:
        raise UserError(f"{path}: is not a record of a sweep ({error}); restore it or use another --workdir") from error
    return here


def _agree(study: optuna.Study, experiment: Experiment, workdir: Path, here: dict[str, str]) -> None:
    """Record in a new study and its workdir which sweep they hold; compare the records of existing ones.

    The workdir is written first, as opening: if the process dies in between, the next one completes the study. Once it
    is no longer opening, a study without a record is refused, such as one in a mistyped storage.
    """
    shared = experiment.config({})
    mine, path = {"experiment": experiment.path.stem, "metric": experiment.metric}, workdir / RECORD
    here = here or read_record(path)  # another process may have written it by now, if nothing locks the workdir
    opening = here.pop(OPENING, None) is not None or not here
    if opening and "sweep" not in study.user_attrs and here.get("study", study.study_name) == study.study_name:
        here = here or {**mine, "study": study.study_name, "id": secrets.token_hex(8)}
        replace_content(path, json.dumps({**here, OPENING: "yes"}).encode())
        study.set_user_attr("sweep", {**here, "shared": dataclasses.asdict(shared)})
    goal = "min" if study.direction == optuna.study.StudyDirection.MINIMIZE else "max"
    saved = study.user_attrs.get("sweep", {}) | {"goal": goal}
    if here.get("id") != saved.get("id"):
        holds = f"holds a sweep of {here['experiment']!r}, not" if here else "is new, and does not belong to"
        raise UserError(
            f"{workdir}: {holds} study {study.study_name!r} of the storage: use another --workdir or --study"
        )
    if opening:
        replace_content(path, json.dumps(here).encode())
    for key, value in {**mine, "goal": experiment.goal}.items():
        if saved[key] != value:
            raise UserError(f"{workdir}: its {key} is {saved[key]!r}, not {value!r}: use another --workdir")
    first = resolve(saved["shared"])
    # In a run, train.num_steps may have become what its epochs take; here it is the limit, then as now.
    now = dataclasses.replace(with_saved_config(shared, first), train=shared.train)
    for key, (before, after) in differences(first, now).items():
        if not key.startswith(MAY_DIFFER):
            raise UserError(
                f"{key}={after!r} but the trials of this sweep have {before!r}: set it back or use a new --workdir"
            )
