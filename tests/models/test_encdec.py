"""The encoder-decoder keeps the contracts of design: counts, causality, padding, packing, cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.decoding.search import reorder, repeat_rows
from jformer.models import ExecutionConfig, ModelConfig, build_model, param_shapes
from jformer.models.layers.transformer import Stack
from jformer.models.layers.visibility import TokenPlaces
from tests.conftest import TINY, make_batch, run
from tests.models.contracts import check_cache

ARRANGEMENTS = [  # what no preset has; the others are in test_contracts.py, and every pair of options in test_parts.py
    {
        "shared_embedding": False,
        "target_vocab_size": 50,
        "tied_output": False,
        "num_decoder_layers": 3,
        "execution": ExecutionConfig(unroll=2),
    },
    {"norm": "sandwich", "positions": "alibi", "num_kv_heads": 2, "d_k": 6, "d_v": 10},
    {"positions": "transformer_xl", "embedding_scale": "positions", "num_kv_heads": 1, "shared_layers": True},
]
every_arrangement = pytest.mark.parametrize("fields", ARRANGEMENTS, ids=lambda fields: "-".join(fields) or "paper")


@pytest.mark.parametrize("cross", [True, False])
def test_a_stack_without_the_memory_it_needs_or_with_one_it_would_not_read_is_refused(cross):
    stack, x = Stack(ModelConfig(**TINY), 2, cross=cross, causal=True), jnp.ones((1, 3, 32))
    segments, positions = jnp.ones((1, 3), jnp.int32), jnp.arange(3)[None]
    memory = (None, None) if cross else (x, segments)
    with pytest.raises(AssertionError, match="a memory is for stacks with cross-attention"):
        stack.init(jax.random.key(0), x, TokenPlaces(segments, positions), *memory)


@pytest.mark.slow
@every_arrangement
def test_cached_step_equals_full_pass(tiny, fields):
    check_cache(*tiny(**fields), make_batch([7, 5], [6, 6]), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 1])
def test_beams_share_memory_and_entries_and_go_on_from_any_history(tiny, window):
    model, params = tiny(window=window)
    batch = make_batch([7, 4], [5, 5])
    apply = functools.partial(run, model, params)
    one = np.ones((4, 1), bool)
    cache = repeat_rows(apply(apply(batch, method="encode"), 2, 8, method="start"), 2)
    _, cache = apply(cache, np.array([[4], [6], [8], [10]], np.int32), one, method="extend")
    cache = reorder(cache, jnp.array([[1, 1], [1, 0]]))
    found, cache = apply(cache, np.array([[5], [7], [9], [11]], np.int32), one, method="extend")
    _, cache = apply(cache, np.array([[3], [3], [3], [3]], np.int32), one, method="extend")
    for row, history in enumerate([[6, 5], [6, 7], [10, 9], [8, 11]]):
        alone = {name: leaf[row // 2 : row // 2 + 1] for name, leaf in batch.items()}
        alone |= {"target_in": np.array([history], np.int32), "target_positions": np.arange(2, dtype=np.int32)[None]}
        alone["target_segments"] = np.ones((1, 2), np.int32)
        np.testing.assert_allclose(found[row, 0], run(model, params, alone, method="hidden")[0, 1], atol=2e-5)
    assert cache["memory"]["layers"][0]["k"].shape[0] == cache["entries"]["layers"][0]["k"].shape[0] == 2
    assert cache["entries"]["used"] == 6


def test_bfloat16_activations_stay_close_and_parameters_stay_float32(tiny):
    batch = make_batch([7, 5], [6, 4])
    model, params = tiny()
    half = build_model(dataclasses.replace(model.config, dtype="bfloat16"))
    shapes = param_shapes(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    got = run(half, params, batch)
    expected = run(model, params, batch)
    assert got.dtype == jnp.float32  # logits are, whatever the layers compute in, and are not rounded on the way
    assert (got != got.astype(jnp.bfloat16)).mean() > 0.9
    assert np.abs(np.asarray(got, np.float32) - expected).max() < 0.05 * np.abs(expected).max()
