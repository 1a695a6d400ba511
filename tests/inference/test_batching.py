"""How many rows a batch has, how many are computed at a time, and when a first attempt with little room is made."""

import types

from jformer.inference.batching import WHILE, BatchedSearch, batch_rows, concurrent_batches
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh


def test_two_batches_at_once_keep_a_cpu_busy_and_nothing_else():
    assert concurrent_batches(None) == concurrent_batches(make_mesh(1)) == 2
    assert concurrent_batches(make_mesh(2)) == 1
    with compiling_for(Target("gpu")):
        assert concurrent_batches(None) == 1


def test_few_pieces_do_not_wait_for_a_whole_batch():
    counts = (1, 2, 3, 8, 9, 1_000)
    assert [batch_rows(count, 64, None) for count in counts] == [2, 2, 8, 8, 64, 64]
    assert [batch_rows(count, 64, None, hypotheses=4) for count in counts] == [1, 2, 8, 8, 64, 64]
    assert [batch_rows(count, 1, None) for count in counts] == [1] * 6
    assert [batch_rows(count, 64, make_mesh(4)) for count in counts] == [4, 4, 8, 8, 64, 64]


def searched(continues=False):
    return BatchedSearch(lambda: None, types.SimpleNamespace(continues=continues), None)


def test_long_outputs_of_a_few_pieces_end_no_short_attempts():
    search = searched()
    search._learn(short=True, tried=16, unfinished=16)
    assert search.outputs_are_short
    search._learn(short=True, tried=100, unfinished=5)  # 21 of 116
    assert search.outputs_are_short
    assert not searched(continues=True).outputs_are_short


def test_short_attempts_begin_again_after_a_while():
    search = searched()
    search._learn(short=True, tried=1_000, unfinished=300)
    assert not search.outputs_are_short
    search._learn(short=False, tried=WHILE - 1, unfinished=0)
    assert not search.outputs_are_short
    search._learn(short=False, tried=1, unfinished=0)
    assert search.outputs_are_short
