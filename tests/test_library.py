"""The public surface: what is in it, what docs/library.md lists, and that each part works on a small run."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import jformer
from jformer.config import default_config, resolve
from jformer.data.tokenizers import Symbols, learn
from jformer.decoding.decode_config import DecodeConfig, DecodeOptions
from jformer.errors import UserError
from jformer.inference.predict import Predictor
from jformer.models.lora import merged
from jformer.models.lora_config import LoraConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks.build import TASKS, build_sized, build_task
from jformer.tasks.sums import Sum
from tests import small_run
from tests.slow import slow_but

ROOT = Path(__file__).parents[1]


def test_the_public_surface_is_what_the_document_lists():
    text = (ROOT / "docs" / "library.md").read_text()
    assert set(re.findall(r"^\| `jformer\.(\w+)", text, re.MULTILINE)) == set(jformer.__all__)
    assert all(hasattr(jformer, name) for name in jformer.__all__)


def test_the_version_is_that_of_the_package():
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    assert dynamic["version"] == {"attr": "jformer.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", jformer.__version__)


def test_importing_it_does_not_import_jax():
    program = "import sys, jformer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_the_documents_own_loop_learns_searches_and_is_differentiated_twice():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training_loop.md").read_text(), re.DOTALL)
    loop, search, derivatives = blocks[-3:]
    assert len(loop.splitlines()) <= 40
    names: dict[str, Any] = {}
    assert loop.count("jformer.make_mesh()") == 1
    for block in (loop.replace("jformer.make_mesh()", "jformer.make_mesh(1)"), search, derivatives):  # eight take turns
        exec(block, names)
    nll = names["metrics"].sums["nll"]
    assert float(nll.total / nll.count) < 0.2
    np.testing.assert_array_equal(names["found"].tokens[:, 0], names["pad"](names["target"]))
    pull = jax.jit(jax.grad(names["total"]))(names["state"].params)
    assert float(names["slope"]) == pytest.approx(sum(float(g.sum()) for g in jax.tree.leaves(pull)), rel=1e-3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(names["hessian_product"]))


@pytest.mark.parametrize("preset", slow_but(["transformer_tiny", "rnnsearch_tiny"], "transformer_tiny"))
def test_a_run_of_arrays_of_ones_own_answers_as_they_do(preset, tmp_path):
    values = default_config(preset)
    values.model.update(num_layers=1, d_model=16, shared_embedding=False)
    values.data.update(vocab_shared=False)
    values.train.ema_decay, values.evaluate.weights = 0.9, "ema"  # of training, which this run has not
    sides = learn("char", ["abcd"], 9, "identity", False), learn("char", ["wxyz!"], 9, "identity", False)
    built = build_sized(resolve(values), build_task(resolve(values)), sides)
    params = jax.tree.map(lambda leaf: leaf + 0.5 * jax.random.normal(jax.random.key(leaf.size), leaf.shape),
                          jformer.init_params(built, jax.random.key(0)))  # fmt: skip
    named = {name: np.asarray(leaf) for name, leaf in traverse_util.flatten_dict(params, sep="/").items()}
    jformer.save_run(values, named, [*sides], tmp_path / "run")
    loaded = jformer.load(tmp_path / "run", beam_size=1)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert len({*loaded.predict(["abc", "dd", "bcda"])}) > 1
    longer = jformer.load(tmp_path / "run", {"data.max_source_length": 500, "evaluate.weights": "best"}, beam_size=3)
    config = longer.config
    assert (config.data.max_source_length, config.evaluate.weights, config.decode.beam_size) == (500, "best", 3)
    with pytest.raises(UserError, match=r"mesh.*tensor=3.* 8 devices"):
        jformer.load(tmp_path / "run", {"mesh.tensor": 3})
    with pytest.raises(UserError, match=r"model\.num_layers=2 but .* with 1: it cannot change"):
        jformer.load(tmp_path / "run", {"model.num_layers": 2})
    first = next(name for name in named if name.endswith("kernel"))
    wrong = {name: leaf for name, leaf in named.items() if name != first} | {"extra": np.zeros(3)}
    with pytest.raises(UserError, match=rf"extra \[3\] has no place; {first} is missing: \["):
        jformer.save_run(values, wrong, sides, tmp_path / "other")
    with pytest.raises(UserError, match="is not empty"):
        jformer.save_run(values, named, sides, tmp_path / "run")
    assert not (tmp_path / "other").exists()


def test_a_batch_is_made_from_ids_alone():
    batch = jformer.make_batch([[5, 6, 2], [7, 2]], target=np.array([[8, 2], [2, 0]]))
    assert {name: array.tolist() for name, array in batch.items()} == {
        "source": [[5, 6, 2], [7, 2, 0]],
        "source_segments": [[1, 1, 1], [1, 1, 0]],
        "source_positions": [[0, 1, 2], [0, 1, 0]],
        "source_types": [[0, 0, 0], [0, 0, 0]],
        "target_in": [[1, 8], [1, 1]],
        "target_out": [[8, 2], [2, 0]],
        "target_segments": [[1, 1], [1, 0]],
        "target_positions": [[0, 1], [0, 0]],
        "weights": [[1.0, 1.0], [1.0, 0.0]],
        "row": [0, 1],
    }
    assert jformer.make_batch([[5, 0, 2], [7]])["source_segments"].tolist() == [
        [1, 1, 1],
        [1, 0, 0],
    ]  # 0 may be a token
    padded = jformer.make_batch(target=np.array([[0, 0, 5, 6, 2], [7, 8, 9, 6, 2]]))
    assert padded["target_positions"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert padded["target_in"].tolist() == [[1, 1, 1, 5, 6], [1, 7, 8, 9, 6]]
    packed = jformer.make_batch(target=[[5, 2, 6, 7]], target_positions=[[0, 1, 0, 1]], weights=[[1, 1, 0, 1]])
    assert (packed["target_in"].tolist(), packed["weights"].tolist()) == ([[1, 5, 1, 6]], [[1, 1, 0, 1]])
    labelled = jformer.make_batch([[5, 2]], target_out=np.array([[3]]), row=np.array([9]))
    assert (labelled["weights"].tolist(), labelled["row"].tolist()) == ([[1.0]], [9])
    with pytest.raises(jformer.UserError, match=r"target_out: 1 rows"):
        jformer.make_batch([[5, 2], [2]], target_out=np.array([[3]]))
    ragged, wanted = [[5, 6, 2], [2]], np.array([[5, 6, 2], [2, 0, 0]])
    assert jformer.make_batch([[4]] * 2, ragged, target_out=wanted)["weights"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert jformer.make_batch(ragged, target_out=wanted)["weights"].all()  # of three labels a text


def test_a_language_model_goes_on_from_a_prompt_as_its_logits_say():
    model = jformer.build_model(
        jformer.ModelConfig("decoder", vocab_size=9, num_layers=1, d_model=8, d_ff=8, num_heads=2)
    )
    params = jformer.init_params(model, jax.random.key(1))
    prompt = np.array([[1, 5, 6], [1, 7, 0]])
    found = jax.jit(lambda p: jformer.search(model, p, {}, 1, prompt=jnp.asarray(prompt), beam_size=1))(params)
    for row, length in enumerate((3, 2)):
        batch = jformer.make_batch(target=[[*prompt[row, 1:length], 3]])
        logits = np.array(jax.jit(model.apply)({"params": params}, batch)[0, -1])
        logits[:2] = -np.inf  # PAD and BOS are never written
        assert found.tokens[row, 0, 0] == logits.argmax()
    for same in (np.array([[1, 5, 6], [0, 1, 7]]), [[1, 5, 6], [1, 7]]):  # as others pad, and as lists
        again = jax.jit(lambda p, same=same: jformer.search(model, p, {}, 1, prompt=same, beam_size=1))(params)
        assert again.tokens.tolist() == found.tokens.tolist()
    alone = jax.eval_shape(lambda params: jformer.search(model, params, {}, 2, beam_size=np.int64(3)), params)
    assert alone.tokens.shape == (1, 1, 2)


def test_a_search_is_of_the_model_with_its_interventions_and_adapters():
    sizes = {"vocab_size": 9, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2}
    plain, lora = jformer.ModelConfig("decoder", **sizes), LoraConfig(rank=2)
    adapted = jformer.build_model(dataclasses.replace(plain, lora=lora))
    params = jax.tree.map(lambda leaf: leaf + jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape),
                          jformer.init_params(adapted, jax.random.key(1)))  # fmt: skip

    def search(model, params):
        return jax.jit(lambda params: jformer.search(model, params, {}, 3, beam_size=1))(params)

    found, expected = search(adapted, params), search(jformer.build_model(plain), merged(lora, params))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
    always = jformer.intervene(adapted, {"logits": lambda x, _: x.at[..., 5].set(99.0)})
    assert (search(always, params).tokens[:, 0] == 5).all()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train the small run for a few updates by the library."""
    config, workdir = small_run.get_config(), tmp_path_factory.mktemp("library") / "run"
    config.data.cache_dir = str(workdir.parent / "cache")
    config.data.update(num_pairs=200)
    config.train.update(num_steps=4, log_every=2, eval_every=4, checkpoint_every=2)
    assert jformer.train(config, str(workdir))
    return workdir


