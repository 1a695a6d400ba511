"""Which trials there are, who does which, and what became of them: rows of a study that any number of workers share.

A row is taken by the storage's compare-and-set of its state, so it has one owner. An owner that falls silent loses it:
the row is failed as lost and a new one is made for the same trial, which goes on in the same directory. Two workers may
both make one; of several rows of a trial the first that is not lost counts, and the others are never looked at. So each
trial has one result, whoever is killed, and whenever.
"""

import contextlib
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import optuna
from etils.epath import Path
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from jformer.errors import UserError
from jformer.tools.sweep.experiment import JOURNAL, Experiment, Trial, label_of
from jformer.tools.sweep.lease import Silence, is_gone, owner
from jformer.tools.sweep.store import StorageError, open_study, reaching
from jformer.tools.sweep.study_rows import _as_trial, _crashes, _live, _losses, _planned, _trial

OPEN = ("waiting", "running")
PAUSE = 0.5  # seconds before a storage that is away is tried again
T = TypeVar("T")


class Queue:
    """The trials of an experiment."""

    def __init__(self, experiment: Experiment, workdir: Path, storage: str = "", name: str = "", lease: float = 60.0):
        """Open the study, which is made if need be.

        Args:
            experiment: whose trials these are.
            workdir: of the sweep; without `storage`, the trials are kept in a file there.
            storage: a URL of Optuna's, such as that of a database.
            name: of the study; "" = that of the experiment's file.
            lease: seconds that the owner of a trial may say nothing before others take it.
        """
        self.experiment, self.lease = experiment, lease
        self._planned = experiment.planned()
        self._where = storage or str(workdir / JOURNAL)
        self._silence = Silence()
        self.study = open_study(experiment, workdir, storage, name or experiment.path.stem)
        self._store = self.study._storage
        self._id = self.study._study_id

    def trials(self) -> list[Trial]:
        """Return all trials as they stand: those planned in their order, those of a search in that of their rows."""
        found = {name: _as_trial(rows) for name, rows in self._rows().items()}
        planned = [found.pop(trial.name, trial) for trial in self._planned]
        return planned if self.experiment.search is None else [*found.values()]

    def plan(self, retry_failed: bool = False) -> None:
        """Make sure that every trial that is to be done has a row; with `retry_failed` those that failed, too."""
        rows = self._rows()
        for name, trial in self._wanted(rows).items():
            members = rows.get(name, [])
            live = _live(members)
            if live is None or (retry_failed and live.state == TrialState.FAIL):
                self._add(trial, members, after=-1 if live is None else live.number)

    def claim(self) -> "Claim | None":
        """Return a trial that is now ours, or None if there is none to be had at the moment."""
        self._take_back()
        self.plan()
        rows = self._rows()
        for name in sorted(self._wanted(rows), key=lambda name: _losses(rows[name])):
            row = _live(rows[name])
            if row and row.state == TrialState.WAITING and self._take(row):
                return Claim(self, row._trial_id, _as_trial(rows[name]), _crashes(rows[name]))
        return self._ask() if self.experiment.search else None

    def left(self) -> int:
        """Return how many trials have not come to an end."""
        trials = self.trials()
        unknown = max(self.experiment.trials - len(trials), 0) if self.experiment.search else 0
        return unknown + sum(trial.state in OPEN for trial in trials)

    def _wanted(self, rows: Mapping[str, list[FrozenTrial]]) -> dict[str, Trial]:
        """Return the trials that are to be done: the planned ones, or those that a search has made so far."""
        if self.experiment.search:
            return {name: _trial(members[0]) for name, members in rows.items()}
        return {trial.name: trial for trial in self._planned}

    def _ask(self) -> "Claim | None":
        """Let the sampler make one more trial of a search, unless others have made the last or are at it.

        Of several that ask for the last one at a time, the first row counts.
        """
        if self._known() >= self.experiment.trials:
            return None
        new = optuna.create_trial(state=TrialState.RUNNING, user_attrs={"owner": self._me()})
        row = self._reach(lambda: optuna.trial.Trial(self.study, self._store.create_new_trial(self._id, new)))
        if self._known(before=row.number) >= self.experiment.trials:
            self._end(row._trial_id, TrialState.FAIL)
            return None
        with contextlib.suppress(UpdateFinishedTrialError):  # it was taken back: this worker was silent
            trial = self._suggested(row)
            self._reach(lambda: self._store.set_trial_user_attr(row._trial_id, "trial", _planned(trial)))
            return Claim(self, row._trial_id, dataclasses.replace(trial, state="running", attempts=1))
        return None

    def _known(self, before: float = math.inf) -> int:
        """Return how many trials of a search have been made or are being made, in rows before this number."""
        rows = [row for row in self._all() if row.number < before]
        asking = sum("trial" not in row.user_attrs and row.state == TrialState.RUNNING for row in rows)
        return asking + len({row.user_attrs["trial"]["name"] for row in rows if "trial" in row.user_attrs})

    def _suggested(self, row: optuna.trial.Trial) -> Trial:
        """Return the trial that search() makes of a row."""
        experiment = self.experiment
        assert experiment.search
        try:
            overrides = experiment.search(row)
            experiment.config(overrides)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{experiment.path}: search() of trial {row.number}: {error}") from error
        return experiment.trial(label_of(overrides), overrides, experiment.seeds[0], row.number)

    def _all(self) -> list[FrozenTrial]:
        """Return all rows in the order in which they were made."""
        rows = self._reach(lambda: self._store.get_all_trials(self._id, deepcopy=False))
        return sorted(rows, key=lambda row: row.number)

    def _rows(self) -> dict[str, list[FrozenTrial]]:
        """Return trial → its rows. Rows that search() never named are of none."""
        named: defaultdict[str, list[FrozenTrial]] = defaultdict(list)
        for row in self._all():
            if "trial" in row.user_attrs:
                named[row.user_attrs["trial"]["name"]].append(row)
        return named

    def _add(self, trial: Trial, rows: list[FrozenTrial], after: int) -> None:
        """Make a row for a trial; what a search suggested goes with it."""
        row = optuna.create_trial(
            state=TrialState.WAITING,
            params=rows[0].params if rows else None,
            distributions=rows[0].distributions if rows else None,
            user_attrs={"trial": _planned(trial), "after": after},
        )
        self._reach(lambda: self._store.create_new_trial(self._id, row))

    def _take(self, row: FrozenTrial) -> bool:
        with contextlib.suppress(UpdateFinishedTrialError):
            if self._reach(lambda: self._store.set_trial_state_values(row._trial_id, TrialState.RUNNING)):
                return self._set(row._trial_id, owner=self._me())
        return False

    def _me(self) -> dict[str, Any]:
        """Return who we are, and for how long we may say nothing: it is for the owner to keep its word."""
        return {**owner(), "lease": self.lease}

    def _take_back(self) -> None:
        """Fail the rows of owners that are gone or have been silent for too long."""
        now = time.monotonic()
        for row in self._all():
            if row.state != TrialState.RUNNING:
                continue
            by = row.user_attrs.get("owner", {})
            silent = self._silence.seconds(row._trial_id, row.user_attrs.get("beat"), now)
            if silent > by.get("lease", self.lease) or (by and is_gone(by)):
                self._end(row._trial_id, TrialState.FAIL)

    def _set(self, row: int, **values: Any) -> bool:
        """Keep values with a row; return whether it was still running."""
        with contextlib.suppress(UpdateFinishedTrialError):
            for key, value in values.items():
                self._reach(partial(self._store.set_trial_user_attr, row, key, value))
            return True
        return False

    def _end(self, row: int, state: TrialState, value: float | None = None) -> bool:
        """End a row; return whether it was still running."""
        values = None if value is None else [value]
        with contextlib.suppress(UpdateFinishedTrialError):
            self._reach(lambda: self._store.set_trial_state_values(row, state, values))
            return True
        return False

    def _reach(self, act: Callable[[], T]) -> T:
        """Return what an act on the storage gives; one that is away for less than half a lease changes nothing.

        An act that was done though the storage did not say so may be done again: a second row of a trial does not
        count, and a row that was taken so falls silent.
        """
        deadline = time.monotonic() + self.lease / 2
        while True:
            try:
                with reaching(self._where):
                    return act()
            except StorageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE)


