import ast
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jformer.config import as_config_dict, checks, default_config, load_config, options, resolve, resume, save_config
from jformer.config.config_files import override, parse_keys, run_config_file, with_keys
from jformer.config.options import Config
from jformer.data import tokenizers
from jformer.data.data_config import CHOICES, TOKENIZERS, SourceConfig
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError, check_choice, check_least, check_range
from jformer.models import build_model
from jformer.models.model_config import ModelConfig
from jformer.tasks.build import TASKS
from jformer.tasks.denoise import NOISES as MAKE_NOISE

ROOT = Path(__file__).parents[2]
DEFAULTS = options.flatten(dataclasses.asdict(Config()))
MIXED = {"mixture": ({"source": "generated", "name": "copy", "weight": 0.5},), "test": ("a=x", "b=y")}


def with_values(changes, preset="transformer_base"):
    """Return the default config as plain values, with dotted keys changed."""
    values = default_config(preset).to_dict()
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[name] = value
    return values


def refused(changes):
    """Return the one line that refuses a change of the defaults."""
    with pytest.raises(UserError) as error:
        resolve(with_values(changes))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown preset 'transformer_bas'; did you mean transformer_base\?"):
        default_config("transformer_bas")


def test_a_saved_config_is_read_back_equal(tmp_path):
    values = with_values(
        {"data.mixture": MIXED["mixture"], "data.test": MIXED["test"], "optim.learning_rate": 1e-5 / 3}
    )
    config = resolve(values)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    assert resolve(as_config_dict(config)) == config
    assert config.data.mixture == (SourceConfig(source="generated", name="copy", weight=0.5),)
    assert resolve({"data": {"mixture": config.data.mixture}}).data.mixture == config.data.mixture
    with pytest.raises(UserError, match=r"data\.mixture\[0\]\.weight='2' must be a finite number"):
        resolve({"data": {"mixture": (SourceConfig(weight="2"),)}})
    assert config.data.test_splits() == {"a": "x", "b": "y"}


def test_a_config_of_the_package_is_found_beside_a_folder_of_its_name_such_as_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("letters").mkdir()
    assert run_config_file(Path("letters")).data.name == "reverse"


@pytest.mark.parametrize("name", ["quickstart", "facts_qa", "scenes_caption"])
def test_a_resolved_config_resolves_to_itself(name):
    config = resolve(run_config_file(ROOT / "configs" / f"{name}.py"))
    assert resolve(config) == config


def test_defaults_survive_the_way_through_a_config_dict():
    assert resolve(default_config()) == Config() == resolve(default_config().to_dict())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", None])
def test_a_file_that_is_no_saved_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    missing = r"holds no run: name .* has no config\.json\)$"
    wrong = missing if content is None else r"config\.json: .*is this a run's directory\?$"
    with pytest.raises(UserError, match=wrong):
        load_config(path)


def typos():
    """Return 1-edit typos of every key, at every position, with the keys they may stand for."""
    near = {}
    for key in DEFAULTS:
        for i in range(len(key)):
            edits = [key[:i] + key[i + 1 :], key[:i] + "x" + key[i + 1 :], key[:i] + "x" + key[i:]]
            near.setdefault(edits[i % 3], set()).add(key)
    return {typo: keys for typo, keys in near.items() if typo not in DEFAULTS}


@pytest.mark.slow
def test_every_typo_of_every_key_is_refused_with_the_nearest_key():
    config = default_config()
    assert len(typos()) > 1_000
    for typo, keys in itertools.islice(typos().items(), 0, None, 7):  # 3 does not divide it: some of every kind
        with pytest.raises(UserError) as error:
            override(config, [f"--config.{typo}=1"])
        assert str(error.value) in {f"unknown config key {typo}; did you mean {key}?" for key in keys}


@pytest.mark.parametrize("key", ["model.num_layer", "data.mixture", "seeed", "modle"])
def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(key):
    values = default_config().to_dict()
    if key == "data.mixture":
        values["data"]["mixture"] = ({"tokenizer": "char"},)  # further corpora share the first one's tokens
    else:
        *section, name = key.split(".")
        (values[section[0]] if section else values)[name] = 1
    with pytest.raises(UserError, match=rf"^unknown config key {key}.*; (did you mean|choose one of)"):
        resolve(values)


WRONG = {
    bool: [0, 1, 0.0, "True", None, ()],
    int: [True, 1.0, "1", None, [1]],
    float: [True, "0.1", None, math.nan, math.inf, -math.inf, [0.1]],
    str: [1, True, None, b"x", ("x",), ["x"]],
    tuple: ["text", 1, None, {"a": 1}, (1,), (None,)],
}


def holds_numbers(value):
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], float)


def wrong_values(default):
    """Return values that are of another type than a default."""
    return [*WRONG[tuple][:4], ("x",), (None,)] if holds_numbers(default) else WRONG[type(default)]


@pytest.mark.parametrize("key", DEFAULTS)
def test_values_of_another_type_are_refused_for_every_key(key):
    for value in wrong_values(DEFAULTS[key]):
        shown = f"{key}[0]={value[0]!r}" if type(value) is type(DEFAULTS[key]) is tuple else f"{key}={value!r}"
        assert refused({key: value}).startswith(f"{shown} must be a ")


