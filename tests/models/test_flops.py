"""FLOPs are those of the products that are made, whatever padding and packing do to the rows."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax.interpreters import partial_eval

from jformer.config.options import OptimConfig
from jformer.models import ModelConfig, build_model, param_shapes
from jformer.models.flops import Work, batch_work, forward_flops, text_work, total, update_flops, work_of
from jformer.models.head_config import HeadConfig
from jformer.models.lora_config import LoraConfig
from jformer.models.parts import join, split
from jformer.models.recurrent_config import RecurrentConfig
from jformer.models.vision_config import VisionConfig
from jformer.training.optim import build_optimizer
from tests.conftest import make_batch

SMALL = {"vocab_size": 50, "target_vocab_size": 50, "num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 4}
OWN_SIZES = {"d_k": 6, "d_v": 10}
VISION = {"family": "vit", "vision": VisionConfig(image_size=8, patch_size=4, channels=2)}
RECURRENT = {"vocab_size": 50, "target_vocab_size": 50, "num_layers": 2, "d_model": 32}
BAHDANAU = RecurrentConfig(
    "gru", bidirectional=True, attention="additive", bridge="dense", embedding_size=20, readout_size=12
)
MODELS = {
    "base": ModelConfig(**SMALL),
    "sizes of its own": ModelConfig(**SMALL, **OWN_SIZES, num_decoder_layers=3, norm="pre"),
    "nothing shared": ModelConfig(
        **{**SMALL, "target_vocab_size": 70}, shared_embedding=False, tied_output=False, positions="learned"
    ),
    "grouped and gated": ModelConfig(
        **SMALL, **OWN_SIZES, num_kv_heads=2, activation="swiglu", norm="sandwich", positions="relative", bias=False
    ),
    "decoder": ModelConfig(**SMALL, family="decoder", num_kv_heads=1, positions="rotary", norm="none", window=4),
    "untied decoder": ModelConfig(**SMALL, family="decoder", tied_output=False, activation="geglu", positions="alibi"),
    "masked": ModelConfig(**SMALL, family="encoder", embedding_norm=True, head=HeadConfig(transform=True)),
    "texts": ModelConfig(**SMALL, family="encoder", head=HeadConfig(num_classes=3, pooler=True, num_segments=2)),
    "mean of texts": ModelConfig(
        **SMALL, **OWN_SIZES, family="encoder", activation="glu", head=HeadConfig(num_classes=3, pooling="mean")
    ),
    "images": ModelConfig(**SMALL, **VISION, positions="learned", head=HeadConfig(num_classes=3)),
    "mean of images": ModelConfig(
        **SMALL, **VISION, num_kv_heads=2, head=HeadConfig(num_classes=3, pooling="mean", pooler=True)
    ),
    "captions of images": ModelConfig(
        **SMALL,
        **OWN_SIZES,
        num_decoder_layers=3,
        vision=VisionConfig(image_size=8, patch_size=4, channels=2, source=True),
    ),
    "lstm": ModelConfig(**RECURRENT, recurrent=RecurrentConfig("lstm", bridge="copy")),
    "bahdanau": ModelConfig(**RECURRENT, tied_output=False, recurrent=BAHDANAU),
    "luong": ModelConfig(**RECURRENT, recurrent=RecurrentConfig("gru", attention="dot", input_feeding=True)),
    "concat": ModelConfig(**RECURRENT, recurrent=RecurrentConfig("rnn", bidirectional=True, attention="concat")),
    "recurrent decoder": ModelConfig(
        **RECURRENT, family="decoder", tied_output=False, recurrent=RecurrentConfig("gru", embedding_size=20)
    ),
    "recurrent texts": ModelConfig(
        **RECURRENT,
        family="encoder",
        recurrent=RecurrentConfig("lstm", bidirectional=True),
        head=HeadConfig(num_classes=3),
    ),
    "pooled recurrent texts": ModelConfig(
        **RECURRENT,
        family="encoder",
        recurrent=RecurrentConfig("lstm", bidirectional=True),
        head=HeadConfig(num_classes=3, pooling="final", pooler=True),
    ),
}


@functools.cache
def shapes(model):
    return param_shapes(build_model(model))


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


def traced_flops(model, source, target, rows=3):
    image = jax.numpy.zeros((rows, *(model.vision.image_size,) * 2, model.vision.channels), "uint8")
    batch = {**make_batch([source] * rows, [target] * rows), "image": image}
    traced = jax.make_jaxpr(lambda p, b: build_model(model).apply({"params": p}, b))(shapes(model), batch)
    return matmul_flops(traced.jaxpr) / rows


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_products_the_model_makes(name):
    flops = forward_flops(MODELS[name], text_work(5, 9))
    assert sum(flops.values()) == traced_flops(MODELS[name], 5, 9)
    assert all(flops.values())


def test_distances_are_projected_once_a_batch():
    """Dai et al. 2019: what their projection costs is in no text's account, all else is."""
    model = ModelConfig(**SMALL, positions="transformer_xl", num_kv_heads=2)
    flops = sum(forward_flops(model, text_work(5, 9)).values())
    projected = 2 * model.num_layers * 2 * (5 + 9) * model.d_model * model.d_model
    for rows in (1, 3):
        assert rows * flops + projected == rows * traced_flops(model, 5, 9, rows)
    assert flops - sum(forward_flops(ModelConfig(**SMALL, num_kv_heads=2), text_work(5, 9)).values()) == (
        2 * 2 * 2 * (5 * 5 + 9 * 9) * model.d_model
    )


