"""Time ends a run, and saves it, counted over all its restarts."""

import dataclasses
from types import SimpleNamespace

import pytest

from jformer.config.options import TrainConfig
from jformer.training import clock
from jformer.training.clock import Clock, has_ended
from jformer.training.state import Progress


@pytest.fixture
def now(monkeypatch):
    """Return a list whose only entry is the time."""
    time = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def test_seconds_of_earlier_starts_count(now):
    watch = Clock(dataclasses.replace(TrainConfig(), max_minutes=2), 50.0)
    now[0] += 69.0
    assert watch.seconds == 119.0
    assert not watch.is_over()
    assert not watch.ends_run()
    now[0] += 1.0
    assert watch.is_over()
    assert watch.ends_run()


def test_a_save_is_due_some_minutes_after_the_last(now):
    watch = Clock(dataclasses.replace(TrainConfig(), checkpoint_minutes=1), 0.0)
    now[0] += 59.0
    assert not watch.is_save_due()
    now[0] += 1.0
    assert watch.is_save_due()
    assert watch.note_save() == 60.0
    assert not watch.is_save_due()


def test_without_limits_time_decides_nothing(now):
    watch = Clock(TrainConfig(), 0.0)
    now[0] += 1e9
    assert [watch.is_over(), watch.ends_run(), watch.is_save_due()] == [False] * 3


def test_a_limit_that_passes_in_a_validation_or_save_ends_the_run_with_the_next_update(now):
    train = dataclasses.replace(TrainConfig(), max_minutes=1)
    watch = Clock(train, 0.0)
    now[0] += 59.0
    assert not watch.is_over()
    now[0] += 2.0
    assert not has_ended(train, Progress(seconds=watch.note_save()))  # the last update is to be validated
    assert watch.ends_run()
    assert has_ended(train, Progress(seconds=watch.note_save()))


def test_where_one_process_is_over_all_of_them_are(now, monkeypatch):
    monkeypatch.setattr(clock.processes, "agree", lambda value, join: join([value, True]))  # another one is
    watch = Clock(dataclasses.replace(TrainConfig(), max_minutes=1), 0.0)
    assert not watch.is_over()
    assert watch.ends_run()
    assert watch.seconds == 60.0
