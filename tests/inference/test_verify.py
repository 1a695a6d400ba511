"""A run that decodes rightly passes every check, and what is broken on purpose fails the check that is for it."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data import progress
from jformer.errors import UserError
from jformer.inference import verify
from jformer.models import ModelConfig, build_model
from jformer.models.recurrent_config import RecurrentConfig
from tests.conftest import draw_params
from tests.inference import untrained
from tests.inference.untrained import CHARS
from tests.slow import slow_but

FIELDS = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "tied_output": False}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(verify, "SENTENCES", 4)
    monkeypatch.setattr(verify, "BEAMS", 2)


def subject(model, params, task=None):
    """Return what is verified of an untrained model."""
    task = task or {"encdec": "translate", "decoder": "lm"}[model.config.family]
    predictor = untrained.predictor(model, params, task, max_extra_length=5)
    return verify.Subject(predictor, predictor.config.decode)


def test_a_check_that_takes_long_is_told(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    assert verify.report(verify.Check("a slow one", "nothing", lambda subject: time.sleep(0.1) or 0.0), None, 1e-3)
    assert "checking: a slow one: 0:00\n" in capsys.readouterr().err


def test_a_run_without_test_sets_is_verified_on_random_tokens(tiny):
    model, params = tiny(vocab_size=CHARS.vocab_size, **FIELDS)
    predictor = untrained.predictor(model, params, "translate", max_extra_length=5)
    data = dataclasses.replace(predictor.config.data, test=())
    predictor.config = dataclasses.replace(predictor.config, data=data)
    found = verify.Subject(predictor, predictor.config.decode)
    assert len(found.pieces) == 4
    assert found.origin == "random tokens, for data.test names no set"


@pytest.mark.parametrize("text", ["", "\n" * 4 + "abc\n"], ids=["empty", "blank lines first"])
def test_a_test_set_that_begins_with_no_text_is_replaced_by_random_tokens(tiny, tmp_path, text):
    for language in ("en", "de"):
        (tmp_path / f"test.{language}").write_text(text)
    model, params = tiny(vocab_size=CHARS.vocab_size, **FIELDS)
    predictor = untrained.predictor(model, params, data={"dir": str(tmp_path)}, max_extra_length=5)
    found = verify.Subject(predictor, predictor.config.decode)
    assert found.origin == "random tokens, for test set 'test' begins with no text"
    assert len(found.pieces) == 4


SEARCHED = ["cached", "one beam", "alone", "packed", "two copies", "scores of the search"]
CHECKED = {  # family, task → how the names of its checks begin
    ("encdec", "translate"): SEARCHED,
    ("decoder", "lm"): SEARCHED,
    ("decoder", "prefix_lm"): SEARCHED,
    ("encdec", "denoise"): ["cached", "alone", "packed"],
    ("encoder", "mlm"): ["alone", "packed"],
}


@pytest.mark.parametrize(
    "case", slow_but([(*case, window) for window in (2, 0) for case in CHECKED], ("encoder", "mlm", 2))
)
def test_every_check_passes_on_a_sound_model(tiny, case, capsys):
    family, task, window = case
    fields = {**FIELDS, "num_layers": 2}  # what a target sees of one layer, no prefix changes
    noise = {"denoise": 100, "mlm": 1}.get(task, 0)  # rows of its symbols
    sound = subject(*tiny(family=family, window=window, vocab_size=CHARS.vocab_size + noise, **fields), task)
    assert sound.origin.startswith("random tokens, for data.dir")
    found = verify.checks_of(sound)
    assert [check.name.startswith(name) for check, name in zip(found, CHECKED[family, task], strict=True)]
    for check in found:
        assert verify.report(check, sound, 2e-4), capsys.readouterr().out


@pytest.mark.slow
def test_every_check_passes_on_a_recurrent_model(capsys):
    feeding = RecurrentConfig("gru", bidirectional=True, attention="general", input_feeding=True, bridge="dense")
    fields = {"num_layers": 1, "d_model": 16, "tied_output": False, "recurrent": feeding}
    model = build_model(ModelConfig(vocab_size=CHARS.vocab_size, **fields))
    sound = subject(model, draw_params(model))
    found = verify.checks_of(sound)
    assert len(found) == len(SEARCHED) - 1  # all but packed rows
    for check in found:
        assert verify.report(check, sound, 2e-4), capsys.readouterr().out


class Altered:
    """A model one of whose methods gives another result, which `change` makes of the right one."""

    def __init__(self, model, method, change):
        self.config = model.config
        self._model, self._method, self._change = model, method, change

    def apply(self, *args, method=None, **options):
        result = self._model.apply(*args, method=method, **options)
        return self._change(result) if method == self._method else result


def altered(method, change):
    """Break the model: not what it says of a whole batch, which is what searches are compared with."""

    def break_model(subject, monkeypatch):
        monkeypatch.setattr(subject, "model", Altered(subject.model, method, change))

    return break_model


def lying(change):
    """Break the search: `change` gets the score of an output, and how `Subject.answer` was asked."""

    def break_search(subject, monkeypatch):
        answer = subject.answer

        def lie(*args, **options):
            return [[(ids, change(score, **options)) for ids, score in outputs] for outputs in answer(*args, **options)]

        monkeypatch.setattr(subject, "answer", lie)

    return break_search


def forget_texts(subject, monkeypatch):
    """Break the rows: two texts that share one are taken for a single one."""
    pack = verify.pack_rows

    def packed(batch):
        shared = pack(batch)
        return {name: np.minimum(x, 1) if "segments" in name else x for name, x in shared.items()}

    monkeypatch.setattr(verify, "pack_rows", packed)


def mix_rows(encoded):
    return jax.tree.map(lambda x: x + x.sum(0) if jnp.issubdtype(x.dtype, jnp.floating) else x, encoded)


BROKEN = {  # check → what is broken
    "cached_and_uncached_logits": altered("extend", lambda result: (2 * result[0], *result[1:])),
    "greedy_and_likeliest": altered("logits", lambda logits: -logits),  # of a step, which takes the least likely
    "alone_and_together": altered("encode", mix_rows),
    "rows_alone_and_together": altered(None, mix_rows),
    "packed_and_unpacked": forget_texts,
    "ensemble_and_single": lying(lambda score, copies=1, **_: copies * score),
    "searched_and_forced": lying(lambda score, **_: 2 * score),
}


QUICK = ("cached_and_uncached_logits", "greedy_and_likeliest", "searched_and_forced")


@pytest.mark.parametrize("name", slow_but(BROKEN, *QUICK))
def test_what_is_broken_fails_its_check(tiny, monkeypatch, name, capsys):
    (check,) = [check for check in verify.CHECKS if check.run.__name__ == name]
    broken = subject(*tiny(vocab_size=CHARS.vocab_size, **FIELDS))
    BROKEN[name](broken, monkeypatch)
    assert not verify.report(check, broken, 2e-4)
    assert capsys.readouterr().out.startswith("FAIL")


def test_numbers_that_are_none_are_refused_and_fail(tiny, capsys):
    model = subject(*tiny(vocab_size=CHARS.vocab_size, **FIELDS))
    assert not verify.report(verify.Check("nothing", "a score", lambda _: float("nan")), model, 2e-4)
    model.params = jax.tree.map(lambda leaf: leaf * jnp.nan, model.params)
    with pytest.raises(UserError, match="scores are NaN"):
        verify.report(verify.CHECKS[0], model, 2e-4)


def test_a_run_is_verified_at_the_highest_precision(tmp_path, monkeypatch, capsys):
    seen = []
    check = verify.Check("c", "a logit", lambda subject: seen.append(subject.model.config.precision) or 0.0)
    monkeypatch.setattr(verify, "CHECKS", (check,))
    workdir = untrained.write_run(tmp_path / "run", untrained.MODEL)
    assert verify.verify(untrained.settings_of(workdir), workdir)
    assert seen == ["highest"]
    assert "products on cpu: of float32 in float32 (model.precision=highest)" in capsys.readouterr().out
