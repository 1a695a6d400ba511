"""What a run says, and when: rows without what was skipped or compiled, and a sign of life in every silence."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from etils.epath import Path

from jformer.config import resolve
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.models.flops import Work
from jformer.tasks.sums import Sum
from jformer.training import heartbeat
from jformer.training.heartbeat import Heartbeat
from jformer.training.log import AHEAD, Cost, TrainingLog, Works
from jformer.training.rows import Sample
from jformer.training.state import Progress
from jformer.training.step import Metrics
from tests import small_run, terminal
from tests.watching import wait_until

WORK = Work(*([8] * len(Work._fields)))


def collect(log, step, skipped_in_row=0, loss=2.0, state="the state"):
    zero = np.int32(0)
    sums = {"loss": Sum(np.float32(loss), np.float32(1)), "nll": Sum(np.float32(loss), np.float32(1))}
    metrics = Metrics(sums, np.float32(1), zero + skipped_in_row, zero + skipped_in_row)
    log.collect(step, state, metrics, Works(WORK, WORK))


def explain(state, update):
    assert state == "the state"
    return f"what is not finite in {update}"


def opened(folder, config=None):
    schedule, cost = (lambda step: 0.1 * (step + 1) ** -0.5), Cost(lambda work: 1, 1.0)
    return TrainingLog(folder, config or resolve({}), Progress(), schedule, cost, explain)


def test_a_log_that_is_closed_holds_no_state(tmp_path):
    state = Progress()  # or anything that can be referred to weakly
    there = weakref.ref(state)
    with opened(tmp_path) as log:
        collect(log, 1, state=state)
        log.flush(1)
    del state
    assert there() is None
    assert log.rows == 1


def test_time_of_compiling_does_not_count_as_training(tmp_path):
    with opened(tmp_path) as log:
        for step, seconds in ((1, 0.5), (2, 0.0)):
            with log.timing(step, "a shape"):
                time.sleep(seconds)
            collect(log, step)
        log.flush(2)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["seconds_per_update"] < 0.2


def test_time_before_the_first_batch_does_not_count_as_training(tmp_path):
    with opened(tmp_path) as log:
        log._since -= 1_000  # since the log was opened
        for step in log.waiting(iter([1])):
            collect(log, step)
            log.flush(step)
            break
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["seconds_per_update"] < 500


def test_time_of_compiling_does_not_count_in_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with opened(tmp_path) as log:
        with log.timing(1, "a shape"):
            time.sleep(0.5)
        assert log._bar.format_dict["elapsed"] < 0.2


def test_a_terminal_shows_the_loss_as_a_curve_too_and_nobody_else_does(tmp_path, monkeypatch, capsys):
    for seen in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda seen=seen: seen)
        with opened(tmp_path / str(seen)) as log:
            for step, loss in enumerate((8.0, 4.0, 2.0, 1.0), start=1):
                collect(log, step, loss=loss)
                log.flush(step)
        assert ("loss █▄▂▁ 1.000, " in capsys.readouterr().err) == seen


def test_the_first_time_of_every_shape_is_compiling(tmp_path):
    with opened(tmp_path) as log:
        for step, shapes in enumerate("aab", start=1):
            with log.timing(step, shapes):
                phase = log.heartbeat._phase
            shape = {1: 1, 3: 2}.get(step)
            assert phase == (f"compiling update {step}, shape {shape}" if shape else "updating")


@pytest.mark.parametrize("skipped", [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
def test_as_many_skipped_updates_as_are_allowed_end_the_run_wherever_they_lie(tmp_path, skipped):
    config = resolve({})
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_skipped=1))
    first = skipped.index(1) + 1
    said = rf"update {first}: 1 updates in a row .* \(train\.max_skipped=1\): what is not finite in {first}; use a new "
    with opened(tmp_path, config) as log, pytest.raises(UserError, match=said):
        for step, in_row in enumerate(skipped, start=1):
            ended = step
            collect(log, step, in_row)
        log.flush(4)
    assert ended == min(first + AHEAD, 4)
    (row,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["step"] == ended


def test_what_is_not_finite_is_looked_for_at_the_first_update_that_is_skipped_and_at_the_row_that_ends_the_run(
    tmp_path, capfd
):
    config = resolve({})
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_skipped=3))
    with opened(tmp_path, config) as log, pytest.raises(UserError, match=r"update 12: .*: what is not finite in 8; "):
        for step, in_row in enumerate([0, 1, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5], start=1):
            collect(log, step, in_row)
    assert re.findall(r"what is not finite in (\d+)", capfd.readouterr().err) == ["2", "8"]


def test_a_row_of_skipped_updates_alone_has_the_first_rate(tmp_path):
    with opened(tmp_path) as log:
        collect(log, 1, skipped_in_row=1)
        log.flush(1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["learning_rate"] == 0.1


def test_skipped_updates_that_are_allowed_write_no_row_of_their_own(tmp_path):
    with opened(tmp_path) as log:
        for step, in_row in enumerate([*range(1, 10), 0, 0, 0], start=1):  # nine in a row: one less than end a run
            collect(log, step, in_row)
        log.flush(12)
    assert [json.loads(row)["step"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [12]


def test_silence_is_broken_and_the_file_follows_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "FILE", 0.05)
    monkeypatch.setattr(heartbeat, "WRITES", 0.01)
    said = []
    beat = Heartbeat(tmp_path / "heartbeat.json", 7, 90, said.append, terminal=False)
    beat.start()
    beat.enter("compiling update 8")
    deadline = time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads((tmp_path / "heartbeat.json").read_text())["phase"] == "compiling update 8"
    beat.step, beat.loss = 8, 1.5
    beat.stop()
    assert said[0].startswith("compiling update 8: 0 s so far")
    content = json.loads((tmp_path / "heartbeat.json").read_text())
    assert {**content, "time": 0} == {"step": 8, "time": 0, "loss": 1.5, "phase": "ended"}


def test_on_a_terminal_the_clock_moves_during_an_update_and_a_phase_tells_its_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "TERMINAL", 0.05)
    monkeypatch.setattr(heartbeat, "WRITES", 0.01)
    said = []
    beat = Heartbeat(tmp_path / "heartbeat.json", 7, 90, said.append, terminal=True)
    beat.enter(heartbeat.UPDATING)
    said.clear()
    beat.start()
    wait_until(lambda: said.count("") > 3)  # each draws the bar anew
    beat.enter("validating update 8")
    wait_until(lambda: "validating update 8, 0 s" in said)
    beat.stop()


def test_time_beside_the_updates_counts_in_the_time_left(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with opened(tmp_path, resolve({"train": {"num_steps": 100}, "optim": {"warmup": 10}})) as log:
        for step in (10, 20):
            collect(log, step)
            clock[0] += 5.0
            log.flush(step)
            clock[0] += 20.0  # of validating and saving
            log.restart_clock()
    first, second = re.findall(r"([\d:]+) left", capsys.readouterr().err)
    assert (first, second) == ("7:30", "8:00")  # 90 updates of 5 s; 80 of 5 s and of one second, 20 s in 20 updates
    assert log.rows == 2


def test_samples_after_the_update_gone_on_from_are_dropped(tmp_path):
    for start, answer in ((0, "a"), (0, "b")):  # the second one begins anew, as nothing was saved
        with TrainingLog(
            tmp_path, resolve({}), Progress(step=start), lambda step: 0.1, Cost(lambda work: 1, 1.0), explain
        ) as log:
            log.show_samples(10, [Sample("source", "target", answer)])
    rows = records.samples(Path(tmp_path))
    assert rows == [{"step": 10, "sample": 1, "source": "source", "reference": "target", "answer": "b"}]


def test_the_config_is_told_as_far_as_it_is_no_default(tmp_path, capsys):
    with opened(tmp_path, resolve({"train": {"num_steps": 7, "patience": 3}, "seed": 2})) as log:
        log.show_start()
    assert capsys.readouterr().err == "seed=2\ntrain: num_steps=7, patience=3\n"


@pytest.mark.slow
def test_a_terminal_sees_a_bar_and_no_colours_and_a_pipe_plain_lines(tmp_path):
    said = {}
    for kind in ("terminal", "pipe"):
        reader, writer = terminal.opened() if kind == "terminal" else os.pipe()
        options = [f"--workdir={tmp_path / kind}", "--config.train.num_steps=20", "--config.data.test=()"]
        command = [sys.executable, "-m", "jformer.main", f"--config={small_run.__file__}", *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer) as run:
            os.close(writer)
            said[kind] = terminal.read_all(reader)
        assert run.returncode == 0
    assert "| 20/20 [" in said["terminal"]
    assert re.search("loss [▁▂▃▄▅▆▇█]+ ", said["terminal"])
    assert terminal.sequences(said["terminal"]) <= terminal.MOVES
    assert not re.search("[\x1b\r▁▂▃▄▅▆▇█]", said["pipe"])