def test_a_section_that_is_none_is_refused_as_such():
    for given, shown in (({"model": "gpt2"}, "model='gpt2'"), ({"data": {"mixture": [3]}}, r"data.mixture\[0\]=3")):
        with pytest.raises(UserError, match=f"^{shown} must be a section of options$"):
            resolve(given)


@pytest.mark.parametrize("value", ["0.1", True, None])
def test_values_of_another_type_that_a_program_gives_are_refused_too(value):
    """`build_model(ModelConfig(dropout="0.1"))` is not read by `resolve`, which would look at types."""
    given = type("Section", (), {"d_model": 512})()
    given.d_model = given.dropout = value
    with pytest.raises(UserError, match=f"^model.dropout={value!r} must be a number$"):
        check_range("model", given, ("dropout",), 0, 1)
    with pytest.raises(UserError, match=f"^model.d_model={value!r} must be a whole number$"):
        check_least("model", given, ("d_model",), 1)
    with pytest.raises(UserError, match=f"^model.norm={value!r}; choose one of: pre, post$"):
        check_choice("model.norm", value, ("pre", "post"))


def test_scalars_of_numpy_and_paths_stand_for_values_of_python():
    config = default_config()
    config.optim.learning_rate = np.float32(0.5)
    config.train.update(num_steps=np.int64(300_000), init_from=Path("runs/a"))
    resolved = resolve({**config.to_dict(), "decode": {"ensemble": [Path("runs/b")], "patience": np.float64(0.5)}})
    assert [*map(type, (resolved.train.num_steps, resolved.decode.top_p))] == [int, float]
    assert (resolved.train.init_from, resolved.decode.ensemble) == ("runs/a", ("runs/b",))
    given = SimpleNamespace(d_model=np.int64(16), dropout=np.float32(0.5))
    check_least("model", given, ("d_model", "dropout"), 0)


def test_a_model_of_texts_needs_its_number_of_tokens():
    with pytest.raises(UserError, match=r"^model\.vocab_size=0: a model of texts needs its number of tokens$"):
        build_model(ModelConfig())


def test_whole_numbers_are_floats_too():
    config = resolve(with_values({"optim.learning_rate": 3, "train.peak_flops": 989 * 10**12}))
    assert isinstance(config.optim.learning_rate, float)
    assert config.train.peak_flops == 989e12


