"""Directories of models as people have them on disk, with few files and fields, are read as transformers reads them.

Small random models and tokenizers, written by transformers and stripped of what published directories leave out: ids,
texts, logits and outputs beside those of transformers, which reads the same directory.
"""

import json
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import tokenizers
from PIL import Image

import jformer
from jformer.errors import UserError
from jformer.inference.predict import load
from jformer.tools.hf.__main__ import main
from jformer.tools.hf.convert import Texts, import_model
from jformer.tools.hf.write_model import export_model
from tests.conftest import run as run_model
from tests.parity import test_tokenizers as made
from tests.parity.pairs import torch, transformers
from tests.slow import slow_but

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "max_position_embeddings": 66}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
TEXTS = ["This is a text of jformer.", "Größe 日本 ™ <mask> [MASK] here", "a </s> b <unk> c [SEP] [UNK] x"]
LOGITS = 1e-5  # relative to the largest; float32


def write(folder, cls, tokenizer, tokens, drop=(), fields=None, **config):
    """Write a random model of a class, with a tokenizer whose config names only `tokens`; return it as it is read."""
    folder.mkdir()
    tokenizer(folder)
    pieces = (folder / "vocab.json").is_file()
    ids = json.loads((folder / ("vocab.json" if pieces else "tokenizer.json")).read_text())
    size = len(ids) if pieces else len(ids["model"]["vocab"])
    if pieces:
        config |= {"pad_token_id": ids["<pad>"], "decoder_start_token_id": ids["<pad>"], "eos_token_id": 0}
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(vocab_size=size, **config))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += weight.requires_grad * torch.tensor(0.3 * rng.standard_normal(weight.shape, np.float32))
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    stored = json.loads((folder / "config.json").read_text())
    whole = {**stored, **(fields or {})}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if key not in drop}))
    return model.eval()


def imported(folder):
    summary = import_model(folder, str(folder.parent / "run"), Texts())
    return load(str(folder.parent / "run")), summary


def assert_same_ids(run, folder, texts=TEXTS):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        (ids,) = run.inputs.encoder.source.encode([text])
        expected = theirs(text)["input_ids"]
        assert [*ids] == expected
        assert run.tokenizers[0].decode(ids) == theirs.decode(expected, skip_special_tokens=True)


def hidden_logits(run, text):
    (ids,) = run.inputs.encoder.source.encode([text])
    whole = np.ones((1, len(ids)), np.int32)
    batch = {"source": np.array([ids], np.int32), "source_segments": whole, "source_types": 0 * whole,
             "source_positions": np.arange(len(ids), dtype=np.int32)[None]}  # fmt: skip
    batch = jax.tree.map(jnp.asarray, batch)
    return np.asarray(run_model(run.model, run.params, batch)), torch.tensor([[*map(int, ids)]])


def assert_same_fillings(theirs, folder):
    """Compare the likeliest tokens in place of one mask, but for special ones, which ours never writes, and of two."""
    tokenizer, run = transformers.AutoTokenizer.from_pretrained(folder), jformer.load(folder.parent / "run", n_best=9)
    fill = transformers.pipeline("fill-mask", model=theirs, tokenizer=tokenizer)
    line, mask = f"This is a {tokenizer.mask_token} of jformer.", tokenizer.mask_token
    never = {tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id}
    expected = [each for each in fill(line, top_k=9 + len(never)) if each["token"] not in never][:9]
    (found,) = run.generate([line])
    assert [output.text for output in found] == [each["sequence"] for each in expected]
    assert [output.filled for output in found] == [(each["token_str"],) for each in expected]
    np.testing.assert_allclose(
        [np.exp(output.log_prob) for output in found], [each["score"] for each in expected], rtol=1e-4
    )
    (both,) = run.generate([f"{line} {mask}"])
    each = [[one["score"] for one in some if one["token"] not in never] for some in fill(f"{line} {mask}", top_k=99)]
    products = np.sort(np.outer(*each).ravel())[::-1][:9]
    np.testing.assert_allclose([np.exp(output.log_prob) for output in both], products, rtol=1e-4)
    with pytest.raises(UserError, match=rf"input line 2: has no {re.escape(mask)}"):
        run.predict([line, "This is a text."])


