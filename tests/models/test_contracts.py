"""The contracts that every preset keeps, at tiny shapes; exact parameter counts are in tests/config/test_presets.py.

Presets that differ in sizes only are one architecture once they are shrunk, and are tested once.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from jformer.config import default_config, resolve
from jformer.config.presets import PRESETS
from jformer.models import ModelConfig, build_model
from jformer.models.vision_config import VisionConfig
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import put_batch
from jformer.tasks.task import make_loss, token_loss
from jformer.training.step import make_gradient
from tests.conftest import TINY, draw_params, make_batch, run
from tests.models.contracts import check_cache, check_causality, check_padding
from tests.slow import slow_but

EXCEPTIONS = {  # (contract, family) → why it does not apply
    ("causality", "encoder"): "every position sees the whole text",
    ("causality", "vit"): "every patch sees the whole image",
    ("padding", "vit"): "images of one size have no padding",
    ("cache", "encoder"): "generates nothing",
    ("cache", "vit"): "generates nothing",
}


QUICK = ("transformer_tiny", "rnnsearch_tiny", "windowed")
BESIDE_PRESETS = {  # architectures that no preset has → the preset they vary, and how
    "image_source": ("transformer_tiny", {"vision": VisionConfig(8, 4, 1, source=True)}),
    "windowed": ("gpt2", {"window": 3}),
}


def shrink(name):
    """Return a preset at tiny sizes: its shapes change, its choices stay."""
    if name in BESIDE_PRESETS:
        preset, fields = BESIDE_PRESETS[name]
        return dataclasses.replace(shrink(preset), **fields)
    fields = vars(resolve(default_config(name)).model)
    if fields["recurrent"].cell:
        return shrink_recurrent(fields)
    head = {**vars(fields["head"]), "num_classes": 3 if fields["family"] == "vit" else 0}
    apart = fields["d_k"] not in (0, fields["d_v"]) or fields["d_v"] not in (0, fields["d_k"])
    own_sizes = {"d_k": 6 if apart else 0, "d_v": 10 if apart else 0, "max_length": 64}
    rates = {key: 0.1 if fields[key] else 0.0 for key in ("attention_dropout", "activation_dropout")}
    own_sizes |= {"num_kv_heads": 2 if fields["num_kv_heads"] else 0, "norm_epsilon": 1e-6}
    vision = {"image_size": 8, "patch_size": 4, "channels": 1}
    nested = {"head": type(fields["head"])(**head), "vision": type(fields["vision"])(**vision)}
    return ModelConfig(**{**fields, **TINY, **own_sizes, **rates, **nested, "dropout": 0.1, "target_vocab_size": 50})


def shrink_recurrent(fields):
    """Return a recurrent preset at tiny sizes, those apart where they were."""
    recurrent = fields["recurrent"]
    sizes = {key: size for key, size in (("embedding_size", 24), ("readout_size", 20)) if getattr(recurrent, key)}
    tiny = {key: TINY[key] for key in ("vocab_size", "num_layers", "d_model", "execution")}
    nested = {"recurrent": dataclasses.replace(recurrent, **sizes)}
    return ModelConfig(**{**fields, **tiny, **nested, "dropout": 0.1, "target_vocab_size": 50})


@functools.cache
def architectures():
    """Return tiny config → the names of the presets it stands for."""
    found = {}
    for name in (*PRESETS, *BESIDE_PRESETS):
        found.setdefault(shrink(name), []).append(name)
    return found


def every_architecture(contract):
    """Run a test over every architecture its contract applies to; all but the quick ones are slow."""
    chosen = [c for c in architectures() if (contract, c.family) not in EXCEPTIONS]
    quick = [c for c in chosen if architectures()[c][0] in QUICK]
    return pytest.mark.parametrize("config", slow_but(chosen, *quick), ids=[architectures()[c][0] for c in chosen])


@functools.cache
def built(config):
    model = build_model(config)
    return model, draw_params(model)


def batch_for(config, source_lengths, target_lengths, **options):
    """Return a batch with targets where the family predicts: after every token, at every token, or once."""
    batch = make_batch(source_lengths, target_lengths, **options)
    rows = len(source_lengths)
    if config.family == "encoder":
        real = batch["source_segments"]
        return batch | {"target_out": batch["source"][:, ::-1] * real, "weights": real.astype(np.float32)}
    image = np.random.default_rng(0).integers(0, 256, (rows, 8, 8, 1)).astype(np.uint8)
    if config.vision.source:
        return batch | {"image": image}
    if config.family == "vit":
        labels = np.arange(rows, dtype=np.int32)[:, None] % 3
        return {"row": batch["row"], "image": image, "target_out": labels, "weights": np.ones((rows, 1), np.float32)}
    return batch


WIDE = [7, 11, 3], [6, 5, 9]  # one shape for two contracts: compiled once
ROOM = {"source_size": 16, "target_size": 12}


def test_every_preset_is_tested_and_every_exception_is_needed():
    assert {name for names in architectures().values() for name in names} == {*PRESETS, *BESIDE_PRESETS}
    assert {family for _, family in EXCEPTIONS} < {config.family for config in architectures()}


@every_architecture("causality")
def test_a_position_sees_no_later_target_token(config):
    check_causality(*built(config), batch_for(config, *WIDE, **ROOM))


@every_architecture("padding")
def test_padding_and_neighbours_change_nothing(config):
    check_padding(*built(config), batch_for(config, [7], [6]), batch_for(config, *WIDE, **ROOM), atol=5e-5)


@every_architecture("cache")
def test_cached_step_equals_full_pass(config):
    check_cache(*built(config), batch_for(config, [7, 5], [6, 6]), atol=5e-5)


@functools.cache
def gradient(config, *shape):
    """Return the compiled gradient of a model on a mesh, dropout on."""
    task = SimpleNamespace(loss=token_loss(0.0))
    mesh = make_mesh(*shape)
    step = jax.jit(make_gradient(make_loss(built(config)[0], task.loss), mesh))
    return lambda params, batch, key: step(params, put_batch(mesh, {k: v[None] for k, v in batch.items()}), key)


@pytest.mark.slow
@every_architecture("devices")
def test_eight_devices_give_the_gradient_of_one_with_dropout_on(config):
    _, params = built(config)
    batch = batch_for(config, [7, 3, 5, 6], [6, 6, 2, 5])
    batch["weights"][3] = 0  # the last device has nothing
    found = [jax.device_get(gradient(config, *s)(params, batch, jax.random.key(3))) for s in ((1,), (2, 2, 2))]
    (expected, one), (got, eight) = found
    assert abs(float(eight["loss"].total) / float(one["loss"].total) - 1) < 1e-6
    difference = jax.tree.map(np.subtract, got, expected)
    # T5 does not scale scores: drawn as widely as others, they round by more than in a run.
    assert float(optax.tree.norm(difference) / optax.tree.norm(expected)) < 2e-6


def adam(leaves, rate=5e-3):
    """Yield the parameters, take gradients by send(): Kingma and Ba 2015 in NumPy, which compiles nothing."""
    mean, square, step = [0 * p for p in leaves], [0 * p for p in leaves], 0
    while True:
        grads, step = (yield leaves), step + 1
        mean = [0.9 * m + 0.1 * g for m, g in zip(mean, grads, strict=True)]
        square = [0.99 * v + 0.01 * g * g for v, g in zip(square, grads, strict=True)]
        sizes = [np.sqrt(v / (1 - 0.99**step)) + 1e-8 for v in square]
        moved = rate / (1 - 0.9**step)
        leaves = [p - moved * m / size for p, m, size in zip(leaves, mean, sizes, strict=True)]


@pytest.mark.slow
@every_architecture("overfit")
def test_a_tiny_batch_is_learned_by_heart(config):
    model, params = built(config)
    # Seed 2: no target begins with one token twice, which relative positions could not tell from once.
    batch = batch_for(config, [7, 5, 4, 6], [6, 4, 5, 6], seed=2)
    leaves, tree = jax.tree.flatten(jax.device_get(params))
    updates = adam(leaves)
    leaves, step, wrong = next(updates), 0, True
    while wrong and step < 600:
        for key in range(step, step + 50):
            grads, _ = gradient(config, 1)(tree.unflatten(leaves), batch, jax.random.key(key))
            leaves = updates.send(jax.tree.leaves(jax.device_get(grads)))
        step += 50
        guesses = np.asarray(run(model, tree.unflatten(leaves), batch)).argmax(-1)
        wrong = (guesses != batch["target_out"])[batch["weights"] > 0].any()
    assert not wrong
