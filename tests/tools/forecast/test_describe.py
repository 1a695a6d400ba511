import re

import jax
import pytest

from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.config.presets import PRESETS
from jformer.data.sources.split import Pair, Split
from jformer.data.vocabularies import learn_tokenizers
from jformer.models import ModelConfig
from jformer.models.flops import forward_flops, text_work
from jformer.models.parts import parameter_rows
from jformer.parallel.backend import Target
from jformer.tasks.build import build_task
from jformer.tools.forecast.describe import describe, summary
from jformer.tools.forecast.shapes import full_shape
from tests.config.test_presets import EXPECTED
from tests.models.test_flops import MODELS, shapes


@pytest.fixture
def without_memory(monkeypatch):
    """Leave out the line for which an update is traced: tests/training/test_memory.py has what it says."""
    monkeypatch.setattr("jformer.tools.forecast.describe.memory_line", lambda *_: "")


@pytest.mark.parametrize("name", MODELS)
def test_rows_add_up_to_all_parameters(name):
    rows = list(parameter_rows(shapes(MODELS[name])))
    assert sum(count for _, _, count in rows) == sum(leaf.size for leaf in jax.tree.leaves(shapes(MODELS[name])))
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names)


def test_rows_name_parts_and_sublayers_with_their_layers():
    def rows(name):
        return {part: (shape, count) for part, shape, count in parameter_rows(shapes(MODELS[name]))}

    base = rows("base")
    assert base["source_embedding"] == ("50 x 32", 50 * 32)
    assert base["encoder/block/feed_forward"] == ("2 x 48 x 32 ...", 2 * (2 * 32 * 48 + 48 + 32))
    assert not [name for name in base if name.startswith("encoder/block/self_attn/")]
    assert rows("grouped and gated")["decoder/position_bias"] == ("32 x 4", 128)
    assert {"encoder/block/self_attn_out_norm", "encoder/final_norm"} <= set(rows("grouped and gated"))
    assert set(rows("decoder")) == {"embedding", "decoder/block/self_attn", "decoder/block/feed_forward"}
    assert rows("masked")["head/bias"] == ("50", 50)
    assert rows("masked")["head/transform"] == ("32 x 32 ...", 32 * 32 + 32)
    assert rows("texts")["pooler/dense"][1] == 32 * 32 + 32
    assert rows("texts")["input/segments"] == ("2 x 32", 64)
    images = rows("images")
    assert images["class_token"] == ("1 x 1 x 32", 32)
    assert images["classifier"] == ("32 x 3 ...", 32 * 3 + 3)
    assert images["patches"] == ("32 x 32 ...", 4 * 4 * 2 * 32 + 32)


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("cpu", {}, r"own \(on cpu there is no fused one\) for 8 of 8 shapes"),
        ("gpu", {}, r"cudnn \(on gpu: scores stay beside the cores\) for 8 of 8 shapes"),
        ("gpu", {"data.batching": "packed"}, r"cudnn \(on gpu: scores stay beside the cores\)"),
        (
            "tpu",
            {"data.max_source_length": 1_000, "data.max_target_length": 1_000},
            r"rows \(on tpu: scores stay beside the cores\) for 8 of 8 shapes",
        ),
    ],
)
def test_lengths_are_what_a_fused_kernel_takes_and_its_shapes_are_counted(kind, options, line, monkeypatch):
    capability = "9.0" if kind == "gpu" else ""
    monkeypatch.setattr("jformer.tools.forecast.describe.target", lambda: Target(kind, f"another {kind}", capability))
    text, _ = described("transformer_base", **{"model.dtype": "bfloat16"} | options)
    assert re.search(rf"\nattention kernel: {line}\n", text)


def table(text):
    """Return the counts and shares of a description's parameter table."""
    rows = text.partition("share\n")[2].partition("\n\n")[0].splitlines()
    cells = [re.split(r"\s{2,}", row) for row in rows]
    return [(row[0], int(row[-2].replace(",", "")), float(row[-1].rstrip("%"))) for row in cells]


def flops(text):
    """Return the columns of a description's table of FLOPs: what each is → part → FLOPs."""
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in text.rpartition("\n\n")[2].splitlines())
    return head[0], {
        name: {row[0]: int(row[column].replace(",", "")) for row in rows} for column, name in enumerate(head) if column
    }


@pytest.mark.slow
@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_described_without_a_weight(preset):
    size, expected = EXPECTED[preset]
    config = default_config(preset)
    rows = {"vocab_size": size} | ({"target_vocab_size": size} if config.model.family == "encdec" else {})
    config.model.update({"head": {"num_classes": size}} if config.model.family == "vit" else rows)
    text = describe(resolve(config))
    *parts, total = table(text)
    assert total == ("total", expected, 100)
    assert sum(count for _, count, _ in parts) == expected
    for _, count, share in parts:
        assert share == pytest.approx(100 * count / expected, abs=0.05)
    for column in flops(text)[1].values():
        whole = column.pop("total; an update takes about three times that")
        assert sum(column.values()) == pytest.approx(whole, abs=len(column))
    assert f"(set by model.{'head.num_classes' if config.model.family == 'vit' else 'vocab_size'}" in text


