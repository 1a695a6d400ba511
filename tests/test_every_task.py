"""Every task from files to scores and answers: trained for some updates, evaluated, asked; and what begins warm."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import jax
import numpy as np
import pytest

from jformer.config import as_config_dict, default_config, resolve
from jformer.config.options import TEST_SCORES
from jformer.data.tokenizers import BOS, EOS
from jformer.errors import UserError
from jformer.evaluation.evaluate import evaluate, report_scores
from jformer.inference.predict import load
from jformer.inference.server.engine import Engine
from jformer.inference.server.limits import Limits
from jformer.inference.server.schema import Inputs
from jformer.training.loop import train
from jformer.training.transfer import adopt

LINES = [
    f"{a} {b} {c}" for a in ("red", "blue", "green") for b in ("cat", "dog", "bird") for c in ("sat", "ran", "saw")
]
SMALL = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "max_length": 64, "execution": {"unroll": 1}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Write lines, labelled lines and images, each as train, valid and test."""
    root = tmp_path_factory.mktemp("texts")
    image = np.random.default_rng(0).integers(0, 256, (27, 4, 4)).astype(np.uint8)
    for split in ("train", "valid", "test"):
        (root / f"{split}.txt").write_text("\n".join(LINES) + "\n")
        (root / f"{split}.tsv").write_text("\n".join(f"{line}\t{line.split()[0]}" for line in LINES) + "\n")
        np.save(root / f"{split}.npy", image)
        (root / f"{split}.labels.txt").write_text("\n".join(line.split()[1] for line in LINES) + "\n")
    return root


def small(preset, texts, task=None, **data):
    """Return the config of a run of seconds."""
    config = default_config(preset)
    config.model.update({**SMALL, "num_layers": 1, "num_decoder_layers": 0})
    config.task = task or config.task
    config.data.update(dir=str(texts), cache_dir=str(texts / "cache"), source="text", tokenizer="word", num_buckets=1)
    config.data.update(max_source_length=32, max_target_length=32, tokens_per_update=256)
    config.data.update(data)
    config.optim.update(schedule="constant", learning_rate=1e-2, warmup=0)
    config.train.update(num_steps=30, log_every=10, eval_every=30, checkpoint_every=30, samples=1)
    config.decode.update(beam_size=1, batch_size=4, max_extra_length=6)
    config.mesh.update(data=1)
    return config


PACKED = {"batching": "packed", "packed_length": 32}
RUNS = {  # name → (preset, options of the data, whether it gives answers)
    "lm": ("gpt2", PACKED, True),
    "mlm": ("bert_base", {}, False),
    "t5": ("t5_small", {}, False),
    "classify": ("bert_base", {"source": "labelled"}, True),
    "vit": ("vit_s16", {"source": "images", "tokenizer": "image"}, True),
}


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """Return a function: name of a run → (its directory, its results), trained once."""
    done = {}

    def get(name):
        if name not in done:
            preset, data, _ = RUNS[name]
            config = small(preset, texts, "classify" if name == "classify" else None, **data)
            if name == "vit":
                config.model.vision.update(image_size=4, patch_size=2, channels=1)
            workdir = tmp_path_factory.mktemp(name)
            assert train(resolve(config), workdir)
            done[name] = workdir, evaluate(resolve(config), workdir)
        return done[name]

    return get


@pytest.mark.parametrize("name", RUNS)
def test_a_task_trains_scores_and_answers(trained, texts, name):
    workdir, results = trained(name)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses[-1] < losses[0]
    assert all(0 < row["padding_efficiency"] <= 1 for row in rows if row["split"] == "train")
    predictor, inputs = load(workdir), [f"{texts}/test.npy#3", f"{texts}/test.npy#5"] if name == "vit" else LINES[:2]
    scores = {key for key, entry in results["test"].items() if isinstance(entry, dict) and "score" in entry}
    assert scores == set(TEST_SCORES[predictor.config.task])
    assert "Try next" in report_scores(results, predictor.config, workdir)
    if RUNS[name][2]:
        answers = predictor.predict(inputs)
        assert len(answers) == 2
        assert all(answers)
    else:
        with pytest.raises(UserError, match="has no answer to a text; --mode=evaluate scores it"):
            predictor.predict(inputs)