def roberta(folder):
    made.byte_level(folder, roberta=True)


ROBERTA = {**BERT, "max_position_embeddings": 66, "type_vocab_size": 1}
ENCODERS = {  # class, tokenizer, what tokenizer_config.json has, sizes, what is said to be left out
    "bert-base-uncased": ("BertForMaskedLM", made.wordpiece, {"do_lower_case": True, "model_max_length": 99}, BERT, ""),
    "distilbert": ("DistilBertForMaskedLM", made.wordpiece, {"model_max_length": 512}, DISTILBERT, ""),
    "roberta-base": ("RobertaForMaskedLM", roberta, {"model_max_length": 512}, ROBERTA, ""),
    "bare": ("BertModel", made.wordpiece, {}, BERT, "bert.pooler.*, a head for masked tokens (train it)"),
    "bare RoBERTa": ("RobertaModel", roberta, {}, ROBERTA, "a head for masked tokens (train it)"),
    "two heads": ("BertForPreTraining", made.wordpiece, {}, BERT, "bert.pooler.*, cls.seq_relationship.*"),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(ENCODERS, "bert-base-uncased", "distilbert", "bare", "two heads"))
def test_encoders_whose_files_name_few_tokens(case, tmp_path):
    cls, tokenizer, tokens, sizes, left_out = ENCODERS[case]
    theirs = write(tmp_path / "model", cls, tokenizer, tokens, **sizes)
    run, summary = imported(tmp_path / "model")
    assert left_out in summary
    assert bool(left_out) == ("not carried over" in summary)
    assert_same_ids(run, tmp_path / "model")
    assert run.tokenizers[0].symbols.noise == (
        run.tokenizers[0].tokens.index("<mask>" if "o" in cls[:2] else "[MASK]"),
    )
    ours, ids = hidden_logits(run, TEXTS[0])
    with torch.no_grad():
        found = theirs(ids)
        states = getattr(found, "last_hidden_state", None)
        expected = getattr(found, "prediction_logits", getattr(found, "logits", None))
        if expected is None:
            expected = states @ theirs.get_input_embeddings().weight.T
    np.testing.assert_allclose(ours, expected.numpy(), rtol=0, atol=LOGITS * float(expected.abs().max()))
    if cls.endswith("MaskedLM"):
        assert_same_fillings(theirs, tmp_path / "model")


