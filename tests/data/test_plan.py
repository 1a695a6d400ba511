import itertools
from collections import Counter

import numpy as np
import pytest

from jformer.data.plan import Plan, Shape, bucket_shapes, cheapest_cuts, side_multiples
from jformer.errors import UserError

SEEDS = range(12)


def captions(number, seed=0):
    """Draw source and target lengths like those of Multi30k in a joint BPE of 10,000: about 14.5 and 15 tokens."""
    rng = np.random.default_rng(seed)
    source = np.clip(np.round(rng.gamma(9, 14.5 / 9, number)), 4, 45).astype(np.int64)
    target = np.clip(np.round(source * rng.lognormal(0.02, 0.17, number)), 4, 50).astype(np.int64)
    return source, target


def bucketed(source, target, *, seed=0, part=None, weights=(1.0,), num_buckets=8, tokens=400, row_multiple=4):
    shapes, bucket = bucket_shapes(source, target, num_buckets, tokens, row_multiple)
    part = np.zeros(len(source), np.int64) if part is None else part
    return Plan(shapes, bucket, part, weights, seed)


def some_plan(seed):
    """Draw a plan of 1 to 300 units with whatever sizes come along."""
    rng = np.random.default_rng(seed)
    source, target = captions(int(rng.integers(1, 300)), seed)
    return bucketed(source, target, seed=seed, num_buckets=int(rng.integers(1, 9))), source, target