def test_a_continuation_is_what_greedy_search_without_a_cache_gives(trained):
    predictor = load(trained("lm")[0])
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


def test_a_label_of_a_test_set_that_training_does_not_hold_is_named_before_the_first_update(texts, tmp_path):
    (texts / "odd.tsv").write_text("a red cat\tred\na pink cat\tpink\n")
    config = small("bert_base", texts, "classify", source="labelled", test=("odd=odd",))
    with pytest.raises(UserError, match=r"data\.test: the set 'odd': .*label 'pink' is none of those trained on"):
        train(resolve(config), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_run_of_another_task_is_no_member_before_the_first_update(trained, texts, tmp_path):
    config = small("gpt2", texts, **PACKED)
    config.decode.ensemble = (str(trained("classify")[0]),)
    with pytest.raises(UserError, match=r"decode\.ensemble: .* has task='classify', this run 'lm'; leave it out"):
        train(resolve(config), tmp_path)


@pytest.mark.parametrize(("name", "route"), [("lm", "continue"), ("classify", "label")])
def test_an_engine_of_a_server_answers_as_predict_does(trained, name, route):
    predictor = load(trained(name)[0])
    engine = Engine(predictor, Limits())
    engine.warm_up()
    assert engine.facts()["route"] == f"/v1/{route}"
    answers = engine.answer(engine.requests(Inputs(inputs=LINES[:3])))
    assert [answer["outputs"][0]["text"] for answer in answers] == predictor.predict(LINES[:3])
    assert ("labels" in answers[0]["outputs"][0]) == (name == "classify")
    assert len(engine.look_into([(LINES[0], None)])[0]["tokens"]) > 0


@pytest.mark.parametrize(("name", "line"), [("mlm", "has no answer to a text"), ("vit", "which no client may name")])
def test_a_run_that_cannot_be_served_is_refused(trained, name, line):
    with pytest.raises(UserError, match=line):
        Engine(load(trained(name)[0]), Limits())


def test_the_command_serves_until_a_signal_asks_to_stop(trained):
    command = [sys.executable, "-m", "jformer.main", f"--workdir={trained('lm')[0]}", "--mode=serve", "--port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        said = server.stderr.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+): ", said)[1])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/health", timeout=30) as answer:
            assert json.load(answer)["status"] == "ok"
        server.send_signal(signal.SIGTERM)
        assert (server.wait(60), server.stderr.read()) == (143, "stopped\n")


def test_a_prompt_over_the_limit_loses_its_beginning_and_is_counted(trained):
    predictor = load(trained("lm")[0])
    long = " ".join(["red cat sat"] * 20)
    kept = " ".join(long.split()[-31:])
    assert predictor.predict([long]) == predictor.predict([kept])
    assert predictor.cut == 1


def test_a_classifier_begins_with_a_masked_language_model_and_a_head_of_its_own(trained, texts, tmp_path, capfd):
    parent, _ = trained("mlm")
    config = small("bert_base", texts, "classify", source="labelled")
    config.train.update(init_from=str(parent), num_steps=10, eval_every=10, checkpoint_every=10)
    config.mesh.update(data=4)  # the parent is read onto one device
    config.optim.update(learning_rate=0.0)
    assert train(resolve(config), tmp_path)
    said = capfd.readouterr().err
    assert "classifier/kernel begins anew" in said
    assert "head/transform/kernel has no use here" in said
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
        "init_from x: 1 parameter taken over", "init_from x: head/bias begins anew", "init_from x: old has no use here",
    ]  # fmt: skip


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
    with pytest.raises(UserError, match=r"vectors\.txt.*16.*model\.d_model=32"):
        train(resolve(config), tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "lm"}, "task='lm' is not for model.family='encdec'"),
        ({"model.family": "decoder"}, "task='translate' is not for model.family='decoder', which learns lm"),
        ({"model.family": "decoder", "task": "lm", "train.source_vectors": "x"}, "embeds no source tokens"),
        ({"train.source_vectors": "x", "train.target_vectors": "y"}, "one shared embedding begins with one of them"),
        ({"model.family": "decoder", "task": "lm", "model.positions": "learned"}, None),
        ({"model.positions": "learned", "data.max_target_length": 600}, "places fewer tokens than data allows (600)"),
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
