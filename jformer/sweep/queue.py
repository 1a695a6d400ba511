"""Which trials there are, who does which, and what became of them: rows of a study that any number of workers share.

A row is taken by the storage's compare-and-set of its state, so it has one owner. An owner that falls silent loses it:
the row is failed as lost and a new one is made for the same trial, which goes on in the same directory. Two workers may
both make one; of several rows of a trial the first that is not lost counts, and the others are never looked at. So each
trial has one result, whoever is killed, and whenever.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import optuna
from etils.epath import Path
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from jformer.sweep.experiment import Experiment, Trial, label_of
from jformer.sweep.lease import Silence, is_gone, owner
from jformer.sweep.store import open_study, reaching

STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
OPEN = ("waiting", "running")


class Queue:
    """The trials of an experiment."""

    def __init__(self, experiment: Experiment, workdir: Path, storage: str = "", name: str = "", lease: float = 60.0):
        """Open the study, which is made if need be; `lease` is how many seconds an owner may say nothing."""
        self.experiment, self.lease = experiment, lease
        self._where = storage or str(workdir)
        self._silence = Silence()
        self.study = open_study(experiment, workdir, storage, name or experiment.path.stem)
        self._store = self.study._storage
        self._id = self.study._study_id

    def trials(self) -> list[Trial]:
        """Return all trials as they stand: those planned in their order, those of a search in that of their rows."""
        found = {name: _as_trial(rows) for name, rows in self._rows().items()}
        planned = [found.pop(trial.name, trial) for trial in self.experiment.planned()]
        return planned if self.experiment.search is None else [*found.values()]

    def plan(self, retry_failed: bool = False) -> None:
        """Make sure that every trial that is to be done has a row; with `retry_failed` those that failed, too."""
        rows = self._rows()
        wanted = {trial.name: trial for trial in self.experiment.planned()}
        wanted |= {name: _trial(members[0]) for name, members in rows.items() if self.experiment.search}
        for name, trial in wanted.items():
            members = rows.get(name, [])
            live = _live(members)
            if live is None or (retry_failed and live.state == TrialState.FAIL):
                self._add(trial, members, after=-1 if live is None else live.number)

    def claim(self) -> "Claim | None":
        """Return a trial that is now ours, or None if there is none to be had at the moment."""
        self._take_back()
        self.plan()
        for members in self._rows().values():
            row = _live(members)
            if row and row.state == TrialState.WAITING and self._take(row):
                return Claim(self, row._trial_id, _as_trial(members), sum("crash" in row.user_attrs for row in members))
        if self.experiment.search and len(self._rows()) < self.experiment.trials:
            return self._ask()
        return None

    def left(self) -> int:
        """Return how many trials have not come to an end."""
        trials = self.trials()
        unknown = max(self.experiment.trials - len(trials), 0) if self.experiment.search else 0
        return unknown + sum(trial.state in OPEN for trial in trials)

    def _ask(self) -> "Claim | None":
        """Let the sampler make one more trial of a search; if others did so meanwhile, there may be none left."""
        search = self.experiment.search
        assert search
        with reaching(self._where):
            row = self.study.ask()
            self._store.set_trial_user_attr(row._trial_id, "owner", owner())
            before = [
                other for other in self._store.get_all_trials(self._id, deepcopy=False) if other.number < row.number
            ]
        named = {other.user_attrs["trial"]["name"] for other in before if "trial" in other.user_attrs}
        asking = sum("trial" not in other.user_attrs and other.state == TrialState.RUNNING for other in before)
        if len(named) + asking >= self.experiment.trials:
            self._end(row._trial_id, TrialState.FAIL)
            return None
        overrides = search(row)
        self.experiment.config(overrides)
        trial = self.experiment.trial(label_of(overrides), overrides, self.experiment.seeds[0], row.number)
        with reaching(self._where):
            self._store.set_trial_user_attr(row._trial_id, "trial", _planned(trial))
        return Claim(self, row._trial_id, dataclasses.replace(trial, state="running", attempts=1))

    def _rows(self) -> dict[str, list[FrozenTrial]]:
        """Return trial → its rows, in the order in which they were made. Rows that search() never named have none."""
        with reaching(self._where):
            rows = self._store.get_all_trials(self._id, deepcopy=False)
        named: defaultdict[str, list[FrozenTrial]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.number):
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
        with reaching(self._where):
            self._store.create_new_trial(self._id, row)

    def _take(self, row: FrozenTrial) -> bool:
        with reaching(self._where), contextlib.suppress(UpdateFinishedTrialError):
            if self._store.set_trial_state_values(row._trial_id, TrialState.RUNNING):
                self._store.set_trial_user_attr(row._trial_id, "owner", owner())
                return True
        return False

    def _take_back(self) -> None:
        """Fail the rows of owners that are gone or have been silent for too long."""
        with reaching(self._where):
            rows = self._store.get_all_trials(self._id, deepcopy=False, states=(TrialState.RUNNING,))
        for row in rows:
            by = row.user_attrs.get("owner")
            silent = self._silence.seconds(row._trial_id, row.user_attrs.get("beat"))
            if silent > self.lease or (by and is_gone(by)):
                self._end(row._trial_id, TrialState.FAIL)

    def _end(self, row: int, state: TrialState, value: float | None = None) -> bool:
        """End a row; return whether it was still running."""
        with reaching(self._where), contextlib.suppress(UpdateFinishedTrialError):
            self._store.set_trial_state_values(row, state, None if value is None else [value])
            return True
        return False


class Claim:
    """A trial that is ours for as long as we say so."""

    def __init__(self, queue: Queue, row: int, trial: Trial, crashes: int = 0) -> None:
        """Own a row that has just been taken; `crashes` is how often the trial's process ended badly before."""
        self.trial, self.crashes = trial, crashes
        self._queue, self._row, self._beats = queue, row, 0
        self._pruning = optuna.trial.Trial(queue.study, row)
        self._reported: set[int] = set()

    def renew(self, seconds: float) -> bool:
        """Say that we are there, and for how long; return whether the trial is still ours."""
        self._beats += 1
        return self._set(beat=self._beats, seconds=seconds)

    def hopeless(self, curve: Mapping[int, float]) -> bool:
        """Tell the pruner the metric at updates so far; return whether it would rather see the trial end."""
        with reaching(self._queue._where):
            for step in sorted(set(curve) - self._reported):
                self._pruning.report(curve[step], step)
                self._reported.add(step)
            return bool(curve) and self._pruning.should_prune()

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
        told = {"crash": crash} if crash else {}
        return self._set(seconds=seconds, **told) and self._end(TrialState.FAIL)

    def _end(self, state: TrialState, value: float | None = None) -> bool:
        return self._queue._end(self._row, state, value)

    def _set(self, **values: Any) -> bool:
        with reaching(self._queue._where), contextlib.suppress(UpdateFinishedTrialError):
            for key, value in values.items():
                self._queue._store.set_trial_user_attr(self._row, key, value)
            return True
        return False


