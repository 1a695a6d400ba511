"""Low-rank adapters: what they compute, what is trained and saved, and what answers need."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import jformer
from jformer import plugins
from jformer.checkpoints.checkpoint import open_run
from jformer.config import resolve
from jformer.config.options import OptimConfig
from jformer.data.tokenizers import EOS
from jformer.errors import UserError
from jformer.evaluation import evaluate
from jformer.inference.predict import Predictor
from jformer.models import ExecutionConfig, build_model, init_params
from jformer.models.lora import merged
from jformer.models.lora_config import LoraConfig, is_factor
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import parameter_names, put_batch, state_shardings
from jformer.tasks.task import make_loss, token_loss
from jformer.tools.server.engine import Engine
from jformer.tools.server.limits import Limits
from jformer.tools.server.serve import load_adapters
from jformer.trainer import train
from jformer.training.optim import build_optimizer, frozen_parameters
from jformer.training.rows import read_row
from jformer.training.state import create_state
from jformer.training.step import make_train_step
from tests import small_run
from tests.conftest import make_batch, run
from tests.models.test_contracts import architectures, batch_for
from tests.slow import slow_but

ADAPTED = [config for config in architectures() if not config.recurrent.cell and config.parametrization == "standard"]
QUICK = [config for config in ADAPTED if architectures()[config][0] == "windowed"]
EVERYWHERE = LoraConfig(rank=2, alpha=6.0, kernels="/kernel$")


def drawn(lora, params, key=7):
    """Return parameters whose second factors are not zero."""

    def draw(name, leaf):
        return 0.1 * jax.random.normal(jax.random.key(key), leaf.shape) if is_factor(name) else leaf

    return jax.tree.map(draw, parameter_names(params), params)


@pytest.mark.parametrize("config", slow_but(ADAPTED, *QUICK), ids=[architectures()[c][0] for c in ADAPTED])
def test_adapters_begin_as_the_base_and_compute_what_their_merged_kernels_do(config):
    base, model = build_model(config), build_model(dataclasses.replace(config, lora=EVERYWHERE))
    params, batch = init_params(model, jax.random.key(0)), batch_for(config, [7, 5, 4], [6, 4, 5])
    before = run(base, init_params(base, jax.random.key(0)), batch)
    np.testing.assert_array_equal(run(model, params, batch), before)
    changed = drawn(EVERYWHERE, params)
    after, of_merged = run(model, changed, batch), run(base, merged(EVERYWHERE, changed), batch)
    scale = np.abs(of_merged).max()
    np.testing.assert_allclose(after / scale, of_merged / scale, atol=5e-6)  # 2.7e-6 on an EPYC; below 4.1e-6
    assert np.abs(after - before).max() / scale > 1e-3
    lora = dataclasses.replace(EVERYWHERE, base_dtype="bfloat16")
    model = build_model(dataclasses.replace(config, lora=lora))
    kept = drawn(lora, init_params(model, jax.random.key(0)))
    for name, leaf in flatten_dict(kept, sep="/").items():
        small = is_factor(name) or name.endswith(("bias", "scale", "bias/embedding", "s/embedding", "token"))
        assert leaf.dtype == ("float32" if small else "bfloat16"), name
    found = run(model, kept, batch)
    np.testing.assert_array_equal(run(model, changed, batch), found)  # of a base in float32, rounded when it is read
    np.testing.assert_allclose(found / scale, run(base, merged(lora, changed), batch) / scale, atol=1e-5)
    assert np.abs(after - found).max() / scale > 1e-4


def test_kernels_that_multiply_distances_have_no_adapters(tiny):
    fields, batch = {"family": "decoder", "positions": "transformer_xl", "dropout": 0.0}, make_batch([7, 5], [6, 4])
    model, params = tiny(**fields, lora=EVERYWHERE)
    params = drawn(EVERYWHERE, params)
    assert any(name.endswith("/q/lora_a/kernel") for name in flatten_dict(params, sep="/"))
    base, _ = tiny(**fields)
    np.testing.assert_allclose(run(model, params, batch), run(base, merged(EVERYWHERE, params), batch), atol=1e-5)


def test_adapters_add_to_products_that_gpus_join(tiny):
    model, params = tiny(family="decoder", lora=EVERYWHERE)
    given = drawn(EVERYWHERE, params), make_batch([7, 5], [6, 4])
    expected = jax.jit(lambda params, batch: model.apply({"params": params}, batch))(*given)
    with compiling_for(Target("gpu")):
        found = jax.jit(lambda params, batch: model.apply({"params": params}, batch))(*given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def updated(model, params, mesh, microbatches=1, steps=3):
    lora = model.config.lora
    base = tuple(name for name in jax.tree.leaves(parameter_names(params)) if not lora.trains(name))
    frozen, tx = frozen_parameters(params, (), base), optax.adamw(5e-3, weight_decay=0.1)
    make = functools.partial(create_state, tx=tx, ema=True, base=base)
    state = jax.jit(make, out_shardings=state_shardings(mesh, jax.eval_shape(make, params)))(params)
    batch = make_batch([7, 3, 5, 6, 2, 7, 1, 4], [6, 6, 2, 5, 3, 4, 6, 1], vocab_size=48)
    batch = {name: x.reshape(microbatches, -1, *x.shape[1:]) for name, x in batch.items()}
    step = make_train_step(make_loss(model, token_loss(0.1)), tx, mesh, seed=0, ema_decay=0.5, frozen=frozen)
    for _ in range(steps):
        state, metrics = step(state, put_batch(mesh, batch))
    return jax.device_get(state), metrics


@pytest.mark.slow
def test_adapters_alone_are_trained_and_alike_on_a_mesh_in_microbatches_with_remat(tiny):
    lora = LoraConfig(rank=4, dropout=0.3, kernels="/(q|v|o|up|down)/kernel$")
    loop = ExecutionConfig(unroll=1)
    fields = {"family": "decoder", "dropout": 0.2, "num_heads": 8, "vocab_size": 48, "lora": lora}
    model, params = tiny(**fields, execution=loop)
    one, metrics = updated(model, params, make_mesh(1))
    again, _ = tiny(**fields, execution=dataclasses.replace(loop, remat="full"))
    other, others = updated(again, params, make_mesh(2, 2, 2), microbatches=2)
    for name, leaf in flatten_dict(one.params, sep="/").items():
        before, on_mesh = (flatten_dict(tree, sep="/")[name] for tree in (params, other.params))
        assert np.array_equal(leaf, before) != is_factor(name), name
        np.testing.assert_allclose(on_mesh, leaf, atol=2e-5, err_msg=name)
    assert float(others.grad_norm) == pytest.approx(float(metrics.grad_norm), rel=1e-5)


def test_adapters_drop_what_they_read_in_training_alone(tiny):
    model, params = tiny(family="decoder", dropout=0.0, lora=dataclasses.replace(EVERYWHERE, dropout=0.5))
    batch, keys = make_batch([7, 5], [6, 4]), [jax.random.key(seed) for seed in (1, 1, 2)]
    found = [run(model, drawn(EVERYWHERE, params), batch, True, rngs={"dropout": key}) for key in keys]
    np.testing.assert_array_equal(found[0], found[1])
    still = run(model, drawn(EVERYWHERE, params), batch)
    assert len({float(each.sum()) for each in (*found, still)}) == 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the workdir of a base."""
    workdir = tmp_path_factory.mktemp("base")
    assert train(small(workdir.parent / "cache", num_steps=10), workdir)
    return workdir


