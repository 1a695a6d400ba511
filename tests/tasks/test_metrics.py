import logging
import math

import numpy as np
import pytest
from sacrebleu import BLEU, CHRF, TER
from scipy.stats import pearsonr, spearmanr

from jformer.config.options import Config, EvaluateConfig
from jformer.data.data_config import DataConfig
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.evaluation.score_tables import score_table
from jformer.tasks.metrics import (
    NO_4_GRAMS,
    agreement,
    exact_match,
    f1_scores,
    reference_texts,
    text_scores,
    tokenization,
)
from jformer.tasks.sums import Sum
from jformer.tasks.task import score_texts

REFERENCES = ["A man doesn't sleep on the bench.", "Two dogs run through the snow.", "It rains."]
TOTALS = {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)}
HYPOTHESES = ["A man doesn't sit on a bench.", "Two dogs run through snow.", "It rains."]


def test_text_scores_are_sacrebleus_with_signatures():
    scores = text_scores(HYPOTHESES, [REFERENCES])
    assert list(scores) == ["bleu", "chrf", "ter"]
    assert scores["bleu"]["score"] == BLEU().corpus_score(HYPOTHESES, [REFERENCES]).score
    assert "tok:13a" in scores["bleu"]["signature"]
    assert "case:mixed" in scores["bleu"]["signature"]
    assert scores["bleu"]["details"].startswith("88.2/64.3/")  # 15 of 17 tokens, 9 of 14 pairs
    assert "BP = 0.943" in scores["bleu"]["details"]
    assert 50 < scores["chrf"]["score"] < 100
    assert 0 < scores["ter"]["score"] < 30


def test_only_the_named_scores_are_made():
    assert list(text_scores(HYPOTHESES, [REFERENCES], names=["chrf"])) == ["chrf"]


def test_tokenized_text_is_scored_as_it_is(caplog):
    """By hand: `n't` stays a token of its own, where 13a would make other tokens, and nobody warns of it."""
    hypotheses = ["a b does n't c-d ."] * 120
    references = ["a b does n't c-e ."] * 120
    with caplog.at_level(logging.WARNING, logger="sacrebleu"):
        scores = text_scores(hypotheses, [references], tokenize="none", names=["bleu"])
        detokenized = text_scores(hypotheses, [references], names=["bleu"])["bleu"]
    precisions = [5 / 6, 3 / 5, 2 / 4, 1 / 3]
    assert scores["bleu"]["score"] == pytest.approx(100 * math.prod(precisions) ** 0.25)
    assert "tok:none" in scores["bleu"]["signature"]
    assert not caplog.records  # which would come at every validation
    assert "notes" not in scores["bleu"]
    assert ["120 outputs end in a space and a period" in note for note in detokenized["notes"]] == [True]


def test_case_is_ignored_on_request():
    lowered = [text.lower() for text in REFERENCES]
    assert text_scores(lowered, [REFERENCES], names=["bleu"])["bleu"]["score"] < 90
    scores = text_scores(lowered, [REFERENCES], names=["bleu", "chrf"], lowercase=True)
    assert scores["bleu"]["score"] == pytest.approx(100)
    assert scores["chrf"]["score"] == pytest.approx(100)


def test_an_unknown_tokenization_is_refused_with_the_choices():
    with pytest.raises(UserError, match=r"evaluate\.tokenize='13b'; choose one of: none, .*13a"):
        text_scores(HYPOTHESES, [REFERENCES], tokenize="13b")


def test_a_tokenization_that_needs_another_package_says_so():
    with pytest.raises(UserError, match=r"evaluate\.tokenize='ja-mecab' .* pip install sacrebleu\[ja\]$"):
        text_scores(HYPOTHESES, [REFERENCES], tokenize="ja-mecab")


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="3 hypotheses but 2 references"):
        exact_match(HYPOTHESES, REFERENCES[:2])
    with pytest.raises(ValueError, match="3 hypotheses but 2 references"):
        text_scores(HYPOTHESES, [REFERENCES, REFERENCES[:2]])


def test_several_references_are_scored_as_by_sacrebleu():
    others = ["A man isn't sitting on a bench.", "Dogs run through snow.", "Rain."]
    examples = [Pair("", *both, others=(other,)) for *both, other in zip(REFERENCES, others, strict=True)]
    references = reference_texts(examples)
    assert references == [REFERENCES, others]
    scores = text_scores(HYPOTHESES, references)
    assert scores["bleu"]["score"] == BLEU().corpus_score(HYPOTHESES, [REFERENCES, others]).score
    assert all("nrefs:2" in scores[name]["signature"] for name in ("bleu", "chrf", "ter"))
    assert reference_texts([pair._replace(others=()) for pair in examples]) == [REFERENCES]


