"""Which validation is the best, and which examples are answered in the course of training."""

import numpy as np
import pytest

from jformer.config import default_config, resolve
from jformer.data.sources.split import Pair
from jformer.trainer import best_measured_with
from jformer.training.state import Progress
from jformer.training.validation import forget_best, note_best, of_each_label, prompt


def test_the_first_example_of_each_label_comes_first():
    sorted_by_label = [Pair(str(i), label) for i, label in enumerate("aaabbc")]
    assert [pair.source for pair in of_each_label(sorted_by_label)] == ["0", "3", "5", "1", "4", "2"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("short", "short"),
        ("a" * 41, "a" * 40),  # one word, or a language that writes without spaces
        ("a" * 40 + " b", "a" * 40),
        ("a" * 30 + " " + "b" * 10 + "c", "a" * 30),
        ("line\n" + "a" * 30 + " " + "b" * 9, "line\n" + "a" * 30),
    ],
)
def test_a_prompt_ends_with_a_whole_word(text, kept):
    assert prompt(text) == kept


def test_validation_that_is_not_finite_is_never_the_best():
    progress = Progress()
    for step, loss in ((1, np.nan), (2, 3.0), (3, np.nan), (4, 2.0), (5, np.inf)):
        progress.step = step
        note_best(progress, loss, "loss")
    assert (progress.best, progress.best_step, progress.since_best) == (2.0, 4, 1)


def test_best_that_other_options_measured_is_forgotten():
    best = {"best": 84.65, "best_step": 20, "since_best": 3}
    told = "limit=3 (was 2): this changes train.best_by; its best (84.6500 of update 20) and train.patience are "
    for held, before, line in (
        (
            {"limit": 2},
            {"limit": 3},
            told,
        ),  # what the checkpoint holds goes before the config of a start that saved none
        ({}, {"limit": 2}, told),
        ({"limit": 3}, {}, ""),
        ({"older": 1}, {"limit": 3}, ""),  # an option that the version that saved it did not have
        ({}, {}, "limit=3 (was None)"),
    ):
        progress = Progress(**best, measured=held)
        lines = forget_best(progress, {"limit": 3}, before)
        assert "".join(lines).startswith(line)
        assert len(lines) == bool(line)
        assert (progress.best, progress.best_step, progress.since_best) == ((None, 0, 0) if line else (84.65, 20, 3))
        assert progress.measured == {"limit": 3}
    assert forget_best(Progress(), {"limit": 3}, {}) == []


def test_the_pooling_of_vectors_decides_on_the_best():
    config = default_config("bert_base")
    config.task, config.data.valid = "embed", "valid"
    config.update({"train": {"best_by": "retrieval_accuracy"}, "evaluate": {"during": ("retrieval_accuracy",)}})
    config.model.head.vectors = True
    pooled = []
    for config.decode.pooling in ("", "mean"):
        pooled.append(best_measured_with(resolve(config)))
    assert [each["decode.pooling"] for each in pooled] == ["", "mean"]


@pytest.mark.parametrize(("best_by", "best"), [("loss", 1.0), ("ter", 1.0), ("chrf", 3.0), ("accuracy", 3.0)])
def test_the_best_is_the_lowest_of_what_should_be_low_and_the_highest_of_the_rest(best_by, best):
    progress = Progress()
    for value in (2.0, 3.0, 1.0):
        note_best(progress, value, best_by)
    assert progress.best == best


def test_options_that_one_beam_does_not_read_leave_the_best_alone():
    config = default_config()
    config.update({"train": {"best_by": "bleu"}, "evaluate": {"during": ("bleu",)}})
    before = best_measured_with(resolve(config))
    config.decode.update(length_penalty=1.0, length_offset=1.0, patience=2.0, ended_first=False)
    assert best_measured_with(resolve(config)) == before
    config.decode.repetition_penalty = 2.0
    assert best_measured_with(resolve(config)) != before


def test_the_tokenizations_of_all_validation_sets_decide_on_the_best():
    config = default_config()
    config.update({"train": {"best_by": "bleu"}, "evaluate": {"during": ("bleu",)}})
    config.data.mixture = ({"source": "files", "target_language": "zh", "valid": "valid"},)
    assert best_measured_with(resolve(config))["evaluate.tokenize"] == "13a, zh"
    config.evaluate.tokenize = "13a"
    assert best_measured_with(resolve(config))["evaluate.tokenize"] == "13a"