def small(cache, lora=None, **options):
    config = small_run.get_config()
    config.data.cache_dir = str(cache)
    config.train.update(peak_flops=1e9, eval_every=0, samples=0)
    config.train.update(options)
    config.model.lora.update(lora or {})
    return resolve(config)


@pytest.mark.slow
def test_checkpoints_hold_adapters_alone_and_resume_to_the_bit(base, tmp_path):
    cache, moved = base.parent / "cache", shutil.copytree(base, tmp_path / "moved")
    lora = {"rank": 2, "dropout": 0.1, "base_dtype": "bfloat16"}
    for name, steps, parent in (("whole", 10, base), ("parts", 5, base), ("parts", 10, moved)):
        options = {"num_steps": steps, "init_from": str(parent), "ema_decay": 0.9, "checkpoint_every": 5}
        assert train(small(cache, lora, **options), tmp_path / name)
    found = [open_run(tmp_path / name).manifest(10).arrays for name in ("whole", "parts")]
    assert found[0] == found[1]  # digests
    for item in ("params", "ema"):
        assert all(map(is_factor, found[0][item]))
    assert len(found[0]["params"]) == 2 * 2 * 3  # of q and v of three attentions
    names = [name for name in found[0]["rest"] if name.endswith("kernel")]
    assert names
    assert all(map(is_factor, names))


