import signal

import pytest

from experiments.faults.process_faults import is_an_end


@pytest.mark.parametrize(("kind", "code"), [("dead", 75), ("frozen", 75), ("stuck", 76), ("cut", -signal.SIGABRT)])
def test_a_fault_ends_the_others_with_its_exit_code(kind, code):
    assert is_an_end(kind, code)
    assert not is_an_end(kind, 1)
