import dataclasses
import functools

import jax
import numpy as np
import pytest

from jformer.data.data_config import DataConfig
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.models.head_config import HeadConfig
from jformer.models.vision_config import VisionConfig
from jformer.tasks.build import TASKS
from jformer.tasks.losses import cross_entropy
from jformer.tasks.task import make_loss
from jformer.training.diagnostics import make_norms
from tests.conftest import TINY, make_batch
from tests.slow import slow_but

BATCH = make_batch([5, 9, 3], [7, 4, 9])
LABELS = {"target_out": np.array([[1], [0], [2]], np.int32), "weights": np.ones((3, 1), np.float32)}
IMAGES = {"image": np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8), "row": BATCH["row"]}
MASKED = {"target_out": BATCH["source"], "weights": (BATCH["source_positions"] % 3 == 1).astype(np.float32)}
FAMILIES = {
    "encdec": ("translate", {"num_decoder_layers": 2}, BATCH),
    "decoder": ("lm", {}, BATCH),
    "encoder": ("mlm", {}, {**BATCH, **MASKED}),
    "vit": ("classify", {"head": HeadConfig(num_classes=3), "vision": VisionConfig(8, 4)}, {**IMAGES, **LABELS}),
}
STACKS = {"encdec": ["decoder", "encoder"], "decoder": ["decoder"], "encoder": ["encoder"], "vit": ["encoder"]}


@functools.cache
def prepare(name, **fields):
    """Return model, parameters, batch and probe of a family."""
    task, options, batch = FAMILIES[name]
    model = build_model(
        ModelConfig(**{**TINY, "family": name, "norm": "none", "positions": "relative", **options, **fields})
    )
    rng = np.random.default_rng(0)  # drawn quicker than the initial ones are compiled
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    made = TASKS[task](DataConfig(), label_smoothing=0.1, scores=(), tokenize="13a", lowercase=False)
    return model, params, batch, make_norms(model, make_loss(model, made.loss))


@functools.cache
def measured(name):
    """Return stacks with their blocks' parameters, and the norms."""
    _, params, batch, probe = prepare(name)
    return {stack: params[stack]["block"] for stack in STACKS[name]}, probe(params, batch)


@pytest.mark.parametrize("name", slow_but(FAMILIES, "encdec"))
def test_every_layer_of_every_family_has_its_norms(name):
    blocks, norms = measured(name)
    assert set(norms.gradients) == {f"{stack}/{sublayer}" for stack, block in blocks.items() for sublayer in block}
    assert len(norms.parameter_gradients) == len(jax.tree.leaves(blocks))
    assert list(norms.activations) == STACKS[name]
    for found in jax.tree.leaves(norms):
        assert found.shape == (2,)
        assert np.isfinite(found).all()
    assert min(map(np.min, norms.gradients.values())) > 0


@pytest.mark.parametrize("name", slow_but(["encdec", "vit"], "encdec"))
def test_gradients_are_those_of_the_mean_loss_layer_by_layer(name):
    model, params, batch, _ = prepare(name)

    def mean(params, batch):
        logits = model.apply({"params": params}, batch)
        return cross_entropy(logits, batch["target_out"], batch["weights"], 0.1)["loss"].total / batch["weights"].sum()

    expected = jax.jit(jax.grad(mean))(params, batch)
    _, norms = measured(name)
    for key, found in norms.gradients.items():
        stack, sublayer = key.split("/")
        leaves = jax.tree.leaves(expected[stack]["block"][sublayer])
        for layer in range(2):
            flat = np.concatenate([np.asarray(leaf[layer], np.float64).ravel() for leaf in leaves])
            assert found[layer] == pytest.approx(np.linalg.norm(flat), rel=1e-4)
    for key, found in norms.parameter_gradients.items():
        stack, *path = key.split("/")
        kernels = functools.reduce(lambda tree, part: tree[part], path, expected[stack]["block"])
        np.testing.assert_allclose(found, [np.linalg.norm(kernel) for kernel in kernels], rtol=1e-4, atol=1e-5)


