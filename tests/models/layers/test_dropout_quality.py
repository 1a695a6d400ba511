"""Dropout masks look random to tests that do find what is not."""

import numpy as np
import pytest

from experiments.checks import dropout_quality as quality

SHAPE = (32, 32, 64)


@pytest.mark.slow
def test_masks_differ_from_independent_bits_no_more_than_chance_does():
    found = [*quality.hashed_bits(2**16, 2), *quality.tests(quality.ours, SHAPE, 2, (0.1, 0.5))]
    worst = max(found, key=lambda test: abs(test.z))
    assert len(found) > 90
    assert abs(worst.z) < quality.bound(len(found)), worst


def worst_of(draw):
    return max(abs(test.z) for test in quality.tests(draw, SHAPE, 2, (0.3,)))


@pytest.mark.slow
def test_masks_that_repeat_are_found():
    """One fault at a time: layers, seeds, halves of a word and neighbours that are alike; a rate that is off."""

    def halves(rate, seed, step, layer, site, shape):
        first = quality.ours(rate, seed, step, layer, site, (*shape[:2], shape[2] // 2))
        return np.concatenate([first, first], axis=-1)

    def neighbours(rate, seed, step, layer, site, shape):
        return np.repeat(quality.ours(rate, seed, step, layer, site, (shape[0] // 2, *shape[1:])), 2, axis=0)

    faults = (
        lambda rate, seed, step, layer, site, shape: quality.ours(rate, seed, step, 0, site, shape),
        lambda rate, seed, step, layer, site, shape: quality.ours(rate, 0, step, layer, site, shape),
        lambda rate, seed, step, layer, site, shape: quality.ours(rate * 1.05, seed, step, layer, site, shape),
        halves,
        neighbours,
    )
    for fault in faults:
        assert worst_of(fault) > 1.5 * quality.bound(200)
