"""A run of ours becomes a directory of theirs and comes back as a run; what does not fit together is refused."""

import dataclasses
import json
import re
import sys

import jax
import numpy as np
import pytest
from etils.epath import Path

import jformer
from jformer.checkpoints import weights
from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import default_config, load_config, resolve, save_config
from jformer.config.options import Config
from jformer.data.data_config import DataConfig
from jformer.data.tokenizers import NumberTokenizer, Symbols, learn
from jformer.data.tokenizers.pretrained import FastTokenizer
from jformer.data.vocabularies import directed, load_tokenizers
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.evaluation.evaluate import evaluate
from jformer.models import ExecutionConfig, build_model
from jformer.models.lora_config import LoraConfig
from jformer.storage import run_path
from jformer.tools.hf import generation_config as generation
from jformer.tools.hf import peft, vocabulary
from jformer.tools.hf.__main__ import main
from jformer.tools.hf.convert import FAMILIES, ORIGIN, Texts, import_model, renamed
from jformer.tools.hf.sentence_modules import read_modules, write_modules
from jformer.tools.hf.vocabulary import TokenizerFiles, read_kind, read_labels
from jformer.tools.hf.write_model import StoredRun, export_model, symbol_fields
from jformer.trainer import train
from tests.conftest import draw_params
from tests.tools.hf import small_runs

