"""Ranks by expected utility, the utilities being those that sacreBLEU gives for single sentences."""

import itertools

import numpy as np
import pytest
from sacrebleu import BLEU, CHRF

from jformer.decoding import mbr

TEXTS = [
    "ein mann mit einem orangefarbenen hut starrt auf etwas .",
    "ein mann mit orangefarbenem hut sieht etwas an .",
    "eine frau, die (etwas) an-sieht: 3,5 % – „ja“",
    "der hund",
    "a",
    "",
    "ja ja ja ja ja ja",
]
METRICS = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}


def rank(candidates, name, **options):
    return mbr.rank(candidates, getattr(mbr, name)([*dict.fromkeys(candidates)], **options))


@pytest.mark.parametrize("name", METRICS)
def test_utilities_are_those_of_sacrebleu(name):
    ours = getattr(mbr, name)(TEXTS)
    for (i, hypothesis), (j, reference) in itertools.product(enumerate(TEXTS), repeat=2):
        assert abs(ours[i, j] - METRICS[name].sentence_score(hypothesis, [reference]).score) < 1e-9


@pytest.mark.parametrize("name", METRICS)
def test_ranks_follow_the_mean_over_all_candidates(name):
    drawn = [TEXTS[i] for i in (3, 0, 1, 0, 2, 4)]
    order, utilities = rank(drawn, name)
    means = [np.mean([METRICS[name].sentence_score(text, [other]).score for other in drawn]) for text in drawn]
    assert np.allclose(utilities, [means[i] for i in order])
    assert utilities == sorted(utilities, reverse=True)
    assert order[0] == 1  # drawn twice and close to another: it is ranked once, at its first place
    assert sorted(order) == [0, 1, 2, 4, 5]


def test_one_candidate_and_equal_ones_are_ranked_too():
    assert rank(["ja"], "chrf") == ([0], [100.0])
    assert rank(["", ""], "chrf")[0] == rank(["", ""], "bleu")[0] == [0]
    assert rank(["a b", "c d", "a b", "c d"], "chrf")[0] == [0, 1]  # of equals the first


def test_bleu_takes_texts_apart_as_it_is_asked_to():
    drawn = ["山上的花", "一大的房子。", "一大的房子", "小的房子"]
    assert rank(drawn, "bleu")[0][0] == 0  # nothing is shared between words of a whole clause
    assert rank(drawn, "bleu", tokenization="zh")[0][0] == 2
