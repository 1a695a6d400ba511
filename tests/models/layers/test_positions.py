"""Positions against the values that their papers give."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ModelConfig, build_model
from jformer.models.layers.positions import PositionBias, alibi_slopes, apply_rotary, relative_buckets, sinusoids
from tests.conftest import TINY, make_batch, run
from tests.models.reference import forward, random_params


def test_sinusoids_alternate_sine_and_cosine():
    expected = [
        [0, 1, 0, 1],
        [0.84147098, 0.54030231, 0.00999983, 0.99995000],  # sin 1, cos 1, sin 0.01, cos 0.01
        [0.90929743, -0.41614684, 0.01999867, 0.99980001],  # sin 2, cos 2, sin 0.02, cos 0.02
    ]
    np.testing.assert_allclose(sinusoids(3, 4), expected, atol=1e-7)


def test_far_sinusoids_are_as_exact_as_near_ones():
    position, feature = 9_999, 100
    angle = position / 10_000 ** (feature / 512)
    np.testing.assert_allclose(sinusoids(10_000, 512)[position, feature], np.sin(angle), atol=1e-6)


def rotated(positions, k=8, seed=0):
    """Return random vectors [t k], the same at every position, turned by it."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal(k), jnp.float32)
    return np.asarray(apply_rotary(jnp.tile(x, (1, len(positions), 1, 1)), jnp.array([positions])))[0, :, 0]


def test_rotary_scores_depend_on_the_difference_alone():
    queries, keys = rotated([3, 10, 90]), rotated([1, 8, 88], seed=1)
    scores = (queries * keys).sum(-1)
    np.testing.assert_allclose(scores, scores[0], atol=1e-5)
    assert np.abs(queries @ keys.T - scores[0])[~np.eye(3, dtype=bool)].min() > 0.01


def test_rotary_turns_each_pair_by_its_own_rate():
    x = jnp.ones((1, 1, 1, 4))
    fast, slow = 2.0, 2.0 / 100  # position 2 times 10,000^(-2i/k), k = 4
    first = [np.cos(fast) - np.sin(fast), np.cos(slow) - np.sin(slow)]
    second = [np.cos(fast) + np.sin(fast), np.cos(slow) + np.sin(slow)]
    np.testing.assert_allclose(apply_rotary(x, jnp.array([[2]]))[0, 0, 0], first + second, atol=1e-6)
    np.testing.assert_array_equal(apply_rotary(x, jnp.array([[0]])), x)


DISTANCES = [0, 1, 7, 8, 15, 16, 31, 32, 64, 127, 128, 1000]
# 16 + floor(16 · ln(n / 16) / ln(128 / 16)) from 16 on: n = 31 gives 16 + floor(5.09), 127 gives 16 + floor(15.94).
CAUSAL = [0, 1, 7, 8, 15, 16, 21, 21, 26, 31, 31, 31]
# 8 + floor(8 · ln(n / 8) / ln(128 / 8)) from 8 on: n = 15 gives 8 + floor(1.81), 31 gives 8 + floor(3.91).
BIDIRECTIONAL = [0, 1, 7, 8, 9, 10, 11, 12, 14, 15, 15, 15]


def test_buckets_of_a_causal_stack_hold_the_past():
    past = -jnp.array(DISTANCES)
    assert relative_buckets(past, 32, 128, causal=True).tolist() == CAUSAL
    assert set(relative_buckets(-past, 32, 128, causal=True).tolist()) == {0}


def test_buckets_of_an_encoder_tell_the_directions_apart():
    past = -jnp.array(DISTANCES)
    assert relative_buckets(past, 32, 128, causal=False).tolist() == BIDIRECTIONAL
    assert relative_buckets(-past[1:], 32, 128, causal=False).tolist() == [16 + number for number in BIDIRECTIONAL[1:]]


@pytest.mark.parametrize(("count", "longest"), [(32, 128), (64, 256), (16, 20), (8, 100)])
def test_buckets_equal_the_formula_in_whole_numbers(count, longest):
    """Logarithms round: floor(m · ln(n / e) / ln(longest / e)) is the greatest i with n^m · e^i ≥ longest^i · e^m."""
    exact = count // 2
    m = count - exact

    def far(n):
        return max(i for i in range(m + 1) if n**m * exact**i >= longest**i * exact**m)

    expected = [n if n < exact else min(exact + far(n), count - 1) for n in range(300)]
    assert relative_buckets(-jnp.arange(300), count, longest, causal=True).tolist() == expected
    assert relative_buckets(-jnp.arange(300), 2 * count, longest, causal=False).tolist() == expected


def test_alibi_slopes_are_those_published():
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    np.testing.assert_allclose(alibi_slopes(8), eight)
    np.testing.assert_allclose(alibi_slopes(16), [2 ** (-i / 2) for i in range(1, 17)])
    np.testing.assert_allclose(alibi_slopes(12), [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_alibi_falls_with_the_distance_on_either_side(family):
    c = ModelConfig(family=family, positions="alibi")
    bias = PositionBias(c, causal=family == "decoder").apply({}, jnp.arange(4)[None], jnp.arange(4)[None])
    assert bias[0, 0, 1].tolist() == [-0.5, 0.0, -0.5, -1.0]
    assert bias[0, 1, 3].tolist() == [-0.75, -0.5, -0.25, 0.0]


# How a bias and turned keys are placed in a cache; the positions that presets have are in test_contracts.
@pytest.mark.parametrize("positions", ["rotary", "alibi", "transformer_xl"])
def test_ragged_cached_steps_equal_the_reference(positions):
    model = build_model(ModelConfig(**TINY, positions=positions, num_kv_heads=2))
    params, batch = random_params(model), make_batch([7, 5], [6, 4])
    apply = functools.partial(run, model, params)
    cache = apply(apply(batch, method="encode"), 2, 9, method="start")
    tokens = batch["target_in"]
    first, cache = apply(cache, tokens[:, :3], np.array([[1, 1, 1], [1, 0, 0]], bool), method="extend")
    second, cache = apply(cache, np.stack([tokens[0, 3:6], tokens[1, 1:4]]), np.ones((2, 3), bool), method="extend")
    logits = [apply(hidden, method="logits") for hidden in (first, second)]
    for row, (done, s, t) in enumerate([(3, 7, 6), (1, 5, 4)]):
        expected = forward(model.config, params, {"source": batch["source"][row, :s], "target": tokens[row, :t]})
        found = np.concatenate([logits[0][row, :done], logits[1][row]])
        np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())
