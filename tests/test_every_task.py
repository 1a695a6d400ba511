"""Every task from files to scores and answers: trained for some updates, evaluated, asked; and what begins warm."""

import contextlib
import dataclasses
import functools
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter

import jax
import numpy as np
import pytest

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.checkpoints.weights import adopt
from jformer.config import as_config_dict, default_config, load_config, resolve
from jformer.config.options import MeshConfig, final_scores
from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.tokenizers import BOS, EOS
from jformer.errors import UserError
from jformer.evaluation.evaluate import evaluate, report_scores
from jformer.inference.answer_files import predict_file
from jformer.inference.answers import CUT, Request
from jformer.inference.predict import Predictor, load
from jformer.inference.restore import Trained
from jformer.inference.verify import verify
from jformer.parallel.sharding import replicated
from jformer.tasks.batch_arrays import make_batch
from jformer.tasks.build import open_mesh
from jformer.tools.server.engine import Engine
from jformer.tools.server.limits import Limits
from jformer.tools.server.schema import InputsBody
from jformer.trainer import settle, train
from jformer.training.initial_state import table_of
from tests.conftest import draw_params
from tests.conftest import run as run_model
from tests.opening import opened
from tests.slow import slow_but

LINES = [
    f"{a} {b} {c}" for a in ("red", "blue", "green") for b in ("cat", "dog", "bird") for c in ("sat", "ran", "saw")
]
SMALL = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "max_length": 64, "execution": {"unroll": 1}}