PAIRS = {"model.head.pooling": "mean", "data.overlong": "drop"}  # what task embed needs of any model


def described(preset, **options):
    config = default_config(preset)
    config.update_from_flattened_dict(options)
    return describe(resolve(config)), resolve(config)


@pytest.mark.usefixtures("without_memory")
def test_a_column_is_a_token_or_an_example():
    text, config = described("transformer_tiny", **{"data.max_target_length": 100, "data.max_source_length": 90})
    what, columns = flops(text)
    model = config.model.with_vocabulary(8_000, 8_000)
    assert what == "forward FLOPs of one target token, source and target having"
    assert list(columns) == ["32 tokens", "100 tokens"]
    for length, column in zip((32, 100), columns.values(), strict=True):
        assert [*column.values()][:-1] == [
            part / length for part in forward_flops(model, text_work(length, length)).values()
        ]

    what, columns = flops(described("gpt2", **{"data.max_target_length": 1_024, "data.max_source_length": 2_000})[0])
    assert (what, list(columns)[-1]) == ("forward FLOPs of one token of a text that has", "1,024 tokens")

    what, columns = flops(described("bert_base", task="classify", **{"data.max_source_length": 64})[0])
    assert (what, list(columns)) == ("forward FLOPs of one text that has", ["32 tokens", "64 tokens"])
    assert {column["logits"] for column in columns.values()} == {2 * 2 * 768}

    what, columns = flops(described("gpt2", task="embed", **PAIRS, **{"data.max_target_length": 64})[0])
    assert (what, list(columns)) == ("forward FLOPs of one text that has", ["32 tokens", "64 tokens"])

    what, columns = flops(described("vit_s16")[0])
    assert (what, list(columns)) == ("forward FLOPs of one image", ["FLOPs"])
    assert columns["FLOPs"]["patches"] == 2 * 14 * 14 * 16 * 16 * 3 * 384


@pytest.mark.usefixtures("without_memory")
def test_the_first_line_names_family_layers_and_task():
    config = default_config("transformer_base")
    config.model.num_decoder_layers = 2
    assert describe(resolve(config)).startswith("model: encdec of 6 + 2 layers, for task translate\n")
    assert next(summary(resolve(default_config("gpt3_175b")))) == "model: decoder of 96 layers, for task lm"
    assert next(summary(resolve(default_config("vit_l16")))) == "model: vit of 24 layers, for task classify"


@pytest.mark.usefixtures("without_memory")
def test_the_dtype_is_that_of_the_devices(monkeypatch):
    monkeypatch.setattr("jformer.tasks.build.quicker_dtype", lambda device: ("bfloat16", "of this test"))
    assert "init glorot, bfloat16\n" in described("transformer_tiny", **{"model.dtype": "auto"})[0]


@pytest.mark.usefixtures("without_memory")
def test_without_a_run_vocabulary_and_classes_are_assumed():
    line = "vocabulary: 8,000 source and 8,000 target rows (assumed from data.vocab_size)\n"
    assert line in described("transformer_tiny")[0]
    assert "vocabulary: 8,000 rows (assumed from data.vocab_size)\n" in described("gpt2")[0]
    masked = described("bert_base")[0]
    assert "vocabulary: 8,001 rows (assumed from data.vocab_size; 1 for noise symbols)\n" in masked
    assert "classes" not in masked
    text = described("bert_base", task="classify")[0]
    assert "vocabulary: 8,000 rows (assumed from data.vocab_size)\n" in text
    assert "classes: 2 (assumed; model.head.num_classes sets another number)\n" in text
    assert dict(row[:2] for row in table(text))["classifier"] == 2 * 768 + 2


TEXTS = [Pair("a b", "yes"), Pair("c", "no"), Pair("a", "perhaps")]


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(
    ("preset", "options", "expected"),
    [
        # Four symbols and the characters of all texts, or of the targets alone, with those of the noise.
        ("transformer_tiny", {}, "16 source and 16 target rows (of the run's tokenizer)"),
        ("gpt2", {}, "13 rows (of the run's tokenizer)"),
        ("bert_base", {}, "14 rows (of the run's tokenizer; 1 for noise symbols)"),
        ("bert_base", {"task": "classify"}, "classes: 3 (of the run's labels)"),
    ],
)
def test_vocabulary_and_classes_are_those_of_the_run(tmp_path, preset, options, expected):
    config = default_config(preset)
    config.update_from_flattened_dict({**options, "data.tokenizer": "char"})
    resolved = resolve(config)
    split = Split("train", "", lambda counts: iter(TEXTS))
    learn_tokenizers(tmp_path / "tokenizer", resolved.data, [split], build_task(resolved).vocabularies)
    assert expected in describe(resolved, tmp_path)
    assert expected not in describe(resolved)


