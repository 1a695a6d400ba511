"""The encoder-decoder keeps the contracts of design: counts, causality, padding, packing, cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import ModelConfig, build_model, init_params
from tests.conftest import make_batch, run

ARRANGEMENTS = [  # what no preset has; the others are in test_contracts.py, and every pair of options in test_parts.py
    {"shared_embedding": False, "target_vocab_size": 50, "tied_output": False, "num_decoder_layers": 3, "unroll": 2},
    {"norm": "sandwich", "positions": "alibi", "num_kv_heads": 2, "d_k": 6, "d_v": 10},
]
every_arrangement = pytest.mark.parametrize("fields", ARRANGEMENTS, ids=lambda fields: "-".join(fields) or "paper")


def test_feed_forward_of_the_paper_has_2_099_712_parameters():
    shapes = jax.eval_shape(functools.partial(init_params, build_model(ModelConfig(vocab_size=8))), jax.random.key(0))
    leaves = jax.tree.leaves(shapes["encoder"]["block"]["feed_forward"])
    assert sum(leaf.size for leaf in leaves) == 6 * 2_099_712


@every_arrangement
def test_a_position_sees_no_later_target_token(tiny, fields):
    model, params = tiny(**fields)
    batch = make_batch([7, 5], [6, 6])
    changed = {**batch, "target_in": batch["target_in"].copy()}
    changed["target_in"][:, 4] = 3
    before, after = (np.asarray(run(model, params, b)) for b in (batch, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-3


@every_arrangement
def test_padding_and_neighbours_change_nothing(tiny, fields):
    model, params = tiny(**fields)
    alone = make_batch([7], [6])
    wide = make_batch([7, 11, 3], [6, 2, 9], source_size=16, target_size=12)
    for name, x in alone.items():
        wide[name][0] = 0
        wide[name][(0, slice(x.shape[1])) if x.ndim > 1 else 0] = x[0]
    wide["source"][0, 7:] = 9  # what stands in padding does not matter
    expected = run(model, params, alone)[0]
    np.testing.assert_allclose(run(model, params, wide)[0, :6], expected, atol=2e-5)


@every_arrangement
def test_packed_sentences_do_not_see_each_other(tiny, fields):
    model, params = tiny(**fields)
    one, two = make_batch([5], [4], seed=1), make_batch([6], [7], seed=2)
    packed = {name: np.concatenate([one[name], two[name]], axis=1) for name in one if name != "row"}
    for side, start in (("source_segments", 5), ("target_segments", 4)):
        packed[side][:, start:] = 2
    together = run(model, params, packed)[0]
    np.testing.assert_allclose(together[:4], run(model, params, one)[0], atol=2e-5)
    np.testing.assert_allclose(together[4:], run(model, params, two)[0], atol=2e-5)


def cached_logits(model, params, batch, pieces, rows_per_sentence=1):
    """Run the decoder piece by piece, each piece a (tokens, valid) pair; return the logits of every piece."""
    apply = functools.partial(run, model, params)
    memory = apply(batch, method="encode")
    cache = apply(memory, len(batch["source"]) * rows_per_sentence, 12, method="start")
    found = []
    for tokens, valid in pieces:
        hidden, cache = apply(cache, tokens, valid, method="extend")
        found.append(np.asarray(apply(hidden, method="logits")))
    return found, cache


@every_arrangement
def test_cached_step_equals_full_pass(tiny, fields):
    model, params = tiny(**fields)
    batch = make_batch([7, 5, 6], [6, 6, 6])
    ones = np.ones((3, 1), bool)
    steps, cache = cached_logits(model, params, batch, [(batch["target_in"][:, i : i + 1], ones) for i in range(6)])
    np.testing.assert_allclose(np.concatenate(steps, axis=1), run(model, params, batch), atol=2e-5)
    assert cache["position"].tolist() == [6, 6, 6]
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(cache))


@every_arrangement
def test_ragged_prompts_advance_each_row_by_its_own_count(tiny, fields):
    model, params = tiny(**fields)
    batch = make_batch([7, 5], [6, 6])
    tokens = batch["target_in"]
    valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    second = np.stack([tokens[0, 4:6], tokens[1, 2:4]])
    pieces, cache = cached_logits(model, params, batch, [(tokens[:, :4], valid), (second, np.ones((2, 2), bool))])
    full = np.asarray(run(model, params, batch))
    np.testing.assert_allclose(pieces[0][0], full[0, :4], atol=2e-5)
    np.testing.assert_allclose(pieces[1], np.stack([full[0, 4:6], full[1, 2:4]]), atol=2e-5)
    assert cache["position"].tolist() == [6, 4]


def test_beams_share_the_memory_of_their_sentence(tiny):
    model, params = tiny()
    batch = make_batch([7, 4], [5, 5])
    apply = functools.partial(run, model, params)
    memory = apply(batch, method="encode")
    twice = {name: jnp.repeat(leaf, 2, axis=0) for name, leaf in memory.items()}
    tokens = np.array([[4, 5], [6, 7], [8, 9], [10, 11]], np.int32)
    shared, own = (
        apply(apply(m, 4, 8, method="start"), tokens, np.ones((4, 2), bool), method="extend")[0]
        for m in (memory, twice)
    )
    np.testing.assert_allclose(shared, own, atol=2e-5)
    assert apply(memory, 4, 8, method="start")["memory"]["k"].shape[0] == 2


def test_scanned_blocks_equal_unrolled_ones(tiny):
    batch = make_batch([7, 5], [6, 4])
    outputs = [tiny(unroll=unroll, num_layers=3) for unroll in (1, 3)]
    one, three = (run(model, params, batch) for model, params in outputs)
    np.testing.assert_allclose(one, three, atol=2e-6)


def test_bfloat16_activations_stay_close_and_parameters_stay_float32(tiny):
    batch = make_batch([7, 5], [6, 4])
    model, params = tiny()
    half = build_model(dataclasses.replace(model.config, dtype="bfloat16"))
    shapes = jax.eval_shape(functools.partial(init_params, half), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    got = run(half, params, batch)
    expected = run(model, params, batch)
    assert got.dtype == jnp.bfloat16
    assert np.abs(np.asarray(got, np.float32) - expected).max() < 0.05 * np.abs(expected).max()


def test_post_norm_output_is_normalised_and_pre_norm_has_a_final_norm(tiny):
    batch = make_batch([7], [6])
    for norm, final in (("post", False), ("pre", True)):
        model, params = tiny(norm=norm)
        assert ("final_norm" in params["decoder"]) is final
        hidden = np.asarray(run(model, params, batch, method="hidden"))
        np.testing.assert_allclose(hidden.mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(hidden.std(-1), 1, atol=1e-3)
