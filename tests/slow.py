"""Mark cases of a parametrized test as slow, where the test stands."""

import pytest


def slow_but(cases, *quick):
    """Return `cases` for pytest.mark.parametrize, all marked slow but the quick ones.

    Raises:
        AssertionError: a quick case is not among them, so that renaming one cannot make the whole test slow.
    """
    cases = list(cases)
    assert all(case in cases for case in quick), f"{quick}: not all of them are among {cases}"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
