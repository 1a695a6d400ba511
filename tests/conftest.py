"""Set up the whole test session: eight virtual devices, and shapes checked at every call of an annotated function."""

import functools
import os
import re
import shutil
import tempfile

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"
# What one process of the session compiles, the others find, and so do the runs that tests start.
CACHE = None if "JAX_COMPILATION_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="jformer-tests-")
if CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

from jaxtyping import install_import_hook

install_import_hook(["jformer.models", "jformer.products", "jformer.losses", "jformer.decoding"], "beartype.beartype")

import jax
import numpy as np
import pytest

from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params

SLOW = re.compile(  # what takes long and repeats for further cases what others test: python -m pytest -m slow
    r"test_contracts.*(eight_devices.*|by_heart)\[(?!transformer_tiny)"
    r"|test_contracts.*(cached_step|no_later|neighbours).*(table3|marian|t5_1_1|tinyllama)"
    r"|test_describe.*a_weight\[(?!transformer_base|bert_base|gpt2\]|t5_small|vit_s16)"
    r"|test_encdec.*(packed_sentences|cached_step_equals)"
    r"|test_verify.*(broken|decoder)"
    r"|test_step.*whole_batch\[(?!1x1x1-4|1x2x2-2|2x2x2)"
    r"|test_step.*sgd_update"
    r"|test_mesh.*(another_mesh|(products|data_axis).*(8x1x1|1x8x1|1x1x8)|answers.*\[(?!beam-2x2x2))"
    r"|test_probe.*stay_in_post_ln"
    r"|test_export.*same_log_probabilities\[(?!2017)"
    r"|test_train.*(test_mixture|test_average_and_ema)"
    r"|test_every_task.*(answers\[(t5|mlm)|begins_with_a_masked)"
    r"|test_remat.*the_same"
    r"|test_hosts.*(two_devices_train|half_an_output)"
    r"|test_walkthrough"
    r"|test_slices"
)
LONG = ("test_train.py", "test_contracts.py", "test_every_task.py", "test_parts.py", "test_probe.py")
TINY = {
    "vocab_size": 50,
    "num_layers": 2,
    "d_model": 32,
    "d_ff": 48,
    "num_heads": 4,
    "dropout": 0.0,
    "execution": ExecutionConfig(unroll=1),
}


def pytest_addoption(parser):
    parser.addoption("--multi30k", default="", help="folder of the Multi30k files, for the tests of the real corpus")


def pytest_unconfigure():
    if CACHE:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow ones. The longest files come first, so that no process is left with one of them at the end.

    Tests of a file share what they compile, and stay in one process (--dist=loadfile).
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if SLOW.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


def make_batch(source_lengths, target_lengths, *, seed=0, vocab_size=50, source_size=None, target_size=None):
    """Return a random padded batch as the data room makes them."""
    rng = np.random.default_rng(seed)

    def side(lengths, size):
        size = size or max(lengths)
        segments = (np.arange(size) < np.array(lengths)[:, None]).astype(np.int32)
        tokens = rng.integers(4, vocab_size, (len(lengths), 64)).astype(np.int32)[:, :size] * segments
        return tokens, segments, np.tile(np.arange(size, dtype=np.int32), (len(lengths), 1)) * segments

    source, target = side(source_lengths, source_size), side(target_lengths, target_size)
    out = rng.integers(4, vocab_size, (len(target_lengths), 64)).astype(np.int32)[:, : target[0].shape[1]]
    return {
        "source": source[0], "source_segments": source[1], "source_positions": source[2],
        "source_types": (source[2] > source[2].max(axis=1, keepdims=True) // 2).astype(np.int32),
        "target_in": target[0], "target_segments": target[1], "target_positions": target[2],
        "target_out": out * target[1], "weights": target[1].astype(np.float32),
        "row": np.arange(len(source_lengths), dtype=np.int32),
    }  # fmt: skip


@functools.cache
def compiled(model, method, static):
    """Return a model's method compiled; `static` holds its last arguments, which are no arrays."""

    def apply(params, arrays, rngs):
        return model.apply({"params": params}, *arrays, *static, method=method, rngs=rngs)

    return jax.jit(apply)


def run(model, params, *args, method="__call__", rngs=None):
    """Apply a model's method as users do, compiled."""
    arrays = [argument for argument in args if not isinstance(argument, int)]
    return compiled(model, method, args[len(arrays) :])(params, arrays, rngs or {})


@pytest.fixture(scope="session")
def tiny():
    """Return a function: model fields → (model, parameters) of a tiny model."""

    @functools.cache
    def build(**fields):
        model = build_model(ModelConfig(**{**TINY, **fields}))
        return model, jax.jit(lambda key: init_params(model, key))(jax.random.key(0))

    return build