def several(line):
    """Return the labels of a line: its colour and animal, unless it is green; nothing of a green bird."""
    colour, animal, _ = line.split()
    return ",".join([colour, animal] if colour != "green" else [animal] * (animal != "bird"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Write lines, labelled lines and images, each as train, valid and test."""
    root = tmp_path_factory.mktemp("texts")
    image = np.random.default_rng(0).integers(0, 256, (27, 4, 4)).astype(np.uint8)
    for split in ("train", "valid", "test"):
        (root / f"{split}.txt").write_text("\n".join(LINES) + "\n")
        (root / f"{split}.tsv").write_text("\n".join(f"{line}\t{line.split()[0]}" for line in LINES) + "\n")
        (root / f"{split}-several.tsv").write_text("\n".join(f"{line}\t{several(line)}" for line in LINES) + "\n")
        (root / f"{split}-number.tsv").write_text("\n".join(f"{line}\t{len(line) / 2}" for line in LINES) + "\n")
        tagged = (zip(line.split(), ("B-colour", "B-animal", "O"), strict=True) for line in LINES)
        sentences = ("".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in tagged)
        (root / f"{split}.conll").write_text("\n".join(sentences))
        np.save(root / f"{split}.npy", image)
        (root / "captions").mkdir(exist_ok=True)
        captions = [f"../{split}.npy#{i}\t{line}" for i, line in enumerate(LINES)]
        (root / "captions" / f"{split}.tsv").write_text("\n".join(captions) + "\n")
        (root / f"{split}.labels.txt").write_text("\n".join(line.split()[1] for line in LINES) + "\n")
        (root / f"{split}.json").write_text(json.dumps({"data": [{"paragraphs": list(map(asked, LINES))}]}))
    return root


def asked(line):
    """Return a paragraph of SQuAD that is the line, with a question about its second word."""
    answer = {"text": line.split()[1], "answer_start": len(line.split()[0]) + 1}
    return {"context": line, "qas": [{"id": line, "question": f"who {line.split()[2]}", "answers": [answer]}]}


def inputs_of(name, texts):
    """Return two inputs for the run of a name."""
    if name in OF_IMAGES:
        return [f"{texts}/test.npy#3", f"{texts}/test.npy#5"]
    if name == "mlm":
        return [line.replace(line.split()[1], "<mask>") for line in LINES[:2]]
    return [f"who {line.split()[2]}\t{line}" for line in LINES[:2]] if name == "qa" else LINES[:2]


def small(preset, texts, task=None, **data):
    """Return the config of a run of seconds."""
    config = default_config(preset)
    sizes = {"num_layers": 1, "d_model": 16} if preset == "lstm_medium" else SMALL
    config.model.update({**sizes, "num_decoder_layers": 0})
    config.task = task or config.task
    config.data.update(dir=str(texts), cache_dir=str(texts / "cache"), source="text", tokenizer="word", num_buckets=1)
    config.data.update(max_source_length=32, max_target_length=32, tokens_per_update=256)
    config.data.update(data)
    config.optim.update(schedule="constant", learning_rate=1e-2, warmup=0)
    config.train.update(num_steps=30, log_every=10, eval_every=30, checkpoint_every=30, samples=1)
    config.train.update(peak_flops=1e9)  # which would be measured
    config.decode.update(beam_size=1, batch_size=4, max_extra_length=6)
    config.mesh.update(data=1)
    return config


def splits(name):
    """Return the options of the data that name other files of the same splits."""
    return {"train": f"train-{name}", "valid": f"valid-{name}", "test": (f"test=test-{name}",)}


PACKED = {"batching": "packed", "packed_length": 32}
RUNS = {  # name → (preset, options of the data, whether it gives answers)
    "lm": ("gpt2", PACKED, True),
    "lm_lstm": ("lstm_medium", {}, True),
    "prefix_lm": ("gpt2", {"source": "files", "overlong": "drop", **PACKED}, True),
    "mlm": ("bert_base", {}, True),
    "t5": ("t5_small", {}, False),
    "classify": ("bert_base", {"source": "labelled"}, True),
    "several": ("bert_base", {"source": "labelled", "labels": "several", **splits("several")}, True),
    "number": ("bert_base", {"source": "labelled", "labels": "number", **splits("number")}, True),
    "vit": ("vit_s16", {"source": "images", "tokenizer": "image"}, True),
    "tag": ("bert_base", {"source": "conll", **PACKED}, True),
    "tag_chain": ("bert_base", {"source": "conll", **PACKED}, True),
    "caption": ("transformer_tiny", {"source": "captions", "augment": ("flip", "crop", "color")}, True),
    "qa": ("bert_base", {"source": "squad", "doc_stride": 8}, True),
    "embed": ("bert_base", {"source": "files"}, False),
}
OF_IMAGES = ("vit", "caption")
TRAINED = ("lm", "lm_lstm", "number")  # where what was learned matters, or training alone is tested
NAMED = ("prefix_lm", "tag", "tag_chain", "caption", "qa", "embed")  # after their task


def config_of(name, texts):
    """Return the config of the run of a name."""
    preset, data, _ = RUNS[name]
    named = name.removesuffix("_chain") if name in NAMED else None
    task = "classify" if data.get("source") == "labelled" else named
    config = small(preset, texts, task, **data)
    config.model.head.crf = name == "tag_chain"
    config.model.num_layers = 1 + (name == "prefix_lm")  # what a target sees of one layer, no prefix changes
    if name == "caption":
        config.data.dir = str(texts / "captions")
    if name in OF_IMAGES:
        config.model.vision.update(image_size=4, patch_size=2, channels=1)
    return resolve(config)


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """Return a function: name of a run → its directory, trained once."""

    @functools.cache
    def get(name):
        workdir = tmp_path_factory.mktemp(name)
        assert train(config_of(name, texts), workdir)
        return workdir

    return get


@pytest.fixture(scope="module")
def begun(texts, trained, tmp_path_factory):
    """Return a function: name of a run → its directory, of a run of drawn parameters before its first update if it can.

    What a model has learned is nothing to most of what asks it, and compiling its update takes seconds.
    """

    @functools.cache
    def get(name):
        if name in TRAINED:
            return trained(name)
        workdir = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            seed = int(name == "qa")  # of which answers have words
            patch.setattr("jformer.models._draw", lambda: lambda model, key: draw_params(model, seed))
            run = opened(config_of(name, texts), workdir)
        checkpoints = Checkpoints(workdir / "checkpoints")
        checkpoints.save(1, {"params": run.state.params}, dataclasses.asdict(run.progress) | {"step": 1}, None)
        checkpoints.close()
        return workdir

    return get


@pytest.fixture(scope="module")
def loaded(begun):
    """Return a function: name of a run → its Predictor on one device, loaded once, that has answered nothing yet."""

    @functools.cache
    def read(name):
        workdir = begun(name)
        return load(workdir, load_config(workdir / "config.json"))

    def get(name):
        read(name).forget()
        return read(name)

    return get


@pytest.mark.parametrize("name", slow_but(RUNS, "lm"))
def test_a_task_trains_scores_and_answers(trained, texts, name):
    workdir = trained(name)
    config = load_config(workdir / "config.json")
    results = evaluate(config, workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses[-1] < losses[0]
    assert all(0 < row["padding_efficiency"] <= 1 for row in rows if row["split"] == "train")
    predictor, inputs = load(workdir, config), inputs_of(name, texts)
    scores = {key for key, entry in results["test"].items() if isinstance(entry, dict) and "score" in entry}
    assert scores == set(final_scores(predictor.config))
    assert "Try next" in report_scores(results, predictor.config, workdir)
    if RUNS[name][2]:
        answers = predictor.predict(inputs)
        assert len(answers) == 2
        assert all(answers) or name == "several"
    else:
        line = "use embed" if name == "embed" else "has no answer to a text; --mode=evaluate scores it"
        with pytest.raises(UserError, match=line):
            predictor.predict(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("lm", "lm_lstm", "prefix_lm", "caption")])
def test_a_run_that_searches_for_nothing_is_verified(trained, name, capsys):
    workdir = trained(name)
    assert verify(load_config(workdir / "config.json"), workdir)
    assert "16 inputs (of test set 'test')" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "poolings"),
    [
        ("lm", ("last",)),
        ("lm_lstm", ("last",)),
        ("mlm", ("mean", "first")),
        ("t5", ("",)),
        ("classify", ("pooler",)),
        ("embed", ("", "last")),
    ],
)
def test_any_run_of_texts_embeds_them_in_any_order_and_batch(loaded, name, poolings):
    lines = [*LINES[:5], " ".join(LINES), "", "red"]
    for pooling in poolings:
        given = loaded(name)
        decode = dataclasses.replace(given.config.decode, pooling=pooling)
        config = dataclasses.replace(given.config, decode=decode)
        predictor = Predictor(Trained(config, given.task, given.tokenizers, given.model, given.params))
        vectors = predictor.embed(lines)
        assert predictor.embedder.counts[CUT] == 1
        np.testing.assert_allclose(np.concatenate([predictor.embed([line]) for line in lines]), vectors, atol=1e-5)
        np.testing.assert_allclose(predictor.embed(lines[::-1])[::-1], vectors, atol=1e-5)
        decode = dataclasses.replace(decode, normalize=True)
        config = dataclasses.replace(given.config, decode=decode, mesh=MeshConfig(data=2, fsdp=2))
        mesh = open_mesh(config)
        params = jax.device_put(given.params, replicated(mesh))
        run = Trained(config, given.task, given.tokenizers, given.model, params)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(Predictor(run, mesh=mesh).embed(lines), vectors / lengths, atol=1e-5)
        ids = predictor.embedder.inputs.pieces([Request(LINES[0])])[0][0].ids
        states = states_of(given, ids)
        chosen = {"first": states[0], "last": states[-1], "pooler": states[0]}.get(pooling, states.mean(axis=0))
        if pooling == "pooler":
            dense = given.params["pooler"]["dense"]
            chosen = np.tanh(chosen @ dense["kernel"] + dense["bias"])
        elif pooling == "" and name == "embed":  # as BERT has it: the pooler over the first position
            dense = given.params["pooler"]["dense"]
            chosen = np.tanh(states[0] @ dense["kernel"] + dense["bias"])
        np.testing.assert_allclose(vectors[0], chosen, atol=1e-5)


def states_of(predictor, ids):
    """Return what a model computes of every token of a text, the end symbol of a decoder's left out."""
    base = getattr(predictor.model, "base", predictor.model)
    if base.config.family == "decoder":
        return np.asarray(run_model(base, predictor.params, make_batch(target=[ids]), method="hidden"))[0]
    return np.asarray(run_model(base, predictor.params, make_batch(source=[ids]), method="encode")["hidden"])[0]


@pytest.mark.slow
def test_an_empty_line_among_paths_of_images_has_an_empty_answer(loaded, texts):
    answers = loaded("vit").predict([f"{texts}/test.npy#3", "", f"{texts}/test.npy#5"])
    assert [bool(answer) for answer in answers] == [True, False, True]


@pytest.mark.slow
def test_a_number_needs_no_list_of_all_numbers(begun, monkeypatch):
    """A list of what may be written would have 2^32 entries."""
    monkeypatch.setattr("jformer.inference.predict.writable", None)
    assert load(begun("number")).predict([LINES[0]])


def test_several_labels_are_those_more_probable_than_not_and_a_number_is_near(loaded):
    (outputs,) = loaded("several").generate(["red cat sat"])
    assert set(outputs[0].labels) == {"red", "blue", "cat", "dog", "bird"}
    chosen = {label for label, probability in outputs[0].labels.items() if probability > 0.5}
    assert set(filter(None, outputs[0].text.split(","))) == chosen
    assert sum(outputs[0].labels.values()) != pytest.approx(1)
    numbers = [float(text) for text in loaded("number").predict(LINES)]
    assert np.corrcoef(numbers, [len(line) / 2 for line in LINES])[0, 1] > 0.5
    assert 4 < np.mean(numbers) < 8  # of 5.5 to 7: in their own unit again


@pytest.mark.slow
def test_a_continuation_is_what_greedy_search_without_a_cache_gives(loaded):
    predictor = loaded("lm")
    tokenizer, limit = predictor.tokenizers[1], predictor.config.decode.max_extra_length
    apply = jax.jit(predictor.model.apply)
    prompts = ["red", "blue cat", "", "green bird saw"]
    assert len(predictor.predict(["red " * 16, "red " * 15])) == 2  # with BOS these are 17 and 16 tokens
    for prompt, found in zip(prompts, predictor.predict(prompts), strict=True):
        tokens = list(tokenizer.encode([prompt])[0])
        for _ in range(limit):
            fed = np.zeros((1, 16), np.int32)
            fed[0, : len(tokens) + 1] = [BOS, *tokens]
            real = (np.arange(16) <= len(tokens))[None].astype(np.int32)
            positions = np.arange(16)[None] * real
            batch = {"target_in": fed, "target_segments": real, "target_positions": positions}
            logits = np.array(apply({"params": predictor.params}, batch)[0, len(tokens)])
            logits[[0, BOS]] = -np.inf
            tokens.append(int(logits[: tokenizer.vocab_size].argmax()))
            if tokens[-1] == EOS:
                break
        assert found == tokenizer.decode(tokens)


@pytest.mark.slow
def test_a_prefix_is_continued_as_greedy_search_without_a_cache_does_and_scored_alike(loaded):
    predictor = loaded("prefix_lm")
    tokenizer = predictor.tokenizers[1]
    apply, sources = jax.jit(predictor.model.apply), ["red cat sat", "blue dog"]  # of other lengths than each other
    for source, (found,) in zip(sources, predictor.generate(sources), strict=True):
        prefix = [*tokenizer.encode([source])[0], EOS]
        tokens, log_prob = list(prefix), 0.0
        while len(tokens) == len(prefix) or tokens[-1] != EOS:
            batch = make_batch(target=np.array([[*tokens, 1] + [0] * (15 - len(tokens))]))
            batch["target_prefix"] = np.arange(16)[None] < len(prefix)
            logits = np.array(apply({"params": predictor.params}, batch)[0, len(tokens)])
            tokens.append(int(np.where(np.isin(np.arange(len(logits)), (0, BOS)), -np.inf, logits).argmax()))
            log_prob += float(jax.nn.log_softmax(logits)[tokens[-1]])
        assert found.ids == (*tokens[len(prefix) :],)
        (scored,) = predictor.score([(source, found.text)])
        assert len(scored.tokens) == len(found.ids)
        assert scored.log_prob == pytest.approx(log_prob, abs=1e-4)
        penalty = ((5 + len(found.ids)) / 6) ** predictor.config.decode.length_penalty
        assert found.score * penalty == pytest.approx(log_prob, abs=1e-4)
    (attended,) = predictor.attend([("red cat sat", "red")])
    assert attended.decoder.mask.astype(int).tolist() == [
        *[[1, 1, 1, 1, 0, 0]] * 4, [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1],
    ]  # fmt: skip


def test_a_label_of_a_test_set_that_training_does_not_hold_is_named_before_the_first_update(texts, tmp_path):
    (texts / "odd.tsv").write_text("a red cat\tred\na pink cat\tpink\n")
    config = small("bert_base", texts, "classify", source="labelled", test=("odd=odd",))
    with pytest.raises(
        UserError, match=r"data\.test: the set 'odd': .*label 'pink' does not occur in the training data"
    ):
        train(resolve(config), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_run_of_another_task_is_no_member_before_the_first_update(begun, texts, tmp_path):
    config = small("gpt2", texts, **PACKED)
    config.decode.ensemble = (str(begun("classify")),)
    with pytest.raises(UserError, match=r"decode\.ensemble: .* has task='classify', this run 'lm'; leave it out"):
        train(resolve(config), tmp_path)


def in_order(batches):
    """Return what an engine yields by number, batch by batch, in the order of the numbers."""
    found = {}
    for some in batches:
        found |= some
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("lm", "continue"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("prefix_lm", "translate"),
                ("classify", "label"),
                ("several", "label"),
                ("number", "estimate"),
                ("tag", "tag"),
                ("tag_chain", "tag"),
                ("qa", "answer"),
                ("embed", "embeddings"),
                ("mlm", "fill"),
            )
        ),
    ],
)
def test_an_engine_of_a_server_answers_as_predict_does(loaded, texts, name, route):
    predictor, lines = loaded(name), inputs_of(name, texts)
    engine = Engine(predictor, Limits())
    engine.warm_up()
    assert engine.facts()["route"] == f"/v1/{route}"
    answers = in_order(engine.answer(engine.requests(InputsBody(inputs=lines))))
    if name == "embed":
        np.testing.assert_array_equal(np.float32([answer["vector"] for answer in answers]), predictor.embed(lines))
        return
    assert [answer["outputs"][0]["text"] for answer in answers] == predictor.predict(lines)
    assert ("labels" in answers[0]["outputs"][0]) == (name in ("classify", "several"))
    if name == "qa":
        objects = [dict(zip(("question", "context"), line.split("\t"), strict=True)) for line in lines]
        assert in_order(engine.answer(engine.requests(InputsBody(inputs=objects)))) == answers
        assert {"start", "end", "log_prob"} < answers[0]["outputs"][0].keys()
        (looked,) = in_order(engine.look_into([(lines[0], None)]))
        assert [token["token"].partition(":")[0] for token in looked["tokens"]] == ["start", "end"]
        return
    with pytest.raises(UserError, match="reads no context: send texts"):
        engine.requests(InputsBody(inputs=[{"question": "a", "context": "b"}]))
    pairs = [(LINES[0], None), *([(LINES[0], "red,cat")] if name == "several" else [])]
    looked = in_order(engine.look_into(pairs))[-1]
    chosen = [token["token"] for token in looked["tokens"]]
    assert chosen == ["cat", "red"] if name == "several" else bool(chosen) == (name != "number")


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (lambda p: p.score([("a\tb", "b")]), "has no targets to score"),
        (lambda p: p.attend([("a\tb", "c")]), "'c' is not in the context 'b': an answer is some words of it"),
        (lambda p: p.attend([("a", "b")]), "'a': 0 TABs; a text is a question, one TAB, its context"),
        (lambda p: p.attend([("a\t ", None)]), "no question or no context"),
        (lambda p: p.predict(["a"]), r"^input line 1: 0 TABs; a text is a question, one TAB, its context$"),
        (lambda p: p.generate([Request("a\tb", prefix="c")]), "spans have no prefix and no constraints"),
    ],
)
def test_what_a_span_cannot_do_is_refused_in_one_line(loaded, use, line):
    with pytest.raises(UserError, match=line) as error:
        use(loaded("qa"))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_answer_does_not_depend_on_the_batch_on_windows_or_on_devices(begun, loaded, texts):
    workdir, predictor = begun("qa"), loaded("qa")
    lines = [*inputs_of("qa", texts), f"who sat\t{' '.join(LINES)}", "", "who\t"]
    whole = predictor.generate(lines)
    alone = [predictor.generate([line])[0] for line in lines]
    config = dataclasses.replace(predictor.config, mesh=MeshConfig(data=2, fsdp=2))
    for others in (alone, load(workdir, config, open_mesh(config)).generate(lines)):
        for outputs, same in zip(whole, others, strict=True):
            assert [(output.text, output.span) for output in outputs] == [(output.text, output.span) for output in same]
            assert outputs[0].log_prob == pytest.approx(same[0].log_prob, abs=1e-4)
    assert len(predictor.inputs.pieces([Request(lines[2])])[0]) > 5
    assert [outputs[0].text for outputs in whole[3:]] == ["", ""]
    text, span = whole[2][0].text, whole[2][0].span
    assert text == lines[2].split("\t")[1][slice(*span)]