def test_answers_merge_adapters_with_their_base_and_no_other(base, tmp_path, monkeypatch):
    cache, moved = base.parent / "cache", tmp_path / "moved"
    shutil.copytree(base, moved)
    monkeypatch.chdir(tmp_path)
    assert train(small(cache, {"rank": 2}, num_steps=10, init_from="moved"), tmp_path / "run")
    monkeypatch.chdir(base)  # answers find the base from any directory
    answers = jformer.load(tmp_path / "run")
    kernels = [flatten_dict(params, sep="/") for params in (answers.params, jformer.load(base).params)]
    assert kernels[0].keys() == kernels[1].keys()
    changed = {name for name, leaf in kernels[0].items() if not np.array_equal(leaf, kernels[1][name])}
    assert changed == {name for name in kernels[0] if name.endswith(("/q/kernel", "/v/kernel"))}
    assert train(small(cache, {}, num_steps=2, init_from=str(tmp_path / "run")), tmp_path / "child")  # of the merged
    shutil.rmtree(moved)
    with pytest.raises(UserError, match=r"holds adapters of the run in '.*moved', which is not there: restore it"):
        jformer.load(tmp_path / "run")
    assert train(small(cache, num_steps=2), moved)
    with pytest.raises(UserError, match=r"run: holds adapters of other parameters than train\.init_from has now"):
        jformer.load(tmp_path / "run")


