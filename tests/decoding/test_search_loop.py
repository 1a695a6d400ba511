"""A search some steps at a time finds what it finds at once, and its stable prefix is never taken back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jformer.decoding.beam import beam_search
from jformer.decoding.greedy import greedy
from jformer.decoding.sample import sample
from tests.slow import slow_but

LIMITS = [6, 6, 3, 0, 6, 5, 6, 6]
CASES = {
    "greedy": (greedy, {}),
    "sample": (sample, {"keys": jax.random.split(jax.random.key(0), 16)}),
    "one beam": (beam_search, {"size": 1, "length_penalty": 1.0}),
    "beams": (beam_search, {"size": 3, "n_best": 3, "length_penalty": 0.6}),
    "beams of which one is asked for": (beam_search, {"size": 3, "length_penalty": 1.0}),
    "beams ranked with those cut": (beam_search, {"size": 3, "length_penalty": 1.0, "ended_first": False}),
    "groups of beams": (beam_search, {"size": 4, "groups": 2, "diversity": 0.5, "length_penalty": 0.6}),
    "beams that stop early": (beam_search, {"size": 3, "patience": 1.0, "length_penalty": 1.0}),
    "beams with a phrase": (
        beam_search,
        {"size": 4, "length_penalty": 1.0, "constraints": np.full((len(LIMITS), 1, 1, 1), 3, np.int32)},
    ),
}


def step_by_step(function):
    """Return a search that also tells, after each step, the stable prefixes and which sentences were done."""

    def search(*arguments):
        loop = function(*arguments)

        def advance(state, _):
            state = loop.advance(state, jnp.int32(1))
            return state, (*loop.stable_prefix(state), loop.result(state).done)

        state, told = lax.scan(advance, loop.init, length=max(LIMITS))
        return loop.result(state), told

    return search


@pytest.mark.parametrize("name", slow_but(CASES, "greedy", "sample", "beams"))
def test_stable_prefixes_stay_and_the_results_are_those_of_the_whole(toy, name):
    function, options = CASES[name]
    model = toy(5, len(LIMITS), 2.0)
    whole = model.search(function, LIMITS, **options)
    found, told = model.search(step_by_step(function), LIMITS, **options)
    for one, other in zip(whole, found, strict=True):
        np.testing.assert_array_equal(one, other)
    early = 0
    for i in range(len(LIMITS)):
        best = whole.tokens[i, 0, : whole.lengths[i, 0]].tolist()
        beginnings = [
            tokens[i, : lengths[i]].tolist() for tokens, lengths, done in zip(*told, strict=True) if not done[i]
        ]
        assert all(best[: len(beginning)] == beginning for beginning in beginnings)
        assert [*map(len, beginnings)] == sorted(map(len, beginnings))
        early += any(beginnings)
    assert early  # something is told before the end
