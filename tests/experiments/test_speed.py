"""What the comparison of training steps times is what it says."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from experiments.speed.steps_floor import quickest_form
from experiments.speed.steps_shapes import Product, make_batch, model_config, step_products
from experiments.speed.steps_worker import serve
from jformer.models import ModelConfig, build_model, param_shapes
from jformer.models.flops import batch_work, update_flops


@pytest.mark.parametrize("kind", ["full", "padded", "packed"])
def test_products_of_the_floor_are_those_of_a_step(kind):
    model, batch = model_config("tiny"), make_batch(kind, 16, 100)
    rows, target = batch["target_out"].shape
    products = step_products(model, rows, batch["source"].shape[1], target)
    total = sum(count * product.flops for product, count in products.items())
    assert total == update_flops(model, batch_work(batch)[1])


def test_batches_are_as_full_as_they_say():
    filled = {kind: make_batch(kind, 256, 100)["weights"].mean() for kind in ("full", "padded", "packed")}
    assert filled["full"] == 1
    assert filled["padded"] == pytest.approx(0.6, abs=0.05)
    assert 0.9 < filled["packed"] < 1


def test_every_sentence_of_a_packed_row_is_read_shifted():
    batch = make_batch("packed", 16, 100)
    for i, j in np.argwhere(batch["target_segments"] > 0):
        before = batch["target_out"][i, j - 1] if batch["target_positions"][i, j] else 1
        assert batch["target_in"][i, j] == before


@pytest.mark.slow
@pytest.mark.parametrize(("side", "more"), [("jformer", 0), ("flax", 2 * 32 * 16)])  # learned positions of two sides
def test_worker_takes_steps_when_asked(tmp_path, side, more):
    sizes = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2}
    config = ModelConfig(vocab_size=50, target_vocab_size=50, max_length=32, **sizes)
    fields = {name: value for name, value in dataclasses.asdict(config).items() if not isinstance(value, dict)}
    np.savez(tmp_path / "batch.npz", **make_batch("full", 2, 50))
    told = {"model": fields, "batch": str(tmp_path / "batch.npz"), "warmup": 10, "packed": False, "flax_wmt": None}
    out = io.StringIO()
    serve(side, [json.dumps(told), "{}", "{}", "{}"], out)
    facts, *steps = map(json.loads, out.getvalue().splitlines())
    shapes = param_shapes(build_model(config))
    assert facts["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(shapes)) + more
    assert facts["temp_bytes"] > 0
    assert all(step["seconds"] > 0 for step in steps)
    assert abs(steps[0]["loss"] - np.log(50)) < 1
    assert steps[2]["loss"] < steps[0]["loss"]


def test_what_a_side_lacks_is_an_answer(capsys):
    out = io.StringIO()
    serve("nothing", ["{}"], out)
    assert json.loads(out.getvalue()) == {
        "error": "ModuleNotFoundError: No module named 'experiments.speed.steps_nothing'"
    }
    assert "Traceback" in capsys.readouterr().err


def test_quickest_form_times_a_product():
    assert 0 < quickest_form(Product(2, 4, 8, 3), "float32")() < 1
