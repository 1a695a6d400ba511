"""A slice of the campaign's resumes: one variant, from the beginning, from within an epoch and from where two meet."""

import random

import pytest

from tests.faults.resumes import EPOCHS, STEPS, Resumes, count_examples
from tests.faults.verdicts import Verdict


@pytest.fixture(scope="module")
def resumes(tmp_path_factory):
    return Resumes(tmp_path_factory.mktemp("resumes"), "packed", "bfloat16", every=10)


@pytest.mark.slow  # tests/training/test_loop.py kills one run by default
@pytest.mark.parametrize("step", [0, 10, STEPS // EPOCHS, 50])
def test_a_run_goes_on_to_the_same_bits_rows_and_examples(resumes, step):
    fault, verdict = resumes.resume(step, random.Random(step))
    assert verdict == Verdict("unharmed", ""), fault
    assert ": 0 examples repeated, 0 missed of 3 x 144" in fault


def test_examples_that_come_twice_or_never_are_counted():
    updates = [(step, [step % 20]) for step in range(STEPS)]
    assert count_examples(updates, 20) == (0, 0)
    assert count_examples([*updates, updates[5]], 20) == (1, 0)
    assert count_examples(updates[:30] + updates[31:], 20) == (0, 1)
    assert count_examples([*updates[:30], (30, [11]), *updates[31:]], 20) == (1, 1)
