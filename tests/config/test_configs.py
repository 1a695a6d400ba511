"""The config files that come along: they say what they are, they resolve, and their models can be built."""

import ast
import functools
import importlib
import re
from pathlib import Path

import jax
import pytest

from jformer import main
from jformer.config import options, resolve
from jformer.models import build_model, param_shapes
from jformer.tasks.build import build_task
from jformer.tasks.task import sized

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def named(name):
    return resolve(importlib.import_module(f"configs.{name}").get_config())


def at(config, expected):
    """Return a config's values under the dotted keys of `expected`."""
    return {key: functools.reduce(getattr, key.split("."), config) for key in expected}


@functools.cache
def parameters(model):
    """Return the number of parameters, none of them allocated."""
    shapes = param_shapes(build_model(model))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_docstring_says_what_runs_on_what_with_which_command_to_which_score(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    title, _, rest = text.partition("\n\n")
    assert title.endswith(".")
    sections = dict(re.findall(r"^(\w+): +(.+?)(?=^\w+:|\Z)", rest, re.DOTALL | re.MULTILINE))
    assert set(sections) >= {"Data", "Model", "Command", "Expected"}
    assert " ".join(sections["Command"].split()).startswith(
        f"python -m jformer.main --config=configs/{path.name} --workdir=runs/"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_command_is_understood_and_its_model_can_be_built(path):
    command = re.search(
        r"python -m (jformer\.main .+?)\nExpected", ast.get_docstring(ast.parse(path.read_text())), re.DOTALL
    )
    config = main.configure(*main.read_flags(command[1].replace("configs/", f"{path.parent}/", 1).split()))
    assert config.seed == 0
    size = config.data.vocab_size
    assert parameters(sized(config.model, build_task(config), size, size)) > 50_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_averaged_checkpoints_exist_by_the_end(path):
    config = named(path.stem)
    if config.evaluate.weights == "average":
        assert config.train.num_steps // config.train.checkpoint_every >= config.evaluate.average_last


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_short_trial_is_one_override(path):
    arguments = [f"--config={path}", "--workdir=new", "--config.train.num_steps=5"]
    config = main.configure(*main.read_flags(["jformer.main", *arguments]))
    assert config.optim.warmup_steps(config.train.num_steps) <= 5 or config.optim.schedule in options.OPEN_SCHEDULES


def test_multi30k_tiny_is_the_published_recipe():
    """Wu et al. 2021: 4 + 4 layers of 128, 256, 4 heads; 10k joint BPE, 2 x 4096 tokens, 8,000 updates; beam 5."""
    expected = {
        "model.num_layers": 4, "model.decoder_layers": 4, "model.d_model": 128, "model.d_ff": 256,
        "model.num_heads": 4, "model.dropout": 0.3, "model.norm": "post", "model.activation": "relu",
        "model.shared_embedding": True, "model.tied_output": True, "data.tokenizer": "bpe", "data.vocab_size": 10_000,
        "data.vocab_shared": True, "data.normalization": "identity", "data.tokens_per_update": 8_192,
        "data.train": "train.lc.norm.tok", "data.valid": "val.lc.norm.tok",
        "data.test": ("test=test_2016_flickr.lc.norm.tok",), "optim.optimizer": "adam", "optim.b1": 0.9,
        "optim.b2": 0.98, "optim.schedule": "inverse_square_root", "optim.learning_rate": 0.005,
        "optim.warmup": 2_000, "optim.label_smoothing": 0.1, "train.num_steps": 8_000, "train.patience": 10,
        "evaluate.weights": "average", "evaluate.average_last": 10, "evaluate.tokenize": "none", "decode.beam_size": 5,
    }  # fmt: skip
    assert at(named("multi30k_tiny"), expected) == expected


def test_multi30k_raw_differs_in_its_text_and_score_only():
    raw = named("multi30k_raw")
    assert (raw.data.train, raw.data.test, raw.evaluate.tokenize) == ("train", ("test=test_2016_flickr",), "13a")
    tiny = named("multi30k_tiny")
    for section in ("model", "optim", "train", "decode", "mesh"):
        assert getattr(raw, section) == getattr(tiny, section)


PAPER = {  # Vaswani et al. 2017, sections 5 and 6
    "model.num_layers": 6, "model.decoder_layers": 6, "model.key_size": 64, "model.value_size": 64,
    "model.norm": "post", "model.activation": "relu", "model.positions": "sinusoidal", "model.embedding_scale": "input",
    "model.shared_embedding": True, "model.tied_output": True, "data.tokenizer": "bpe", "data.vocab_size": 37_000,
    "data.tokens_per_update": 25_000, "optim.optimizer": "adam", "optim.b1": 0.9, "optim.b2": 0.98,
    "optim.epsilon": 1e-9, "optim.schedule": "noam", "optim.learning_rate": 1.0, "optim.warmup": 4_000,
    "optim.label_smoothing": 0.1, "evaluate.weights": "average", "decode.beam_size": 4, "decode.length_penalty": 0.6,
    "decode.max_extra_length": 50,
}  # fmt: skip
BASE = {
    "model.d_model": 512, "model.d_ff": 2_048, "model.num_heads": 8, "model.dropout": 0.1,
    "train.num_steps": 100_000, "evaluate.average_last": 5,
}  # fmt: skip
BIG = {
    "model.d_model": 1_024, "model.d_ff": 4_096, "model.num_heads": 16, "model.dropout": 0.3,
    "train.num_steps": 300_000, "evaluate.average_last": 20,
}  # fmt: skip


@pytest.mark.parametrize(("name", "own", "millions"), [("base", BASE, 63.1), ("big", BIG, 214.2)])
def test_wmt14_is_the_papers(name, own, millions):
    config = named(f"wmt14_en_de_{name}")
    assert at(config, PAPER | own) == PAPER | own
    assert round(parameters(config.model.with_vocabulary(37_000, 37_000)) / 1e6, 1) == millions


def test_shakespeare_gpt_cpu_is_the_small_row_of_nanogpt():
    """Its README's command over config/train_shakespeare_char.py, and the windows of its get_batch."""
    expected = {
        "model.num_layers": 4, "model.num_heads": 4, "model.d_model": 128, "model.d_ff": 512, "model.max_length": 64,
        "model.bias": False, "model.dropout": 0.0, "model.attention_dropout": 0.0, "model.activation": "gelu",
        "model.norm": "pre", "model.norm_epsilon": 1e-5, "model.tied_output": True, "model.init": "gpt2",
        "data.tokenizer": "char", "data.share_of": "characters", "data.train": "input[:90%]",
        "data.valid": "input[90%:]", "data.max_target_length": 64, "data.tokens_per_update": 12 * 64,
        "data.piece_start": "previous", "optim.optimizer": "adamw", "optim.learning_rate": 1e-3,
        "optim.final_rate": 0.1, "optim.b1": 0.9, "optim.b2": 0.99, "optim.weight_decay": 0.1, "optim.clip_norm": 1.0,
        "optim.schedule": "cosine", "optim.label_smoothing": 0.0, "train.num_steps": 2_000,
    }  # fmt: skip
    config = named("shakespeare_gpt_cpu")
    assert at(config, expected) == expected
    assert config.optim.warmup_steps(config.train.num_steps) == 100
    assert parameters(config.model.with_vocabulary(69, 69)) - 4 * 128 - 64 * 128 == 795_904  # 0.80 M without positions


def test_reverse_numbers_luong_is_the_model_of_the_tutorial_of_joeynmt():
    """Its rnn_reverse.yaml, with the AdamW and the 24 sentences an update of the tutorial's text."""
    expected = {
        "model.num_layers": 1, "model.d_model": 64, "model.dropout": 0.1, "model.recurrent.cell": "lstm",
        "model.recurrent.bidirectional": True, "model.recurrent.attention": "general",
        "model.recurrent.input_feeding": True, "model.recurrent.embedding_size": 16, "model.recurrent.bridge": "zeros",
        "model.tied_output": False, "data.num_pairs": 50_000, "data.tokens_per_update": 24 * 26,
        "optim.optimizer": "adamw", "optim.learning_rate": 1e-3, "optim.weight_decay": 0.0, "optim.b1": 0.0,
        "train.best_by": "bleu", "train.eval_every": 1_000, "train.num_steps": 10_000, "evaluate.tokenize": "auto",
        "decode.beam_size": 1,
    }  # fmt: skip
    assert at(named("reverse_numbers_luong"), expected) == expected


def test_quickstart_needs_no_data_and_decodes_greedily():
    expected = {"data.source": "generated", "data.name": "quickstart", "data.dir": "", "decode.beam_size": 1}
    assert at(named("quickstart"), expected) == expected
