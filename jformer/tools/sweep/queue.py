"""Which trials exist, which worker runs each, and their results: rows of an Optuna study that many workers share.

A worker claims a waiting row by Optuna's atomic `Study.ask`, so a row has one owner. An owner that dies or falls silent
loses the row: it is failed, and a new row is added for the same trial, which resumes in the same directory. Two workers
may both add one; the first row of a trial that was not lost counts, and the others are never run. So each trial has
exactly one result, whichever worker is killed, and whenever. docs/decisions/0023 and 0044 give the reasons.
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path as LocalPath
from typing import Any, TypeVar

import optuna
from etils.epath import Path
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from jformer.errors import UserError
from jformer.tools.sweep.experiment import JOURNAL, Experiment, Trial, label_of, plain_values
from jformer.tools.sweep.store import UNREACHABLE, StorageError, open_study, reaching

STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
OPEN = ("waiting", "running")
PAUSE = 0.5  # seconds between attempts to reach a storage
PROC = LocalPath("/proc")  # Linux's
T = TypeVar("T")


class TrialQueue:
    """The trials of an experiment."""

    def __init__(self, experiment: Experiment, workdir: Path, storage: str = "", name: str = "", lease: float = 60.0):
        """Open the study, and create it if it does not exist.

        Args:
            experiment: whose trials these are.
            workdir: of the sweep; without `storage`, a file there holds the trials.
            storage: a URL of Optuna's, such as that of a database.
            name: of the study; "" = that of the experiment's file.
            lease: seconds that the owner of a trial may be silent before another worker takes over.
        """
        self.experiment, self.lease = experiment, lease
        self.study = open_study(experiment, workdir, storage, name or experiment.path.stem)
        self._planned = experiment.planned()
        self._where = storage or str(workdir / JOURNAL)
        self._heard: dict[int, tuple[object, float]] = {}  # row → its last beat, and when we first saw that

    def trials(self) -> list[Trial]:
        """Return all trials as they are now: planned ones in their order, those of a search in that of their rows.

        An arm's label is the current one, which may have changed since a row was added: it depends on the other arms.
        Its overrides are those of the file, where rows have lists for tuples.
        """
        found = {name: _as_trial(rows) for name, rows in self._rows().items()}
        if self.experiment.search:
            return [*found.values()]
        return [
            dataclasses.replace(found.get(trial.name, trial), arm=trial.arm, overrides=trial.overrides)
            for trial in self._planned
        ]

    def plan(self, retry_failed: bool = False) -> None:
        """Make sure that every trial to be run has a row; with `retry_failed`, trials that failed get a new one."""
        rows = self._rows()
        for name, trial in self._wanted(rows).items():
            members = rows.get(name, [])
            live = _live(members)
            if live is None or (retry_failed and live.state == TrialState.FAIL):
                self._add(trial, members, after=-1 if live is None else live.number)

    def claim(self) -> "Claim | None":
        """Return a trial that this worker now owns, or None if none is available at the moment."""
        self._take_back()
        self.plan()
        while any(row.state == TrialState.WAITING for row in self._all()):
            if claim := self._ask():
                return claim
        return self._ask() if self.experiment.search and self._suggested_before() < self.experiment.trials else None

    def left(self) -> int:
        """Return how many trials have not ended."""
        trials = self.trials()
        unknown = max(self.experiment.trials - len(trials), 0) if self.experiment.search else 0
        return unknown + sum(trial.state in OPEN for trial in trials)

    def _wanted(self, rows: Mapping[str, list[FrozenTrial]]) -> dict[str, Trial]:
        """Return the trials to be run: the planned ones, or those that a search has suggested so far."""
        if self.experiment.search:
            return {name: _trial(members[0]) for name, members in rows.items()}
        return {trial.name: trial for trial in self._planned}

    def _ask(self) -> "Claim | None":
        """Claim a row from Optuna: the first that waits, or a new one; None if that row is not to be run."""
        row = self._reach(self.study.ask)
        with contextlib.suppress(UpdateFinishedTrialError):  # it was taken back: this worker was silent
            self._reach(partial(row.set_user_attr, "owner", {**this_process(), "lease": self.lease}))
            if "trial" not in row.user_attrs:
                return self._suggest(row)
            name, rows = row.user_attrs["trial"]["name"], self._rows()
            live = _live(rows[name])
            if name in self._wanted(rows) and live and live.number == row.number:
                return Claim(self, row, _as_trial(rows[name]), _crashes(rows[name]))
            self.end(row.number, TrialState.FAIL)  # another row of the trial counts, or its arm is gone
        return None

    def _suggest(self, row: optuna.Trial) -> "Claim | None":
        """Let search() fill in a new row, unless there are enough; if workers ask at once, the first rows count.

        A suggestion that cannot work is a failed trial. If it is the first one, so that perhaps none works, or if
        search() itself fails, this raises UserError.
        """
        experiment = self.experiment
        if experiment.search is None or self._suggested_before(row.number) >= experiment.trials:
            self.end(row.number, TrialState.FAIL)
            return None
        where = f"{experiment.path}: search() of trial {row.number}"
        try:
            overrides = plain_values(experiment.search(row))
            trial = experiment.trial(label_of(overrides), overrides, experiment.seeds[0], row.number)
        except (UserError, UpdateFinishedTrialError, *UNREACHABLE):
            raise
        except Exception as error:
            raise UserError(f"{where}: {type(error).__name__}: {error}") from error
        claim = Claim(self, row, dataclasses.replace(trial, state="running", attempts=1))
        try:
            experiment.check(overrides)
        except (KeyError, TypeError, ValueError) as error:
            if not self._suggested_before(row.number):
                raise UserError(f"{where}: {error}") from error
            self._reach(partial(row.set_user_attr, "trial", _planned(trial)))
            claim.fail(str(error), 0.0)
            return None
        self._reach(partial(row.set_user_attr, "trial", _planned(trial)))
        return claim

    def _suggested_before(self, number: float = float("inf")) -> int:
        """Return how many trials a search has suggested, or is suggesting now, in rows before a number."""
        rows = [row for row in self._all() if row.number < number]
        pending = sum("trial" not in row.user_attrs and row.state == TrialState.RUNNING for row in rows)
        return pending + len({row.user_attrs["trial"]["name"] for row in rows if "trial" in row.user_attrs})

    def _all(self) -> list[FrozenTrial]:
        return self._reach(lambda: self.study.get_trials(deepcopy=False))

    def _rows(self) -> dict[str, list[FrozenTrial]]:
        """Return trial → its rows, oldest first. A row that search() never filled in belongs to no trial."""
        named: defaultdict[str, list[FrozenTrial]] = defaultdict(list)
        for row in self._all():
            if "trial" in row.user_attrs:
                named[row.user_attrs["trial"]["name"]].append(row)
        return named

    def _add(self, trial: Trial, rows: list[FrozenTrial], after: int) -> None:
        """Add a row for a trial, with the parameters that a search suggested for it."""
        row = optuna.create_trial(
            state=TrialState.WAITING,
            params=rows[0].params if rows else None,
            distributions=rows[0].distributions if rows else None,
            user_attrs={"trial": _planned(trial), "after": after},
        )
        self._reach(lambda: self.study.add_trial(row))

    def _take_back(self) -> None:
        """Fail the rows of owners that are dead or have been silent for too long."""
        now = time.monotonic()  # before reading: if suspended in between, this worker must not find others silent
        for row in self._all():
            if row.state != TrialState.RUNNING:
                continue
            owner, beat = row.user_attrs.get("owner", {}), row.user_attrs.get("beat")
            if row.number not in self._heard or self._heard[row.number][0] != beat:
                self._heard[row.number] = (beat, now)
            silent = now - self._heard[row.number][1]
            if silent > owner.get("lease", self.lease) or (owner and is_dead(owner)):
                self.end(row.number, TrialState.FAIL)

    def end(self, number: int, state: TrialState, value: float | None = None) -> None:
        """End a row, unless it has ended already."""
        with contextlib.suppress(UpdateFinishedTrialError):
            self._reach(lambda: self.study.tell(number, value, state, skip_if_finished=True))

    def _reach(self, act: Callable[[], T]) -> T:
        """Return the result of an access to the storage, retried for half a lease while the storage is unreachable.

        An access may succeed although the storage reports an error, and then runs twice: a second row of a trial does
        not count, and a row claimed that way falls silent.
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
    """A trial that this worker owns as long as it renews the claim."""

    def __init__(self, queue: TrialQueue, row: optuna.Trial, trial: Trial, crashes: int = 0) -> None:
        """Own a row that was just claimed; `crashes` counts how often the trial's process has crashed before."""
        self.trial, self.crashes = trial, crashes
        self._queue, self._row, self._beats = queue, row, 0
        self._reported: set[int] = set()  # steps

    def renew(self, seconds: float) -> bool:
        """Send a heartbeat with the trial's seconds so far; return whether the trial is still ours."""
        self._beats += 1
        return self._set(beat=self._beats, seconds=seconds)

    def should_prune(self, curve: Mapping[int, float]) -> bool:
        """Report the metric at each update so far; return whether the pruner would end the trial."""
        with contextlib.suppress(UpdateFinishedTrialError):
            for step in sorted(set(curve) - self._reported):
                self._queue._reach(partial(self._row.report, curve[step], step))
                self._reported.add(step)
            return bool(curve) and self._queue._reach(self._row.should_prune)
        return False

    def complete(self, value: float, metrics: Mapping[str, float], seconds: float) -> bool:
        """Record the result; return whether it counts, which it does once."""
        return self._finish(TrialState.COMPLETE, value, metrics=dict(metrics), seconds=seconds)

    def prune(self, metrics: Mapping[str, float], seconds: float) -> bool:
        """End the trial as pruned."""
        return self._finish(TrialState.PRUNED, metrics=dict(metrics), seconds=seconds)

    def fail(self, error: str, seconds: float) -> bool:
        """End the trial as failed, with the reason."""
        return self._finish(TrialState.FAIL, error=error, seconds=seconds)

    def give_back(self, seconds: float, crash: str = "") -> bool:
        """Let another worker resume the trial; its process may have crashed."""
        attributes: dict[str, Any] = {"seconds": seconds, "crash": crash} if crash else {"seconds": seconds}
        return self._finish(TrialState.FAIL, **attributes)

    def _finish(self, state: TrialState, value: float | None = None, /, **attributes: Any) -> bool:
        """End the row with some attributes; return whether it was still ours."""
        owned = self._set(**attributes)
        if owned:
            self._queue.end(self._row.number, state, value)
        return owned

    def _set(self, **attributes: Any) -> bool:
        """Store attributes of the row; return whether it was still running, and so ours."""
        with contextlib.suppress(UpdateFinishedTrialError):
            for key, value in attributes.items():
                self._queue._reach(partial(self._row.set_user_attr, key, value))
            return True
        return False