class Claim:
    """A trial that is ours for as long as we say so."""

    def __init__(self, queue: Queue, row: int, trial: Trial, crashes: int = 0) -> None:
        """Own a row that has just been taken; `crashes` is how often the trial's process ended badly before."""
        self.trial, self.crashes = trial, crashes
        self._queue, self._row, self._beats = queue, row, 0

    def renew(self, seconds: float) -> bool:
        """Say that we are there, and for how long; return whether the trial is still ours."""
        self._beats += 1
        return self._set(beat=self._beats, seconds=seconds)

    def hopeless(self, curve: Mapping[int, float]) -> bool:
        """Tell the pruner the metric at updates so far; return whether it would rather see the trial end."""
        queue, store = self._queue, self._queue._store
        with contextlib.suppress(UpdateFinishedTrialError):
            known = queue._reach(lambda: store.get_trial(self._row)).intermediate_values
            for step in sorted(set(curve) - set(known)):
                queue._reach(partial(store.set_trial_intermediate_value, self._row, step, curve[step]))
            return bool(curve) and queue._reach(
                lambda: queue.study.pruner.prune(queue.study, store.get_trial(self._row))
            )
        return False

    def complete(self, value: float, metrics: Mapping[str, float], seconds: float) -> bool:
        """Tell the result; return whether it counts, which it does once."""
        return self._set(metrics=dict(metrics), seconds=seconds) and self._end(TrialState.COMPLETE, value)

    def prune(self, metrics: Mapping[str, float], seconds: float) -> bool:
        """End the trial as one that others have overtaken."""
        return self._set(metrics=dict(metrics), seconds=seconds) and self._end(TrialState.PRUNED)

    def fail(self, error: str, seconds: float) -> bool:
        """End the trial with the reason why it cannot be done."""
        return self._set(error=error, seconds=seconds) and self._end(TrialState.FAIL)

    def give_back(self, seconds: float, crash: str = "") -> bool:
        """Let a worker go on with the trial, which has crashed or not."""
        return self._set(seconds=seconds, returned=True, **({"crash": crash} if crash else {})) and self._end(
            TrialState.FAIL
        )

    def _end(self, state: TrialState, value: float | None = None) -> bool:
        return self._queue._end(self._row, state, value)

    def _set(self, **values: Any) -> bool:
        return self._queue._set(self._row, **values)
