"""What a search costs on the devices, of programs that are compiled and never run; what a batch makes of its rules."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data.tokenizers import Symbols
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference import generation
from jformer.inference.generation import make_answer, make_setup
from jformer.inference.inputs import prompts
from jformer.models import ModelConfig

ROWS, LENGTH, ROOM = 2, 5, 16


def flops_of_a_row(model, params, **options):
    """Return the FLOPs that XLA counts of one row of a search: a pass of the encoder, and one step of the loop."""
    vocabulary = np.ones(model.config.vocab_size, bool)
    answer = make_answer(make_setup([model], DecodeConfig(**options), vocabulary, Symbols()), "text")
    ones = np.ones((ROWS, LENGTH), np.int32)
    batch = {
        "source": ones, "source_segments": ones, "source_positions": np.cumsum(ones, axis=1) - 1,
        **prompts([[4, 5]] * ROWS, ROWS, 3, Symbols()), "limit": np.full(ROWS, ROOM), "line": np.arange(ROWS),
    }  # fmt: skip
    costs = answer.lower([params], batch, ROOM).compile().cost_analysis()
    return costs["flops"] / ROWS / DecodeConfig(**options).hypotheses


@pytest.mark.parametrize("fields", [{}, {"family": "decoder"}], ids=["encdec", "decoder"])
def test_a_sample_costs_no_more_where_there_are_more_of_them(tiny, fields):
    model, params = tiny(**fields)
    few, many = (flops_of_a_row(model, params, search="sample", samples=samples) for samples in (4, 32))
    assert many <= few


def test_an_end_is_forced_on_inputs_without_phrases_whatever_others_of_the_batch_ask_for():
    batch = {**prompts([[]] * 2, 2, 1, Symbols()), "limit": np.array([5, 7])}
    batch["constraints"] = jnp.array([[[4, 5], [6, 0]], [[0, 0], [0, 0]]])
    models = [SimpleNamespace(config=ModelConfig(vocab_size=9))]
    setup = make_setup(models, DecodeConfig(forced_end=True), np.ones(9, bool), Symbols())
    rules = generation._rules(setup, batch)
    assert (rules.last >= batch["limit"]).tolist() == [True, False]  # of a limit of 5, no token is number 5
    assert rules.last[1] == 6