CLASSIFIERS = {  # labels, further fields, dropped fields, what a text is answered with, from the logits
    "one logit": (1, {}, (), lambda logits: f"{logits[0]:.4f}"),
    "regression": (1, {"problem_type": "regression"}, (), lambda logits: f"{logits[0]:.4f}"),
    "sigmoid": (
        1, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, (),
        lambda logits: {"LABEL_0": 1 / (1 + math.exp(-logits[0]))},
    ),
    "several labels": (
        3, {"problem_type": "multi_label_classification"}, (),
        lambda logits: {f"LABEL_{i}": 1 / (1 + math.exp(-x)) for i, x in enumerate(logits)},
    ),
    "fewer names than labels, no model_type": (
        3, {"num_labels": 3, "id2label": {"0": "a", "1": "b"}}, ("model_type",),
        lambda logits: dict(zip(("a", "b", "LABEL_2"), np.exp(logits) / np.exp(logits).sum(), strict=True)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifiers_answer_with_what_their_logits_mean(case, tmp_path):
    labels, fields, drop, expected = CLASSIFIERS[case]
    theirs = write(tmp_path / "model", "BertForSequenceClassification", made.wordpiece, {"model_max_length": 99}, drop,
                   fields, num_labels=labels, **BERT, max_position_embeddings=99)  # fmt: skip
    run, _ = imported(tmp_path / "model")
    for text in ("a text", "This is a query\tand a passage of it"):
        ids, types = [], []
        for i, part in enumerate(run.tokenizers[0].encode(text.split("\t"))):
            more = [*([2] if not i else []), *part, 3]
            ids, types = [*ids, *more], [*types, *[i] * len(more)]
        with torch.no_grad():
            wanted = expected(theirs(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0].tolist())
        (output,) = run.generate([text])[0]
        if isinstance(wanted, str):
            assert float(output.text) == pytest.approx(float(wanted), abs=1e-4)
        else:
            assert output.labels == pytest.approx(wanted, abs=1e-5)
    for again in (tmp_path / "again", tmp_path / "derived"):
        export_model(str(tmp_path / "run"), again)
        tokenizer = transformers.AutoTokenizer.from_pretrained(again)
        exported = transformers.BertForSequenceClassification.from_pretrained(again).eval()
        with torch.no_grad():
            found = exported(**tokenizer(*text.split("\t"), return_tensors="pt")).logits
            wanted = theirs(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=0, atol=1e-6 * float(wanted.abs().max()))
        assert len(tokenizer("a " * 200, truncation=True)["input_ids"]) == 99
        stored = (again / "tokenizer_config.json").read_bytes()
        assert (stored == (tmp_path / "model" / "tokenizer_config.json").read_bytes()) == (again.name == "again")
        (tmp_path / "run" / "imported.json").unlink(missing_ok=True)  # as if it had been trained here


def two_vocabularies(folder):
    """Write two sentencepiece models, each with a list of ids of its own; the source's has unknown pieces."""
    made.sentencepieces(folder)
    for side, file, dropped in (("source", "vocab.json", 40), ("target", "target_vocab.json", 0)):
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        pieces = [model.id_to_piece(i) for i in range(model.get_piece_size() - dropped)]
        (folder / file).write_text(json.dumps({piece: i for i, piece in enumerate([*pieces, "<pad>"])}))


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_marian_of_two_vocabularies_comes_in_and_goes_out(tmp_path):
    tokens = {"source_lang": "en", "target_lang": "de", "separate_vocabs": True}
    sizes = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": made.SIZE + 1}
    theirs = write(tmp_path / "model", "MarianMTModel", two_vocabularies, tokens, **BART, **sizes)
    run, _ = imported(tmp_path / "model")
    export_model(str(tmp_path / "run"), tmp_path / "again")
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "again").eval()
    for folder in (tmp_path / "model", tmp_path / "again"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            (ids,) = run.inputs.encoder.source.encode([text])
            assert [*ids] == tokenizer(text)["input_ids"]
            (ids,) = run.tokenizers[1].encode([text])
            assert [*ids, 0] == tokenizer(text_target=text)["input_ids"]
            assert run.tokenizers[1].decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    start = theirs.config.decoder_start_token_id
    ids = torch.tensor(run.inputs.encoder.source.encode([TEXTS[0]]))
    settings = {"max_new_tokens": 8, "bad_words_ids": [[start], [made.SIZE]]}
    expected = theirs.generate(ids, **settings)[0].tolist()
    assert [*run.generate([TEXTS[0]])[0][0].ids[:7]] == expected[1:8]
    assert expected == again.generate(ids, **settings)[0].tolist()
    with torch.no_grad():
        first = theirs(input_ids=ids, decoder_input_ids=torch.tensor([expected])).logits
        assert torch.equal(first, again(input_ids=ids, decoder_input_ids=torch.tensor([expected])).logits)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_marian_that_names_its_languages_alone_reads_unknown_signs(tmp_path):
    theirs = write(tmp_path / "model", "MarianMTModel", made.sentencepieces, {"source_lang": "en", "target_lang": "de"},
                   **BART)  # fmt: skip
    run, _ = imported(tmp_path / "model")
    assert_same_ids(run, tmp_path / "model")
    assert run.tokenizers[0].symbols.unk == 1
    (ids,) = run.inputs.encoder.source.encode(["日本 ☃ here"])
    assert 1 in ids
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=8, bad_words_ids=[[theirs.config.pad_token_id]])[
        0
    ].tolist()
    found = run.generate(["日本 ☃ here"])[0][0].ids
    assert [*found[:7]] == expected[1:8]


def test_a_vocabulary_without_an_unknown_token_is_refused(tmp_path):
    write(tmp_path / "model", "MarianMTModel", made.sentencepieces, {"unk_token": "<none>"}, **BART)
    with pytest.raises(UserError, match=r"has no '<none>' for unknown text: name the unk_token of vocab\.json"):
        import_model(tmp_path / "model", str(tmp_path / "run"), Texts())


@pytest.mark.parametrize("forced", slow_but([None, 0], 0), ids=["null", "<s>"])
def test_outputs_of_bart_begin_with_its_first_token_if_it_is_forced(forced, tmp_path):
    theirs = write(tmp_path / "model", "BartForConditionalGeneration", roberta, {}, **BART, pad_token_id=1,
                   bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)  # fmt: skip
    settings = {"forced_bos_token_id": forced, "max_new_tokens": 9, "eos_token_id": 2, "decoder_start_token_id": 2,
                "stop_strings": ["x"], "top_p": 0.9, "pad_token_id": 1, "forced_eos_token_id": 2}  # fmt: skip
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    run, summary = imported(tmp_path / "model")
    assert summary.endswith("not carried over: stop_strings=['x']")
    known = {**settings, "stop_strings": None, "top_p": None}
    for text in TEXTS[:2]:
        ids = torch.tensor(run.inputs.encoder.source.encode([text]))
        config = transformers.GenerationConfig(**known, bad_words_ids=[[1]], do_sample=False)
        expected = theirs.generate(ids, generation_config=config)[0].tolist()
        assert expected[1] == 0 or forced is None
        found = run.generate([text])[0][0].ids
        assert [*found] == expected[1 + (forced is not None) : 1 + (forced is not None) + len(found)]
        assert len(found) >= min(len(expected) - 2, 8)
    export_model(str(tmp_path / "run"), tmp_path / "again")
    for file in ("generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


def test_a_tokenizer_without_added_tokens_and_with_one_that_has_no_row(tmp_path):
    folder = tmp_path / "model"
    write(folder, "BertForMaskedLM", made.wordpiece, {}, **BERT)
    stored = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**stored, "added_tokens": []}))
    run, _ = imported(folder)
    assert_same_ids(run, folder)
    fast = tokenizers.Tokenizer.from_str(json.dumps(stored))
    fast.add_tokens(["<extra>"])
    fast.save(str(folder / "tokenizer.json"))
    summary = import_model(folder, str(tmp_path / "again"), Texts())
    assert summary.endswith("not carried over: the token '<extra>', which has no row")
    again = load(str(tmp_path / "again"))
    assert again.tokenizers[0].encode(["a <extra> b"]) == run.tokenizers[0].encode(["a <extra> b"])


