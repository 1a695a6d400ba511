"""Equal searches share what is compiled for them, and searches that differ in anything that is read do not."""

import dataclasses

import numpy as np
import pytest

from jformer.data.tokenizers import Symbols
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference.forced_pass import make_scorer
from jformer.inference.generation import UNREAD, make_answer, make_recorder, make_setup, make_stream
from jformer.models import build_model
from jformer.parallel.backend import compiling_for
from jformer.parallel.mesh import make_mesh

FIELDS = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2}
VOCABULARY = np.ones(50, bool)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(**FIELDS)[0]


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
    others = DecodeConfig(forbid=("a",), only=("b",), ensemble=("x",), inputs="jsonl", outputs="jsonl", scores=True,
                          alignments=True, overlong="split", batch_size=3)  # fmt: skip
    assert all(getattr(others, name) != getattr(DecodeConfig(), name) for name in UNREAD)
    assert make_setup([model], others, VOCABULARY, Symbols()) == plain


def test_what_a_search_reads_makes_another_program(model, tiny):
    plain = make_setup([model], DecodeConfig(), VOCABULARY, Symbols())
    few = np.arange(50) != 7
    read = {"beam_size": 2, "length_penalty": 0.0, "seed": 1, "search": "sample", "forced_end": True, "n_best": 2}
    others = [
        *(make_setup([model], DecodeConfig(**{name: value}), VOCABULARY, Symbols()) for name, value in read.items()),
        make_setup([model] * 2, DecodeConfig(), VOCABULARY, Symbols()),
        make_setup([tiny(**FIELDS, norm="pre")[0]], DecodeConfig(), VOCABULARY, Symbols()),
        make_setup([model], DecodeConfig(), few, Symbols()),
        make_setup([model], DecodeConfig(), VOCABULARY, Symbols(eos=3)),
        make_setup([model], DecodeConfig(), VOCABULARY, Symbols(), make_mesh(2)),
    ]
    with compiling_for("tpu"):  # which attends by other kernels
        others.append(make_setup([model], DecodeConfig(), VOCABULARY, Symbols()))
    assert len({plain, *others}) == 1 + len(others)
