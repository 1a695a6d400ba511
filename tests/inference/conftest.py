"""The Predictor that the tests of this room ask."""

import functools

import pytest

from tests.inference import untrained
from tests.inference.untrained import MODEL, ROWS


@pytest.fixture(scope="module")
def predictor(tiny):
    """Return a function: task and decode options → Predictor of an untrained model that does write something."""

    @functools.cache
    def build(task="translate", max_source_length=64, **options):
        family = {"translate": "encdec", "lm": "decoder"}[task]
        options = {"batch_size": 4, "beam_size": 1, "max_extra_length": 6, **options}
        data = {"max_source_length": max_source_length, "max_target_length": max_source_length}
        return untrained.predictor(*tiny(vocab_size=ROWS, family=family, **MODEL), task, data=data, **options)

    return build
