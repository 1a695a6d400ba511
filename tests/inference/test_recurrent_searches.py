"""Searches know a step function and a cache: those of a recurrent model, whose cache is its state, do as well."""

import numpy as np
import pytest

from jformer.data.tokenizers.symbols import EOS
from jformer.decoding.mbr import chrf, rank
from jformer.inference.predict import load
from jformer.models.recurrent_config import RecurrentConfig
from tests.inference.untrained import TEXTS, settings_of, write_run

FEEDING = RecurrentConfig("gru", bidirectional=True, attention="general", input_feeding=True, bridge="dense")
FIELDS = {"num_layers": 1, "d_model": 16, "recurrent": FEEDING}


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / str(seed), FIELDS, seed) for seed in (57, 5)]


@pytest.fixture(scope="module")
def generate(workdirs):
    """Return a function: options of decoding → the outputs for every text."""
    return lambda **options: load(workdirs[0], settings_of(workdirs[0], **options)).generate(TEXTS)


@pytest.mark.slow
def test_samples_are_drawn_line_by_line_and_the_best_of_them_is_that_of_all(generate):
    samples = generate(search="sample", samples=6, seed=3)
    assert len({output.text for output in samples[2]}) > 3
    for drawn, (best, *_) in zip(samples, generate(search="mbr", samples=6, seed=3, n_best=1), strict=True):
        texts = [output.text for output in drawn]
        order, utilities = rank(texts, chrf([*dict.fromkeys(texts)]))
        assert best.text == drawn[order[0]].text
        assert not best.text or best.utility == pytest.approx(utilities[0], abs=1e-3)


@pytest.mark.slow
def test_the_likeliest_token_alone_is_what_a_beam_of_one_takes(generate):
    greedy, sampled = generate(beam_size=1), generate(search="sample", top_k=1)
    assert [outputs[0].text for outputs in sampled] == [outputs[0].text for outputs in greedy]
    assert len({outputs[0].text for outputs in greedy}) > 3


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_its_members(generate, workdirs):
    """Of a run with itself it is the run; of two, what they write scores as the mean of both says."""
    alone, twice = generate(), generate(ensemble=(str(workdirs[0]),))
    assert [outputs[0].ids for outputs in twice] == [outputs[0].ids for outputs in alone]
    options = {"ensemble": (str(workdirs[1]),), "ensemble_average": "log_probability", "length_penalty": 0.0}
    both = generate(**options, beam_size=1)
    assert [outputs[0].ids for outputs in both] != [outputs[0].ids for outputs in alone]
    pairs = [(text, outputs[0].text) for text, outputs in zip(TEXTS, both, strict=True) if text]
    scored = load(workdirs[0], settings_of(workdirs[0], **options)).score(pairs)
    ended = [outputs[0] for text, outputs in zip(TEXTS, both, strict=True) if text]
    for output, found in zip(ended, scored, strict=True):
        if output.ids[-1:] == (EOS,):
            assert output.score == pytest.approx(found.log_prob, abs=1e-3)


@pytest.mark.slow
def test_what_is_not_looked_at_costs(generate, workdirs):
    """Wu et al. 2016, equation 14, from the weights of the forced pass."""
    plain, covering = ({**zip_ids(generate(beam_size=4, n_best=4, coverage_penalty=x))} for x in (0.0, 0.4))
    predictor = load(workdirs[0])
    encode = predictor.tokenizers[1].encode
    common = [key for key in covering if key in plain and key[1] == (*encode([covering[key].text])[0], EOS)]
    assert common  # which ended, and whose texts are cut into the tokens that were written
    for key in common:
        (attended,) = predictor.attend([(key[0], covering[key].text)])
        looked = attended.cross.weights[0, 0].sum(0)
        expected = 0.4 * np.log(np.clip(looked, 1e-9, 1)).sum()
        assert covering[key].score - plain[key].score == pytest.approx(expected, abs=1e-3)
        assert expected < -1e-3


def zip_ids(answers):
    """Return every output by its text and its tokens."""
    return {
        (text, output.ids): output for text, outputs in zip(TEXTS, answers, strict=True) for output in outputs if text
    }
