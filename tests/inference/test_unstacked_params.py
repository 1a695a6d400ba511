"""Parameters that are prepared for a CPU are the same parameters, answer the same, and are copied in no call."""

import dataclasses

import jax
import numpy as np
import pytest

from jformer.config import resolve
from jformer.data.tokenizers import Symbols, learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference.generation import PreparedParams, in_compute_dtype, make_answer, make_setup, stack_layers
from jformer.inference.inputs import prompts
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.mesh import make_mesh
from jformer.tasks.build import build_task

TOKENIZER = learn("char", ["abcdefgh "], 99, "identity", False)
LABELS = learn("label", ["good", "bad"], 99, "identity", False)
LAYERS = 2
SMALL = {"num_layers": LAYERS, "d_model": 16, "d_ff": 24, "num_heads": 2, "execution": ExecutionConfig()}
TEXTS = ["abc", "hgfedcba hgfe", "", "ca"]
KINDS = {
    "encdec": ("translate", {**SMALL, "dtype": "bfloat16", "tied_output": False}),
    "decoder": ("lm", {**SMALL, "family": "decoder", "tied_output": False}),
    "encoder": ("classify", {**SMALL, "family": "encoder", "head": HeadConfig(num_classes=2)}),
    "lstm": ("translate", {"recurrent": RecurrentConfig("lstm"), "num_layers": 1, "d_model": 16, "tied_output": False}),
}


@pytest.mark.parametrize("mesh", [None, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_the_same_parameters(tiny, mesh, dtype):
    model, params = tiny(**SMALL, dtype=dtype)
    (laid,) = PreparedParams([model], mesh and make_mesh(mesh), rounded=True)([params])
    block = laid["encoder"]["block"]
    stacked = jax.tree.leaves(block, is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert {isinstance(leaf, tuple) for leaf in stacked} == {mesh != 2}  # devices share whole arrays
    jax.tree.map(np.testing.assert_array_equal, stack_layers(laid), in_compute_dtype(params, dtype))
    assert laid["decoder"]["block"]["feed_forward"]["down"]["kernel"][0].dtype == dtype


def test_a_loop_over_layers_reads_whole_arrays(tiny):
    model, params = tiny(**{**SMALL, "execution": ExecutionConfig(unroll=1)})
    (laid,) = PreparedParams([model], None, rounded=True)([params])
    jax.tree.map(np.testing.assert_array_equal, laid, params)


def test_a_copy_is_made_once_and_anew_for_other_parameters(tiny):
    model, params = tiny(**SMALL)
    prepared = PreparedParams([model], None, rounded=True)
    first = prepared([params])
    assert prepared([params]) is first
    other = jax.tree.map(lambda x: x + 1, params)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(prepared([other])[0]), other)
    assert PreparedParams([model], None, rounded=True, enabled=False)([params])[0] is params


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same(kind):
    task, fields = KINDS[kind]
    model = build_model(ModelConfig(vocab_size=TOKENIZER.vocab_size, **fields))
    params = init_params(model, jax.random.key(0))
    config = resolve({"task": task, "model": {"family": model.config.family}, "data": {"dir": "nowhere"}})
    config = dataclasses.replace(config, decode=DecodeConfig(batch_size=2, beam_size=2, max_extra_length=6))
    answers = LABELS if task == "classify" else TOKENIZER
    run = Trained(config=config, task=build_task(config), tokenizers=(TOKENIZER, answers), model=model, params=params)
    plain, laid = (Predictor(run, prepare=lay_out).generate(TEXTS) for lay_out in (False, True))
    assert laid == plain


def test_no_kernel_is_cut_out_of_a_stack_in_a_call(tiny):
    wide = {"d_model": 128, "d_ff": 256}
    model, params = tiny(**{**SMALL, **wide})
    answer = make_answer(make_setup([model], DecodeConfig(), np.ones(50, bool), Symbols()), "text")
    source = np.ones((2, 3), np.int32)
    batch = {
        "source": source, "source_segments": source, "source_positions": source,
        **prompts([[]] * 2, 2, 1, Symbols()), "limit": np.array([4, 4]), "line": np.arange(2),
    }  # fmt: skip

    def temporary(params):
        return answer.lower([params], batch, 4).compile().memory_analysis().temp_size_in_bytes

    (laid,) = PreparedParams([model], None, rounded=True)([params])
    kernel = 4 * wide["d_model"] * wide["d_ff"]  # bytes
    assert temporary(params) > LAYERS * kernel > 2 * temporary(laid)