def importance(data, **options):
    """Make the task of translation with an array of weights of its own, which its loss reads."""
    task = TASKS["translate"](data, **options)

    def features(source, target):
        made = task.features(source, target)

        def arrays(*given):
            found = made.arrays(*given)
            return {**found, "importance": found["weights"] * 2.0}

        return made._replace(arrays=arrays)

    def loss(hidden, project, batch):
        return task.loss(hidden, project, {**batch, "weights": batch["importance"]})

    return task._replace(features=features, loss=loss)


def test_a_task_may_add_an_array_that_its_loss_reads(tmp_path):
    config = small_run.get_config()
    config.task = f"{__name__}:importance"
    config.data.update(num_pairs=200, cache_dir=str(tmp_path / "cache"))
    config.train.update(num_steps=2, log_every=1, eval_every=2, checkpoint_every=2)
    jformer.plugins.allow(__name__)
    assert jformer.train(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train", "train", "valid"]


@pytest.mark.slow
def test_a_run_is_trained_scored_and_answers(run):
    first = jformer.evaluate(run, beam_size=1)["test"]["settings"]
    assert (first["decode"]["beam_size"], first["steps"]) == (1, [4])
    rows = [made.model.config.execution.rows for made in (jformer.load(run), jformer.restore(run))]
    assert rows == ["one_text", "auto"]  # of its own batches, and of anybody's
    translator = jformer.load(run, n_best=2, beam_size=2, length_penalty=0.0)
    outputs = translator.generate(["a b", jformer.Request("c d", prefix="d")])
    assert [len(each) for each in outputs] == [2, 2]
    assert outputs[1][0].text.startswith("d")
    assert translator.predict(["a b"]) == [outputs[0][0].text]
    (scored,) = translator.score([("a b", outputs[0][0].text)])
    assert isinstance(scored, jformer.Scored)
    assert len(jformer.load(run, search="sample", samples=3).generate(["a b"])[0]) == 3
    assert jformer.load(run, alignments=True).generate(["a b"])[0][0].alignment.source
    assert "steps=[4]" in repr(translator)
    ((tree,),) = translator.search_trees(["a b"])
    assert isinstance(tree, jformer.SearchTree)
    assert tree.scores[tree.ranks == 1] == outputs[0][0].score
    (attended,) = translator.attend([("a b", "b a")])
    assert isinstance(attended, jformer.Attended)
    assert attended.cross.weights.shape[2:] == (len(attended.cross.rows), len(attended.cross.columns))


def test_keyword_arguments_have_the_names_and_types_of_the_options():
    types = {field.name: field.type for field in dataclasses.fields(DecodeConfig)}
    assert DecodeOptions.__annotations__ == {n: Sequence[str] if t == tuple[str, ...] else t for n, t in types.items()}


def test_the_methods_that_the_document_lists_are_there():
    table = (ROOT / "docs" / "library.md").read_text().partition("| method | returns |")[2].partition("\n\n")[0]
    names = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))
    public = {name for name, value in vars(Predictor).items() if not name.startswith("_") and callable(value)}
    assert public - {"fingerprint", "forget", "answers", "answers_to"} <= names  # for commands, and for servers
    assert all(hasattr(Predictor, name) for name in names)


