import doctest
import hashlib
import time

import numpy as np
import pytest

from jformer.data import packing, plan
from jformer.data.packing import packed_shape
from jformer.data.pipeline import PackedParts
from jformer.data.plan import Shape
from jformer.errors import UserError
from tests.data.test_plan import captions


def sentences(number, seed=0):
    """Draw lengths like those of news in subwords: 27 tokens, give or take 18, and sides that often differ."""
    rng = np.random.default_rng(seed)
    source = np.maximum(np.rint(rng.lognormal(3.11, 0.61, number)), 2).astype(np.int64)
    target = np.maximum(np.rint(source * rng.lognormal(0.02, 0.2, number)), 2).astype(np.int64)
    usable = (source <= 128) & (target <= 128)
    return source[usable], target[usable]


def fill(source, target, length):
    """Return the share of packed rows that holds tokens."""
    shape = packed_shape(source, target, length, 8192, 8)
    _, sizes = pack(source, target, shape, 0)
    return (source.sum() + target.sum()) / (len(sizes) * sum(shape[1:]))


def pack(*arguments, turn=0):
    packed = packing.pack(*arguments)
    return PackedParts([packed], [1.0]).examples(np.arange(packed.rows.sum()), turn)


def as_rows(examples, sizes):
    return [row.tolist() for row in np.split(examples, np.cumsum(sizes)[:-1])]


@pytest.mark.parametrize("draw", [captions, sentences])
def test_every_pair_is_packed_once_into_a_row_that_holds_both_its_sides(draw):
    for seed in range(5):
        source, target = draw(500, seed)
        shape = packed_shape(source, target, 128, 1024, 4)
        examples, sizes = pack(source, target, shape, seed)
        assert sorted(examples) == list(range(len(source)))
        assert sizes.sum() == len(source)
        for row in as_rows(examples, sizes):
            assert source[row].sum() <= shape.source_length
            assert target[row].sum() <= shape.target_length


@pytest.mark.parametrize(
    ("draw", "length", "least"), [(captions, 64, 0.98), (captions, 256, 0.98), (sentences, 256, 0.97)]
)
def test_packed_rows_are_nearly_full(draw, length, least):
    assert fill(*draw(12_000), length) > least


def test_rows_of_one_side_are_nearly_full():
    lengths = captions(2_000)[1]
    assert fill(np.zeros_like(lengths), lengths, 64) > 0.98


def test_equal_examples_fill_rows_without_a_gap():
    lengths = np.full(3_300, 4)
    examples, sizes = pack(lengths, lengths, Shape(8, 128, 128), 0)
    assert sorted(examples) == list(range(3_300))
    assert sizes.tolist() == [32] * 103 + [4]


def test_time_grows_with_the_different_lengths_and_not_with_the_corpus():
    source, target = captions(20_000)
    shape = packed_shape(source, target, 128, 8192, 8)
    seconds = []
    for times in (1, 20):
        began = time.process_time()
        pack(np.tile(source, times), np.tile(target, times), shape, 0)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 8 * seconds[0] + 0.5


def test_the_worked_examples_hold():
    assert doctest.testmod(packing).failed == 0


def test_packing_stays_what_it_was(monkeypatch):
    """A run that is resumed with a newer jformer finds its rows again. The digest is of the rows of 2026-11-24."""
    monkeypatch.setattr(plan, "CHUNK", 99)
    source, target = np.random.default_rng(0).integers(2, 60, (2, 1_500))
    packed = np.concatenate(pack(source, target, Shape(1, 128, 128), 0))
    assert hashlib.sha256(packed.astype("<i8").tobytes()).hexdigest()[:16] == "7885635c84d34d8d"


def test_an_example_without_a_token_is_refused():
    with pytest.raises(ValueError, match="2 examples have no token"):
        pack(np.array([0, 3, 0]), np.array([0, 3, 0]), Shape(1, 8, 8), 0)


def test_an_example_does_not_keep_itself_company():
    lengths = np.array([24, 20])  # beside 24 there is room for 20 twice
    examples, sizes = pack(lengths, lengths, Shape(1, 64, 64), 0)
    assert (sorted(examples), sizes.tolist()) == ([0, 1], [2])


@pytest.mark.parametrize("sides", [captions(200), (np.full(200, 4), np.full(200, 4))], ids=["captions", "equal"])
def test_packing_is_shuffled_by_the_seed(sides):
    shape = packed_shape(*sides, 64, 1024, 4)
    packed = [as_rows(*pack(*sides, shape, seed)) for seed in (0, 0, 1)]
    assert packed[0] == packed[1] != packed[2]


def test_a_packed_row_gives_the_smaller_side_its_share_and_at_least_its_longest_sentence():
    long, short = np.full(100, 20), np.full(100, 10)
    assert packed_shape(long, short, 100, 1000, 1) == (10, 100, 50)
    assert packed_shape(short, long, 100, 1000, 1) == (10, 50, 100)
    short[0] = 70
    assert packed_shape(long, short, 100, 1000, 1) == (10, 100, 70)


def test_the_smaller_side_of_a_packed_row_divides_by_a_multiple():
    long, short = np.full(100, 20), np.full(100, 9)
    assert packed_shape(long, short, 96, 1000, 1) == (10, 96, 44)
    assert packed_shape(long, short, 96, 1000, 1, 16) == (10, 96, 48)
    assert packed_shape(long, 0 * short, 96, 1000, 1, 16) == (10, 96, 0)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_side_that_holds_nothing_takes_no_room(empty):
    sides = [captions(300)[0], np.zeros(300, np.int64)]
    source, target = sides[::-1] if empty == 0 else sides
    shape = packed_shape(source, target, 64, 1024, 4)
    assert (shape.rows, shape[1 + empty], shape[2 - empty]) == (16, 0, 64)
    examples, sizes = pack(source, target, shape, 0)
    assert sorted(examples) == list(range(300))
    assert max((source + target)[row].sum() for row in as_rows(examples, sizes)) <= 64


def test_a_row_that_no_batch_holds_is_refused_with_the_number_needed():
    source, target = captions(300)
    with pytest.raises(UserError, match=r"^data\.tokens_per_update=100 .* make it 512 or lower data\.packed_length$"):
        packed_shape(source, target, 64, 100, 8)


def test_a_packed_row_shorter_than_a_sentence_is_refused():
    source, target = np.array([5, 30]), np.array([4, 20])
    with pytest.raises(UserError, match=r"^data\.packed_length=29 .*30 tokens"):
        packed_shape(source, target, 29, 1000, 1)
    assert packed_shape(source, target, 30, 1000, 1).source_length == 30