PROCESSORS = {  # of photographs of any size; the model's have 32 pixels a side
    "ImageNet": {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "resample": 2,
                 "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "cropped": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 37}, "resample": 3,
                "do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "do_normalize": False},
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(PROCESSORS, "cropped"))
def test_photographs_of_any_size_are_prepared_as_their_processor_does(case, tmp_path):
    sizes = {"image_size": 32, "patch_size": 8, "num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}
    config = transformers.ViTConfig(**BERT, **sizes)
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[case]))
    noise = np.random.default_rng(0).integers(0, 256, (43, 64, 3), np.uint8)
    paths = [str(tmp_path / "wide.png"), str(tmp_path / "small.png")]
    Image.fromarray(noise.repeat(10, axis=0).repeat(10, axis=1)[:427]).save(paths[0])
    Image.fromarray(noise[:20, :10]).save(paths[1])
    run, _ = imported(tmp_path / "model")
    for folder in ("model", "again", "derived"):
        if folder != "model":
            export_model(str(tmp_path / "run"), tmp_path / folder)
            (tmp_path / "run" / "imported.json").unlink(missing_ok=True)  # as if it had been trained here
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / folder)
        model = transformers.ViTForImageClassification.from_pretrained(tmp_path / folder).eval()
        for path in paths:
            pixels = processor([Image.open(path)], return_tensors="pt")["pixel_values"]
            with torch.no_grad():
                expected = model(pixels).logits[0].softmax(-1).tolist()
            (output,) = run.generate([path])[0]
            assert output.labels == pytest.approx(dict(zip("abc", expected, strict=True)), rel=2e-6)
    stored = [(tmp_path / name / "preprocessor_config.json").read_bytes() for name in ("model", "again")]
    assert stored[0] == stored[1]
    before, after = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_each_refusal_names_the_command_that_comes_next_until_a_model_is_in(tmp_path, capsys):
    folder = tmp_path / "models" / "model"
    folder.parent.mkdir()
    theirs = write(folder, "BertForMaskedLM", lambda path: made.wordpiece(path, lowercase=False), {}, ["model_type"],
                   {"architectures": ["OfTheirOwn"]}, **BERT)  # fmt: skip
    state = {**theirs.state_dict(), "cls.species.weight": torch.ones(6, 16)}
    torch.save(state, folder / "pytorch_model.bin")
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder.parent / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.get)))
    (folder / "tokenizer_config.json").rename(folder.parent / "tokenizer_config.json")
    for file in ("model.safetensors", "tokenizer.json"):
        (folder / file).unlink()
    command = ["import", str(folder), f"--workdir={tmp_path / 'run'}"]
    capsys.readouterr()  # what the library prints
    for refusal, remedy in {
        "no model_type; there are: gpt2, bert, ": "--model_type=bert",
        f"import reads no pickle: convert it with python -m jformer.hf unpickle {folder}": "",
        "has no tokenizer.json or vocab.txt; name the directory that has it with": f"--tokenizer={folder.parent}",
        "of its tokens have capitals, such as ": "--do_lower_case=false",
    }.items():
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert refusal in error
        if remedy:
            command.append(remedy)
        else:
            assert main(["unpickle", str(folder)]) == 0
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("not carried over: architectures=['OfTheirOwn'], cls.species.*\n")
    run = load(str(tmp_path / "run"))
    tokenizer = transformers.BertTokenizer.from_pretrained(folder.parent, do_lower_case=False)
    assert [[*each] for each in run.inputs.encoder.source.encode(TEXTS)] == tokenizer(TEXTS)["input_ids"]
    ours, ids = hidden_logits(run, TEXTS[0])
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(ids).logits.numpy(), rtol=0, atol=1e-5)
    export_model(str(tmp_path / "run"), tmp_path / "again")
    assert_same_ids(run, tmp_path / "again")


