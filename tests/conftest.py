"""Set up the whole test session: eight virtual devices, and shapes checked at every call of an annotated function.

JFORMER_TEST_PLATFORM=cuda (rocm, tpu) has the tests of ON_ACCELERATORS, and no others, run on the devices there are: in
one process, with float32 products at the highest precision, which the tolerances of these tests assume.
"""

import functools
import gc
import os
import re
import shutil
import sys
import zlib
from importlib.metadata import version
from pathlib import Path

from tests import signals

PLATFORM = os.environ.get("JFORMER_TEST_PLATFORM", "")
if PLATFORM:
    os.environ["JAX_PLATFORMS"] = ",".join(dict.fromkeys((PLATFORM, "cpu")))
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # runs that tests start share the memory
else:
    os.environ["XLA_FLAGS"] = (  # most programs run once: compiling them costs more than running them
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
    )
    if version("jaxlib").startswith("0.10."):  # compiles in 2.3 instead of 4.0 s; later versions know no such option
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JFORMER_PARTS"] = "experiments,tests"  # parts that configs of tests may name
# What one process compiles, the others find, and so do the runs that tests start and the next session.
compiled_files = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
if sum(file.stat().st_size for file in compiled_files.rglob("*")) > 2**30:  # what older code compiled is not asked for
    shutil.rmtree(compiled_files, ignore_errors=True)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiled_files)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if sys.dont_write_bytecode:  # where Python may keep no modules beside their sources, each process compiled them anew
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(compiled_files / "python")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

signals.heed()

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects, and few of them are garbage

from jaxtyping import install_import_hook

install_import_hook(
    ["jformer.models", "jformer.models.layers.matmul", "jformer.tasks.losses", "jformer.decoding"], "beartype.beartype"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.errors import UserError
from jformer.models import ExecutionConfig, ModelConfig, _draw, build_model

LONGEST = ("test_smoke", "test_contracts", "test_loop", "test_every_task", "test_processes", "test_parts")
ON_ACCELERATORS = (  # what depends on how a device computes: numerics, decoding, updates, save and resume
    *("models", "decoding", "tasks/test_losses.py", "tasks/test_r_drop.py", "training/test_step.py"),
    *("training/test_state.py", "checkpoints/test_checkpoint.py", "inference/test_verify.py"),
    *("inference/test_generation.py", "inference/test_streaming.py"),
)
ANY_STACK = (  # what no version of Python or of a library changes: documents, pages, shell scripts, who imports whom
    *("launch", "test_documents.py", "test_layering.py", "test_site.py", "tools/compare", "tools/pages"),
)
only_on_cpus = pytest.mark.skipif(PLATFORM not in ("", "cpu"), reason="accelerators round, or compile, otherwise")
MAPS = Path("/proc/self/maps")
INITIAL = _draw()  # model, key → initial parameters
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
    parser.addoption("--slow-share", default="0/1", help="K/N: of the slow tests take the share K of N, from 0 on")


def pytest_xdist_auto_num_workers():
    """One more than there are cores: some tests wait for processes that they started. A TPU has one process."""
    return 0 if PLATFORM else (os.cpu_count() or 1) + 1


def pytest_report_header():
    """Say where the tests run, if not on eight devices of the CPU."""
    return f"JFORMER_TEST_PLATFORM={PLATFORM}: products of float32 at the highest precision" if PLATFORM else None


@functools.cache
def lies_in(path, places):
    """Return whether a file of tests is one of some files, or lies in one of some folders."""
    return not {Path(__file__).parent / place for place in places}.isdisjoint({path, *path.parents})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out the slow tests of other shares, which another run takes, and on accelerators what is not about them.

    The longest files come first, so that no process is left with one of them at the end.

    Tests of a file share what they compile and stay in one process, and the order stays what it is made here
    (--dist=loadfile --no-loadscope-reorder).
    """
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    share, shares = map(int, config.getoption("--slow-share").split("/"))
    others = {item for item in items if "slow" in item.keywords and zlib.crc32(item.nodeid.encode()) % shares != share}
    if PLATFORM:
        others |= {item for item in items if not lies_in(item.path, ON_ACCELERATORS)}
    for item in items:
        if lies_in(item.path, ANY_STACK):
            item.add_marker("any_stack")
        if lies_in(item.path, ("parity",)):
            item.add_marker("torch")
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish():
    """Spare what was imported and collected, none of which is garbage, from every later search for some."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """On accelerators, skip a test that needs more devices than there are, with that reason."""
    try:
        return (yield)
    except UserError as error:
        if PLATFORM and re.search(r"does not fit \d+ devices", str(error)):
            pytest.skip(str(error))
        raise


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


def equations(jaxpr):
    """Yield every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def draw_params(model, seed=0):
    """Return parameters drawn by NumPy: compiling what draws the initial ones takes longer than most tests."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if "scale" in name or "lora_b" in name or name.endswith("bias']"):
            return jnp.asarray(np.full(leaf.shape, "scale" in name), leaf.dtype)
        numbers = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(leaf.shape)
        return jnp.asarray(np.float32(numbers / np.sqrt(leaf.shape[-1 if "embedding" in name else -2])), leaf.dtype)

    shapes = jax.eval_shape(lambda key: INITIAL(model, key), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Forget compiled programs before they fill the 65,530 memory maps that Linux allows: XLA would end the process."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def tiny():
    """Return a function: model fields → (model, parameters) of a tiny model."""

    @functools.cache
    def build(**fields):
        model = build_model(ModelConfig(**{**TINY, **fields}))
        return model, draw_params(model)

    return build