@pytest.mark.slow
def test_scores_of_spans_do_not_depend_on_devices_or_microbatches(begun, tmp_path):
    workdir = begun("qa")
    config = load_config(workdir / "config.json")
    results = evaluate(config, workdir, tmp_path / "one")
    mesh, shared = MeshConfig(data=2, fsdp=2), dataclasses.replace(config.train, accumulation=2)
    found = evaluate(dataclasses.replace(config, mesh=mesh, train=shared), workdir, tmp_path / "four")["test"]
    for name in final_scores(config):
        assert found[name]["score"] == pytest.approx(results["test"][name]["score"], rel=1e-4)


@pytest.mark.slow
def test_tags_are_written_as_conll_and_go_on_after_whole_sentences(begun, loaded, tmp_path):
    workdir = begun("tag")
    predictor, lines = loaded("tag"), [*LINES[:2], "", LINES[2]]
    options = dataclasses.replace(predictor.config.decode, outputs="conll")
    config, target = dataclasses.replace(predictor.config, decode=options), tmp_path / "tagged.conll"
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    predict_file(config, workdir, str(tmp_path / "lines"), str(target))
    written = target.read_text()
    split = open_split(SourceConfig(source="conll", dir=str(tmp_path)), "tagged")
    answers = predictor.predict(lines)
    assert [(pair.source, pair.target) for pair in split.read(Counter())] == [
        (line, answer) for line, answer in zip(lines, answers, strict=True) if line
    ]
    target.write_text(written[: written.index("\n\n") + 9])  # one sentence, and some of the next
    predict_file(config, workdir, str(tmp_path / "lines"), str(target), resume=True)
    assert target.read_text() == written


