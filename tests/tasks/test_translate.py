import math

import pytest

from jformer.data.sources.split import Pair
from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from jformer.tasks.build import TASKS
from jformer.tasks.sums import Sum
from tests.tasks.conftest import make_task

TOTALS = {"nll": Sum(6.0, 3.0), "correct": Sum(1.0, 4.0), "loss": Sum(7.0, 3.0)}


def test_scores_are_of_the_outputs_and_of_the_losses():
    examples = [Pair("x", "the cat sat here", "cats"), Pair("y", "the dog ran off", "dogs")]
    scores = make_task("translate")[0].score(["the cat sat here", "a dog ran off"], examples, TOTALS)
    assert set(scores) == {"bleu", "exact_match", "perplexity", "token_accuracy"}
    assert 0 < scores["bleu"]["score"] < 100
    assert scores["exact_match"] == {"score": 0.5, "by_group": {"cats": 1.0, "dogs": 0.0}}
    assert scores["perplexity"]["score"] == pytest.approx(math.exp(2))
    assert scores["token_accuracy"]["score"] == 0.25


def test_vocabularies_are_shared_or_apart():
    assert make_task("translate")[0].vocabularies == {"shared": VocabularySpec("char", ("source", "target"))}
    apart = make_task("translate", vocab_shared=False)[0].vocabularies
    assert apart == {"source": VocabularySpec("char", ("source",)), "target": VocabularySpec("char", ("target",))}


def test_limits_of_both_sides_are_those_of_the_options(make):
    made = make("translate", max_source_length=20, max_target_length=12, overlong="cut")
    assert made.corpus.source.lengths.max() == 20
    assert made.corpus.target.lengths.max() == 12


def test_a_tokenization_that_is_not_to_be_had_is_refused_at_once():
    with pytest.raises(UserError, match=r"^evaluate\.tokenize='14a'"):
        TASKS["translate"](
            make_task("translate")[1], label_smoothing=0.1, scores=("bleu",), tokenize="14a", lowercase=False
        )
