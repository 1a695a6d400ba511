"""An option that a part of the house does not know is refused by that part, by name, and never ignored."""

import dataclasses

import pytest

from jformer.errors import UserError, refuse_unknown
from jformer.models import ModelConfig, flops
from jformer.models.recurrent_config import READ, RecurrentConfig
from jformer.tools.export import ctranslate2
from jformer.tools.hf import families
from jformer.tools.hf.families import config_fields
from jformer.tools.hf.gpt2 import GPT2

Later = dataclasses.make_dataclass("Later", [("invented", int, 0)], bases=(ModelConfig,), frozen=True)
SIZES = {"vocab_size": 9, "target_vocab_size": 9}
READERS = {
    "recurrent": lambda **new: Later(**SIZES, recurrent=RecurrentConfig("gru"), **new).check(),
    "flops": lambda **new: flops.forward_flops(Later(**SIZES, **new), flops.text_work(3, 3)),
    "ctranslate2": lambda **new: ctranslate2.check(Later(**SIZES, **new)),
    "hf": lambda **new: config_fields(GPT2, Later(**GPT2.ours, vocab_size=9, **new), "lm"),
}


@pytest.mark.parametrize("name", READERS)
def test_an_option_added_later_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(families, "ModelConfig", Later)
    READERS[name]()
    with pytest.raises(UserError, match=r"model\.invented=3: "):
        READERS[name](invented=3)


def test_known_options_and_defaults_pass():
    refuse_unknown("model", Later(invented=3, norm="pre"), ("invented", "norm"), "a part")
    with pytest.raises(UserError, match=r"^model\.invented=3: a part has no such option; use 0$"):
        refuse_unknown("model", Later(invented=3), ("norm",), "a part")


@pytest.mark.parametrize("known", [READ, flops.KNOWN, ctranslate2.KNOWN], ids=["recurrent", "flops", "ctranslate2"])
def test_lists_name_options_that_exist(known):
    assert set(known) <= {field.name for field in dataclasses.fields(ModelConfig)}
