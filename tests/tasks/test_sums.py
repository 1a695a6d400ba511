import math

import numpy as np

from jformer.tasks.sums import Sum, add_up, summarize


def test_sums_become_means_of_all_their_tokens():
    means = summarize({"loss": Sum(30.0, 10.0), "nll": Sum(20.0, 10.0), "correct": Sum(7.0, 10.0)})
    assert means == {"loss": 3.0, "nll": 2.0, "accuracy": 0.7, "perplexity": math.exp(2.0)}


def test_a_perplexity_beyond_floats_is_infinite_and_the_mean_of_nothing_is_nan():
    assert summarize({"nll": Sum(9000.0, 1.0)})["perplexity"] == math.inf
    assert all(math.isnan(value) for value in summarize({"nll": Sum(0.0, 0.0), "correct": Sum(0.0, 0.0)}).values())


def test_sums_of_batches_are_added_before_anything_is_divided():
    batches = [{"loss": Sum(np.float32(6), np.float32(2))}, {"loss": Sum(np.float32(1), np.float32(8))}]
    assert add_up(batches) == {"loss": Sum(7.0, 10.0)}
    assert add_up([]) == {}
