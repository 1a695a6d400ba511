"""Searches as compiled programs: what they cost, what they share, and the parameters that they are prepared for."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data.tokenizers import Symbols, learn
from jformer.decoding.decode_config import NO_PROGRAM_READS, DecodeConfig
from jformer.inference import generation
from jformer.inference.batching import PreparedParams
from jformer.inference.forced_pass import make_scorer
from jformer.inference.generation import in_compute_dtype, make_answer, make_setup, stack_layers
from jformer.inference.inputs import prompts
from jformer.inference.search_tree import make_recorder
from jformer.inference.streaming import make_stream
from jformer.models import ExecutionConfig, ModelConfig, build_model
from jformer.models.head_config import HeadConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.parallel.backend import Target, compiling_for
from jformer.parallel.mesh import make_mesh
from tests.conftest import draw_params
from tests.inference import untrained
from tests.inference.untrained import CHARS

INPUTS, LENGTH, ROOM = 2, 5, 16


def flops_of_a_row(model, params, **options):
    """Return the FLOPs that XLA counts of one row of a search: a pass of the encoder, and one step of the loop."""
    vocabulary = np.ones(model.config.vocab_size, bool)
    answer = make_answer(make_setup([model], DecodeConfig(**options), vocabulary, Symbols()), "text")
    ones = np.ones((INPUTS, LENGTH), np.int32)
    batch = {
        "source": ones, "source_segments": ones, "source_positions": np.cumsum(ones, axis=1) - 1,
        **prompts([[4, 5]] * INPUTS, INPUTS, 3, Symbols()), "limit": np.full(INPUTS, ROOM), "line": np.arange(INPUTS),
    }  # fmt: skip
    costs = answer.lower([params], batch, ROOM).compile().cost_analysis()
    return costs["flops"] / INPUTS / DecodeConfig(**options).hypotheses


@pytest.mark.slow
@pytest.mark.parametrize("family", ["encdec", "decoder"])
def test_a_sample_costs_no_more_where_there_are_more_of_them(tiny, family):
    model, params = tiny(family=family)
    few, many = (flops_of_a_row(model, params, search="sample", samples=samples) for samples in (4, 32))
    assert many <= few


def test_an_end_is_forced_on_inputs_without_phrases_whatever_others_of_the_batch_ask_for():
    batch = {**prompts([[]] * 2, 2, 1, Symbols()), "limit": np.array([5, 7])}
    batch["constraints"] = jnp.array([[[[4, 5]], [[6, 0]]], [[[0, 0]], [[0, 0]]]])
    models = [SimpleNamespace(config=ModelConfig(vocab_size=9))]
    setup = make_setup(models, DecodeConfig(forced_end=True), np.ones(9, bool), Symbols())
    rules = generation._rules(setup, batch)
    assert (rules.last >= batch["limit"]).tolist() == [True, False]  # of a limit of 5, no token is number 5
    assert rules.last[1] == 6


SMALLEST = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2}
VOCABULARY = np.ones(50, bool)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(**SMALLEST)[0]


def test_who_asks_again_gets_the_same_program(model):
    def keys():  # nothing in one is an object of the other
        again = build_model(dataclasses.replace(model.config))
        return make_setup([again], DecodeConfig(beam_size=2), np.array(VOCABULARY), Symbols(), make_mesh(2))

    for make in (lambda key: make_answer(key, "text"), make_recorder, make_stream):
        assert make(keys()) is make(keys())
    assert make_scorer([model], "probability") is make_scorer([build_model(model.config)], "probability", None)
    assert make_answer(keys(), "text") is not make_answer(keys(), "label")


def test_what_no_search_reads_makes_no_other_program(model):
    plain = make_setup([model], DecodeConfig(), VOCABULARY, Symbols())
    others = DecodeConfig(forced_start=False, forbid=("a",), only=("b",), ensemble=("x",), inputs="jsonl",
                          outputs="jsonl", scores=True, alignments=True, overlong="split", batch_size=3,
                          pooling="mean", source_language="a", target_language="b")  # fmt: skip
    assert all(getattr(others, name) != getattr(DecodeConfig(), name) for name in NO_PROGRAM_READS)
    assert make_setup([model], others, VOCABULARY, Symbols()) == plain


def test_what_a_search_reads_makes_another_program(model, tiny):
    plain = make_setup([model], DecodeConfig(), VOCABULARY, Symbols())
    few = np.arange(50) != 7
    read = {"beam_size": 2, "length_penalty": 0.0, "seed": 1, "search": "sample", "forced_end": True, "n_best": 2}
    others = [
        *(make_setup([model], DecodeConfig(**{name: value}), VOCABULARY, Symbols()) for name, value in read.items()),
        make_setup([model] * 2, DecodeConfig(), VOCABULARY, Symbols()),
        make_setup([tiny(**SMALLEST, norm="pre")[0]], DecodeConfig(), VOCABULARY, Symbols()),
        make_setup([model], DecodeConfig(), few, Symbols()),
        make_setup([model], DecodeConfig(), VOCABULARY, Symbols(eos=3)),
        make_setup([model], DecodeConfig(), VOCABULARY, Symbols(), make_mesh(2)),
    ]
    with compiling_for(Target("tpu")):  # which attends by other kernels
        others.append(make_setup([model], DecodeConfig(), VOCABULARY, Symbols()))
    assert len({plain, *others}) == 1 + len(others)


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


def test_a_bias_of_positions_is_added_to_scores_as_in_training(tiny):
    _, params = tiny(**SMALL, positions="relative", dtype="bfloat16")
    rounded = in_compute_dtype(params, "bfloat16")
    assert rounded["decoder"]["position_bias"]["embedding"].dtype == "float32"
    assert rounded["source_embedding"]["embedding"].dtype == "bfloat16"


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same(kind):
    task, fields = KINDS[kind]
    model = build_model(ModelConfig(vocab_size=CHARS.vocab_size, **fields))
    params = draw_params(model)
    tokenizers = (CHARS, LABELS if task == "classify" else CHARS)
    options = {"batch_size": 2, "beam_size": 2, "max_extra_length": 6}
    plain, laid = (
        untrained.predictor(model, params, task, tokenizers, prepare=prepare, **options).generate(TEXTS)
        for prepare in (False, True)
    )
    assert laid == plain


@pytest.mark.slow
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


def test_a_search_is_compiled_with_the_options_of_its_platform(monkeypatch):
    monkeypatch.setitem(generation.XLA_OPTIONS, "cpu", {"xla_no_such_option": True})
    program = generation.compile_over_rows(lambda params, batch, room: batch, None)
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_no_such_option'"):
        program([], {"line": np.arange(2)}, ROOM)


@pytest.mark.parametrize(("platform", "entries"), [("cpu", 2 + 3 * 5), ("gpu", 24)])
def test_accelerators_get_a_cache_that_their_products_need_not_fill_up(tiny, platform, entries):
    model, params = tiny(family="decoder", **SMALLEST)
    batch = {**prompts([[4, 5]], 1, 3, Symbols()), "limit": np.array([5]), "line": np.array([0])}
    with compiling_for(Target(platform, platform, "9.0")):
        setup = make_setup([model], DecodeConfig(beam_size=3), np.ones(model.config.vocab_size, bool), Symbols())
        state = jax.eval_shape(lambda *given: generation.begin_search(setup, *given, 5).init, [params], batch)
    assert state.cache["self"][0]["self"]["visible"].shape == (3, entries)