def test_parts_of_the_flops_by_hand():
    """One layer of d 4, f 6, one head, vocabulary 10, three tokens on each side."""
    sizes = {"vocab_size": 10, "target_vocab_size": 10, "num_layers": 1, "d_model": 4, "d_ff": 6, "num_heads": 1}
    projections, pairs, feed_forward = 4 * 4 * 4, 2 * 3 * 4, 2 * 4 * 6  # multiplications for each token
    block, logits = 3 * 2 * (projections + pairs + feed_forward), 3 * 2 * 4 * 10
    assert forward_flops(ModelConfig(**sizes), text_work(3, 3)) == {
        "encoder": block,
        "decoder self-attention and feed-forward": block,
        "decoder cross-attention": 3 * 2 * (projections + pairs),
        "logits": logits,
    }
    masked = ModelConfig(**sizes, family="encoder", head=HeadConfig(transform=True))
    assert forward_flops(masked, text_work(3, 99)) == {"encoder": block, "transform": 3 * 2 * 4 * 4, "logits": logits}
    assert forward_flops(ModelConfig(**sizes, family="decoder"), text_work(99, 3)) == {
        "decoder": block,
        "logits": logits,
    }
    head = HeadConfig(num_classes=5, pooler=True)
    assert forward_flops(ModelConfig(**sizes, family="encoder", head=head), text_work(3, 1)) == {
        "encoder": block,
        "pooler": 2 * 4 * 4,
        "logits": 2 * 4 * 5,
    }
    two_patches_by_one = VisionConfig(image_size=2, patch_size=2, channels=3)
    image = ModelConfig(**sizes, family="vit", head=HeadConfig(num_classes=5), vision=two_patches_by_one)
    both = 2 * 2 * (projections + 2 * 2 * 4 + feed_forward)  # the patch and the class token
    assert forward_flops(image, text_work(1, 0)) == {"patches": 2 * 12 * 4, "encoder": both, "logits": 2 * 4 * 5}