def _live(rows: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the row that speaks for a trial: the first that is not lost, and not tried again."""
    after = max((row.user_attrs.get("after", -1) for row in rows), default=-1)
    for row in rows:
        if row.number > after and (row.state != TrialState.FAIL or "error" in row.user_attrs):
            return row
    return None


def _planned(trial: Trial) -> dict[str, Any]:
    return {"name": trial.name, "arm": trial.arm, "overrides": trial.overrides, "seed": trial.seed}


def _trial(row: FrozenTrial) -> Trial:
    return Trial(**row.user_attrs["trial"])


def _as_trial(rows: list[FrozenTrial]) -> Trial:
    """Return a trial as its rows tell it."""
    trial, live = _trial(rows[0]), _live(rows)
    trial = dataclasses.replace(
        trial,
        seconds=sum(row.user_attrs.get("seconds", 0.0) for row in rows),
        attempts=sum("owner" in row.user_attrs for row in rows),
    )
    if live is None:
        return trial
    value = live.value if live.state == TrialState.COMPLETE else None
    if live.state == TrialState.PRUNED and live.intermediate_values:
        value = live.intermediate_values[max(live.intermediate_values)]
    return dataclasses.replace(
        trial,
        state=STATES[live.state],
        value=value,
        metrics=live.user_attrs.get("metrics", {}),
        error=live.user_attrs.get("error", ""),
    )