RANGES = [
    ("seed", -1, "0 to 4294967295"),
    ("seed", 2**32, "must be below 4294967296"),
    ("decode.seed", 2**32, "must be below 4294967296"),
    ("model.d_model", 2**31, "must be below 2147483648"),
    ("data.vocab_size", 2**31, "must be below 2147483648"),
    ("train.num_steps", -(2**31), "must be above -2147483648"),
    *((f"model.{key}", 0, "at least 1") for key in ("num_layers", "d_model", "d_ff", "num_heads", "max_length")),
    *((f"model.{key}", -1, "must be at least 0") for key in ("vocab_size", "num_decoder_layers", "d_k", "d_v")),
    *((f"model.{key}", "x", "choose one of: ") for key in ("norm", "activation", "positions", "dtype")),
    ("model.num_heads", 7, "must divide model.d_model=512, or set d_k and d_v"),
    ("model.dropout", 1.0, "below 0.99999"),
    ("model.lora.dropout", 0.999999, "below 0.99999"),
    ("model.dropout", -0.1, "at least 0"),
    ("model.target_vocab_size", 9, "differs from model.vocab_size=0"),
    ("data.tokenizer", "wrod", "choose one of: word, char, byte, bpe, unigram"),
    ("data.batching", "bucket", "choose one of: buckets, packed"),
    ("data.overlong", "keep", "choose one of: drop, cut"),
    ("data.piece_start", "eos", "choose one of: bos, previous"),
    ("data.labels", "two", "choose one of: one, several, number"),
    ("data.labels", "several", "is read by task='classify' only, not by 'translate'"),
    ("data.label_weights", "equal", "choose one of: none, balanced"),
    ("data.label_weights", "balanced", "is read by task='classify' only"),
    ("data.share_of", "words", "choose one of: lines, characters"),
    ("data.share_of", "characters", "may cut a line: it needs data.document='file', not 'line'"),
    ("data.normalization", "nfc", "choose one of: identity, nfkc"),
    ("data.source", "file", "choose one of: files, labelled, text, images, captions, tables, tfds, generated"),
    ("data.num_buckets", 0, "must be 1 to 8"),
    ("data.num_buckets", 9, "must be 1 to 8"),
    *((f"data.{key}", 0, "at least 1") for key in ("vocab_size", "num_pairs", "packed_length", "tokens_per_update")),
    ("data.row_multiple", -1, "at least 0"),
    ("data.length_multiple", -1, "at least 0"),
    ("model.relative.num_buckets", 0, "at least 1"),
    ("model.relative.max_distance", -1, "at least 1"),
    ("model.vision.image_size", -1, "at least 1"),
    ("model.vision.patch_size", 0, "at least 1"),
    ("model.vision.channels", 0, "at least 1"),
    ("model.vision.image_size", 32, "task='translate', which reads texts here, has no such option; use 224"),
    ("model.recurrent.embedding_size", -1, "must be at least 0"),
    ("model.recurrent.readout_size", -1, "must be at least 0"),
    *((f"data.max_{side}_length", 1, "at least 2") for side in ("source", "target")),
    ("data.cache_dir", "gs://mine/cache", "must be a folder on disk"),
    ("data.weight", 0.0, "above 0"),
    ("data.test", ("a=x", "a=y"), "names a key twice"),
    ("data.test", ("run=x",), "'run' cannot be a key; name the set, as in 'name=run'"),
    ("data.test", ("a/b",), "'a/b' cannot be a key; name the set, as in 'name=a/b'"),
    ("optim.loss", "mse", "choose one of: task, or name package.module:function"),
    ("optim.optimizer", "sgd", "choose one of: adam, adamw, adafactor"),
    ("optim.schedule", "step", f"choose one of: {', '.join(options.SCHEDULES)}"),
    *((f"optim.{key}", 1.0, "below 1") for key in ("b1", "b2", "label_smoothing")),
    *((f"optim.{key}", -0.5, "at least 0") for key in ("learning_rate", "epsilon", "weight_decay", "clip_norm")),
    ("optim.warmup", -1, "at least 0"),
    ("optim.warmup", 1.5, "whole updates (2147483647 at most), or a share below 1"),
    ("optim.decay", -1.0, "at least 0"),
    ("optim.final_rate", 1.5, "0 to 1"),
    ("optim.final_rate", 0.1, "is read by optim.schedule='cosine' or 'linear' or 'warmup_stable_decay'"),
    ("optim.weight_decay", 0.1, "optim.optimizer='adamw' only"),
    ("optim.epsilon", 0.0, "divides 0 by 0"),
    ("optim.epsilon", 1e-60, "divides 0 by 0"),
    ("optim.epsilon", 1e-40, "divides 0 by 0"),
    *((f"optim.{key}", 3e9, "2147483647 at most") for key in ("warmup", "decay")),
    *((key, 1e39, "at most 3.4e+38") for key in ("optim.learning_rate", "train.num_epochs", "decode.length_penalty")),
    *((f"decode.{key}", 2**20 + 1, "at most 1048576") for key in ("max_extra_length", "no_repeat_ngram")),
    ("optim.b1", 0.99999999999, "is 1 in float32"),
    ("optim.b2", 0.99999999999, "is 1 in float32"),
    ("evaluate.during", ("macro_f1",), "bleu"),
    ("evaluate.during_examples", 0, "at least 1"),
    ("evaluate.command", "sh -c 'a.py; b.py'", "';' separates commands, also within quotes: use a script"),
    ("evaluate.command", "python a.py; b/a --fast", "another score is named 'a', too: rename its file"),
    ("evaluate.command", "bleu.sh", "another score is named 'bleu', too"),
    ("decode.mbr_utility", "comet", "choose one of: chrf, bleu"),
    ("decode.rerank", "comet", "names no evaluate.command: there is none"),
    ("train.best_by", "bleu", "loss"),
    *(
        (f"train.{key}", 0, "at least 1")
        for key in ("num_steps", "log_every", "checkpoint_every", "keep_last", "accumulation", "max_skipped")
    ),
    *((f"train.{key}", -1, "at least 0") for key in ("eval_every", "patience", "samples")),
    *((f"train.{key}", -1.5, "at least 0") for key in ("num_epochs", "max_minutes", "checkpoint_minutes")),
    ("train.ema_decay", 1.0, "below 1"),
    *(
        ("train.profile_steps", steps, "must be FIRST:LAST, two updates from 1 to train.num_steps=100000, such as")
        for steps in ("10", "13:10", "0:3", "1:100001", "1:2:3", "a:b", "10:", ":3", "-1:3", " 1:2")
    ),
    ("train.checkpoint_every", 300, "so that the best evaluation has a checkpoint: set it to 100"),
    ("train.freeze", ("encoder", "(",), "is not a regular expression"),
    ("evaluate.weights", "first", "choose one of: last, best, average, ema"),
    ("evaluate.weights", "ema", "needs train.ema_decay above 0"),
    ("evaluate.scores", ("bleu", "blue"), "choose one of: bleu, chrf, ter"),
    ("evaluate.average_last", 0, "at least 1"),
    *((f"decode.{key}", 0, "at least 1") for key in ("beam_size", "batch_size", "max_extra_length")),
    ("decode.length_penalty", -0.1, "at least 0"),
    ("mesh.data", 0, "at least 1, or -1"),
    ("mesh.data", -2, "at least 1, or -1"),
    ("mesh.fsdp", 0, "at least 1, or -1"),
    ("mesh.fsdp", -1, "only one axis can be -1"),
    ("mesh.sequence", 0, "at least 1, or -1"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "remedy"), RANGES, ids=lambda x: str(x)[:30])
def test_a_value_that_cannot_work_is_refused_by_key_value_and_remedy(key, value, remedy):
    text = refused({key: value})
    shown = [str(value), repr(value), *(map(repr, value) if isinstance(value, tuple) else [])]
    assert any(f"{key}={form}" in text for form in shown), text
    assert remedy in text