def segments(rows, length):
    """Lay texts of these lengths side by side, a list for each row."""
    laid = np.zeros((len(rows), length), np.int32)
    for row, lengths in zip(laid, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return laid


SOURCES = [[3, 1, 7], [], [12], [2, 2, 1, 4]]  # four rows of texts, of which the second is empty
TARGETS = [[2, 5, 1], [], [9], [1, 3, 3, 2]]
PACKED = {
    "source_segments": segments(SOURCES, 12), "target_segments": segments(TARGETS, 10), "weights": np.ones((4, 10)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if "images" not in name])
def test_packed_rows_cost_what_each_of_their_texts_costs(name):
    texts, rows = batch_work(PACKED)
    each = [
        forward_flops(MODELS[name], text_work(source, target))
        for sources, targets in zip(SOURCES, TARGETS, strict=True)
        for source, target in zip(sources, targets, strict=True)
    ]
    assert forward_flops(MODELS[name], texts) == {part: sum(flops[part] for flops in each) for part in each[0]}
    full = forward_flops(MODELS[name], text_work(12, 10))
    assert forward_flops(MODELS[name], rows) == {part: 4 * flops for part, flops in full.items()}


def test_a_side_that_is_not_there_has_no_work():
    source = {"source_segments": PACKED["source_segments"], "weights": np.ones((4, 12))}
    assert batch_work(source)[0] == Work(8, source=32, source_pairs=9 + 1 + 49 + 144 + 4 + 4 + 1 + 16)
    target = {"target_segments": segments([[2], [3]], 4), "weights": np.ones((2, 4))}
    assert batch_work(target) == (Work(2, target=5, target_pairs=13), Work(2, target=8, target_pairs=32))


def test_images_without_a_label_are_padding():
    batch = {"image": np.zeros((3, 8, 8, 2), np.uint8), "weights": np.array([[1.0], [0.0], [1.0]])}
    texts, rows = batch_work(batch)
    assert (texts.texts, texts.tokens, rows.texts, rows.tokens) == (2, 128, 3, 192)
    one = forward_flops(MODELS["images"], text_work(1, 0))
    assert forward_flops(MODELS["images"], texts) == {part: 2 * flops for part, flops in one.items()}


def test_an_image_and_its_caption_cost_what_each_costs_with_padding_apart():
    weights = np.arange(6) < np.array([4, 0, 6])[:, None]
    batch = {"image": np.zeros((3, 8, 8, 2), np.uint8), "weights": weights, "target_segments": weights.astype(np.int32)}
    texts, rows = batch_work(batch)
    assert (texts.texts, texts.source, texts.target, rows.texts, rows.target) == (2, 128, 10, 3, 18)
    model = MODELS["captions of images"]
    each = [forward_flops(model, text_work(64, length)) for length in (4, 6)]
    assert forward_flops(model, texts) == {part: sum(flops[part] for flops in each) for part in each[0]}
    full = forward_flops(model, text_work(64, 6))
    assert forward_flops(model, rows) == {part: 3 * flops for part, flops in full.items()}


def test_work_adds_up():
    works = [text_work(3, 4), text_work(5, 6)]
    assert total(works) == work_of(np.array([3, 5]), np.array([4, 6])) == Work(2, 8, 10, 9 + 25, 16 + 36, 12 + 30)


def test_full_rows_cost_what_the_compiler_says():
    """XLA also counts norms, the softmax and the like: at this size within 2 %, the less the wider the model."""
    sizes = {"vocab_size": 512, "target_vocab_size": 512, "num_layers": 2, "d_model": 256, "d_ff": 512, "num_heads": 4}
    model, batch = ModelConfig(**sizes), make_batch([64] * 4, [48] * 4)
    forward = jax.jit(lambda params, batch: build_model(model).apply({"params": params}, batch))
    compiled = forward.lower(shapes(model), batch).compile().cost_analysis()["flops"]
    assert 1 <= compiled / sum(forward_flops(model, batch_work(batch)[0]).values()) < 1.02


@pytest.mark.parametrize(("length", "attention"), [(128, 0.019), (1_024, 0.153)])
def test_an_update_costs_six_flops_for_each_parameter_and_token_and_its_attention(length, attention):
    """Kaplan et al. 2020, section 2.1; what their rule leaves out is attention, here of GPT-2 small."""
    sizes = {"vocab_size": 50_257, "num_layers": 12, "d_model": 768, "d_ff": 3_072, "num_heads": 12}
    rule = 6 * (12 * (4 * 768**2 + 2 * 768 * 3_072) + 50_257 * 768) * length
    flops = update_flops(ModelConfig(**sizes, family="decoder"), text_work(0, length))
    assert flops == rule + 12 * 12 * 768 * length**2
    assert flops / rule - 1 == pytest.approx(attention, abs=0.001)


def traced_update_flops(model, frozen, source, target):
    """Return the FLOPs of the products of a loss and its gradients by what is trained."""
    image = jax.numpy.ones((1, *(model.vision.image_size,) * 2, model.vision.channels), "uint8")
    built = build_model(model)
    batch = {**jax.tree.map(jax.numpy.asarray, make_batch([source], [target])), "image": image}

    def loss(trained, fixed):
        return jax.numpy.sin(built.apply({"params": join(trained, fixed)}, batch)).sum()  # no gradient is constant

    program = jax.make_jaxpr(jax.value_and_grad(loss))(*split(shapes(model), frozen)).jaxpr
    return matmul_flops(partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0])


@pytest.mark.parametrize(
    ("name", "lora", "freeze", "error"),
    [
        ("base", LoraConfig(), (), 0),
        ("base", LoraConfig(), ("/kernel$", "embedding"), 0),  # biases alone (BitFit)
        ("nothing shared", LoraConfig(), ("^(?!head)",), 0),  # the head alone
        ("masked", LoraConfig(), ("^encoder", "embedding", "^input"), 0),
        ("decoder", LoraConfig(rank=1), (), 0.1),  # factors are not counted: at this width they are not small
        ("nothing shared", LoraConfig(), ("^encoder", "embedding", "^source_input"), 0.05),  # gradients by the memory
        ("bahdanau", LoraConfig(), ("kernel$",), 0.1),
        ("images", LoraConfig(), (), 0),
        ("images", LoraConfig(), ("^patches", "^class_token"), 0),
    ],
)
def test_an_update_counts_no_gradient_of_what_is_frozen(name, lora, freeze, error):
    model = dataclasses.replace(MODELS[name], lora=lora)
    optimizer = build_optimizer(build_model(model), OptimConfig(), 10, freeze)
    found = update_flops(model, text_work(5, 9), optimizer.frozen_parts)
    assert found == pytest.approx(traced_update_flops(model, optimizer.frozen, 5, 9), rel=error, abs=0)
    assert (found < update_flops(model, text_work(5, 9))) == bool(lora.rank or freeze)
