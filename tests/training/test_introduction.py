"""The first lines of a run speak of the sides that it has."""

import dataclasses

import numpy as np
import pytest

from jformer.config import default_config, resolve
from jformer.config.resume import resume_config
from jformer.data.data_config import DataConfig
from jformer.data.plan import Plan, Shape, bucket_shapes
from jformer.data.tokenizers import learn
from jformer.data.tokenizers.lists import ByteTokenizer, learn_labels
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.head_config import HeadConfig
from jformer.models.vision_config import VisionConfig
from jformer.parallel.backend import Target
from jformer.tasks.build import choose_lengths
from jformer.training.introduction import kernel_line, shapes, too_long, unfilled, vocabulary
from tests.models.test_flops import MODELS, SMALL

CPU, TPU, H100 = Target("cpu", "cpu"), Target("tpu", "TPU v5 lite"), Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")


def plan(*each):
    return Plan(tuple(Shape(*shape) for shape in each), np.zeros(0), np.zeros(0), (1.0,), 0)


def test_batches_are_described_by_the_sides_that_hold_something():
    assert shapes(plan((24, 21, 20), (8, 64, 60))) == "of rows x source + target = 24 x 21 + 20, 8 x 64 + 60"
    assert shapes(plan((32, 0, 128))) == "of rows x target = 32 x 128"
    assert shapes(plan((32, 128, 0))) == "of rows x source = 32 x 128"


def test_labels_are_counted_without_the_symbols():
    one, other = ByteTokenizer("identity"), ByteTokenizer("nfkc")
    assert vocabulary(one, one) == "260"
    assert vocabulary(one, other) == "260 source, 260 target"
    assert vocabulary(one, learn_labels("label", ["good", "bad"], "identity")) == "260, 2 labels"


def test_a_vocabulary_that_the_text_does_not_fill_is_noted():
    words, labels = (
        learn("word", ["a b c"], 100, "identity", split_digits=False),
        learn_labels("label", ["good"], "identity"),
    )
    note = " (the text does not fill data.vocab_size=8)"
    assert unfilled(DataConfig(tokenizer="word", vocab_size=8), (words, labels)) == note
    assert unfilled(DataConfig(tokenizer="word", vocab_size=7), (words, labels)) == ""
    assert unfilled(DataConfig(tokenizer="byte", vocab_size=999), (ByteTokenizer("identity"),) * 2) == ""


def test_a_text_that_loses_many_examples_to_its_limits_is_noted():
    few = {"examples read": 1_000, "empty examples dropped": 500, "overlong examples dropped": 10, "examples used": 490}
    assert too_long(few) == too_long({"examples read": 9, "overlong examples cut": 9, "examples used": 9}) == ""
    note = " (40% are over data.max_source_length or data.max_target_length; data.overlong='cut' in a new run keeps "
    assert too_long({**few, "overlong examples dropped": 400}) == note + "their beginnings)"


def test_the_kernel_that_attends_is_named_with_the_reason(monkeypatch):
    plain, dropping = ModelConfig(**SMALL), ModelConfig(**SMALL, attention_dropout=0.1)
    short, long = [Shape(8, 32, 32)], [Shape(8, 128, 4_096)]
    assert kernel_line(plain, H100, short) == "attention kernel: own (cuDNN's has no float32)"
    assert kernel_line(plain, CPU, short) == "attention kernel: own (on cpu there is no fused one)"
    told = []
    monkeypatch.setattr("jformer.parallel.processes.check_same", lambda fields: told.extend(fields.values()))
    why = "model.attention_dropout=0.1 drops weights"
    few, on_tpu = "few enough to store their scores", "(on tpu: scores stay beside the cores)"
    assert kernel_line(dropping, TPU, short) == f"attention kernel: own ({why})"
    assert told == [[("own", 1)]]  # what all processes must choose; reasons name the kind of device
    chunks = "attention kernel: chunked (up to {} queries at a time; {}), rows {}"
    for parts, size in ((1, 64), (4, 128)):  # the decoder's own, and the others
        assert kernel_line(dropping, TPU, long, parts=parts) == chunks.format(size, why, on_tpu)
    assert kernel_line(plain, TPU, long) == f"attention kernel: splash {on_tpu}, rows {on_tpu}"
    counted = kernel_line(plain, TPU, [Shape(16, 128, 64), Shape(8, 1_024, 1_024)])
    own = f"own (64 queries and 128 keys: {few}) for 1 of 2 shapes"
    assert counted == f"attention kernel: rows {on_tpu} for 2 of 2 shapes, {own}"
    assert kernel_line(MODELS["sizes of its own"], H100, short).endswith("own (keys of 6 and values of 10)")
    shared = kernel_line(plain, TPU, [Shape(8, 1_024, 1_024)], sequence=3)  # 1,026 positions
    assert "1,026 queries and 1,026 keys: not multiples of 128" in shared
    with pytest.raises(
        UserError, match=r"^mesh.sequence=3 does not divide rows of 32 \+ 32, .*=3 in a new run, or mesh."
    ):
        kernel_line(dropping, CPU, [Shape(8, 33, 33), *short], sequence=3)
    plugin = dataclasses.replace(plain, attention="package.module:Class")
    assert kernel_line(plugin, H100, short) == "attention: package.module:Class"