CLASSIFIES = {"task": "classify", "model.family": "encoder", "data.source": "labelled"}
TWO_ENDS = {"tied_output": False, "recurrent.cell": "gru", "recurrent.bidirectional": True, "head.pooling": "last"}
PREFIX_LM = {"task": "prefix_lm", "model.family": "decoder"}
COMBINATIONS = [
    ({"model.num_heads": 7, "model.d_k": 64}, "model.num_heads=7 must divide model.d_model=512"),
    *(
        ({"mesh.sequence": 2, **given}, f"mesh.sequence=2: {option} needs whole rows: set mesh.sequence=1")
        for given, option in [
            (CLASSIFIES, "task='classify'"),
            ({"model.recurrent.cell": "lstm"}, "model.recurrent.cell='lstm'"),
            ({"model.positions": "transformer_xl"}, "model.positions='transformer_xl'"),
            ({"model.attention": "own.part:Attention"}, "model.attention='own.part:Attention'"),
            ({"model.norm_type": "own.part:Norm"}, "model.norm_type='own.part:Norm'"),
            ({"optim.loss": "own.part:loss"}, "optim.loss='own.part:loss'"),
        ]
    ),
    ({"model.d_model": 9, "model.num_heads": 3}, "model.d_model=9 must be even"),
    ({"model.positions": "learned", "model.max_length": 255}, "model.max_length=255 is below the"),
    (
        {**PREFIX_LM, "model.positions": "learned", "model.max_length": 511},
        "model.max_length=511 is below the 512 tokens that data allows",
    ),
    (
        {**PREFIX_LM, "model.recurrent.cell": "lstm"},
        "task='prefix_lm': a recurrent state (model.recurrent.cell) cannot",
    ),
    ({"data.vocab_shared": False}, "model.shared_embedding=True needs data.vocab_shared=True"),
    ({"train.eval_every": 0, "train.patience": 3}, "train.patience=3 needs evaluations: set train.eval_every"),
    ({"train.eval_every": 0, "evaluate.weights": "best"}, "evaluate.weights='best' needs evaluations"),
    (
        {"optim.schedule": "linear", "train.num_steps": 3_999},
        "optim.warmup=4000.0 take more updates than train.num_steps=3999, when optim.schedule='linear' ends: give",
    ),
    (
        {"optim.schedule": "warmup_stable_decay", "optim.warmup": 0.5, "optim.decay": 0.6},
        "optim.warmup=0.5 and optim.decay=0.6 take more updates than train.num_steps=100000",
    ),
    (
        {"train.accumulation": 3, "data.row_multiple": 8},
        "train.accumulation=3 must divide data.row_multiple=8, or set data.row_multiple=0 to derive it",
    ),
    (
        {"data.batching": "packed", "data.packed_length": 100, "data.length_multiple": 8},
        "data.length_multiple=8 must divide data.packed_length=100 of packed rows",
    ),
    (
        {"data.batching": "packed", "model.execution.rows": "one_text"},
        "model.execution.rows='one_text' needs data.batching='buckets', not 'packed': use 'auto'",
    ),
    (
        {"train.max_minutes": 90.0, "optim.schedule": "cosine", "optim.warmup": 0.1},
        "train.max_minutes=90 may end the run before optim.schedule='cosine', which ends at train.num_steps",
    ),
    (
        {"model.parametrization": "mup", "optim.optimizer": "adafactor"},
        "model.parametrization='mup' divides the rates of Adam: use optim.optimizer='adam' or 'adamw'",
    ),
    ({"decode.n_best": 3, "decode.beam_size": 2}, "decode.n_best=3 is more than decode.beam_size=2: lower it or"),
    (
        {"decode.search": "sample", "decode.n_best": 3},
        "decode.n_best=3: decode.search='sample' has decode.samples outputs: set that",
    ),
    ({"data.mixture": ({"weight": 101.0},)}, "weight=101.0"),
    ({"data.mixture": ({"train": ""},)}, "data.mixture[0].train=''"),
    ({"data.train": ""}, "data.train=''"),
    ({"data.valid": ""}, "train.eval_every=1000 needs data.valid"),
    ({"data.mixture": ({"test": ("test",)},)}, "data.test=('test', 'test') names a key twice"),
    ({"data.mixture_temperature": 0.5}, "mixture_temperature=0.5"),
    ({"data.language_symbols": "both"}, "language_symbols='both'"),
    (
        {"data.language_symbols": "source", "data.tokenizer": "char"},
        "needs data.tokenizer='bpe' or 'unigram', not 'char'",
    ),
    ({"data.language_symbols": "source", "task": "lm", "model.family": "decoder"}, "by task='translate' only"),
    ({"decode.target_language": "fr", "task": "lm", "model.family": "decoder"}, "by task='translate' only"),
    ({"data.character_coverage": 0.97}, "character_coverage=0.97"),
    ({"data.byte_fallback": True, "data.tokenizer": "word"}, "data.byte_fallback=True needs data.tokenizer='bpe'"),
    ({"data.symbols": ("a b",)}, "data.symbols: 'a b'"),
    ({"data.symbols": ("<BT>", "<BT>")}, "data.symbols: '<BT>'"),
    ({"data.symbols": ("<0x41>",), "data.byte_fallback": True}, "data.symbols: '<0x41>'"),
    ({"data.clean": ("characters=9-1",)}, "'characters=9-1' admits no text: write characters=LEAST-MOST"),
    ({"data.clean": ("ratio=0.5",)}, "'ratio=0.5' must be at least 1"),
    ({"decode.temperature": 1e-38, "decode.search": "sample"}, "decode.temperature=1e-38 must be at least 1e-06"),
    ({"data.vocabulary": "m.model", "data.split_digits": True}, "split_digits=True has no effect on data.vocabulary"),
    (
        {"data.piece_start": "previous", "data.overlong": "split"},
        "task='lm' and data.overlong='split', not 'translate'",
    ),
    (
        {"data.piece_start": "previous", "data.overlong": "cut", "task": "lm", "model.family": "decoder"},
        "needs task='lm' and data.overlong='split', not 'lm' and 'cut'",
    ),
    (
        {"task": "mlm", "model.family": "encoder", "data.source": "text", "data.mixture": ({"source": "conll"},)},
        "data.source='conll' has words and their tags: task='tag' learns them, not 'mlm'",
    ),
    (
        {"task": "tag", "model.family": "encoder", "data.source": "conll", "decode.ensemble": ("runs/b",)},
        "decode.ensemble=('runs/b',) is read by searches, but task='tag' answers in one pass: leave it out",
    ),
    (
        {"task": "mlm", "model.family": "encoder", "decode.search": "sample"},
        "decode.search='sample' is read by searches, but task='mlm' answers in one pass: leave it out",
    ),
    (
        {"task": "qa", "model.family": "encoder", "decode.forbid": ("the",)},
        "decode.forbid=('the',) is read by searches, but task='qa' answers in one pass: leave it out",
    ),
    (
        {"task": "classify", "model.family": "encoder", "data.source": "labelled", "decode.n_best": 3},
        "decode.n_best=3: task='classify' has one answer to an input: leave it out",
    ),
    (
        {"decode.search": "mbr", "decode.samples": 4, "decode.rerank": "a", "evaluate.command": "a"},
        "decode.rerank='a' with decode.search='mbr', which ranks by itself",
    ),
    (
        {"decode.mbr_utility": "a", "evaluate.command": "a"},
        "decode.mbr_utility='a' is read by decode.search='mbr' only",
    ),
    ({"decode.mbr_utility": "bleu"}, "decode.mbr_utility='bleu' is read by decode.search='mbr' only: set that"),
    ({"data.test": ("a", "a.b"), "evaluate.command": "c.py; b.py"}, "both write outputs/a.b.txt: rename the set"),
    (
        {"decode.beam_size": 1, "decode.rerank": "a", "evaluate.command": "a"},
        "decode.rerank='a' with decode.search='beam' has one candidate to choose from: raise decode.beam_size",
    ),
    ({"decode.search": "mbr"}, "decode.search='mbr' has one candidate to choose from: raise decode.samples"),
    (
        {"task": "classify", "model.family": "encoder", "model.head.pooling": "none", "data.source": "labelled"},
        "model.head.pooling='none' classifies each token: task='classify' needs one vector for each text",
    ),
    (
        {**CLASSIFIES, "model.recurrent.cell": "lstm"},
        "model.head.pooling='first' reads a recurrent state that has read one token: use 'final', or 'mean'",
    ),
    (
        {**CLASSIFIES, "model.recurrent.cell": "lstm", "model.head.num_segments": 2},
        "model.head.num_segments=2 is for BERT: a recurrent model has none",
    ),
    (
        {**CLASSIFIES, **{f"model.{key}": value for key, value in TWO_ENDS.items()}},
        "model.head.pooling='last' reads a recurrent state of a direction that has read one token: use 'final', or",
    ),
    (
        {**CLASSIFIES, "model.head.pooling": "final"},
        "model.head.pooling='final' is for recurrent models: set model.recurrent.cell, or use 'last'",
    ),
    (
        {"data.mixture": ({"source": "web"},)},
        "source='web'; choose one of: files, labelled, text, images, captions, tables, tfds",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), COMBINATIONS, ids=lambda x: str(x)[:40])