def test_nothing_is_allocated():
    model = ModelConfig(vocab_size=1_000_000, d_model=8_192, d_ff=65_536, num_heads=64, num_layers=100)
    rows = parameter_rows(shapes(model))
    assert sum(count for _, _, count in rows) > 10**11


@pytest.mark.usefixtures("without_memory")
def test_the_default_is_the_base_model_of_the_paper():
    text = describe(Config())
    assert table(text)[-1][1] == 44_138_496 + 8_000 * 512


@pytest.mark.usefixtures("without_memory")
def test_an_update_of_full_rows_is_priced_and_timed_where_the_peak_is_known():
    options = {"data.max_source_length": 64, "data.max_target_length": 48, "data.tokens_per_update": 1_000}
    text, config = described("transformer_tiny", **options)
    assert full_shape(config) == (8, 64, 48)
    flops = 3 * 8 * sum(forward_flops(config.model.with_vocabulary(8_000, 8_000), text_work(64, 48)).values())
    assert f"update: 8 full rows of 64 + 48 tokens: {flops:.3g} FLOPs forward and backward\n" in text
    assert "MFU" not in text
    timed, _ = described("transformer_tiny", **options, **{"train.peak_flops": flops / 2, "mesh.data": 2})
    assert "its time on 2 x cpu: 1 s at 100% MFU, 2.5 s at 40% MFU\n" in timed


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize("preset", ["gpt2", "bert_base"])
def test_a_pair_of_texts_is_priced_as_two_texts(preset):
    options = {"data.max_source_length": 300, "data.max_target_length": 200, "data.tokens_per_update": 4_000}
    text, config = described(preset, task="embed", **PAIRS, **options)
    model = config.model.with_vectors()
    flops = 3 * 8 * sum(forward_flops(model, text_work(n, n))[config.model.family] for n in (300, 200))
    assert f"tokens: {flops:.3g} FLOPs forward and backward\n" in text


@pytest.mark.usefixtures("without_memory")
def test_rows_that_training_refuses_are_noted():
    note = (
        "note: training refuses rows as long as that: data.tokens_per_update=2000 cannot hold data.row_multiple=8 rows"
    )
    options = {"data.max_source_length": 250, "data.max_target_length": 250}
    assert note not in described("transformer_tiny", **options, **{"data.tokens_per_update": 2_000})[0]
    options["data.max_target_length"] = 251
    assert f"{note} of 251 tokens: " in described("transformer_tiny", **options, **{"data.tokens_per_update": 2_000})[0]


@pytest.mark.usefixtures("without_memory")
@pytest.mark.parametrize(
    ("preset", "options", "shape"),
    [
        ("gpt2", {"data.max_target_length": 128}, (64, 0, 128)),
        ("bert_base", {"data.max_source_length": 128}, (64, 128, 0)),
        ("vit_s16", {"data.tokens_per_update": 8 * 224 * 224}, (8, 224 * 224, 0)),
        ("t5_small", {"data.max_target_length": 513}, (16, 462, 104)),
        ("bart_base", {"data.max_target_length": 513}, (8, 513, 513)),
        ("transformer_tiny", {"data.batching": "packed", "data.max_source_length": 128}, (32, 128, 256)),
    ],
)
def test_full_rows_are_those_of_the_task(preset, options, shape):
    assert full_shape(described(preset, **options)[1]) == shape


@pytest.mark.usefixtures("without_memory")
def test_what_is_described_is_named():
    text, _ = described("transformer_tiny", **{"data.source": "generated", "data.name": "copy"})
    assert text.splitlines()[:5] == [
        "model: encdec of 4 + 4 layers, for task translate",
        "  post layernorm, sinusoidal positions, relu, 4 heads of 32",
        "  d_model 128, d_ff 256, dropout 0.3, init glorot, float32",
        "data: generated copy, bpe tokenizer, buckets, 8,192 tokens an update",
        "learning rate: noam, 0.0014 at update 4,000, 0.00028 at update 100,000",
    ]


def test_what_a_model_has_not_is_not_described():
    text, _ = described("luong_tiny")
    assert "d_ff" not in text
    assert "recurrent layers: lstm, attention: " in text


@pytest.mark.usefixtures("without_memory")
def test_what_a_model_has_is_described():
    more = {"model.num_kv_heads": 2, "model.attention_dropout": 0.1, "model.activation_dropout": 0.2}
    text, _ = described("transformer_tiny", **more)
    assert "4 heads of 32 over 2 of keys and values\n" in text
    assert "dropout 0.3, of attention weights 0.1, of feed-forwards 0.2, init" in text
    text, _ = described("transformer_tiny", **{"train.num_epochs": 3.0})
    assert "at update 100,000; train.num_epochs=3 may end it sooner\n" in text
