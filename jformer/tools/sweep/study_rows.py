"""The rows of a study: what they say of a trial."""

import dataclasses
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from jformer.tools.sweep.experiment import Trial

STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def _live(rows: list[FrozenTrial]) -> FrozenTrial | None:
    """Return the row that speaks for a trial: the first that is not lost, and not tried again."""
    for row in _newest(rows):
        if row.state != TrialState.FAIL or "error" in row.user_attrs:
            return row
    return None


def _newest(rows: list[FrozenTrial]) -> list[FrozenTrial]:
    """Return the rows since the trial was last told to be tried again."""
    after = max((row.user_attrs.get("after", -1) for row in rows), default=-1)
    return [row for row in rows if row.number > after]


def _crashes(rows: list[FrozenTrial]) -> int:
    return sum("crash" in row.user_attrs for row in _newest(rows))


def _losses(rows: list[FrozenTrial]) -> int:
    """Return how often a trial was lost with its worker. It comes after others then: it may be what ends workers."""
    return sum(row.state == TrialState.FAIL and not {"error", "returned"} & row.user_attrs.keys() for row in rows)


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
