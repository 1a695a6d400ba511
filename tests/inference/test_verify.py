"""A run that decodes rightly passes every check, and what is broken on purpose fails the check that is for it."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest

from jformer.config import resolve
from jformer.data import progress
from jformer.data.tokenizers import learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference import verify
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks.build import build_task

TOKENIZER = learn("char", ["abcdefgh "], 99, "identity", False)
FIELDS = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "tied_output": False}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(verify, "SENTENCES", 4)
    monkeypatch.setattr(verify, "BEAMS", 2)
    jax.clear_caches()  # else what was compiled whole hides what is broken, and the other way round
    yield
    jax.clear_caches()


def subject(tiny, family="encdec"):
    """Return what is verified of an untrained model."""
    task = {"encdec": "translate", "decoder": "lm"}[family]
    config = resolve({"task": task, "model": {"family": family}, "data": {"dir": "nowhere"}})
    options = DecodeConfig(max_extra_length=5)
    config = dataclasses.replace(config, decode=options)
    return subject_of(config, *tiny(family=family, vocab_size=TOKENIZER.vocab_size, **FIELDS))


def subject_of(config, model, params):
    tokenizers = (TOKENIZER, TOKENIZER)
    run = Trained(config=config, task=build_task(config), tokenizers=tokenizers, model=model, params=params)
    return verify.Subject(Predictor(run), config.decode)


def test_a_check_that_takes_long_is_told(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    assert verify.report(verify.Check("a slow one", "nothing", lambda subject: time.sleep(0.1) or 0.0), None, 1e-3)
    assert "checking: a slow one: 0:00\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["encdec", "decoder"])
def test_every_check_passes_on_a_sound_model(tiny, family, capsys):
    sound = subject(tiny, family)
    assert sound.origin.startswith("random tokens, for data.dir")
    for check in verify.CHECKS:
        assert verify.report(check, sound, 2e-4), capsys.readouterr().out
    assert capsys.readouterr().out.count("pass") == len(verify.CHECKS)


@pytest.mark.slow
def test_every_check_passes_on_a_recurrent_model(capsys):
    feeding = RecurrentConfig("gru", bidirectional=True, attention="general", input_feeding=True, bridge="dense")
    model = build_model(
        ModelConfig(vocab_size=TOKENIZER.vocab_size, num_layers=1, d_model=16, tied_output=False, recurrent=feeding)
    )
    params = init_params(model, jax.random.key(0))
    config = resolve({"data": {"dir": "nowhere"}, "decode": {"max_extra_length": 5}})
    sound = subject_of(config, model, params)
    for check in verify.CHECKS:
        assert verify.report(check, sound, 2e-4), capsys.readouterr().out


def shifted(advance):
    """Let every token stand one place too far."""

    def broken(*arguments):
        to, after = advance(*arguments)
        return to._replace(positions=to.positions + 1), after

    return broken


BROKEN = {  # check → (what is replaced, by what)
    "cached_and_uncached_logits": ("jformer.models.encdec.advance", shifted),
    "greedy_and_likeliest": (
        "jformer.decoding.greedy.next_log_probs",
        lambda weigh: lambda *a: weigh(*a)._replace(scores=-a[1]),
    ),
    "alone_and_together": (
        "jformer.models.encdec.TokenPlaces",
        lambda make: lambda segments, *a: make(segments * 0 + 1, *a),
    ),
    "ensemble_and_single": ("jformer.inference.generation._mean", lambda mean: lambda logits, _: sum(logits)),
    "searched_and_forced": (
        "jformer.inference.verify.make_scorer",
        lambda make: lambda *a: lambda *b: {"log_probs": 2 * make(*a)(*b)["log_probs"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_fails_its_check(tiny, monkeypatch, name, capsys):
    (check,) = [check for check in verify.CHECKS if check.run.__name__ == name]
    place, breaking = BROKEN[name]
    module, _, attribute = place.rpartition(".")
    module = __import__(module, fromlist=[attribute])
    monkeypatch.setattr(module, attribute, breaking(getattr(module, attribute)))
    assert not verify.report(check, subject(tiny), 2e-4)
    assert capsys.readouterr().out.startswith("FAIL")


def test_numbers_that_are_none_are_refused_and_fail(tiny, capsys):
    model = subject(tiny)
    assert not verify.report(verify.Check("nothing", "a score", lambda _: float("nan")), model, 2e-4)
    model.params = jax.tree.map(lambda leaf: leaf * jnp.nan, model.params)
    with pytest.raises(UserError, match="scores are NaN"):
        verify.report(verify.CHECKS[0], model, 2e-4)