def test_questions_are_answered_from_files(begun, loaded, texts, tmp_path):
    workdir = begun("qa")
    predictor, lines = loaded("qa"), inputs_of("qa", texts)
    options = dataclasses.replace(
        predictor.config.decode, outputs="jsonl", inputs="jsonl", scores=True, n_best=2, beam_size=2
    )
    config = dataclasses.replace(predictor.config, decode=options)
    asked = [dict(zip(("question", "context"), line.split("\t"), strict=True)) for line in lines]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in asked))
    predict_file(config, workdir, str(tmp_path / "in"), str(tmp_path / "out"))
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [len(record["outputs"]) for record in records] == [2, 2]
    for record, each, text in zip(records, asked, predictor.predict(lines), strict=True):
        best = record["outputs"][0]
        assert best["text"] == text == each["context"][best["start"] : best["end"]]
        assert best["log_prob"] >= record["outputs"][1]["log_prob"]
    for form, content, line in (
        ("text", "a\tb\nno context\n", "in:2: 0 TABs; a text is a question, one TAB, its context"),
        ("jsonl", '{"question": "a"}\n', "in:1: not a JSON object with 'question' and 'context'"),
    ):
        (tmp_path / "in").write_text(content)
        config = dataclasses.replace(config, decode=dataclasses.replace(options, inputs=form))
        with pytest.raises(UserError, match=line):
            predict_file(config, workdir, str(tmp_path / "in"), str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"), [("t5", "has no answer to a text"), *((name, "which no client may name") for name in OF_IMAGES)]
)
def test_a_run_that_cannot_be_served_is_refused(loaded, name, line):
    with pytest.raises(UserError, match=line):
        Engine(loaded(name), Limits())