class Hostile:
    """Unpickled without care, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("shards", slow_but([1, 2], 1))
def test_pickled_weights_are_converted_beside_everything_else(shards, tmp_path, capsys):
    folder = tmp_path / "model"
    theirs = write(folder, "BertForSequenceClassification", made.wordpiece, {}, num_labels=3, **BERT)
    whole, config = theirs.state_dict(), (folder / "config.json").read_bytes()
    (folder / "model.safetensors").unlink()
    names = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{i}-of-2.bin" for i in (1, 2)]
    places = {name: names[i % shards] for i, name in enumerate(whole)}
    if shards == 1:  # of an older torch, with a tensor under two names
        torch.save({**whole, "cls.copy": whole["classifier.weight"]}, folder / names[0],
                   _use_new_zipfile_serialization=False)  # fmt: skip
    else:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
        for file in names:
            torch.save({name: whole[name] for name in places if places[name] == file}, folder / file)
    with pytest.raises(UserError, match=f"reads no pickle: convert it with python -m jformer.hf unpickle {folder}"):
        imported(folder)
    assert main(["unpickle", str(folder)]) == 0
    assert "import it now" in capsys.readouterr().out
    run, _ = imported(folder)
    assert (folder / "config.json").read_bytes() == config
    ours, ids = hidden_logits(run, TEXTS[0])
    with torch.no_grad():
        np.testing.assert_allclose(ours[:, 0], theirs(ids).logits.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("what", slow_but(["code", "code without a zip", "a number", "no pickle"], "code"))
def test_pickles_of_anything_but_tensors_are_refused_and_nothing_of_them_runs(what, tmp_path, capsys):
    path, touched = tmp_path / "pytorch_model.bin", tmp_path / "touched"
    if what == "no pickle":
        path.write_bytes(b"hello")
    elif what == "code without a zip":
        path.write_bytes(pickle.dumps(Hostile(touched)))
    else:
        torch.save({"a": torch.ones(2), "b": 3 if what == "a number" else Hostile(touched)}, path)
    assert main(["unpickle", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "was not converted, and nothing in it was executed" in error
    assert what not in ("code", "code without a zip") or "open" in error
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]
