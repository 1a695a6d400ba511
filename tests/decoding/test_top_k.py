import jax
import numpy as np
import pytest

from jformer.decoding.top_k import CHUNK, top_k


@pytest.mark.parametrize("vocabulary", [7, 4 * CHUNK, 4 * CHUNK + 1, 6 * CHUNK - 1])
@pytest.mark.parametrize("k", [1, 3])
def test_the_k_largest_scores_are_exact_and_equals_are_ordered_by_token(vocabulary, k):
    rng = np.random.default_rng(vocabulary)
    many_equals = rng.integers(0, 4, (30, vocabulary)).astype(np.float32)
    many_equals[:10] = rng.permuted(np.tile(np.arange(vocabulary, dtype=np.float32), (10, 1)), axis=1)
    many_equals[10, :-1] = -np.inf
    values, tokens = jax.jit(top_k, static_argnums=1)(many_equals, k)
    expected = np.argsort(-many_equals, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(many_equals, expected, axis=1))


def test_a_gpu_ranks_the_whole_vocabulary_at_once_and_others_rank_chunks():
    traced = jax.jit(top_k, static_argnums=1).trace(jax.ShapeDtypeStruct((4, 32_000), np.float32), 8)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu", "tpu")}
    assert [(text.count("chlo.top_k"), text.count("stablehlo.sort")) for text in texts.values()] == [
        (1, 0),
        (2, 1),
        (2, 1),
    ]