def test_vectors_of_an_encoder_decoder_are_those_of_its_encoder_alone():
    texts = ModelConfig(**SMALL).with_vectors("mean")
    own = "attention kernel: own (100 queries and 100 keys: few enough to store their scores)"
    assert kernel_line(texts, TPU, [Shape(8, 100, 0)]) == own
    assert kernel_line(dataclasses.replace(texts, family="decoder"), TPU, [Shape(8, 0, 100)]) == own


def test_images_attend_by_their_patches_and_the_class_token():
    size = {"vision": VisionConfig(image_size=80, patch_size=2), "num_heads": 4, "d_model": 32}
    vit, mean = (ModelConfig("vit", **size, head=HeadConfig(pooling=pooling)) for pooling in ("first", "mean"))
    assert "1,601 queries and 1,601 keys: not multiples of 128" in kernel_line(vit, TPU, [Shape(8, 80 * 80, 1)])
    assert "1,600 queries and 1,600 keys: not multiples of 128" in kernel_line(mean, TPU, [Shape(8, 80 * 80, 1)])
    source = dataclasses.replace(size["vision"], source=True)
    captions = dataclasses.replace(mean, family="encdec", vision=source, head=HeadConfig())
    assert "1,600 queries and 1,600 keys" in kernel_line(captions, TPU, [Shape(8, 80 * 80, 32)])


@pytest.mark.parametrize(
    ("options", "target", "multiple"),
    [
        ({}, H100, 8),
        ({}, CPU, 1),
        ({}, TPU, 1),  # 256 x 256 pairs are few
        ({"data.max_target_length": 512}, TPU, 128),
        ({"data.max_target_length": 512, "data.length_multiple": 3}, TPU, 3),
        ({"data.max_target_length": 512, "mesh.sequence": 3}, TPU, 384),
        ({"data.max_target_length": 1_025, "data.tokens_per_update": 8_300}, TPU, 1),  # 8 x 1,152 are too many
        ({"data.batching": "packed", "data.packed_length": 1_024}, TPU, 128),
        ({"data.batching": "packed", "data.packed_length": 1_000}, TPU, 1),
        ({"data.batching": "packed", "data.packed_length": 1_000}, H100, 8),
        ({"model.dtype": "float32"}, H100, 1),
        ({"model.attention_dropout": 0.1}, H100, 1),
        ({}, H100._replace(capability="7.5"), 1),
        ({}, H100._replace(capability="gfx942"), 1),
    ],
)
def test_lengths_divide_by_what_a_fused_kernel_takes_where_it_can_attend(options, target, multiple):
    config = default_config("transformer_base")
    config.update_from_flattened_dict({"model.dtype": "bfloat16"} | options)
    config, lines = choose_lengths(resolve(config), target)
    assert config.data.length_multiple == multiple
    assert bool(lines) == (multiple in (8, 128, 384))
    assert (
        resume_config(config, dataclasses.replace(config, data=dataclasses.replace(config.data, length_multiple=0)))
        == config
    )


def test_a_fused_kernel_takes_every_shape_of_translations():
    """The lengths of which three of eight qualified, and with multiples of 8 all do."""
    lengths = np.random.default_rng(0).lognormal(2.9, 0.5, (2, 10_000)).clip(4, 100).astype(np.int64)
    model = ModelConfig(dtype="bfloat16")
    for multiple in (1, 8):
        found, _ = bucket_shapes(*lengths, 8, 8_192, 8, multiple)
        whole = sum(not length % multiple for shape in found for length in shape[1:])
        assert (len(found), whole) == (8, 16)
        assert kernel_line(model, H100, found).endswith(
            "cudnn (on gpu: scores stay beside the cores) for 8 of 8 shapes"
        )