def test_combinations_that_cannot_work_are_refused(changes, expected):
    assert expected in refused(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.num_heads": 7, "model.d_k": 16, "model.d_v": 8},
        {"task": "qa", "model.family": "encoder", "data.source": "squad", "decode.n_best": 9, "decode.beam_size": 1},
        {"task": "my:task", "model.family": "encoder", "data.source": "squad", "data.doc_stride": 64},
        {
            "task": "my:task",
            "data.source": "conll",
            "data.labels": "several",
            "data.language_symbols": "source",
            "data.source_language": "de",
            "data.target_language": "fr",
            "model.vision.source": True,
        },
        {"task": "my:task", "optim.temperature": 0.1, "data.piece_start": "previous", "data.overlong": "split"},
        {"model.positions": "learned", "model.max_length": 256},
        {"data.vocab_shared": False, "model.shared_embedding": False},
        {"optim.optimizer": "adamw", "optim.weight_decay": 0.1},
        {"train.eval_every": 0},
        {"train.num_steps": 5},
        {"optim.schedule": "linear", "train.num_steps": 4_000},
        {"optim.schedule": "cosine", "optim.warmup": 0.04, "optim.final_rate": 0.1, "train.num_steps": 5},
        {"train.num_steps": 5, "evaluate.weights": "average", "evaluate.average_last": 6},
        {"train.accumulation": 3},
        {"train.ema_decay": 0.999, "evaluate.weights": "ema"},
        {"seed": 2**32 - 1, "decode.search": "sample", "decode.seed": 2**32 - 1},
    ],
    ids=str,
)
def test_their_neighbours_that_work_are_accepted(changes):
    resolve(with_values(changes))


