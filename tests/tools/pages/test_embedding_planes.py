"""Embeddings and positions are shown as the model has them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models.head_config import HeadConfig
from jformer.models.layers.positions import PositionBias, sinusoids
from jformer.models.model_config import RelativeConfig
from jformer.models.vision_config import VisionConfig
from jformer.tools.pages.embedding_planes import (
    FAR,
    context_planes,
    embedding_planes,
    nearest,
    position_tables,
    principal_components,
)
from tests.inference.test_forced_pass import ADDITIVE, FIELDS, RECURRENT, predictor_of
from tests.inference.untrained import CHARS


def test_principal_components_of_points_on_a_line():
    line = np.array([3.0, 4.0, 12.0]) / 13
    points, shares = principal_components(np.outer([-2.0, 0.0, 5.0], line).astype(np.float32))
    np.testing.assert_allclose(points, [[-3, 0], [-1, 0], [4, 0]], atol=1e-5)
    np.testing.assert_allclose(shares, [1, 0], atol=1e-6)


def test_principal_components_keep_what_differs_most():
    vectors = np.random.default_rng(0).normal(size=(20, 6)) * [5, 0.1, 3, 0.1, 0.1, 0.1]
    points, shares = principal_components(vectors.astype(np.float32))
    values = np.linalg.eigvalsh(np.cov(vectors.T))[::-1]
    np.testing.assert_allclose(points.var(axis=0, ddof=1), values[:2], rtol=1e-4)
    np.testing.assert_allclose(shares, values[:2] / values.sum(), rtol=1e-4)
    assert points[np.abs(points).argmax(axis=0), [0, 1]].min() > 0


def test_one_token_is_one_point():
    points, shares = principal_components(np.ones((1, 4), np.float32))
    assert (points.tolist(), shares) == ([[0, 0]], (0.0, 0.0))


def test_neighbours_are_the_nearest_others_by_angle():
    table = np.array([[1, 0], [3, 0.3], [0, 2], [-1, 0], [0, 0]], np.float32)
    ((first, second), (other, _)) = nearest(table, [0, 2], "abcde", 2)
    assert [first[0], second[0], other[0]] == ["b", "c", "b"]
    assert [first[1], second[1]] == pytest.approx([3 / np.hypot(3, 0.3), 0.0])


@pytest.mark.parametrize(
    ("task", "fields", "pair", "expected"),
    [
        ("translate", FIELDS, ("abba", "fg"), {"embeddings": ("a", "b", "</s>", "f", "g")}),
        (
            "translate",
            {**FIELDS, "shared_embedding": False, "target_vocab_size": CHARS.vocab_size},
            ("ab", "f"),
            {"embeddings of the source": ("a", "b", "</s>"), "embeddings of the target": ("f", "</s>")},
        ),
        ("lm", {**FIELDS, "family": "decoder"}, ("", "aba"), {"embeddings": ("a", "b", "</s>")}),
        (
            "classify",
            {**FIELDS, "family": "encoder", "head": HeadConfig(num_classes=2)},
            ("ab", "good"),
            {"embeddings": ("<s>", "a", "b", "</s>")},
        ),
        ("translate", {**RECURRENT, "recurrent": ADDITIVE}, ("a", "b"), {"embeddings": ("a", "</s>", "b")}),
    ],
)
def test_a_plane_has_each_token_that_is_read_from_a_table(task, fields, pair, expected):
    (planes,) = embedding_planes(predictor_of(task, **fields), [pair])
    assert {plane.name: plane.tokens for plane in planes} == expected
    for plane in planes:
        assert len(plane.points) == len(plane.neighbours) == len(plane.tokens)
        for token, near in zip(plane.tokens, plane.neighbours, strict=True):
            assert token not in dict(near)
            assert [cosine for _, cosine in near] == sorted(dict(near).values(), reverse=True)


def test_added_positions_are_those_that_the_model_adds():
    predictor = predictor_of("translate", positions="sinusoidal", **FIELDS)
    (shown,) = position_tables(predictor, 7)
    np.testing.assert_array_equal(shown.values, sinusoids(7, 16))
    predictor = predictor_of("translate", positions="learned", max_length=5, **FIELDS)
    source, target = position_tables(predictor, 7)
    assert (source.name, target.name) == ("learned positions of the source", "learned positions of the target")
    assert source.rows == ("1", "2", "3", "4", "5")
    for side, found in (("source", source), ("target", target)):
        np.testing.assert_array_equal(found.values, predictor.params[f"{side}_input"]["positions"]["embedding"])


def test_positions_of_an_image_are_those_of_its_patches(tiny):
    head = HeadConfig(num_classes=2, pooling="first")  # a token of its own, too
    model, params = tiny(family="vit", positions="learned", vision=VisionConfig(8, 4), head=head)
    (shown,) = position_tables(SimpleNamespace(model=model, params=params), 99)
    assert shown.name == "learned positions"
    np.testing.assert_array_equal(shown.values, params["input"]["positions"]["embedding"])


@pytest.mark.parametrize("positions", ["relative", "alibi"])
def test_biases_are_those_that_the_model_adds(positions):
    options = {"positions": positions, "relative": RelativeConfig(8, 20)} if positions == "relative" else {}
    predictor = predictor_of("translate", **{"positions": positions, **options, **FIELDS})
    tables, length = position_tables(predictor, 99), 2 * FAR + 1
    assert len(tables) == (2 if positions == "relative" else 1)
    for found, stack in zip(tables, ("encoder", "decoder"), strict=False):
        causal = stack == "decoder" or positions == "alibi"
        params = {"params": predictor.params[stack]["position_bias"]} if positions == "relative" else {}
        keys = jnp.arange(length)[None]
        module = PositionBias(predictor.model.config, causal)
        bias = jax.jit(module.apply)(params, jnp.array([[FAR]]), keys)  # [1 h 1 s]
        expected = bias[0, :, 0, : FAR + 1] if causal else bias[0, :, 0]
        np.testing.assert_allclose(found.values, expected, rtol=1e-6)
        assert found.columns[FAR - 1 : FAR + 1] == ("-1", "0")
    assert tables[0].rows[0] == ("1, slope 0.0625" if positions == "alibi" else "1")


@pytest.mark.parametrize("fields", [{**FIELDS, "positions": "rotary"}, {**RECURRENT, "recurrent": ADDITIVE}])
def test_what_is_not_stored_is_not_shown(fields):
    assert position_tables(predictor_of("translate", **fields), 7) == []


def test_vectors_in_context_are_those_of_each_layer_and_sentence():
    predictor = predictor_of("translate", **FIELDS)
    pairs = [("ab", "c"), ("b", "cd")]
    planes = context_planes(predictor, pairs)
    assert [plane.name for plane in planes["encoder"]] == ["input", "layer 1", "layer 2"]
    assert planes["encoder"][0].tokens == ("a [1]", "b [1]", "</s> [1]", "b [2]", "</s> [2]")
    assert planes["decoder"][0].tokens == ("<s> [1]", "c [1]", "<s> [2]", "c [2]", "d [2]")
    first, second = (
        found.arrays["encoder/block/output"][1] for found in predictor.activations(pairs, ["*/block/output"])
    )
    points, shares = principal_components(np.concatenate([first, second]))
    np.testing.assert_allclose(planes["encoder"][2].points, points, atol=1e-5)
    assert planes["encoder"][2].shares == pytest.approx(shares)
    assert {token for token, _ in planes["decoder"][0].neighbours[0]} == {"c [1]", "<s> [2]", "c [2]", "d [2]"}
    assert planes["decoder"][0].neighbours[0][0][0] == "<s> [2]"  # before any layer equal tokens at one place are equal