@pytest.mark.slow
def test_the_command_serves_until_a_signal_asks_to_stop(trained):
    command = [sys.executable, "-m", "jformer.main", f"--workdir={trained('lm')}", "--mode=serve", "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        said = server.stderr.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+): ", said)[1])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/health", timeout=30) as answer:
            assert json.load(answer)["status"] == "ok"
        server.send_signal(signal.SIGTERM)
        assert (server.wait(60), server.stderr.read()) == (143, "stopped\n")


def test_a_prompt_over_the_limit_loses_its_beginning_and_is_counted(loaded):
    predictor = loaded("lm")
    long = " ".join(["red cat sat"] * 20)
    kept = " ".join(long.split()[-31:])
    assert predictor.predict([long]) == predictor.predict([kept])
    assert predictor.counts[CUT] == 1


@pytest.mark.slow
def test_a_classifier_begins_with_a_masked_language_model_and_a_head_of_its_own(trained, texts, tmp_path, capfd):
    parent = trained("mlm")
    config = small("bert_base", texts, "classify", source="labelled")
    config.train.update(init_from=str(parent), num_steps=10, eval_every=10, checkpoint_every=10)
    config.mesh.update(data=4)  # the parent is read onto one device
    config.optim.update(learning_rate=0.0)
    assert train(resolve(config), tmp_path)
    said = capfd.readouterr().err
    assert "classifier/kernel is newly initialised" in said
    assert "head/transform/kernel is not used here" in said
    child, old = load(tmp_path), load(parent)
    kernel = "encoder", "block", "feed_forward", "up", "kernel"
    for name in (kernel, ("input", "positions", "embedding")):
        new, before = child.params, old.params
        for key in name:
            new, before = new[key], before[key]
        np.testing.assert_array_equal(new, before)
    rows = len(child.params["embedding"]["embedding"])
    assert rows == len(old.params["embedding"]["embedding"]) - 1  # without the mask
    np.testing.assert_array_equal(child.params["embedding"]["embedding"], old.params["embedding"]["embedding"][:rows])


