import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.greedy import greedy
from jformer.decoding.sample import apply_filters, inverse_cdf, sample, weighted_quantile

from .conftest import EOS, PAD
from .reference import hypotheses

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "epsilon": 0.0, "typical": 1.0}
FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-30},  # all but the likeliest underflow
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"epsilon": 0.02},
    {"epsilon": 0.9},
    {"typical": 0.5},
    {"typical": 1e-6},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.1, "epsilon": 0.03, "typical": 0.7},
]


def shortest(order, probs, mass):
    """Return the shortest beginning of `order` with at least that mass."""
    sums = np.cumsum(probs[order])
    return order[: np.searchsorted(sums, mass) + 1]


def by_the_papers(log_probs, *, temperature, top_k, top_p, min_p, epsilon, typical):
    """Return the probabilities to draw from: each filter as its paper has it, by sorting, on what is left so far."""
    probs = np.exp((log_probs - log_probs.max()) / temperature)

    def keep(choose):
        left = np.flatnonzero(probs)
        kept = left[choose(probs[left] / probs.sum())]
        return np.where(np.isin(np.arange(len(probs)), kept), probs / probs.sum(), 0)

    if top_k:
        probs = keep(lambda p: np.argsort(-p)[:top_k])
    if top_p < 1:
        probs = keep(lambda p: shortest(np.argsort(-p), p, top_p))
    if min_p:
        probs = keep(lambda p: p >= min_p * p.max())
    if epsilon:
        probs = keep(lambda p: (p >= epsilon) | (p == p.max()))
    if typical < 1:
        probs = keep(lambda p: shortest(np.argsort(np.abs(-np.log(p) + (p * np.log(p)).sum())), p, typical))
    return probs / probs.sum()


def draw_log_probs(seed, rows, vocabulary):
    logits = np.random.default_rng(seed).normal(0, 2, (rows, vocabulary)).astype(np.float32)
    logits[:, 5:8] = -np.inf  # forbidden by rules
    return np.array(jax.nn.log_softmax(logits))


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_filter_keeps_what_its_paper_keeps(options):
    log_probs, options = draw_log_probs(0, 60, 40), {**OFF, **options}
    found = np.exp(jax.jit(lambda x: apply_filters(x, DecodeConfig(**options)))(log_probs))
    expected = np.stack([by_the_papers(row.astype(np.float64), **options) for row in log_probs])
    np.testing.assert_array_equal(found > 0, expected > 1e-37)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-30)


def test_tokens_that_are_equally_likely_stay_or_go_together():
    log_probs = np.log(np.array([[0.4, 0.2, 0.2, 0.1, 0.1]], np.float32))
    for options, size in (({"top_k": 2}, 3), ({"top_p": 0.5}, 3), ({"top_p": 0.85}, 5), ({"top_k": 1}, 1)):
        assert (apply_filters(jnp.asarray(log_probs), DecodeConfig(**options)) > -np.inf).sum() == size


def test_a_weighted_quantile_is_exact_to_the_last_bit():
    costs = np.float32([[1.0, np.nextafter(np.float32(1), np.float32(2)), 0.0, 1e-42, 3e38, np.inf]])
    order = np.sort(costs[0])
    for count, expected in enumerate(order, start=1):
        assert weighted_quantile(jnp.asarray(costs), jnp.ones_like(costs), float(count))[0, 0] == expected
    assert weighted_quantile(jnp.asarray(costs), jnp.ones_like(costs), 7.0)[0, 0] == np.inf