def test_configs_offer_what_the_data_room_has():
    of_tasks = {"label", "labels", "number", "tag"}  # not to be chosen
    assert {*TOKENIZERS, *of_tasks} == set(tokenizers.TOKENIZERS)
    assert set(CHOICES["noise"]) == set(MAKE_NOISE)
    assert set(options.TASKS) == set(TASKS)


OTHER = {bool: lambda v: not v, int: lambda v: v + 2, float: lambda v: v + 0.25, str: lambda v: v + "x"}
ALLOWED = {
    "train.num_steps", "train.log_every", "train.eval_every", "train.checkpoint_every", "train.keep_last",
    "train.patience", "train.max_skipped", "train.samples", "train.peak_flops", "train.profile_steps",
    "train.stall_seconds", "train.accumulation", "train.trackers", "train.num_epochs", "train.max_minutes",
    "train.checkpoint_minutes",
    "data.dir", "data.cache_dir", "data.test",
    "evaluate.weights", "evaluate.average_last", "evaluate.scores", "evaluate.tokenize", "evaluate.lowercase",
    "evaluate.during", "evaluate.during_examples", "evaluate.command", "evaluate.command_seconds",
    *(f"decode.{field.name}" for field in dataclasses.fields(DecodeConfig)),
    "mesh.data", "mesh.sequence", "mesh.fsdp", "mesh.tensor", "model.execution.remat", "model.execution.unroll",
    "model.execution.attention_chunk", "model.execution.attention_kernel", "model.execution.rows",
}  # fmt: skip