@pytest.mark.slow
def test_scores_go_into_another_folder_and_leave_the_run_as_it_was(run, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    folder = tmp_path / "scores" / "greedy"
    found = jformer.evaluate(run, output=folder, beam_size=1)
    assert json.loads((folder / "results.json").read_text())["test"]["bleu"] == found["test"]["bleu"]
    assert len((folder / "outputs" / "test.txt").read_text().splitlines()) == found["test"]["examples"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_what_it_is_given_wrong_is_one_line(run):
    with pytest.raises(
        jformer.UserError, match=r"unknown config key decode\.beam_sise; did you mean decode\.beam_size\?"
    ):
        jformer.load(run, beam_sise=3)
    with pytest.raises(jformer.UserError, match=r"decode\.beam_size='3' must be a whole number"):
        jformer.load(run, beam_size="3")
    with pytest.raises(jformer.UserError, match="nothing holds no run: name the directory of one"):
        jformer.load(run.parent / "nothing")


def test_a_run_needs_a_directory(run, tmp_path):
    with pytest.raises(jformer.UserError, match="workdir='' names no directory"):
        jformer.train(small_run.get_config(), "")
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "run"):
        with pytest.raises(jformer.UserError, match=r"workdir=.*notes.txt is a file; name a folder"):
            jformer.train(small_run.get_config(), path)
        with pytest.raises(jformer.UserError, match=r"output=.*notes.txt is a file; name a folder"):
            jformer.evaluate(run, output=path)


@pytest.mark.parametrize(
    "option",
    [
        {"max_length": 2},
        {"forbid": ("x",)},
        {"ensemble": ("runs/b",)},
        {"search": "mbr", "samples": 2},
        {"normalize": True},
        {"beam_size": 2.0},
        {"beam_sise": 2},
        {"prompt": np.ones((2, 1), int)},
    ],
)
def test_a_search_of_ids_refuses_what_it_does_not_read(option):
    model = jformer.build_model(jformer.ModelConfig(vocab_size=16, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    with pytest.raises(jformer.UserError, match=next(iter(option))):
        jformer.search(model, {}, jformer.make_batch([[4, 5]]), 4, **option)


@pytest.mark.parametrize(("max_tokens", "option"), [(3, {"coverage_penalty": 0.1}), (7, {"beam_size": 1})])
def test_a_search_of_ids_refuses_attention_and_positions_that_the_model_lacks(max_tokens, option):
    sizes = {"vocab_size": 16, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2, "max_length": 8}
    model = jformer.build_model(jformer.ModelConfig(family="decoder", positions="learned", **sizes))
    with pytest.raises(jformer.UserError, match=r"has none|3 tokens and max_tokens=7 take 9 positions"):
        jformer.search(model, {}, {}, max_tokens, prompt=np.array([[1, 4, 5]]), **option)


def test_a_search_has_the_symbols_of_any_vocabulary():
    sizes = {"vocab_size": 9, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2}
    model = jformer.build_model(jformer.ModelConfig("decoder", **sizes))
    params, t5 = jformer.init_params(model, jax.random.key(1)), Symbols(pad=0, bos=0, eos=1, noise=(8,))
    found = jformer.search(model, params, {}, 4, prompt=[[0, 5], [0]], symbols=t5, search="sample", samples=64)
    alone = jformer.search(model, params, {}, 4, symbols=t5, search="sample", samples=64)
    for length in (2, 1):
        batch = jformer.make_batch(target=[[0, 5, 3][1 : length + 1]], bos=0, pad=7)
        logits = np.array(model.apply({"params": params}, batch)[0, length - 1])
        greedy = jformer.search(model, params, {}, 1, prompt=[[0, 5][:length]], symbols=t5, beam_size=1)
        assert greedy.tokens[0, 0, 0] == 1 + logits[1:8].argmax()
    for some in (found, alone):
        written = [row[:length] for row, length in zip(some.tokens[0].tolist(), some.lengths[0].tolist(), strict=True)]
        assert {i for row in written for i in row} == {*range(1, 8)}
        assert all(1 not in row[:-1] for row in written)  # the end is one
    with pytest.raises(jformer.UserError, match="padding is bos=0, too"):
        jformer.search(model, params, {}, 4, prompt=np.array([[0, 5]]), symbols=t5)
    past = jformer.make_batch(target=np.array([[5, 0, 12]]), bos=1, pad=12)  # padding past the vocabulary
    assert (past["target_out"].tolist(), past["target_segments"].tolist()) == ([[5, 0, 0]], [[1, 1, 0]])


def test_a_prefix_ends_before_the_last_token_of_a_prompt():
    sizes = {"vocab_size": 9, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2}
    model = jformer.build_model(jformer.ModelConfig("decoder", **sizes))
    params, prompt = jformer.init_params(model, jax.random.key(1)), [[1, 5, 6], [1, 7]]
    prefix = jnp.array([[True, True, False], [True, False, False]])
    found = jformer.search(model, params, {"target_prefix": prefix}, 1, prompt=prompt, beam_size=1)
    batch = jformer.make_batch(target=[[5, 6, 3]], target_prefix=prefix[:1])
    logits = np.array(model.apply({"params": params}, batch)[0, -1])
    assert found.tokens[0, 0, 0] == 2 + logits[2:].argmax()
    with pytest.raises(jformer.UserError, match="target_prefix: that of row 1 has the last token of the prompt"):
        jformer.search(model, params, {"target_prefix": prefix.at[1, 1].set(True)}, 1, prompt=prompt)
    other = jformer.build_model(jformer.ModelConfig("decoder", positions="transformer_xl", **sizes))
    with pytest.raises(jformer.UserError, match="'transformer_xl' has no scores for later keys"):
        jformer.search(other, {}, {"target_prefix": prefix}, 1, prompt=prompt)
    recurrent = RecurrentConfig(cell="lstm", attention="none")
    lstm = jformer.build_model(
        jformer.ModelConfig("decoder", vocab_size=9, num_layers=1, d_model=8, recurrent=recurrent)
    )
    params = jformer.init_params(lstm, jax.random.key(1))
    answers = [
        jformer.search(lstm, params, some, 3, prompt=prompt, beam_size=1).tokens.tolist()
        for some in ({}, {"target_prefix": prefix})
    ]
    assert answers[0] == answers[1]


HEADS = {
    "model.head.vectors=True": {"vectors": True, "num_classes": 3},
    "'none' gives no single vector": {"vectors": True, "pooling": "none"},
    "crf=True: a chain": {"crf": True},
}


@pytest.mark.parametrize("says", HEADS)
def test_heads_that_no_model_has_are_refused(says):
    head = dataclasses.replace(jformer.ModelConfig().head, **HEADS[says])
    with pytest.raises(jformer.UserError, match=says):
        jformer.build_model(jformer.ModelConfig("encoder", vocab_size=9, head=head))
    for wrong, vit in (
        ({"vectors": True}, "another family than"),
        ({"crf": True, "num_classes": 3}, "one for an image"),
    ):
        head = dataclasses.replace(jformer.ModelConfig().head, **wrong)
        with pytest.raises(jformer.UserError, match=vit):
            jformer.build_model(jformer.ModelConfig("vit", head=head))
    with pytest.raises(jformer.UserError, match="target_vocab_size=40 is read by family='encdec' only"):
        jformer.build_model(jformer.ModelConfig("decoder", vocab_size=50, target_vocab_size=40))


@dataclasses.dataclass
class Unhashable:
    """A loss that cannot be a key of a cache, and lacks what is minimized."""

    def __call__(self, hidden, project, batch):
        return {"nll": Sum(0.0, 1.0)}


def test_what_is_no_search_and_no_batch_is_one_line():
    sizes = {"vocab_size": 16, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2}
    shapes = "give a list of token ids for each row"
    for prompt, wrong in (
        ([[1], []], "row 1 has no token"), ([[1, 500]], "the token id 500 is outside"), ([], shapes),
        (np.array([1, 5, 6]), shapes), (np.ones((0, 3), int), shapes), (np.array(1), shapes),
    ):  # fmt: skip
        with pytest.raises(jformer.UserError, match=f"prompt: {wrong}"):
            jformer.search(jformer.build_model(jformer.ModelConfig(**sizes)), {}, {}, 4, prompt=prompt)
    with pytest.raises(jformer.UserError, match=r"which model\.family='encoder' does not"):
        jformer.search(jformer.build_model(jformer.ModelConfig(family="encoder", **sizes)), {}, {}, 4)
    vectors = jformer.build_model(jformer.ModelConfig(**sizes).with_vectors())
    with pytest.raises(jformer.UserError, match=r"which model\.head\.vectors=True does not"):
        jformer.search(vectors, {}, {}, 4)
    with pytest.raises(jformer.UserError, match="max_tokens=0 must be at least 1"):
        jformer.search(jformer.build_model(jformer.ModelConfig(**sizes)), {}, {}, 0)
    config = jformer.ModelConfig(**sizes)
    object.__setattr__(config, "recurrent", {"cell": "lstm"})  # tests refuse the type before
    with pytest.raises(jformer.UserError, match=r"model\.recurrent: give a .*\.RecurrentConfig, not a dict"):
        config.check()
    model = jformer.build_model(jformer.ModelConfig(**sizes))
    params = jax.eval_shape(lambda: jformer.init_params(model, jax.random.key(0)))
    batch = jformer.make_batch([[4]], [[4]])
    for r_drop, key in ((0.0, None), (1.0, jax.random.key(0))):
        lossless = jformer.make_loss(model, Unhashable(), r_drop)
        with pytest.raises(jformer.UserError, match=r"its sums lack 'loss', a jformer\.tasks\.sums\.Sum to minimize"):
            jax.eval_shape(lambda params, lossless=lossless, key=key: lossless(params, batch, key), params)
    with pytest.raises(jformer.UserError, match="source: give a list of token ids for each row"):
        jformer.make_batch([4, 5])
    with pytest.raises(jformer.UserError, match="source: token ids are integers"):
        jformer.make_batch([[4], [0.5]])
    with pytest.raises(jformer.UserError, match="'source_segment': did you mean 'source_segments'"):
        jformer.make_batch([[4, 5]], source_segment=np.array([[1, 2]]))
    with pytest.raises(jformer.UserError, match=r"source_segments \[1, 3\] must have the shape of source \[1, 2\]"):
        jformer.make_batch([[4, 5]], source_segments=np.array([[1, 2, 2]]))
    assert jformer.make_batch([[], [4]], teacher=np.ones((2, 3)))["teacher"].shape == (2, 3)  # a loss may read more
    assert "source2" in jformer.make_batch([[4]], source2=np.ones((1, 3)))
