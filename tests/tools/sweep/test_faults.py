"""Workers that are killed or stopped, whenever: each trial has one result, and is never done by two at once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.tools.sweep.deaths import LEASE
from tests.tools.sweep.sweeps import ROOT

KILLED = int(signal.SIGKILL)


def die(folder, way):
    command = [sys.executable, "-m", "tests.tools.sweep.deaths", way, str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("way", "writes", "trials"), [("arms", 10, 1), ("search", 17, 2)])
def test_a_worker_killed_before_any_write_leaves_a_sweep_that_another_finishes(tmp_path, way, writes, trials):
    outcomes, said = die(tmp_path, way)
    assert said == ""
    assert [one["codes"] for one in outcomes] == [[KILLED, 0]] * (len(outcomes) - 1) + [[0, 0]]
    assert len(outcomes) > writes
    for one in outcomes:
        assert one["states"] == {"complete": trials}
        assert one["results"] == [1] * trials
        assert one["steps"] == [[1, 2, 3]]
        assert (one["shared"], one["directories"]) == (0, trials)
        assert one["seconds"] < LEASE + 30  # the rest is what the trials take


@pytest.mark.slow
def test_killed_at_random_moments_all_trials_have_one_result(tmp_path):
    one, said = die(tmp_path, "storm")
    assert said == ""
    assert one["deaths"] >= 6
    assert one["victims"] >= 2
    assert one["states"] == {"complete": 12}
    assert one["results"] == [1] * 12
    assert one["values"] == pytest.approx([arm + seed + 0.2 for seed in range(4) for arm in (1, 2, 3)])
    assert one["steps"] == [[1, 2, 3, 4, 5]]
    assert (one["shared"], one["directories"]) == (0, 12)
    assert one["held"] < 5 * LEASE  # the dead of this machine are not waited for


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sleeping worker", "sleeping worker and process"])
def test_a_worker_that_sleeps_longer_than_its_lease_wakes_up_to_a_trial_that_is_anothers(tmp_path, way):
    one, said = die(tmp_path, way)
    assert said.endswith("another worker took over, because this one was silent\n")
    assert one["codes"] == [0, 0]
    assert (one["states"], one["results"]) == ({"complete": 1}, [1])
    assert one["steps"] == [list(range(1, 21))]
    assert (one["shared"], one["directories"]) == (0, 1)