def units_of(batches):
    return Counter(int(unit) for batch in batches for unit in batch.units if unit >= 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_epoch_deals_every_unit_exactly_once(seed):
    plan, source, _ = some_plan(seed)
    for epoch in range(3):
        assert units_of(plan.epoch(epoch)) == Counter(range(len(source)))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_unit_lies_in_a_shape_that_holds_it(seed):
    plan, source, target = some_plan(seed)
    for batch in plan.epoch(seed):
        units = batch.units[batch.units >= 0]
        assert batch.units.shape == (batch.shape.rows,)
        assert source[units].max() <= batch.shape.source_length
        assert target[units].max() <= batch.shape.target_length


@pytest.mark.parametrize("seed", SEEDS)
def test_only_one_batch_of_the_longest_shape_has_empty_rows(seed):
    plan, *_ = some_plan(seed)
    for epoch in range(3):
        with_empty_rows = [batch.shape for batch in plan.epoch(epoch) if (batch.units < 0).any()]
        assert with_empty_rows in ([], [plan.shapes[-1]])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_epoch_has_the_same_batches_of_each_shape_in_another_order(seed):
    plan, *_ = some_plan(seed)
    epochs = [plan.epoch(epoch) for epoch in range(4)]
    shapes = [Counter(batch.shape for batch in epoch) for epoch in epochs]
    assert all(count == shapes[0] for count in shapes)
    assert {len(epoch) for epoch in epochs} == {plan.batches_per_epoch}


def test_epochs_and_seeds_deal_differently():
    source, target = captions(300)
    deals = [
        [batch.units.tolist() for batch in bucketed(source, target, seed=seed).epoch(epoch)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(a != b for a, b in itertools.combinations(deals, 2))


def test_an_epoch_does_not_go_from_short_to_long():
    plan = bucketed(*captions(300))
    lengths = [batch.shape.target_length for batch in plan.epoch(0)]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def test_a_batch_depends_on_seed_and_step_alone():
    source, target = captions(300)
    plan = bucketed(source, target, seed=3)
    forward = [plan.batch(step) for step in range(3 * plan.batches_per_epoch)]
    fresh = bucketed(source, target, seed=3)
    for step in np.random.default_rng(0).permutation(len(forward)):
        again = fresh.batch(int(step))
        assert again.shape == forward[step].shape
        np.testing.assert_array_equal(again.units, forward[step].units)


def test_step_counts_over_all_epochs():
    source, target = captions(300)
    plan = bucketed(source, target)
    n = plan.batches_per_epoch
    assert n > 3
    assert plan.batch(2 * n + 1).units.tolist() == plan.epoch(2)[1].units.tolist()


@pytest.mark.parametrize(("num_buckets", "tokens", "row_multiple"), [(8, 8192, 8), (3, 640, 8), (2, 400, 1)])
def test_shapes_are_few_and_keep_to_the_token_budget(num_buckets, tokens, row_multiple):
    shapes, bucket = bucket_shapes(*captions(3000), num_buckets, tokens, row_multiple)
    assert 1 < len(shapes) <= num_buckets
    assert set(bucket) == set(range(len(shapes)))
    for shape in shapes:
        longer = max(shape.source_length, shape.target_length)
        assert shape.rows % row_multiple == 0
        assert shape.rows * longer <= tokens < (shape.rows + row_multiple) * longer
    for short, long in itertools.pairwise(shapes):
        assert short.source_length <= long.source_length
        assert short.target_length <= long.target_length


@pytest.mark.parametrize("multiple", [8, 7])
def test_lengths_of_shapes_divide_by_a_multiple(multiple):
    source, target = captions(3000)
    shapes, bucket = bucket_shapes(source, target, 4, 8192, 8, multiple)
    assert len(shapes) == 4
    for index, shape in enumerate(shapes):
        fitting = (source <= shape.source_length) & (target <= shape.target_length)
        assert (shape.source_length % multiple, shape.target_length % multiple) == (0, 0)
        assert fitting[bucket == index].all()
        assert shape.rows * max(shape[1:]) <= 8192
    shapes, _ = bucket_shapes(source, np.ones_like(source), 4, 8192, 8, multiple)
    assert {shape.target_length for shape in shapes} == {1}  # a label is no text
    assert side_multiples(np.array([1, 2]), np.array([1, 1]), multiple) == (multiple, 1)  # but two tokens are one


def test_more_buckets_waste_less_padding():
    source, target = captions(30_000)
    fills = []
    for num_buckets in (1, 2, 4, 8):
        computed = positions(*bucket_shapes(source, target, num_buckets, 8192, 8))
        fills.append((source.sum() + target.sum()) / computed)
    assert fills == sorted(fills)
    assert fills[0] < 0.4
    assert fills[-1] > 0.85


def positions(shapes, bucket):
    """Return what one epoch computes with these shapes."""
    plan = Plan(tuple(shapes), bucket, np.zeros(len(bucket), np.int64), (1.0,), 0)
    return sum(batch.shape.rows * sum(batch.shape[1:]) for batch in plan.epoch(0))


def with_limits(limits, source, target, tokens):
    """Return the shapes with these limits and the first that fits each example."""
    shapes = [Shape(tokens // max(limit), *limit) for limit in limits]
    fits = (source <= np.array(limits)[:, :1]) & (target <= np.array(limits)[:, 1:])
    return shapes, fits.argmax(axis=0)


@pytest.mark.parametrize("seed", range(8))
def test_no_limit_moved_by_a_token_lets_an_epoch_compute_less(seed):
    source, target = captions(150, seed)
    shapes, bucket = bucket_shapes(source, target, 4, 300, 1)
    limits, fewest = [shape[1:] for shape in shapes], positions(shapes, bucket)
    assert len(limits) > 2
    for i in range(len(limits) - 1):
        for move in itertools.product((-1, 0, 1), repeat=2):
            moved = [*limits]
            moved[i] = (limits[i][0] + move[0], limits[i][1] + move[1])
            if moved == sorted(moved) and [limit[1] for limit in moved] == sorted(limit[1] for limit in moved):
                assert positions(*with_limits(moved, source, target, 300)) >= fewest


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_wastes_less_padding(seed):
    rng = np.random.default_rng(seed)
    number, parts = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    cost, count = np.cumsum(rng.integers(1, 5, number)), rng.integers(1, 9, number)

    def waste(ends):
        return sum(cost[ends[np.searchsorted(ends, i)]] * count[i] for i in range(number))

    every = [
        [*cuts, number - 1] for n in range(min(parts, number)) for cuts in itertools.combinations(range(number - 1), n)
    ]
    found = cheapest_cuts(cost, count, parts)
    assert len(found) <= parts
    assert waste(found) == min(map(waste, every))


def mixture(weights, populations, seed=0):
    part = np.repeat(np.arange(len(weights)), populations)
    return bucketed(*captions(len(part), seed), part=part, weights=weights, seed=seed), part


def test_weight_two_deals_a_corpus_twice_an_epoch():
    plan, part = mixture((1.0, 2.0), (150, 40))
    for epoch in range(3):
        assert units_of(plan.epoch(epoch)) == Counter({unit: 1 + int(part[unit]) for unit in range(190)})


@pytest.mark.parametrize(
    ("weights", "epochs"),
    [((1.0, 0.5), 4), ((0.05,), 40), ((0.3, 1.0, 2.7), 20), ((0.1,) * 10, 20), ((1 / 3, 0.01), 300)],
)
def test_fractions_deal_every_unit_its_share(weights, epochs):
    """Whatever its bucket, though a share of a bucket may be far below one unit."""
    plan, part = mixture(weights, [200 // len(weights)] * len(weights))
    deals = [plan.epoch(epoch) for epoch in range(epochs)]
    counts = sum(map(units_of, deals), Counter())
    assert counts == {unit: round(weights[part[unit]] * epochs) for unit in range(len(part)) if counts[unit]}
    assert len(counts) == len(part)
    assert len({tuple(sorted(batch.shape for batch in deal)) for deal in deals}) == 1
    for batch in itertools.chain(*deals):
        units = batch.units[batch.units >= 0]
        assert len(units)
        assert all(plan.shapes.index(batch.shape) >= plan.bucket[units])
    sizes = [units_of(deal).total() for deal in deals]
    assert max(sizes) - min(sizes) <= len(set(weights))
    assert sorted(deals[0][0].units) != sorted(deals[-1][0].units)


def test_few_long_units_are_dealt_as_often_as_the_others():
    shapes, bucket = (Shape(8, 4, 4), Shape(8, 90, 90)), np.repeat([0, 1], [1_991, 9])
    plan = Plan(shapes, bucket, np.zeros(2_000, np.int64), (0.05,), 0)
    dealt = sum((units_of(plan.epoch(epoch)) for epoch in range(20)), Counter())
    assert dealt == Counter(range(2_000))
    halves = [[unit for epoch in pair for unit in units_of(plan.epoch(epoch))] for pair in ((0, 1), (20, 21))]
    assert sorted(halves[0]) != sorted(halves[1])  # shares of later rounds are others


def test_rows_for_one_unit_are_never_empty():
    """0.5 of 3 units takes turns between one and two, in two batches."""
    plan = Plan((Shape(1, 4, 4),), np.zeros(3, np.int64), np.zeros(3, np.int64), (0.5,), 0)
    assert [len(plan.epoch(epoch)) for epoch in range(4)] == [2] * 4
    assert all(batch.units[0] >= 0 for epoch in range(4) for batch in plan.epoch(epoch))
    assert plan.fewest == 1


def test_whole_weights_deal_as_they_always_did():
    """A resumed run finds its batches again; NumPy's generators keep their streams."""
    plan = Plan((Shape(4, 4, 4), Shape(2, 8, 8)), np.arange(16) // 10, np.arange(16) % 2, (1.0, 2.0), 3)
    assert [batch.units.tolist() for batch in plan.epoch(2)] == [
        [0, 8, 5, 9],
        [1, 4, 9, 7],
        [13, 12],
        [10, 14],
        [15, 11],
        [3, 15],
        [1, 7],
        [11, 13],
        [2, 5, 6, 3],
    ]


@pytest.mark.parametrize("empty", [0, 1])
def test_a_side_that_holds_nothing_takes_no_room(empty):
    sides = [captions(300)[0], np.zeros(300, np.int64)]
    plan = bucketed(*(sides[::-1] if empty == 0 else sides))
    assert all(shape[1 + empty] == 0 < shape[2 - empty] for shape in plan.shapes)
    assert len(plan.shapes) == 8


def test_examples_of_one_length_are_of_one_shape():
    lengths = np.full(40, 16)
    shapes, bucket = bucket_shapes(lengths, np.ones(40, np.int64), 8, 128, 8)
    assert (shapes, set(bucket)) == ((Shape(8, 16, 1),), {0})


def test_too_few_tokens_for_a_batch_are_refused_with_the_number_needed():
    sides = captions(300)
    longest = max(side.max() for side in sides)
    with pytest.raises(
        UserError, match=rf"^data\.tokens_per_update=100 .* data\.row_multiple=8 .* make it {8 * longest} "
    ):
        bucket_shapes(*sides, 2, 100, 8)
    assert bucket_shapes(*sides, 2, 8 * longest, 8)[0][-1].rows == 8


def test_no_update_of_a_mixture_repeats_a_single_unit():
    """Rows that rounding leaves empty would fill whole batches of the first shape: as many as there are fractions."""
    sizes = np.random.default_rng(0).integers(20, 400, 40)
    weights = (sizes / sizes.max()) ** (1 / 5 - 1)
    part = np.repeat(np.arange(40), sizes)
    plan = Plan((Shape(8, 4, 4),), np.zeros(len(part), np.int64), part, tuple(weights / weights.max()), 0)
    assert plan._places.sum() - plan._whole.sum() - len(plan._shares(0)) >= 8  # enough to fill a batch
    rows = [batch.units[batch.units >= 0] for epoch in range(5) for batch in plan.epoch(epoch)]
    alone = [units[0] for units in rows if len(units) == 1]
    assert len({*alone}) == len(alone)