@pytest.mark.slow
def test_adapters_of_one_base_share_its_parameters_in_memory(base, tmp_path, monkeypatch):
    """Two runs of adapters, of different kernels, answer as they do by themselves; the base's arrays are there once."""
    monkeypatch.setattr(Predictor, "answers_to", lambda predictor, examples: [pair.target for pair in examples])
    cache, answers, texts = base.parent / "cache", jformer.load(base), ["a b c", "d", "e f g h"]
    for name, lora in (("one", {"rank": 2}), ("two", {"rank": 3, "kernels": "/kernel$", "base_dtype": "bfloat16"})):
        options = {"num_steps": 5, "init_from": str(base), "eval_every": 5, "checkpoint_every": 5}
        config = small(cache, lora, **options)
        assert train(config, tmp_path / name)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, test=("valid",)))
        found = evaluate.evaluate(config, tmp_path / name)["valid"]["perplexity"]["score"]
        row = read_row((tmp_path / name / "metrics.jsonl").read_bytes().splitlines()[-1], "the validation")
        assert found == pytest.approx(row["perplexity"], rel=5e-6)
    named = load_adapters(Engine(answers, Limits()), [str(tmp_path / "one"), f"{tmp_path / 'two'}/"], Limits())
    assert [*named] == ["one", "two"]
    for name, engine in named.items():
        shared, alone = engine.predictor, jformer.load(tmp_path / name)
        for found, expected in zip(shared.generate(texts), alone.generate(texts), strict=True):
            assert found[0].ids == expected[0].ids
            assert found[0].score == pytest.approx(expected[0].score, abs=1e-5)
            assert found[0].score != pytest.approx(answers.generate(texts)[0][0].score, abs=1e-4)
        scores = [each.score([("a b", "b a")])[0].log_prob for each in (shared, alone)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        shared.attend([("a b", None)])
        trained, before = shared.params, shared.generate(texts)[0][0].score
        shared.params = jax.tree.map(jnp.zeros_like, trained)  # replaced parameters are searched with, too
        assert shared.generate(texts)[0][0].score != pytest.approx(before, abs=1e-4)
        shared.params, of_base = trained, answers.params
        answers.params = jax.tree.map(jnp.zeros_like, of_base)  # but those of the base are not this one's
        assert shared.generate(texts)[0][0].score == pytest.approx(before, abs=1e-5)
        answers.params = of_base
        for trees in ((shared.params, answers.params), (shared.prepared_params[0], answers.prepared_params[0])):
            own, theirs = (flatten_dict(tree, sep="/") for tree in trees)
            assert all(own[path] is leaf for path, leaf in theirs.items())
            assert all(map(is_factor, own.keys() - theirs.keys()))
    vectors = jformer.load(base, pooling="mean").embedder
    alone = jformer.load(tmp_path / "one", pooling="mean")
    np.testing.assert_allclose(vectors.with_adapter(tmp_path / "one").embed(texts), alone.embed(texts), atol=1e-5)
    plugins.allow("sed s/.*/1/")
    ranked = jformer.load(base, {"evaluate.command": "sed s/.*/1/", "decode.rerank": "sed"}, n_best=2, beam_size=2)
    assert [output.utility for output in ranked.with_adapter(tmp_path / "one").generate(["a b c"])[0]]
    silent = answers.intervene({"logits": lambda logits, _: logits.at[..., EOS].add(100.0)})
    assert silent.with_adapter(tmp_path / "one").predict(texts) == [""] * len(texts)
    with pytest.raises(UserError, match=r"base\d*: holds no adapters \(it was trained without model\.lora"):
        answers.with_adapter(base)
    with pytest.raises(UserError, match="one: holds adapters of other parameters than the run that they are to be"):
        jformer.load(tmp_path / "two").with_adapter(tmp_path / "one")
    with pytest.raises(UserError, match=r"the name 'one' of .* is empty or taken"):
        load_adapters(Engine(answers, Limits()), [str(tmp_path / "one"), str(tmp_path / "one")], Limits())


def test_what_adapters_cannot_be_of_is_refused(tiny):
    for lora, message in (
        (LoraConfig(rank=2, kernels="nothing"), "matches no kernel; their names are like decoder/block"),
        (LoraConfig(rank=2, kernels="/o/kernel$", also=("/o/",)), "matches no kernel"),  # trained whole
        (LoraConfig(rank=2, kernels="("), "is not a regular expression"),
        (LoraConfig(alpha=2.0), "alpha=2.0: a model without adapters"),
    ):
        with pytest.raises(UserError, match=message):
            tiny(lora=lora)
    model, _ = tiny(lora=LoraConfig(rank=2, also=("nrom",)))
    with pytest.raises(UserError, match=r"model\.lora\.also='nrom' matches no parameter; their names are like"):
        build_optimizer(model, OptimConfig(), 10)
    with pytest.raises(UserError, match=r"adapters do not support model\.recurrent\.cell='lstm'"):
        tiny(lora=EVERYWHERE, recurrent=RecurrentConfig("lstm"))
    with pytest.raises(UserError, match=r"model\.lora\.rank=2 adapts a trained model: name it in train\.init_from"):
        small("", {"rank": 2})
