"""What an update will take of the memory is known before it is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jformer.config import resolve
from jformer.data.corpus import Tokens
from jformer.data.pipeline import Rows
from jformer.data.plan import Shape
from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.vision_config import VisionConfig
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch
from jformer.tasks.batch_arrays import abstract_batch
from jformer.tasks.build import build_task
from jformer.tasks.caption import captioned_images
from jformer.tasks.classify import labelled_images, labelled_texts, one_label
from jformer.tasks.features import sequence_to_sequence
from jformer.tasks.lm import next_token
from jformer.tasks.mlm import masked
from jformer.tasks.prefix_lm import prefixed
from jformer.tasks.split_loss import make_eval_step
from jformer.tasks.tag import tagged_texts
from jformer.tasks.task import make_loss
from jformer.training.memory import abstract_update, evaluation_memory, peak_bytes, update_memory

KIB = 1_024  # a float32 array of 16 x 16


def peak(function, *arrays):
    return peak_bytes(jax.make_jaxpr(function)(*arrays).jaxpr)


def test_values_take_memory_from_where_they_are_made_to_their_last_reader():
    x = jnp.ones((16, 16))
    assert peak(lambda x: x @ x, x) == KIB
    assert peak(lambda x: (x @ x) @ x @ x, x) == 2 * KIB  # the first product is gone when the third is made
    assert peak(lambda x: ((first := x @ x) @ x @ x) + first, x) == 3 * KIB


@pytest.mark.parametrize(
    ("platform", "unroll", "masks"), [("cpu", 4, 4 * 4), ("cpu", 1, 4 + 1), ("gpu", 4, 4), ("tpu", 4, 4)]
)
def test_masks_of_unrolled_layers_are_words_on_cpus_alone(platform, unroll, masks):
    x = jnp.ones((16, 16))
    with compiling_for(Target(platform)):
        found = peak(lambda x: lax.scan(lambda x, _: (x, x > 0), x, length=4, unroll=unroll)[1], x)
    assert found == masks * KIB / 4  # a loop has that of the current layer, too


def test_what_is_made_element_by_element_is_fused_into_its_only_reader():
    x = jnp.ones((16, 16))
    assert peak(lambda x: (jax.nn.relu(x) * 2 + 1) @ x, x) == KIB
    assert peak(lambda x: jnp.sum(jnp.exp(x @ x)), x) == KIB + 4
    assert peak(lambda x: (twice := x * 2) @ twice, x) == 2 * KIB
    assert peak(lambda x: (x * 2, 3), x) == KIB


def test_a_loop_keeps_its_results_beside_what_its_body_makes():
    def body(carry, x):
        return carry, (x @ x) @ x

    assert peak(lambda xs: jax.lax.scan(body, 0.0, xs)[1], jnp.ones((5, 16, 16))) == 5 * KIB + 2 * KIB


def update(model, shape, mesh, *, ema=False, freeze=()):
    """Return the compiled update of a translation model, and what it reads, as shapes; and what is frozen."""
    config = resolve({"train": {"ema_decay": 0.9 if ema else 0.0, "freeze": freeze}})
    return *abstract_update(config, build_task(config), build_model(model), mesh), abstract_batch(
        model, "text", shape, mesh
    )


SMALL = {"vocab_size": 60, "target_vocab_size": 60, "num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2}
MEDIUM = {"vocab_size": 500, "target_vocab_size": 500, "num_layers": 2, "d_model": 128, "d_ff": 256, "num_heads": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (ModelConfig(**SMALL, execution=ExecutionConfig(unroll=1)), Shape(128, 16, 16)),
        (ModelConfig(**MEDIUM, execution=ExecutionConfig(unroll=1)), Shape(64, 32, 24)),
    ],
    ids=["small", "medium"],
)
def test_prediction_is_within_15_percent_of_what_the_compiler_says(model, shape):
    step, state, frozen, batch = update(model, shape, make_mesh(1))
    predicted = sum(update_memory(step, state, frozen, batch))
    found = step.trace(state, batch).lower().compile().memory_analysis()
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
    assert predicted == pytest.approx(sum(sizes) - found.alias_size_in_bytes, rel=0.15)


@pytest.mark.slow
def test_validation_in_microbatches_takes_a_share_of_the_memory():
    model, mesh = build_model(ModelConfig(**SMALL)), make_mesh(1)
    config = resolve({})
    eval_step = make_eval_step(make_loss(model, build_task(config).loss), mesh)
    params = update(model.config, Shape(32, 16, 16), mesh)[1].params
    taken = [
        evaluation_memory(
            eval_step, params, abstract_batch(model.config, "text", Shape(32, 16, 16), mesh, accumulation)
        )
        for accumulation in (1, 4)
    ]
    assert taken[1] < 0.5 * taken[0]


@pytest.mark.slow
def test_classes_of_memory_are_told_apart():
    model, shape = ModelConfig(**SMALL), Shape(32, 16, 16)
    count = 4 * sum(leaf.size for leaf in jax.tree.leaves(update(model, shape, make_mesh(1))[1].params))
    one = update_memory(*update(model, shape, make_mesh(1), ema=True))
    assert (one.parameters, one.gradients, one.average) == (count, count, count)
    assert 2 * count <= one.optimizer < 2 * count + 100  # and counters
    four = update_memory(*update(model, shape, make_mesh(4)))
    assert four.average == 0
    assert four.batch == one.batch / 4
    assert four.activations < 0.3 * one.activations
    frozen = update_memory(*update(model, shape, make_mesh(1), freeze=("encoder", "embedding")))
    assert 0 < frozen.gradients < 0.7 * one.gradients
    assert str(four).startswith(f"{sum(four) / 2**20:,.1f} MiB a device: parameters {count / 2**20:,.1f}, optimizer ")
    assert "average" not in str(four)


def tokens(*texts):
    return Tokens(np.concatenate(texts).astype(np.int32), np.cumsum([0, *map(len, texts)]))


PLAIN = {"vocab_size": 50, "target_vocab_size": 50, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2}
EACH = HeadConfig(num_classes=2, pooling="none")
IMAGES = ModelConfig(
    **PLAIN, family="vit", head=HeadConfig(num_classes=2), vision=VisionConfig(image_size=4, patch_size=2, channels=3)
)
CAPTIONS = ModelConfig(**PLAIN, vision=VisionConfig(image_size=4, patch_size=2, channels=3, source=True))


@pytest.mark.parametrize(
    ("model", "made", "source"),
    [
        (ModelConfig(**PLAIN), sequence_to_sequence(), 5),
        (ModelConfig(**PLAIN, family="decoder"), next_token(), 5),
        (ModelConfig(**PLAIN, family="decoder"), prefixed(), 1),
        (ModelConfig(**PLAIN, family="encoder"), masked(0.5, 40), 5),
        (
            ModelConfig(**PLAIN, family="encoder", head=HeadConfig(num_classes=2)),
            labelled_texts(one_label()),
            5,
        ),
        (IMAGES, labelled_images(4, 4, 3, one_label()), 48),
        (ModelConfig(**PLAIN, family="encoder", head=EACH), tagged_texts(), 5),
        (CAPTIONS, captioned_images(4, 4, 3), 48),
    ],
    ids=["translate", "lm", "prefix_lm", "mlm", "classify", "images", "tag", "captions"],
)
def test_batches_have_the_shapes_that_were_assumed(model, made, source):
    mesh, shape = make_mesh(1), Shape(4, 6, 7)
    rows = Rows(np.array([0, 1]), np.array([0, 2]), np.array([1, 1]), np.array([0, 2]))
    sides = tokens(*2 * [np.full(source, 5)]), tokens(*2 * [np.array([5] * (1 if model.pooled else min(source, 6)))])
    arrays = {"row": np.arange(4, dtype=np.int32), **made.arrays(rows, *sides, shape, (0, 0))}
    real = put_batch(mesh, {name: x.reshape(2, -1, *x.shape[1:]) for name, x in arrays.items()})
    assumed = abstract_batch(model, "text" if "target_prefix" in arrays else "label", shape, mesh, accumulation=2)
    describe = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype, x.sharding))
    assert describe(dict(sorted(assumed.items()))) == describe(dict(sorted(real.items())))
