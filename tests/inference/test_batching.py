"""How many batches are computed at a time depends on what computes them."""

from jformer.inference.batching import concurrent_batches
from jformer.parallel.backend import compiling_for
from jformer.parallel.mesh import make_mesh


def test_two_batches_at_once_keep_a_cpu_busy_and_nothing_else():
    assert concurrent_batches(None) == concurrent_batches(make_mesh(1)) == 2
    assert concurrent_batches(make_mesh(2)) == 1
    with compiling_for("gpu"):
        assert concurrent_batches(None) == 1
