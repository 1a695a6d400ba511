"""Set up the whole test session: eight virtual devices, and shapes checked at every call of an annotated function."""

import functools
import gc
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

from tests import signals

os.environ["XLA_FLAGS"] = (  # most programs run once: compiling them costs more than running them
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
)
os.environ["JAX_PLATFORMS"] = "cpu"
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
import numpy as np
import pytest

from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params

SLOW = {  # file → tests that take long and repeat whole, or for further cases, what others test: pytest -m slow
    "test_attention": r"three_kinds_of_attention|kernel_of_another|without_a_target",
    "test_campaign": r"the_command|guard_that|by_name\[[02468]|by_name\[1[13]",
    "test_caption": r"every_check",
    "test_contracts": r"eight_devices|by_heart"
    r"|(cached_step|no_later|neighbours).*\[(?!transformer_tiny|t5_small|rnnsearch_tiny|image_source)",
    "test_describe": r"a_weight\[(?!bert_base|t5_small)",
    "test_diagnostics": r"stay_in_post_ln|exceed_those|\[(decoder|encoder)\]|dropout_of_a_key",
    "test_encdec": r"packed_sentences|cached_step_equals|scanned_blocks",
    "test_every_task": r"answers\[(?!lm)|begins_with_a_masked|word_vectors_and_say",
    "test_folder": r"same_log_probabilities\[(?!2017)|writes_greedily|what_the_run_writes|runs_anywhere"
    r"|answers_as_its_run\[(?!general)",
    "test_exported": r"\[(?!marian)",
    "test_faults": r"sleeps_longer.*process|arms-10",
    "test_generate": r"\[(?!(GPT2LMHeadModel|MarianMTModel)-greedy\])",
    "test_hf": r"\[(?!(BertForMaskedLM|MarianMTModel)-0)",
    "test_library": r"is_trained|another_folder|given_wrong",
    "test_loop": r"test_mixture|test_average_and_ema|bfloat16|scored_in_the_course|reader_leaves|a_row_speaks"
    r"|warm_start_takes|trace_of_updates",
    "test_memory": r"what_the_compiler_says",
    "test_mesh": r"another_mesh|(products|data_axis|over_fsdp).*(8x1x1|1x8x1|1x1x8)|answers_are",
    "test_pipeline": r"takes_no_more_memory.*packed",
    "test_predict": r"asked_for_again|answered_in_pieces|ensemble_is_loaded|minimum_bayes|the_batch\[3",
    "test_processes": r"two_devices_train|half_an_output|request_to_one|refused_by_all\[faults[1-3]",
    "test_published_sizes": r"",
    "test_recurrent": r"no_later|cached_step|(neighbours|sums_to_one).*(dot|concat)|source_is_read\[(?!additive)",
    "test_recurrent_searches": r"likeliest_token|samples_are",
    "test_remat": r"the_same|policy_to_policy",
    "test_rules": r"exhaustive_search_finds\[(?!all)",
    "test_scoring": r"several_models|attention_is_that",
    "test_security": r"directories_of_models",
    "test_service": r"mistake_of_one",
    "test_smoke": r"a_command|a_sweep",
    "test_speed": r"takes_steps",
    "test_step": r"whole_batch\[(?!2x2x2)|sgd_update|drops_something_else",
    "test_storage": r"is_that_in_a_directory|opened_from_anywhere|half_written|begin_with_one",
    "test_tokenizers": r"\[(?!WordPiece)",
    "test_tpu": r"",
    "test_transformers": r"\[(?!(gpt2|marian))",
    "test_verify": r"broken|every_check",
}
LONGEST = ("test_smoke", "test_contracts", "test_loop", "test_every_task", "test_processes", "test_parts")
MAPS = Path("/proc/self/maps")
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
    """One more than there are cores: some tests wait for processes that they started."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the slow ones, and leave out those of other shares, which another run takes.

    The longest files come first, so that no process is left with one of them at the end.

    Tests of a file share what they compile and stay in one process, and the order stays what it is made here
    (--dist=loadfile --no-loadscope-reorder).
    """
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        if item.path.stem in SLOW and re.search(SLOW[item.path.stem], item.name):
            item.add_marker(pytest.mark.slow)
    share, shares = map(int, config.getoption("--slow-share").split("/"))
    others = [item for item in items if "slow" in item.keywords and zlib.crc32(item.nodeid.encode()) % shares != share]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


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
        return model, init_params(model, jax.random.key(0))

    return build
