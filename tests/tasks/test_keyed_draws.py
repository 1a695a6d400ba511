"""Draws are those of their key, are uniform, and are nothing else's."""

import numpy as np
import pytest

from jformer.tasks.keyed_draws import choose, divide, integers, make_keys, other_keys, poisson, uniform, words

KEYS = make_keys((7, 8), np.arange(500), np.arange(500) % 3)


def each(count):
    return np.full(len(KEYS), count)


def test_the_words_of_a_key_are_those_of_splitmix64():
    """The first words of the seeds 0 and 1234567, as published with Vigna's C code and its ports."""
    made = words(np.array([0, 1234567], np.uint64), np.array([1, 5]))
    assert made.tolist() == [
        0xE220A8397B1DCDAF,
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_keys_differ_where_any_of_their_numbers_does():
    assert len(set(KEYS.tolist())) == len(KEYS)
    swapped = make_keys((8, 7), np.arange(500), np.arange(500) % 3)
    assert not set(KEYS.tolist()) & {*swapped.tolist(), *other_keys(KEYS, 1).tolist()}


def test_draws_of_a_key_do_not_depend_on_other_keys():
    counts = np.arange(len(KEYS)) % 5
    together = np.split(uniform(KEYS, counts), np.cumsum(counts)[:-1])
    assert [part.tolist() for part in together] == [
        uniform(KEYS[i : i + 1], counts[i : i + 1]).tolist() for i in range(len(KEYS))
    ]


def test_uniform_numbers_fill_the_interval_evenly():
    drawn = uniform(KEYS, each(200))
    counts = np.histogram(drawn, 64, (0, 1))[0]
    expected = len(drawn) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(2 * 63)  # chi-squared, four deviations
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(len(drawn))
    found = np.bincount(integers(KEYS, each(200), 3, 8))
    assert found[:3].tolist() == [0, 0, 0]
    np.testing.assert_allclose(found[3:] / len(drawn), 0.2, atol=0.006)


@pytest.mark.parametrize("mean", [1.0, 3.0, 20.0])
def test_poisson_has_its_mean_and_its_variance(mean):
    drawn = poisson(KEYS, each(200), mean)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.var() == pytest.approx(mean, rel=0.04)


def test_every_subset_is_as_likely_and_comes_in_any_order():
    found = choose(KEYS, each(4), each(2)).reshape(-1, 2) - 4 * np.arange(len(KEYS))[:, None]
    pairs, counts = np.unique(found, axis=0, return_counts=True)
    assert len(pairs) == 12  # of 4 things, without replacement, in order
    expected = len(KEYS) / 12
    assert ((counts - expected) ** 2 / expected).sum() < 11 + 4 * np.sqrt(2 * 11)


def test_a_total_is_divided_into_parts_that_are_not_empty():
    totals = 1 + np.arange(len(KEYS)) % 9
    parts = 1 + np.arange(len(KEYS)) % totals
    sizes = np.split(divide(KEYS, totals, parts), np.cumsum(parts)[:-1])
    assert [(sum(size), len(size)) for size in sizes] == list(zip(totals, parts, strict=True))
    assert min(map(min, sizes)) == 1
