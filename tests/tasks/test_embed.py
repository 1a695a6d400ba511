"""Vectors of texts: the loss over the pairs of all devices, what a row holds, and options that do not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.config import resolve
from jformer.config.resume import resume_config
from jformer.data.tokenizers import learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import Request
from jformer.inference.inputs import Inputs
from jformer.inference.restore import Trained, embedding_run
from jformer.models import ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_shardings, put_batch
from jformer.tasks.build import build_sized, build_task, with_rows
from jformer.tasks.embed import embed, pair_loss
from jformer.tasks.split_loss import make_eval_step
from jformer.tasks.task import make_loss
from jformer.training.step import make_gradient
from tests.conftest import TINY, draw_params
from tests.tasks.conftest import PAIRS
from tests.training.test_step import distance

TEMPERATURE = 0.5


def make_model(family, **head):
    head = HeadConfig(vectors=True, **{"pooling": "mean", **head})
    return build_model(ModelConfig(**{**TINY, "family": family, "num_heads": 8, "dropout": 0.2, "head": head}))


def place(mesh, batch, microbatches=1):
    return put_batch(mesh, {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()})


def batch_of(make, family="encoder"):
    """Return 16 pairs, the last two of which are missing."""
    made = make("embed", tuple(PAIRS["embed"][:14]), row_multiple=16, tokens_per_update=2048, num_buckets=1)
    assert len(made.batches) == 1
    batch = made.batches[0]
    if family == "decoder":
        batch = {name.replace("source", "target"): x for name, x in batch.items()}
        batch["target_in"] = batch.pop("target")
    return batch


def written_out(vectors, weights, smoothing):
    """Return the loss, its part without smoothing, and right answers, in NumPy over the real pairs alone."""
    vectors = np.asarray(vectors, np.float64)[weights > 0]
    first, second = (side / np.linalg.norm(side, axis=-1, keepdims=True) for side in vectors.swapaxes(0, 1))
    scores = first @ second.T / TEMPERATURE
    log_probs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    nll = -np.diag(log_probs)
    loss = (1 - smoothing) * nll - smoothing * log_probs.mean(axis=1)
    return loss.sum(), nll.sum(), (scores.argmax(axis=1) == np.arange(len(scores))).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_finding_the_second_text_in_both_directions(smoothing):
    rng = np.random.default_rng(0)
    vectors, weights = rng.normal(size=(9, 2, 5)).astype(np.float32), (np.arange(9) < 7).astype(np.float32)
    vectors[:3, 1] += 2 * vectors[:3, 0]
    batch = {"weights": jnp.asarray(weights)[:, None]}
    for symmetric, ways in ((False, [vectors]), (True, [vectors, vectors[:, ::-1]])):
        sums = jax.jit(pair_loss(TEMPERATURE, smoothing, symmetric), static_argnums=1)(vectors, jnp.asarray, batch)
        expected = np.mean([written_out(each, weights, smoothing) for each in ways], axis=0)
        np.testing.assert_allclose([sums[name].total for name in ("loss", "nll", "correct")], expected, rtol=1e-5)
        assert {float(each.count) for each in sums.values()} == {7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [("encoder", (8, 1, 1)), ("encoder", (2, 2, 2)), ("decoder", (4, 2, 1)), ("encdec", (8, 1, 1))],
)
def test_loss_and_gradient_are_those_of_all_pairs_on_any_devices(make, family, shape):
    model, batch = make_model(family, pooling="last" if family == "decoder" else "mean"), batch_of(make, family)
    params = draw_params(model)
    loss, found = make_loss(model, pair_loss(TEMPERATURE, 0.1, symmetric=True)), []
    for mesh in (make_mesh(1), make_mesh(*shape)):
        placed = jax.device_put(params, parameter_shardings(mesh, params))
        gradient, sums = jax.jit(make_gradient(loss, mesh))(placed, place(mesh, batch), jax.random.key(1))
        found.append((gradient, jax.tree.map(float, sums), make_eval_step(loss, mesh)(placed, place(mesh, batch))))
    (one, sums, scored), (other, others, scored_too) = found
    assert sums["loss"].count == 14
    np.testing.assert_allclose(jax.tree.leaves(others), jax.tree.leaves(sums), rtol=1e-5)
    np.testing.assert_allclose(jax.tree.leaves(scored_too), jax.tree.leaves(scored), rtol=1e-5)
    assert distance(other, one) < 1e-5


def test_the_negatives_are_those_of_a_microbatch_and_an_empty_one_adds_nothing(make):
    model, batch, mesh = make_model("encoder"), batch_of(make), make_mesh(2)
    params = draw_params(model)
    step = make_eval_step(make_loss(model, pair_loss(TEMPERATURE, 0.0, symmetric=False)), mesh)
    sums = jax.tree.map(float, step(params, place(mesh, batch, 8)))  # pairs of two; the last is empty
    order = np.arange(16)
    parts = [jax.tree.map(float, step(params, place(mesh, {k: x[order[i : i + 2]] for k, x in batch.items()})))
             for i in range(0, 16, 2)]  # fmt: skip
    np.testing.assert_allclose(sums["loss"].total, sum(part["loss"].total for part in parts), rtol=1e-5)
    assert sums["nll"].total < 14 * np.log(2) * 2
    assert sums["loss"].count == 14


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_a_text_of_a_pair_has_the_vector_that_it_has_alone(make, pooling):
    model = make_model("encoder", pooling=pooling, pooler=True)
    params, batch = draw_params(model), batch_of(make)
    assert set(params) == {"embedding", "encoder", "pooler"}
    hidden = functools.partial(model.apply, {"params": params}, method="hidden")
    both = jax.jit(hidden)(batch)
    for text in (1, 2):
        ids = [row[segments == text] for row, segments in zip(batch["source"], batch["source_segments"], strict=True)]
        size = batch["source"].shape[1]
        alone = {
            "source": np.stack([np.pad(row, (0, size - len(row))) for row in ids]),
            "source_segments": np.stack([(np.arange(size) < len(row)).astype(np.int32) for row in ids]),
            "source_positions": np.broadcast_to(np.arange(size, dtype=np.int32), (len(ids), size)),
        }
        found = jax.jit(hidden)(alone)[:14, 0]
        np.testing.assert_allclose(found, both[:14, text - 1], atol=2e-6)


EMBED = {"task": "embed", "model": {"family": "encoder"}}


@pytest.mark.parametrize(("changes", "line"), [
    ({"optim": {"temperature": 0.0}}, "optim.temperature=0.0 must be above 0"),
    ({"optim": {"r_drop": 1.0}}, "optim.r_drop=1.0 compares one prediction per token or text"),
    ({"model": {"family": "decoder"}}, "model.head.pooling='first' takes BOS in a decoder"),
    ({"model": {"family": "encoder", "head": {"pooling": "none"}}}, "model.head.pooling='none' gives no single vector"),
    ({"model": {"family": "encoder", "recurrent": {"cell": "gru"}}}, "model.recurrent.cell='gru': task='embed' trains"),
    ({"model": {"family": "encoder", "execution": {"rows": "one_text"}}}, "a row of task='embed' holds a pair"),
    ({"task": "mlm", "optim": {"temperature": 0.1}}, "optim.temperature=0.1 is read by task='embed' only"),
    ({"task": "mlm", "model": {"family": "encoder", "head": {"vectors": True}}}, "is for task='embed', not 'mlm'"),
    ({"decode": {"pooling": "max"}}, "decode.pooling='max'; choose one of: '', 'mean', 'first', 'last', 'pooler'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_key(changes, line):
    with pytest.raises(UserError) as error:
        resolve({**EMBED, **changes})
    assert line in str(error.value)


@pytest.mark.parametrize(("task", "family", "limit"), [
    ("translate", "encdec", 12), ("denoise", "encdec", 24), ("lm", "decoder", 24), ("classify", "encoder", 12),
    ("embed", "encoder", 24),
])  # fmt: skip
def test_a_text_to_embed_is_as_long_as_a_run_reads_and_has_positions_for(task, family, limit):
    source = {"denoise": "text", "lm": "text", "classify": "labelled"}.get(task, "files")
    data = {"source": source, "dir": "nowhere", "max_source_length": 12, "max_target_length": 24}
    config = resolve({"task": task, "model": {"family": family, "d_model": 8, "d_ff": 8, "num_heads": 1}, "data": data})
    letters = learn("char", ["abc"], 99, "identity", False)
    made = build_task(config)
    tokenizers = letters, (learn("label", ["a", "b"], 99, "identity", False) if task == "classify" else letters)
    run = embedding_run(Trained(config, made, tokenizers, build_sized(config, made, tokenizers), {}))
    reader = Inputs(DecodeConfig(), run.task, run.tokenizers, [run.model.config])
    ((piece,),) = reader.pieces([Request("a" * 99)])
    assert len(piece.ids) == limit


def test_a_row_of_a_task_of_ones_own_that_gives_vectors_holds_both_texts():
    config = resolve({"task": "my:embed", "model": {"family": "encoder"}})
    assert with_rows(config, embed(config.data, label_smoothing=0.0)).execution.rows == "several"


def test_a_resumed_run_keeps_its_microbatches():
    saved, given = (resolve({**EMBED, "train": {"accumulation": count}}) for count in (1, 2))
    with pytest.raises(UserError, match=r"^train\.accumulation=2 but this workdir was trained with 1"):
        resume_config(saved, given)