def changed(config, key, value):
    """Return a config with one dotted key replaced, unchecked."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_resumed_run_may_change_only_what_its_updates_do_not_depend_on(key):
    old = DEFAULTS[key]
    added = {"name": "x"} if key == "data.mixture" else 1.0 if holds_numbers(old) else "x"
    new = (*old, added) if isinstance(old, tuple) else OTHER[type(old)](old)
    given = changed(Config(), key, new)
    assert resume.differences(Config(), given) == {key: (old, new)}
    if key in ALLOWED:
        resume.resume_config(Config(), given)
    else:
        if key in resume.LENGTHS:
            resume.resume_config(Config(), given, training=False)
        else:
            with pytest.raises(UserError, match="it cannot change after training"):
                resume.resume_config(Config(), given, training=False)
        expected = f"{key}={new!r} but this workdir was trained with {old!r}: set it back or use a new --workdir"
        with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
            resume.resume_config(Config(), given)


@pytest.mark.parametrize("schedule", options.SCHEDULES)
def test_a_longer_run_is_another_one_where_the_schedule_ends_with_it(schedule):
    saved = resolve(with_values({"optim.schedule": schedule}))
    longer = resolve(with_values({"optim.schedule": schedule, "train.num_steps": 200_000}))
    if schedule in ("cosine", "linear", "warmup_stable_decay"):
        with pytest.raises(UserError, match=r"^train\.num_steps=200000 "):
            resume.resume_config(saved, longer)
    else:
        resume.resume_config(saved, longer)


@pytest.mark.parametrize(("warmup", "decay", "steps"), [(0.5, 0.5, 7), (0.1, 0.9, 15)])
def test_shares_of_a_run_fill_it_however_they_are_rounded(warmup, decay, steps):
    values = {"optim.schedule": "warmup_stable_decay", "optim.warmup": warmup, "optim.decay": decay}
    assert resolve(with_values({**values, "train.num_steps": steps})).optim.ramp_steps(steps) == steps


def test_a_longer_run_is_another_one_where_its_warmup_is_a_share():
    saved, longer = (resolve(with_values({"optim.warmup": 0.1, "train.num_steps": n})) for n in (100, 200))
    with pytest.raises(UserError, match=r"^train\.num_steps=200 but"):
        resume.resume_config(saved, longer)


def test_epochs_become_updates_once_the_batches_are_known_and_stay_so_when_a_run_goes_on():
    given = resolve(with_values({"train.num_epochs": 2.5, "train.num_steps": 1_000}))
    counted = checks.count_epochs(given, 300)
    assert counted.train.num_steps == 750
    assert resume.resume_config(counted, given) == counted
    more = resume.resume_config(counted, changed(counted, "train.num_epochs", 5.0))  # as --config.train.num_epochs does
    assert checks.count_epochs(more, 300).train.num_steps == 1_500
    assert checks.count_epochs(Config(), 300) == Config()
    with pytest.raises(
        UserError, match=r"num_epochs=2\.5 takes 1,250 updates \(500 an epoch\), more than train\.num_steps=1000: "
    ):
        checks.count_epochs(given, 500)
    ending = resolve(with_values({"train.num_epochs": 1.0, "optim.schedule": "linear"}))
    with pytest.raises(UserError, match=r"warmup=4000\.0 take more updates than train\.num_steps=300"):
        checks.count_epochs(ending, 300)
    with pytest.raises(UserError, match=r"^train\.num_epochs=2\.0 but this workdir was trained with 1\.0"):
        resume.resume_config(ending, changed(ending, "train.num_epochs", 2.0))


def test_a_resumed_run_finds_its_mixture_in_another_folder_and_no_other_corpus():
    saved, moved, other = (
        resolve(with_values({"data.mixture": ({"dir": folder, "train": name},)}))
        for folder, name in (("a", "x"), ("b", "x"), ("b", "y"))
    )
    assert resume.resume_config(saved, moved) == moved
    scored = {"train": "", "test": ("further=test",)}  # not trained on
    further = resolve(with_values({"data.mixture": ({"dir": "a", "train": "x"}, scored)}))
    assert resume.resume_config(saved, further) == further
    with pytest.raises(UserError, match=r"^data\.mixture="):
        resume.resume_config(saved, other)


def test_rows_divide_by_what_the_mesh_needs_and_a_resumed_run_keeps_it():
    for shards, accumulation, expected in [(1, 1, 8), (8, 1, 8), (2, 4, 8), (256, 1, 256), (6, 1, 24), (1, 3, 24)]:
        config = resolve(with_values({"train.accumulation": accumulation}))
        assert checks.divide_rows(config, shards).data.row_multiple == expected
    saved = checks.divide_rows(Config(), 6)
    assert resume.resume_config(saved, Config()) == saved
    with pytest.raises(UserError, match=r"data\.row_multiple=24 must be a multiple of 16: mesh\.data x mesh"):
        checks.divide_rows(saved, 16)
    with pytest.raises(UserError, match=r"train\.accumulation=1; choose others, or a new --workdir$"):
        checks.divide_rows(saved, 16, fixed=True)
    with pytest.raises(UserError, match=r"^data\.row_multiple=8 but this workdir was trained with 24: "):
        resume.resume_config(saved, resolve(with_values({"data.row_multiple": 8})))


def test_a_dtype_that_was_chosen_stays():
    chosen, auto = (resolve(with_values({"model.dtype": dtype})) for dtype in ("bfloat16", "auto"))
    assert resume.resume_config(chosen, auto) == chosen
    with pytest.raises(UserError, match=r"^model\.dtype='float32' but this workdir was trained with 'bfloat16': "):
        resume.resume_config(chosen, Config())


def test_every_key_is_read_beyond_the_config():
    kinds = [type(part) for part in (Config(), *vars(Config()).values(), *vars(ModelConfig()).values())]
    kinds = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    defining = {inspect.getsourcefile(kind) for kind in kinds} | {checks.__file__}
    files = [path for path in (ROOT / "jformer").rglob("*.py") if str(path) not in defining]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {"source_vectors", "target_vectors"}  # warm_start.put_vectors reads those of a side by their names
    for kind in kinds:
        for method in vars(kind).values():  # what its own methods read, except checks and those of every dataclass
            function = inspect.unwrap(getattr(method, "fget", method))  # of a property; of what checks shapes in tests
            if inspect.isfunction(function) and not re.match("_*check|__", function.__name__):
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
                read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        unread = {field.name for field in dataclasses.fields(kind)} - read
        assert not unread, kind.__name__


def test_a_saved_config_is_readable_json(tmp_path):
    save_config(Config(), tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text()
    assert list(json.loads(text)) == ["schema", *(field.name for field in dataclasses.fields(Config)), "digest"]
    assert text.endswith("}\n")


def test_a_config_without_a_schema_and_newer_options_is_read_and_one_of_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "config.json"
    save_config(Config(), path)
    saved = json.loads(path.read_text())
    older = {key: value for key, value in saved.items() if key not in ("schema", "digest")}
    del older["model"]["window"], older["seed"]
    path.write_text(json.dumps(older))
    assert load_config(path) == Config()
    path.write_text(json.dumps({**older, "schema": 2}))
    with pytest.raises(UserError, match=r"config\.json: schema=2, and this version of jformer reads up to 1: upgrade"):
        load_config(path)


def test_a_saved_config_that_was_changed_is_named_and_one_written_by_hand_is_read(tmp_path):
    path = tmp_path / "config.json"
    save_config(Config(), path)
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 3'))
    with pytest.raises(
        UserError, match=r"config\.json is damaged: its content does not match its digest; restore it, or remove the"
    ):
        load_config(path)
    path.write_text('{"seed": 3}')
    assert load_config(path).seed == 3


def test_a_saved_config_is_written_only_where_it_changed(tmp_path):
    path = tmp_path / "config.json"
    save_config(Config(), path)
    before = path.stat()
    save_config(Config(), path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    save_config(changed(Config(), "seed", 1), path)
    assert path.stat().st_ino != before.st_ino, "written beside and renamed"
    assert load_config(path).seed == 1


def test_a_saved_config_with_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"seed": 1, "task": "lm", "seed": 2}')
    with pytest.raises(UserError, match=r"the key 'seed' occurs twice in one object; keep one"):
        load_config(path)


@pytest.mark.parametrize(("options", "says"), [
    ({"data.tokenizer": "word", "data.split_digits": True}, "data.split_digits=True needs subwords or characters"),
    ({"data.tokenizer": "char", "data.split_digits": True}, ""),  # as they are
    ({"decode.diversity": 2.0}, "decode.diversity=2.0 acts between groups of beams: set decode.beam_groups"),
    ({"decode.coverage_penalty": 0.2, "decode.ended_first": False}, "decode.ended_first=False ranks others with them"),
    ({"decode.diversity": 2.0, "decode.beam_size": 1}, ""),  # greedy search ranks nothing
    ({"decode.diversity": 2.0, "decode.search": "my:search"}, ""),
    ({"decode.diversity": 2.0, "decode.beam_groups": 2}, ""),
    ({"optim.decay": 0.3}, "optim.decay=0.3 is read by optim.schedule='warmup_stable_decay' only"),
    ({"optim.decay": 0.3, "optim.schedule": "my:schedule"}, ""),
    ({"optim.optimizer": "adafactor", "optim.epsilon": 1e-30},
     "optim.epsilon=1e-30 is not read by optim.optimizer='adafactor': leave it out"),
    ({"model.recurrent.cell": "lstm", "model.recurrent.bridge": "dense", "model.execution.remat": "full"},
     "model.execution.remat='full': a recurrent model has no such option; use 'none'"),
    ({"model.relative.num_buckets": 64}, "model.relative.num_buckets=64: model.positions='sinusoidal' has no such"),
    ({"model.relative.num_buckets": 64, "model.positions": "relative"}, ""),
    ({"model.family": "vit", "task": "classify", "data.source": "images"}, "model.embedding_scale='input' is for"),
    ({"model.family": "vit", "task": "classify", "data.source": "images", "model.embedding_scale": "none"}, ""),
    ({"train.best_by": "accuracy", "train.eval_every": 0}, "train.best_by='accuracy' needs evaluations"),
    ({"model.lora.rank": 4, "model.lora.alpha": 0.0, "train.init_from": "runs/a"}, "model.lora.alpha=0 multiplies"),
    ({"evaluate.scores": ("my:auc",), "task": "classify", "model.family": "encoder", "data.source": "labelled"},
     "evaluate.scores='my:auc' scores texts, and task='classify' is not scored by them"),
    ({"evaluate.scores": ("my:auc",), "task": "my:task"}, ""),
    ({"evaluate.during": ("span_f1",), "task": "my:task", "train.best_by": "span_f1"}, ""),
])  # fmt: skip
def test_what_others_leave_without_effect_is_refused_in_a_new_run_and_a_saved_one_opens(options, says):
    config = with_keys(default_config(), options)
    with pytest.raises(UserError, match=re.escape(says)) if says else contextlib.nullcontext():
        checks.refuse_unread(config)


def test_the_last_of_two_lists_counts_as_the_last_of_two_numbers_does():
    given = ["--config.data.test=a", "--config.data.test=b=c", "--config.seed=1", "--config.seed=2"]
    config = resolve(override(default_config(), given))
    assert (config.data.test, config.seed) == (("b=c",), 2)
    assert resolve(override(default_config(), [*given, "--config.data.test="])).data.test == ()


def test_what_arguments_set_is_what_a_command_line_sets():
    set_here = {
        "evaluate.scores": (),
        "data.test": ("a", "b=c"),
        "data.dir": "a b",
        "optim.learning_rate": 3.0,
        "seed": 2,
    }
    given = ["evaluate.scores=", "data.test=('a', 'b=c')", "data.dir=a b", "optim.learning_rate=3", "seed=1", "seed=2"]
    assert parse_keys(default_config(), [f"--config.{each}" for each in given]) == set_here


def test_a_parent_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = resolve(with_values({"train.init_from": "runs/a"}))
    saved = checks.name_parent(given)
    assert saved.train.init_from == str(tmp_path / "runs" / "a")
    assert resume.resume_config(saved, given) == saved
    assert resume.resume_config(given, saved) == given  # of a run that an older version began
    monkeypatch.chdir("/")
    assert resume.resume_config(saved, given) == saved  # its folder was moved
    adapters = {"train.init_from": saved.train.init_from, "model.lora.rank": 2}
    moved = resolve(with_values(adapters | {"train.init_from": "runs/a"}))
    assert resume.resume_config(resolve(with_values(adapters)), moved).train.init_from == "runs/a"  # to be read there
    with pytest.raises(UserError, match=r"train\.init_from='runs/b' but this workdir was trained with"):
        resume.resume_config(saved, resolve(with_values({"train.init_from": "runs/b"})))
