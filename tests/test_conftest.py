"""What the whole session is told of single files is still true of them, and quick cases are cases."""

from pathlib import Path

import pytest

from experiments.checks.accelerator_rows import TESTS
from tests.conftest import ANY_STACK, LONGEST, ON_ACCELERATORS
from tests.slow import slow_but


def test_the_longest_files_are_there():
    assert {path.stem for path in Path(__file__).parent.rglob("test_*.py")} >= set(LONGEST)


def test_what_accelerators_or_one_stack_alone_runs_is_there():
    tests = Path(__file__).parent
    assert all((tests / name).exists() for name in (*ON_ACCELERATORS, *TESTS, *ANY_STACK))
    assert all({name, name.partition("/")[0]} & {*ON_ACCELERATORS} for name in TESTS)


def test_a_quick_case_that_is_none_is_refused():
    quick, slow = slow_but(["a", "b"], "a")
    assert (quick, slow.values, [mark.name for mark in slow.marks]) == ("a", ("b",), ["slow"])
    with pytest.raises(AssertionError, match="not all of them"):
        slow_but(["a", "b"], "c")
