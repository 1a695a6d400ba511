import functools
import math

import jax
import pytest

from jformer.config import Config, default_config, resolve
from jformer.data.config import DataConfig
from jformer.data.sources import Pair, Split
from jformer.data.vocabularies import learn_tokenizers
from jformer.describe import describe, flops_per_token, parameter_rows
from jformer.models import ModelConfig, build_model, init_params
from tests.conftest import make_batch

SMALL = {"vocab_size": 50, "target_vocab_size": 50, "num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 4}
MODELS = {
    "base": ModelConfig(**SMALL),
    "sizes of its own": ModelConfig(**SMALL, num_decoder_layers=3, d_k=6, d_v=10, norm="pre"),
    "nothing shared": ModelConfig(
        **{**SMALL, "target_vocab_size": 70}, shared_embedding=False, tied_output=False, positions="learned"
    ),
}


def shapes(model):
    return jax.eval_shape(functools.partial(init_params, build_model(model)), jax.random.key(0))


def matmul_flops(jaxpr):
    """Count the products of a traced computation from the shapes that are multiplied, whatever they belong to."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"][0]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * summed * equation.outvars[0].aval.size
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            total += times * matmul_flops(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("source", "target"), [(7, 7), (5, 9)])
def test_flops_are_those_of_the_products_the_model_makes(name, source, target):
    model, rows = MODELS[name], 3
    batch = make_batch([source] * rows, [target] * rows)
    traced = jax.make_jaxpr(lambda p, b: build_model(model).apply({"params": p}, b))(shapes(model), batch)
    found = matmul_flops(traced.jaxpr)
    assert sum(flops_per_token(model, source, target).values()) * rows * target == pytest.approx(found, rel=1e-9)


def test_parts_of_the_flops_by_hand():
    """One layer of d 4, f 6, one head, vocabulary 10, three tokens on each side, counted for one target token."""
    model = ModelConfig(vocab_size=10, target_vocab_size=10, num_layers=1, d_model=4, d_ff=6, num_heads=1)
    projections, attention, feed_forward = 4 * 4 * 4, 2 * 3 * 4, 2 * 4 * 6  # multiplications
    assert flops_per_token(model, 3, 3) == {
        "encoder": 2 * (projections + attention + feed_forward),
        "decoder self-attention and feed-forward": 2 * (projections + attention + feed_forward),
        "decoder cross-attention": 2 * (projections + attention),
        "logits": 2 * 4 * 10,
    }


@pytest.mark.parametrize("name", MODELS)
def test_rows_add_up_to_all_parameters(name):
    rows = parameter_rows(shapes(MODELS[name]))
    assert sum(count for _, _, count in rows) == sum(leaf.size for leaf in jax.tree.leaves(shapes(MODELS[name])))
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names)


def test_rows_name_tables_and_sublayers_with_their_layers():
    rows = {name: (shape, count) for name, shape, count in parameter_rows(shapes(MODELS["base"]))}
    assert rows["source_embedding"] == ("50 x 32", 50 * 32)
    found = [name for name in rows if "feed_forward" in name and "encoder" in name and "norm" not in name]
    assert len(found) == 1
    assert rows[found[0]] == ("2 x 48 x 32 ...", 2 * (2 * 32 * 48 + 48 + 32))


def table(text):
    """Return the shares and counts of a description's parameter table."""
    rows = text.splitlines()[1 : [line.startswith("total") for line in text.splitlines()].index(True) + 1]
    return [
        (line.split()[0], int(line.split()[-2].replace(",", "")), float(line.split()[-1].rstrip("%"))) for line in rows
    ]


def test_a_description_shows_counts_and_shares_that_add_up():
    config = resolve(default_config("transformer_tiny"))
    *parts, total = table(describe(config))
    assert total[0] == "total"
    assert total[2] == 100
    assert sum(count for _, count, _ in parts) == total[1]
    assert sum(share for *_, share in parts) == pytest.approx(100, abs=0.05 * len(parts))
    for _, count, share in parts:
        assert share == pytest.approx(100 * count / total[1], abs=0.05)


def test_the_vocabulary_is_the_runs_own_or_assumed(tmp_path):
    config = resolve(default_config("transformer_tiny"))
    assert "8,000 source and 8,000 target rows (assumed from data.vocab_size)" in describe(config, tmp_path)
    pairs = [Pair("a b c", "d e")]
    split = Split("train", "", lambda counts: iter(pairs))
    learn_tokenizers(tmp_path / "tokenizer", DataConfig(tokenizer="char"), [split])
    assert "10 source and 10 target rows (of the run's tokenizer)" in describe(config, tmp_path)


def test_nothing_is_allocated():
    model = ModelConfig(vocab_size=1_000_000, d_model=8_192, d_ff=65_536, num_heads=64, num_layers=100)
    rows = parameter_rows(shapes(model))
    assert sum(count for _, _, count in rows) > 10**11


def test_the_default_is_the_base_model_of_the_paper():
    text = describe(Config())
    assert table(text)[-1][1] == 44_138_496 + 8_000 * 512
