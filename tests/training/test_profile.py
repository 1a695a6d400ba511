"""A trace holds the updates that were asked for, and is written however the run ends."""

import gzip
import json

import jax
import pytest

from jformer.config.options import TrainConfig
from jformer.training.profile import Profile


def trace_events(folder):
    """Return the events of the one trace there is, as a viewer reads them."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def test_a_run_that_begins_or_ends_among_them_traces_those_it_has(tmp_path):
    step, said, states = jax.jit(lambda x: x + 1), [], [jax.numpy.zeros(())]
    profile = Profile(tmp_path, range(3, 9), said.append)
    for number in (4, 5):
        with profile.update(number, lambda: states[-1]):
            states.append(step(states[-1]))
    profile.close()
    assert said == [f"trace of updates 4 to 5: {tmp_path}"]
    assert [event.get("name") for event in trace_events(tmp_path)].count("update") == 2


def test_no_trace_is_begun_for_other_updates(tmp_path):
    with Profile(tmp_path, TrainConfig().profiled(), print).update(1, lambda: pytest.fail("waits")):
        pass
    assert not list(tmp_path.iterdir())