tokenizers = pytest.importorskip("tokenizers", reason="the extra hf is not installed")
pytest.importorskip("safetensors", reason="the extra hf is not installed")
WORDS = ["<pad>", "</s>", "<unk>", "a", "house", "red"]
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def tokenizer():
    """Return a tokenizer of words, as T5's symbols lie."""
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, range(6), strict=True)), unk_token="<unk>"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return FastTokenizer(fast.to_str(), {"pad": 0, "bos": 0, "eos": 1, "unk": 2})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Make a run of a tiny T5 with random weights."""
    return write_run(Path(tmp_path_factory.mktemp("run")))


def write_run(directory, **model):
    values = default_config("t5_small")
    values.model.update({"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "vocab_size": 6, **model})
    values.update(task="translate")
    values.data.update(source="files", overlong="drop", max_source_length=12, max_target_length=12)
    values.decode.update(beam_size=1, length_penalty=0.0, max_extra_length=5, max_length=6)
    config = resolve(values)
    model = build_model(dataclasses.replace(config.model, execution=ExecutionConfig(unroll=1), target_vocab_size=6))
    params = draw_params(model)
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer().save(directory / "tokenizer", "shared")
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(0, {"params": params}, {"step": 0, "config": dataclasses.asdict(config)}, None)
    checkpoints.close()
    save_config(config, directory / "config.json")
    return directory


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("gpt2", "transformer.wte.weight", "transformer.wte.weight"),
        ("gpt2", "wte.weight", "transformer.wte.weight"),
        ("gpt2", "lm_head.weight", "lm_head.weight"),
        ("bert", "bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
    ],
)
def test_names_in_older_files_are_read_as_todays(family, name, expected):
    assert renamed(FAMILIES[family], [name, "lm_head.weight"])[name] == expected


@pytest.fixture(scope="module")
def exported(workdir, tmp_path_factory):
    target = tmp_path_factory.mktemp("theirs") / "model"
    export_model(str(workdir), target)
    return target


@pytest.fixture
def model_dir(exported, tmp_path):
    """Return a copy of the exported model, to be damaged."""
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(path, **fields):
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **fields}))


def test_a_run_becomes_a_directory_of_theirs(exported):
    assert {path.name for path in exported.iterdir()} == FILES
    fields = json.loads((exported / "config.json").read_text())
    assert (fields["model_type"], fields["d_model"], fields["tie_word_embeddings"]) == ("t5", 16, True)
    assert (fields["decoder_start_token_id"], fields["eos_token_id"], fields["pad_token_id"]) == (0, 1, 0)


def test_what_was_exported_comes_back_and_answers_as_before(workdir, exported, tmp_path):
    from jformer.inference.predict import load

    assert main(["import", str(exported), f"--workdir={tmp_path / 'again'}"]) == 0
    before, after = load(str(workdir)), load(str(tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    texts = ["a red house", "red red", "unheard of"]
    assert after.predict(texts) == before.predict(texts)
    assert load_config(Path(tmp_path) / "again" / "config.json").decode.max_length == 6


@pytest.mark.slow
def test_layers_that_share_their_parameters_become_equal_layers(tmp_path):
    from jformer.inference.predict import load

    run = write_run(Path(tmp_path / "run"), num_layers=2, num_decoder_layers=3, shared_layers=True)
    export_model(str(run), tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), f"--workdir={tmp_path / 'again'}"]) == 0
    before, after = load(str(run)), load(str(tmp_path / "again"))
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        kernel = after.params[stack]["block"]["feed_forward"]["down"]["kernel"]
        np.testing.assert_array_equal(
            kernel, np.repeat(before.params[stack]["block"]["feed_forward"]["down"]["kernel"], layers, 0)
        )
    texts = ["a red house", "red red", "unheard of"]
    assert after.predict(texts) == before.predict(texts)


def test_two_exports_are_the_same_bytes(exported, tmp_path):
    import_model(exported, str(tmp_path / "again"), Texts())
    export_model(str(tmp_path / "again"), tmp_path / "twice")
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("file", "fields", "says"), [
    ("config.json", {"model_type": "mamba"}, "model_type='mamba'; there are: gpt2, bert"),
    ("config.json", {"architectures": ["T5Own"], "num_decoder_layers": 2},
     r"\['T5Own'\] of t5; these can be imported: T5ForCond.*decoder\.block\.1\.\S* \(our \S*\) is missing"),
    ("config.json", {"d_ff": 25}, r"wi\.weight \(24, 16\) gives \(16, 24\), our .* needs \(16, 25\)"),
    ("config.json", {"vocab_size": 5}, "tokenizer has 6 ids and config.json vocab_size=5"),
    ("config.json", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(model_dir, tmp_path_factory, file, fields, says):
    edit(model_dir / file, **fields)
    target = tmp_path_factory.mktemp("new") / "run"
    with pytest.raises(UserError, match=says):
        import_model(model_dir, str(target), Texts())
    assert not target.exists()


@pytest.mark.parametrize(("flags", "fields", "says"), [
    ([], {"model_type": None, "architectures": ["MyT5"]}, "no model_type; .*import it as one of .* --model_type"),
    (["--model_type=t55"], {"model_type": None}, r"--model_type='t55'; choose one of: .*\(did you mean 't5'\?\)"),
    (["--model_type=bert"], {}, "--model_type=bert, and config.json has model_type='t5': leave the option out"),
    (["--model_type=t5"], {"model_type": "my-t5", "architectures": ["MyT5"]}, ""),
    (["--model_type=t5"], {"model_type": None, "architectures": None}, ""),
    (["--do_lower_case=true"], {}, "--do_lower_case=True is for bert, distilbert, not t5: leave it out"),
    (["--source_language=de"], {}, "--source_language=de is for mbart, m2m_100, not t5: leave it out"),
])  # fmt: skip
def test_an_option_names_the_family_that_config_json_does_not(model_dir, tmp_path, capsys, flags, fields, says):
    edit(model_dir / "config.json", **fields)
    assert main(["import", str(model_dir), f"--workdir={tmp_path / 'run'}", *flags]) == (2 if says else 0)
    found = capsys.readouterr()
    if says:
        assert re.search(says, found.err)
    else:
        assert found.out.endswith("architectures=['MyT5']\n") == bool(fields["architectures"])


def test_what_the_system_refuses_is_one_line(tmp_path, capsys):
    long = tmp_path / ("x" * 300)
    assert main(["import", str(long), f"--workdir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "is longer than a file name can be: shorten it" in told


@pytest.mark.parametrize(("file", "content", "says"), [
    ("config.json", "[]", "must be a JSON object"), ("config.json", "{", "is not a JSON"),
    ("config.json", '{"d_ff": 1, "d_ff": 2}', "the key 'd_ff' occurs twice"),
    ("tokenizer.json", "{}", "is not a tokenizer"), ("config.json", None, "is not there"),
    ("tokenizer.json", None, "has no tokenizer.json"), ("model.safetensors", None, "has neither"),
])  # fmt: skip
def test_damaged_files_are_one_line(model_dir, tmp_path_factory, capsys, file, content, says):
    if content is None:
        (model_dir / file).unlink()
    else:
        (model_dir / file).write_text(content)
    assert main(["import", str(model_dir), f"--workdir={tmp_path_factory.mktemp('new') / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("jformer: ")
    assert told.count("\n") == 1
    assert says in told


def test_an_id_far_past_all_others_is_refused_before_lists_of_all_ids_are_made(model_dir, tmp_path):
    stored = json.loads((model_dir / "tokenizer.json").read_text())
    stored["model"]["vocab"][next(reversed(stored["model"]["vocab"]))] = 2**31
    (model_dir / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"its tokenizer has 6 tokens and ids up to 2147483648; fetch it again"):
        import_model(model_dir, str(tmp_path / "run"), Texts())


def test_a_language_is_not_the_piece_that_is_spelt_as_its_code():
    vocabulary = TokenizerFiles.__new__(TokenizerFiles)
    vocabulary.ids = {"en": 5, "__en__": 9, "deu_Latn": 7}
    assert vocabulary.language("en", "source_language") == 9
    assert vocabulary.language("deu_Latn", "target_language") == 7


@pytest.mark.parametrize("legacy", [False, True])
def test_languages_stand_where_nllb_had_them_at_first_if_its_tokenizer_says_so(legacy, tmp_path):
    tokenizer = load_tokenizers(small_runs.nllb(tmp_path / "run") / "tokenizer")[0]
    (tmp_path / "tokenizer.json").write_text(tokenizer.content)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="NllbTokenizerFast", legacy_behaviour=legacy)
    files = TokenizerFiles(tmp_path, "m2m_100", {})
    eng, deu = (files.ids[name] for name in ("eng_Latn", "deu_Latn"))
    sides = [files.tokenizer(side, files.symbols(side, language, 2), "")
             for side, language in (("source", "eng_Latn"), ("target", "deu_Latn"))]  # fmt: skip
    expected = ((), (eng,), 2, (deu,)) if legacy else ((eng,), (), 2, (deu,))
    assert (*sides[0].symbols[4:6], sides[1].symbols.bos, sides[1].symbols.before) == expected
    back = directed(sides, DataConfig(), ("deu_Latn", "eng_Latn"))
    expected = ((), (deu,), 2, (eng,)) if legacy else ((deu,), (), 2, (eng,))
    assert (*back[0].symbols[4:6], back[1].symbols.bos, back[1].symbols.before) == expected


@pytest.mark.parametrize(
    ("fields", "classes", "kind"),
    [
        ({}, 1, "number"), ({"problem_type": "regression"}, 1, "number"), ({}, 2, "one"),
        ({"problem_type": "single_label_classification"}, 1, "number"),  # of one label the probability is always 1
        ({"problem_type": "multi_label_classification"}, 1, "several"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, 1, "several"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 1, "several"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "number"),
    ],
)  # fmt: skip
def test_one_class_is_a_number_or_a_probability(fields, classes, kind):
    assert read_kind(fields, classes) == kind


def test_classes_are_counted_by_tensors_and_those_without_a_name_are_numbered():
    assert read_labels({"id2label": {"0": "no", "1": "yes"}, "num_labels": 3}, 3) == ["no", "yes", "LABEL_2"]
    with pytest.raises(UserError, match="id2label must name the classes 0 to 1"):
        read_labels({"id2label": {"0": "no", "2": "yes"}}, 2)
    with pytest.raises(UserError, match="problem_type='regression' with 3 labels"):
        read_kind({"problem_type": "regression"}, 3)


def test_labels_of_several_are_named():
    config = default_config("bert_base")
    config.task, config.data.source, config.data.labels = "classify", "labelled", "several"
    labels = learn("labels", ["a,b"], 10, "identity", False)
    fields = symbol_fields(StoredRun(Path(), resolve(config), (tokenizer(), labels)))
    assert (fields["problem_type"], fields["id2label"]) == ("multi_label_classification", {0: "a", 1: "b"})


def test_a_run_that_gives_numbers_gives_them_after_an_export_in_the_unit_of_its_texts(tmp_path):
    from jformer.inference.predict import load

    run = small_runs.bert(tmp_path / "run", numbers=NumberTokenizer(250.0, 40.0))
    export_model(str(run), tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["problem_type"] == "regression"
    import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    texts = ["the cat sat", "a hat\trats"]
    before, after = (load(path).predict(texts) for path in (run, tmp_path / "again"))
    assert [*map(float, after)] == pytest.approx([*map(float, before)], rel=1e-5)
    assert before[0] != before[1]


def test_a_run_that_restores_spans_goes_there_as_the_translator_of_its_architecture(workdir, tmp_path):
    config = load_config(Path(workdir) / "config.json")
    run = jformer.restore(workdir)
    noisy = FastTokenizer(tokenizer().content, {"pad": 0, "bos": 0, "eos": 1, "unk": 2, "noise": [4, 5]})
    weights.write_run(Path(tmp_path / "more"), dataclasses.replace(config, task="denoise"), (noisy, noisy), run.params)
    assert main(["export", str(tmp_path / "more"), f"--output={tmp_path / 'theirs'}"]) == 0
    fields = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert fields["architectures"] == ["T5ForConditionalGeneration"]


def test_exports_are_not_written_into_a_folder_that_is_named_like_a_bucket(workdir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    adapters = dataclasses.replace(load_config(Path(workdir) / "config.json").model, lora=LoraConfig(rank=2))
    run = StoredRun(Path(workdir), dataclasses.replace(Config(), model=adapters), (tokenizer(), tokenizer()))
    monkeypatch.setattr(peft, "read_run", lambda path: run)
    for more in ([], ["--adapter_of=base"]):
        assert main(["export", str(workdir), "--output=gs://bucket/model", *more]) == 2
        assert "--output=gs://bucket/model: this is written to a disk" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("spelt", ["<extra_id_{}>", "\u2581<extra_id_{}>"])  # T5's and mT5's
def test_sentinels_are_those_of_the_vocabulary(spelt):
    vocabulary = TokenizerFiles.__new__(TokenizerFiles)
    vocabulary.ids = {spelt.format(i): 9 - i for i in range(3)}
    vocabulary.model_type, vocabulary.config, vocabulary.fast, vocabulary.fields = "mt5", {}, True, {}
    vocabulary._role, vocabulary.special = lambda name: 1, lambda name: -1
    assert vocabulary.symbols("source", "", 0).noise == (9, 8, 7)


def test_directories_that_hold_something_are_left_alone(workdir, exported):
    with pytest.raises(UserError, match="is not empty"):
        import_model(exported, str(workdir), Texts())
    with pytest.raises(UserError, match="is not empty"):
        export_model(str(workdir), exported)


def test_settings_that_we_have_not_are_told(model_dir, tmp_path_factory):
    edit(model_dir / "generation_config.json", num_beams=3, early_stopping=True, repetition_penalty=1.3, min_length=4)
    target = tmp_path_factory.mktemp("new") / "run"
    assert "not carried over: repetition_penalty=1.3" in import_model(model_dir, str(target), Texts())
    decode = load_config(Path(target) / "config.json").decode
    assert (decode.beam_size, decode.patience, decode.length_penalty, decode.length_offset) == (3, 1.0, 1.0, 0.0)
    assert decode.min_length == 3  # theirs counts the first token


def test_pieces_are_not_written_for_an_architecture_that_transformers_reads_otherwise(tmp_path):
    tokenizers = load_tokenizers(small_runs.marian(tmp_path / "run") / "tokenizer")
    for model_type, written in (("t5", False), ("mbart", False), ("marian", True)):
        (tmp_path / model_type).mkdir()
        assert vocabulary.write(tmp_path / model_type, model_type, tokenizers) == written
        assert any((tmp_path / model_type).glob("*.spm")) == written


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"eos_token_id": [1, 2]}, "eos_token_id=[1, 2]"),
        ({"forced_bos_token_id": 5}, "forced_bos_token_id=5"),
        ({"forced_eos_token_id": 4}, "forced_eos_token_id=4"),
        ({"sequence_bias": {"3": -1.0}}, "sequence_bias={'3': -1.0}"),
        ({"force_words_ids": [[3]]}, "force_words_ids=[[3]]"),
        ({"eos_token_id": [1], "forced_eos_token_id": 1, "renormalize_logits": True}, ""),
    ],
)
def test_no_setting_of_a_search_is_dropped_without_a_word(settings, told):
    options, notes = generation.read({}, {"num_beams": 2, **settings}, Symbols(0, 0, 1, 2), WORDS)
    assert notes == [told] * bool(told)
    assert options.forced_end == options.renormalize == (not told)
    fields, notes = generation.write(options, Symbols(0, 0, 1, 2), {word: i for i, word in enumerate(WORDS)})
    assert (fields.get("forced_eos_token_id"), fields.get("renormalize_logits")) == ((None,) * 2 if told else (1, True))
    assert notes == []
    ranked = dataclasses.replace(options, rerank="comet")
    assert generation.write(ranked, Symbols(0, 0, 1, 2), {})[1] == ["decode.rerank='comet'"]
    limits = {"max_length": 9, "min_length": 2, "min_new_tokens": 1}
    notes = generation.read({}, limits, Symbols(0, 0, 1, 2), WORDS, continues=True)[1]
    assert notes == ["max_length=9 counts the prompt there, and new tokens alone here"]


def test_settings_of_config_json_count_only_without_a_generation_config_json():
    old, symbols = {"num_beams": 3, "max_length": 9, "forced_bos_token_id": 5, "eos_token_id": 1}, Symbols(0, 0, 1, 2)
    assert generation.read(old, {}, symbols, WORDS)[0].beam_size == 3
    options, notes = generation.read(old, {"max_length": 7, "eos_token_id": 1}, symbols, WORDS)
    assert (options.beam_size, options.max_length) == (1, 6)
    assert notes == [f"{key}={old[key]} of config.json" for key in ("num_beams", "max_length", "forced_bos_token_id")]


@pytest.mark.parametrize(
    ("settings", "most"), [({"num_beams": 2}, 20), ({"max_length": 9}, 8), ({"max_length": 9, "max_new_tokens": 3}, 3)]
)
def test_outputs_are_as_long_as_theirs(settings, most):
    assert generation.read({}, settings, Symbols(0, 0, 1, 2), WORDS)[0].max_length == most


def test_the_end_cannot_be_a_bad_word():
    options, notes = generation.read({}, {"bad_words_ids": [[1], [3]]}, Symbols(0, 0, 1, 2), WORDS)
    assert (options.forbid, notes) == ((WORDS[3],), [])


def test_a_run_remembers_its_origin_through_every_run_that_it_began_with(tmp_path):
    for name, start in {"a": "", "b": "a", "c": "b", "x": "y", "y": "x"}.items():
        (tmp_path / name).mkdir()
        config = resolve({"train": {"init_from": str(tmp_path / start) if start else ""}})
        save_config(config, run_path(tmp_path / name) / "config.json")
    (tmp_path / "a" / ORIGIN).write_text(json.dumps({"model_type": "roberta"}))
    runs = {name: run_path(tmp_path / name) for name in "abcx"}
    found = {name: StoredRun(path, load_config(path / "config.json"), ()).origin for name, path in runs.items()}
    assert found == {name: {"model_type": "roberta"} if name in "abc" else {} for name in runs}
    (tmp_path / "a").rename(tmp_path / "moved")
    lost = [StoredRun(path, load_config(path / "config.json"), ()).lost for name, path in runs.items() if name != "a"]
    assert lost == [str(tmp_path / "a"), str(tmp_path / "a"), ""]


@pytest.mark.parametrize(("limits", "tokens", "told"), [
    ({"max_length": 0, "max_extra_length": 50}, 65, ["decode.max_extra_length=50"]),
    ({"max_length": 60, "max_extra_length": 50}, 61, ["decode.max_extra_length=50"]),
    ({"max_length": 40, "max_extra_length": 50}, 41, []),
    ({"max_length": 0, "max_extra_length": 99}, 100, ["decode.max_extra_length=99"]),
])  # fmt: skip
def test_outputs_may_be_as_long_there_as_that_of_the_longest_source(limits, tokens, told):
    options, symbols = dataclasses.replace(DecodeConfig(beam_size=1), **limits), Symbols(0, 0, 1, 2, before=(3,))
    fields, notes = generation.write(options, symbols, {}, longest=14, places=100)
    assert (fields["max_new_tokens"], notes) == (tokens, told)
    assert generation.write(options, symbols, {})[0]["max_new_tokens"] <= limits["max_extra_length"] + 1  # of prompts


def test_options_that_theirs_has_no_place_for_are_told(workdir, tmp_path):
    config = load_config(Path(workdir) / "config.json")
    decode = dataclasses.replace(config.decode, beam_size=2, length_penalty=0.6, repetition_penalty=1.5)
    symbols, ids = Symbols(0, 0, 1, 2), {word: i for i, word in enumerate(WORDS)}
    assert generation.write(decode, symbols, ids)[1] == [
        "decode.repetition_penalty=1.5", "decode.length_offset=5.0, theirs is 0", "decode.ended_first=True",
    ]  # fmt: skip
    sampled = dataclasses.replace(config.decode, search="sample", temperature=0.5)
    assert generation.write(sampled, symbols, ids)[1] == ["decode.search='sample'"]


def test_an_imported_run_is_scored_not_trained_in_place_and_its_tokenizer_is_guarded(exported, tmp_path):
    import_model(exported, str(tmp_path / "run"), Texts())
    (tmp_path / "test.tsv").write_text("a house\tred house\nred\ta\n")
    config = load_config(Path(tmp_path / "run") / "config.json")
    (tmp_path / "long.tsv").write_text("a house" + 999 * " red" + "\tred house\n")  # of which training would use none
    data = dataclasses.replace(config.data, dir=str(tmp_path), test=("test", "long"), overlong="drop")
    config = dataclasses.replace(config, data=data)
    results = evaluate(config, Path(tmp_path / "run"))
    assert (results["test"]["examples"], results["long"]["examples"]) == (2, 1)
    assert results["long"]["counts"]["overlong examples cut"] == 1
    assert (results["run"]["updates"], results["run"]["data"]) == (0, [])
    with pytest.raises(UserError, match=r"train them in a new --workdir with --config.train.init_from="):
        train(config, Path(tmp_path / "run"))
    (saved,) = (tmp_path / "run" / "tokenizer").glob("shared.*")
    saved.write_bytes(saved.read_bytes().replace(b"house", b"mouse"))
    with pytest.raises(UserError, match=f"{saved.name} is damaged"):
        evaluate(config, Path(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_that_finds_answers_goes_there_and_comes_back(tmp_path):
    from jformer.inference.predict import load

    run = small_runs.bert(tmp_path / "run", "qa")
    export_model(str(run), tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["architectures"] == [
        "BertForQuestionAnswering"
    ]
    assert "task qa" in import_model(tmp_path / "theirs", str(tmp_path / "again"), Texts())
    before, after = load(run), load(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert load_config(tmp_path / "again" / "config.json").data.source == "squad"
    asked = ["what did the cat eat?\tthe cat sat on the mat, a hat and rats", "what?\tthings"]
    assert after.generate(asked) == before.generate(asked)
    assert any(answers[0].text for answers in after.generate(asked))


def test_a_run_of_vectors_is_pooled_by_the_files_of_sentence_transformers_there_and_here(tmp_path):
    from jformer.inference.predict import load

    run, theirs = small_runs.bert(tmp_path / "run", "embed"), tmp_path / "theirs"
    export_model(str(run), theirs)
    assert json.loads((theirs / "config.json").read_text())["architectures"] == ["BertModel"]
    modules = json.loads((theirs / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    assert "task embed" in import_model(theirs, str(tmp_path / "again"), Texts())
    before, after = load(run), load(tmp_path / "again")
    texts = ["the cat", "what did the cat eat? the mat of the hat, that one, and a hat and a cat", ""]
    np.testing.assert_array_equal(after.embed(texts), before.embed(texts))
    np.testing.assert_allclose(np.linalg.norm(after.embed(texts), axis=1), 1, rtol=1e-6)
    pooled = dataclasses.replace(before.config, decode=dataclasses.replace(before.config.decode, pooling="first"))
    (tmp_path / "pooled").mkdir()
    write_modules(tmp_path / "pooled", pooled)
    assert read_modules(tmp_path / "pooled").pooling == "first"
    with pytest.raises(UserError, match=r"decode\.pooling='pooler': sentence-transformers has no such pooling"):
        write_modules(
            tmp_path, dataclasses.replace(pooled, decode=dataclasses.replace(pooled.decode, pooling="pooler"))
        )
    assert after.config.data.max_source_length == 12
    assert after.counts["inputs cut to the model's limit"] == 2
    edit(theirs / "1_Pooling" / "config.json", include_prompt=False)
    edit(theirs / "config_sentence_transformers.json", prompts={"query": "query: "})
    left_out = "the prompt 'query: ' (include_prompt=False leaves it out of the mean, --prefix does not)"
    assert read_modules(theirs).notes == [left_out]
    # as version 6 of sentence-transformers has it
    (theirs / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 16, "pooling_mode": "cls"}')
    (theirs / "modules.json").write_text(json.dumps(modules[:2]))
    edit(theirs / "tokenizer_config.json", model_max_length=9)
    edit(theirs / "config_sentence_transformers.json", prompts={"query": "query: "})
    edit(theirs / "sentence_bert_config.json", max_seq_length=None, do_lower_case=True)
    (theirs / "sentence_bert_config.json").rename(theirs / "sentence_roberta_config.json")
    summary = import_model(theirs, str(tmp_path / "first"), Texts(prefix="query: "))
    assert "the prefix 'query: ' of a text" in export_model(str(tmp_path / "first"), tmp_path / "back")
    assert "the prompt 'query: ' (give it as --prefix), sentence_roberta_config.json: do_lower_case (" in summary
    config = load_config(tmp_path / "first" / "config.json")
    assert (config.model.head.pooling, config.decode.normalize, config.data.max_source_length) == ("first", False, 9)
    (theirs / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(UserError, match="pools by pooling_mode_max_tokens; one of pooling_mode_mean_tokens"):
        import_model(theirs, str(tmp_path / "max"), Texts())
    (theirs / "modules.json").write_text(json.dumps([*modules[:2], {**modules[2], "type": "models.Dense"}]))
    with pytest.raises(UserError, match="its modules are Transformer, Pooling, Dense; only Transformer, Pooling and"):
        import_model(theirs, str(tmp_path / "dense"), Texts())


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, capsys, monkeypatch):
    def export(*given):
        import tokenizers  # noqa: F401

    monkeypatch.setattr("jformer.tools.hf.write_model.export_model", export)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["export", str(tmp_path), f"--output={tmp_path}/model"]) == 2
    assert capsys.readouterr().err == "jformer: this needs the package tokenizers: pip install 'jformer[hf]'\n"


def test_a_missing_package_is_not_taken_for_a_damaged_vocabulary(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\nhouse\n")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package `tokenizers`: pip install 'jformer\[hf\]'"):
        TokenizerFiles(Path(tmp_path), "bert", {})


def test_an_export_that_fails_leaves_nothing_behind(workdir, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jformer.tools.hf.tensors.write", full)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(OSError, match="No space left"):
            export_model(str(workdir), tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