def stack_output(name, stack, layers):
    """Return what a stack gives that is cut off after some layers: without norms, the output of its last block."""
    model, params, batch, _ = prepare(name)
    field = "num_decoder_layers" if (name, stack) == ("encdec", "decoder") else "num_layers"
    cut = build_model(dataclasses.replace(model.config, **{field: layers}))
    block = jax.tree.map(lambda leaf: leaf[:layers], params[stack]["block"])
    kept = {**params, stack: {**params[stack], "block": block}}
    whole_stack = {"capture_intermediates": lambda module, method: (module.name, method) == (stack, "__call__")}
    run = functools.partial(cut.apply, method="hidden", mutable=["intermediates"], **whole_stack)
    return np.asarray(jax.jit(run)({"params": kept}, batch)[1]["intermediates"][stack]["__call__"][0])


@pytest.mark.parametrize(("name", "stack"), [("encdec", "encoder"), ("encdec", "decoder"), ("vit", "encoder")])
def test_activations_are_outputs_of_the_blocks_where_there_is_text(name, stack):
    batch, (_, norms) = FAMILIES[name][2], measured(name)
    for layers in (1, 2):
        output = stack_output(name, stack, layers)
        segments = batch.get({"encoder": "source_segments", "decoder": "target_segments"}[stack])
        real = output if segments is None else output[segments > 0]
        assert norms.activations[stack][layers - 1] == pytest.approx(np.sqrt(np.mean(real**2)), rel=1e-5)


@pytest.mark.slow
def test_dropout_of_a_key_is_in_gradients_and_activations():
    _, params, batch, probe = prepare("decoder", dropout=0.5)
    one, again, other = (probe(params, batch, jax.random.key(seed)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    for different in (measured("decoder")[1], other):
        for norms in ("gradients", "activations"):
            for key, found in getattr(one, norms).items():
                assert not np.allclose(found, getattr(different, norms)[key], rtol=1e-3), key


@functools.cache
def at_initialisation(norm, seeds=3):
    """Return the norms of a model of 6 + 6 layers, averaged over initialisations and batches."""
    sizes = {"vocab_size": 200, "num_layers": 6, "d_model": 64, "d_ff": 256, "num_heads": 4, "dropout": 0.0}
    model = build_model(ModelConfig(**sizes, norm=norm, execution=ExecutionConfig(unroll=1)))
    task = TASKS["translate"](DataConfig(), label_smoothing=0.0, scores=(), tokenize="13a", lowercase=False)
    probe, init = make_norms(model, make_loss(model, task.loss)), jax.jit(functools.partial(init_params, model))
    batches = [make_batch([10, 8, 9, 10], [9, 10, 7, 10], seed=seed, vocab_size=200) for seed in range(seeds)]
    found = [probe(init(jax.random.key(seed)), batch) for seed, batch in enumerate(batches)]
    return jax.tree.map(lambda *norms: np.mean(norms, axis=0), *found)


@pytest.mark.slow
def test_gradients_of_post_ln_grow_towards_the_output_and_exceed_those_of_pre_ln():
    """Xiong et al. 2020, Theorem 1 and Figure 3: the decoder's feed-forward at initialisation."""
    post, pre = (at_initialisation(norm).gradients["decoder/feed_forward"] for norm in ("post", "pre"))
    print("post", post, "pre", pre)
    assert post[-1] > 2.5 * post[0]
    assert (np.diff(post) > 0).all()
    assert post[-1] > 2 * pre[-1]
    assert pre.max() < 2 * pre.min()


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_activations_grow_in_pre_ln_and_stay_in_post_ln(stack):
    """Xiong et al. 2020, Lemma 2."""
    post, pre = (at_initialisation(norm).activations[stack] for norm in ("post", "pre"))
    print("post", post, "pre", pre)
    np.testing.assert_allclose(post, np.ones(6), rtol=1e-4)
    assert (np.diff(pre) > 0).all()
    assert pre[-1] > 1.5 * pre[0]