def test_a_parent_of_another_shape_is_refused_by_name():
    fresh = {"encoder": {"kernel": np.zeros((2, 3))}, "head": {"bias": np.zeros(3)}}
    parent = {"encoder": {"kernel": np.zeros((2, 4))}}
    with pytest.raises(UserError, match=r"train\.init_from='x' has \(2, 4\) for encoder/kernel.* needs \(2, 3\)"):
        adopt(parent, fresh, "x")
    with pytest.raises(UserError, match="has nothing for encoder/kernel"):
        adopt({}, fresh, "x")
    kept, notes = adopt({"encoder": fresh["encoder"], "old": np.zeros(1)}, fresh, "x")
    assert kept["head"] is not None
    assert notes == [
        "init_from x: 1 parameter copied",
        "init_from x: head/bias is newly initialised",
        "init_from x: old is not used here",
    ]


@pytest.mark.slow
def test_embeddings_begin_with_word_vectors_and_say_how_many(texts, tmp_path, capfd):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("".join(f"{word} " + " ".join(["0.25"] * 16) + "\n" for word in ("red", "cat", "unseen")))
    config = small("gpt2", texts)
    config.train.update(target_vectors=str(vectors), num_steps=1, eval_every=0, checkpoint_every=1, log_every=1)
    config.optim.update(learning_rate=0.0)
    assert train(resolve(config), tmp_path / "run")
    assert "2 of 9 words" in capfd.readouterr().err
    predictor = load(tmp_path / "run")
    table = np.asarray(predictor.params["embedding"]["embedding"])
    ids = [i for (i,) in predictor.tokenizers[1].encode(["red", "cat"])]
    assert (table[ids] == 0.25).all()
    assert (table == 0.25).all(axis=1).sum() == 2
    config.model.d_model = 32
    with pytest.raises(UserError, match=r"vectors\.txt:1 .* 16 numbers.* of 32:.*model\.d_model.* to 16"):
        train(resolve(config), tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "lm"}, "task='lm' is not for model.family='encdec'"),
        ({"model.family": "decoder"}, "task='translate' is not for model.family='decoder', which learns lm"),
        ({"model.family": "decoder", "task": "lm", "train.source_vectors": "x"}, "embeds no source tokens"),
        (
            {"train.source_vectors": "x", "train.target_vectors": "y"},
            "can start from one of them only",
        ),
        (
            {
                "task": "embed",
                "model.shared_embedding": False,
                "train.source_vectors": "x",
                "train.target_vectors": "y",
            },
            "can start from one of them only",
        ),
        ({"model.family": "decoder", "task": "lm", "model.positions": "learned"}, None),
        ({"model.positions": "learned", "data.max_target_length": 600}, "is below the 600 tokens that data allows"),
    ],
)
def test_what_does_not_go_together_is_refused(change, words):
    config = as_config_dict(resolve({}))
    config.update_from_flattened_dict(change)
    if words is None:
        resolve(config)
    else:
        with pytest.raises(UserError) as error:
            resolve(config)
        assert words in str(error.value)


@pytest.mark.parametrize("bridge", ["zeros", "copy"])
def test_a_new_run_that_would_not_read_its_source_is_refused(bridge):
    config = as_config_dict(resolve({}))
    config.model.recurrent.update(cell="lstm", bridge=bridge)
    config = resolve(config)
    with pytest.raises(UserError, match="never reads the source") if bridge == "zeros" else contextlib.nullcontext():
        settle(config, None)
    settle(config, config)  # a resumed one goes on


def test_word_vectors_of_captions_go_into_the_only_table_there_is(texts):
    config = resolve(small("transformer_tiny", texts, "caption", source="captions"))
    assert table_of(config.model, "target") == "target_embedding"
    assert table_of(resolve(small("transformer_tiny", texts, source="files")).model, "target") == "source_embedding"