def test_blank_references_are_missing_where_there_are_others():
    full, short = "the quick brown fox jumps over the lazy dog", "the quick brown fox"
    some = [Pair("", full, others=(other,)) for other in ("another text", "", " ")]
    blank = [Pair("", "", others=(full,)), Pair("", "", others=("",))]
    assert reference_texts(some) == [[full] * 3, ["another text", None, None]]
    assert reference_texts(blank) == [[full, ""]]
    scores = score_texts([short] * 3, some, TOTALS, names=["bleu", "chrf", "ter"])
    for name, metric in {"bleu": BLEU(), "chrf": CHRF(), "ter": TER()}.items():
        wanted = metric.corpus_score([short] * 3, [[full] * 3, ["another text", None, None]])
        assert scores[name]["score"] == wanted.score
        assert "nrefs:var" in scores[name]["signature"]
        assert scores[name]["notes"] == ["2 blank references left out: their examples have others"]
    empty = score_texts(["", ""], blank, TOTALS, names=["bleu"])
    assert empty["exact_match"]["score"] == 0.5  # nothing equals the blank one of the first
    assert empty["bleu"]["notes"] == [
        "1 blank reference left out: their examples have others",
        "1 example whose only reference is blank: an answer there is wrong",
    ]
    assert "test: 1 blank reference" in score_table({"test": empty})


def scored_in(language, tokenize="auto"):
    return Config(data=DataConfig(target_language=language), evaluate=EvaluateConfig(tokenize=tokenize))


@pytest.mark.parametrize(
    ("language", "wanted"),
    [("de", "13a"), ("zh", "zh"), ("zh-CN", "zh"), ("zho_Hans", "zh"), ("ja", "char"), ("KO", "char"), ("th", "char")],
)
def test_tokenization_follows_the_language(language, wanted):
    """MeCab is not installed here."""
    assert tokenization(scored_in(language)) == wanted
    assert tokenization(scored_in(language, "intl")) == "intl"


def test_bleu_of_outputs_without_four_words_says_so():
    found = text_scores(["a cat sat", "yes"], [["a cat sat", "yes"]], names=("bleu",))["bleu"]
    assert found["score"] == 0.0
    assert found["notes"] == [NO_4_GRAMS]
    assert "notes" not in text_scores(["a cat sat down", "yes"], [["a cat sat down", "yes"]], names=("bleu",))["bleu"]


def test_bleu_of_text_without_spaces_is_noted_where_its_words_are_not_found():
    references = ["一大的房子在山上。", "小红花在河边，我们去喝水。"]
    outputs = ["一大的房子在山下。", "小红花在河边，我们去吃鱼。"]
    found = text_scores(outputs, [references], names=["bleu"])["bleu"]
    assert found["score"] < 1
    assert "BLEU is near 0 and chrF is not: tok:13a" in found["notes"][0]
    followed = text_scores(outputs, [references], names=["bleu", "ter"], tokenize=tokenization(scored_in("zh")))
    assert followed["bleu"]["score"] > 50
    assert followed["ter"]["score"] < 50
    assert "tok:zh" in followed["bleu"]["signature"]
    assert "notes" not in followed["bleu"]


def test_exact_match_overall_and_by_group():
    hypotheses, references = ["1", "2", "3", "x"], ["1", "2", "3", "4"]
    assert exact_match(hypotheses, references) == {"score": 0.75}
    grouped = exact_match(hypotheses, references, ["time", "time", "date", "date"])
    assert grouped == {"score": 0.75, "by_group": {"date": 0.5, "time": 1.0}}
    assert list(grouped["by_group"]) == ["date", "time"]


def test_score_table_has_a_column_for_each_test_set():
    results = {
        "schema": 1,
        "test": {
            "bleu": {"score": 41.019, "signature": "nrefs:1|tok:13a"},
            "exact_match": {"score": 0.995, "by_group": {"date": 1.0, "money": 0.99}},
            "pairs": 200,
        },
        "test_2017": {"bleu": {"score": 9.5, "signature": "nrefs:1|tok:13a"}},
        "run": {"seed": 1, "libraries": {"jax": "0.12"}},
    }
    assert score_table(results).splitlines() == [
        "                         test  test_2017",
        "bleu                    41.02       9.50",
        "exact match            99.50%          -",
        "  exact match: date   100.00%          -",
        "  exact match: money   99.00%          -",
        "bleu: nrefs:1|tok:13a",
    ]


def test_f1_of_sets_of_labels_by_hand():
    """Right: a twice, b once. Met, on both sides: a and b 5 times, c once."""
    outputs, labels = [{"a", "b"}, {"a"}, set(), {"c"}], [{"a"}, {"a", "b"}, set(), {"a", "b"}]
    found = f1_scores([*outputs, {"b"}], [*labels, {"b"}])
    assert found["micro_f1"] == pytest.approx(2 * 3 / (5 + 5 + 1))
    assert found["macro_f1"] == pytest.approx((2 * 2 / 5 + 2 * 1 / 5 + 0) / 3)
    assert f1_scores([set()], [set()]) == {"micro_f1": 1, "macro_f1": 1}


def test_agreement_of_numbers_is_that_of_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 40).astype(float), rng.normal(size=40)
    found = agreement(a, a + b)
    assert found["pearson"] == pytest.approx(pearsonr(a, a + b)[0])
    assert found["spearman"] == pytest.approx(spearmanr(a, a + b)[0])
    assert found["mean_squared_error"] == pytest.approx(np.mean(b**2))
    for constant in (1, 0.1):  # the mean of three times 0.1 is not 0.1
        assert all(map(math.isnan, [*agreement([constant] * 3, [1, 2, 4]).values()][:2]))
    assert all(map(math.isnan, agreement([1, math.nan], [1, 2]).values()))