# --- rows of a trial ---


def _live(rows: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the row that counts: the first since the last retry that was not lost or given back."""
    for row in _since_retry(rows):
        if row.state != TrialState.FAIL or "error" in row.user_attrs:
            return row
    return None


def _since_retry(rows: list[FrozenTrial]) -> list[FrozenTrial]:
    after = max((row.user_attrs.get("after", -1) for row in rows), default=-1)
    return [row for row in rows if row.number > after]


def _crashes(rows: list[FrozenTrial]) -> int:
    return sum("crash" in row.user_attrs for row in _since_retry(rows))


def _planned(trial: Trial) -> dict[str, Any]:
    return {"name": trial.name, "arm": trial.arm, "overrides": trial.overrides, "seed": trial.seed}


def _trial(row: FrozenTrial) -> Trial:
    return Trial(**row.user_attrs["trial"])


def _as_trial(rows: list[FrozenTrial]) -> Trial:
    """Return a trial as its rows describe it."""
    live = _live(rows)
    trial = dataclasses.replace(
        _trial(rows[0]),
        seconds=sum(row.user_attrs.get("seconds", 0.0) for row in rows),
        attempts=sum("owner" in row.user_attrs for row in rows),
    )
    if live is None:
        return trial
    return dataclasses.replace(
        trial,
        state=STATES[live.state],
        value=live.value if live.state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
        metrics=live.user_attrs.get("metrics", {}),
        error=live.user_attrs.get("error", ""),
    )


# --- owners ---


def this_process() -> dict[str, Any]:
    """Return what identifies this process on its machine and among machines."""
    boot = PROC / "sys/kernel/random/boot_id"
    return {
        "host": socket.gethostname(),
        # This boot and this namespace of process numbers; "" where those are unknown.
        "machine": f"{boot.read_text().strip()} {(PROC / 'self/ns/pid').readlink()}" if boot.exists() else "",
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_dead(owner: Mapping[str, Any]) -> bool:
    """Return whether an owner is a process of this machine that has ended; of other machines nothing is known."""
    machine = this_process()["machine"]
    return bool(machine) and owner["machine"] == machine and _started(owner["pid"]) != owner["started"]


def _started(pid: int) -> str:
    """Return when a process began, in the kernel's ticks, or "" if it has ended: process numbers are reused."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