@pytest.mark.parametrize("vocabulary", [5, 128, 1000])
def test_the_cumulative_distribution_is_inverted(vocabulary):
    rng = np.random.default_rng(vocabulary)
    weights = rng.random((500, vocabulary)).astype(np.float32) * (rng.random((500, vocabulary)) < 0.3)
    weights[:, 3] += 0.1
    uniform = rng.random(500).astype(np.float32)
    uniform[:2] = 0.0, 1 - 2**-24
    sums = np.cumsum(weights.astype(np.float64), axis=1)
    found = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.asarray(uniform)))
    expected = (sums <= uniform[:, None] * sums[:, -1:]).sum(axis=1)
    assert (weights[np.arange(500), found] > 0).all()
    assert (found != expected).sum() <= 1  # where rounding decides


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.8}, {"typical": 0.6}], ids=str)
def test_samples_come_as_often_as_their_probability_says(toy, options):
    model, draws = toy(1, 2), 4000
    found = model.search(sample, [2, 1], keys=jax.random.split(jax.random.key(7), 2 * draws), **options)
    first = draw_from(model, 0, (), options)
    expected = {
        (a, b): first[a] * second[b]
        for a in np.flatnonzero(first)
        if a != EOS
        for second in [draw_from(model, 0, (a,), options)]
        for b in np.flatnonzero(second)
    }
    assert_frequent(found.tokens[0, :, :2], {**expected, (EOS, PAD): first[EOS]})
    assert_frequent(
        found.tokens[1, :, :1], {(token,): share for token, share in enumerate(draw_from(model, 1, (), options))}
    )


def draw_from(model, sentence, tokens, options):
    log_probs = model.log_probs(sentence, tokens)
    log_probs[PAD] = -np.inf
    return by_the_papers(log_probs, **{**OFF, **options})


def assert_frequent(samples, expected):
    """Compare shares with probabilities, by four standard deviations, and see that nothing else was drawn."""
    assert {tuple(one) for one in samples.tolist()} <= {tokens for tokens, share in expected.items() if share > 0}
    for tokens, share in expected.items():
        found = (samples == np.array(tokens)).all(axis=1).mean()
        assert abs(found - share) <= 4 * np.sqrt(share * (1 - share) / len(samples))


@pytest.mark.slow
def test_a_sample_depends_on_its_key_and_sentence_alone(toy):
    model, keys = toy(2, 3), jax.random.split(jax.random.key(0), 12)
    together = model.search(sample, [6, 6, 6], keys=keys, top_p=0.9)
    other = toy(3, 4)
    other.table[1] = model.table[2]
    order = [3, 8, 0, 10, 1, 2, 4, 5]  # two keys a sentence; the second has two of what was the third's
    order[2:4] = 8, 10
    apart = other.search(sample, [1, 6, 0, 3], keys=keys[np.array(order)], top_p=0.9)
    for field, expected in zip(apart[:3], together[:3], strict=True):
        np.testing.assert_array_equal(field[1], expected[2, [0, 2]])
    assert len({tuple(tokens) for tokens in together.tokens[2].tolist()}) > 1


def test_the_likeliest_token_alone_is_greedy_search(toy):
    model, limits = toy(4, 6), [6, 5, 4, 3, 0, 6]
    best = model.search(greedy, limits)
    found = model.search(sample, limits, keys=jax.random.split(jax.random.key(0), 6), top_k=1)
    np.testing.assert_array_equal(found.tokens, best.tokens)
    np.testing.assert_allclose(found.scores, best.scores, rtol=1e-5)


def test_scores_are_those_of_the_model(toy):
    model = toy(5, 2)
    options = {"temperature": 0.5, "top_k": 3, "typical": 0.9}
    found = model.search(sample, [6, 6], keys=jax.random.split(jax.random.key(1), 10), **options)
    for i in range(2):
        for tokens, score in hypotheses(found, i):
            assert score == pytest.approx(model.score(i, tokens), abs=2e-5)


def test_nan_logits_end_their_own_sample_only(toy):
    model, keys = toy(6, 3, 0.3), jax.random.split(jax.random.key(2), 24)
    healthy = model.search(sample, [6, 6, 6], keys=keys)
    model.table[1, 1, 3] = np.nan  # once a sample of the second sentence starts with token 3
    found = model.search(sample, [6, 6, 6], keys=keys)
    broken = (healthy.tokens[:, :, 0] == 3) & (healthy.lengths > 1) & (np.arange(3)[:, None] == 1)
    assert 0 < broken.sum() < 8
    assert np.isnan(found.scores[broken]).all()
    assert (found.lengths[broken] == 0).all()
    assert (found.tokens[broken] == PAD).all()
    for field, expected in zip(found[:3], healthy[:3], strict=True):
        np.testing.assert_array_equal(field[~broken], expected[~broken])
