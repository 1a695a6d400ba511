"""Words and their tags go into batches and come back aligned, whatever the tokenizer, and are scored word by word."""

import math

import numpy as np
import pytest

from jformer.data.sources.split import Pair
from jformer.data.tokenizers import BOS, EOS, LabelTokenizer
from jformer.errors import UserError
from jformer.tasks.sums import Sum
from jformer.tasks.tag import refuse_scores_of_spans, score
from tests.tasks.conftest import make_task

TOTALS = {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)}
RNG = np.random.default_rng(0)
WORDS = ["a", "be", "sea", "deed", "fabled"]
TAGS = {"a": "O", "be": "B-x", "sea": "I-x", "deed": "B-y", "fabled": "O"}
SENTENCES = [tuple(RNG.choice(WORDS, n)) for n in RNG.integers(1, 12, 40)]
PAIRS = tuple(Pair(" ".join(words), " ".join(TAGS[word] for word in words)) for words in SENTENCES)


def read_back(made):
    """Return the sentences of all batches, from first tokens and their tags."""
    source, target = made.tokenizers
    found = []
    for step in range(len(made.batches)):
        batch = made.batches[step]
        for row in range(len(batch["source"])):
            for segment in range(1, batch["source_segments"][row].max() + 1):
                there = batch["source_segments"][row] == segment
                tokens, weights = batch["source"][row][there], batch["weights"][row][there]
                assert (tokens[0], tokens[-1]) == (BOS, EOS)
                starts = np.flatnonzero(weights)
                ends = [*starts[1:], len(tokens) - 1]
                words = [source.decode(tokens[s:e].tolist()).rstrip() for s, e in zip(starts, ends, strict=True)]
                tags = target.decode((batch["target_out"][row][there][starts] + 4).tolist())
                found.append(Pair(" ".join(words), tags))
        assert not batch["weights"][batch["source_segments"] == 0].any()
        assert not batch["source_types"].any()
    return found


@pytest.mark.parametrize("tokenizer", ["word", "char", "bpe", "byte"])
@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_words_and_tags_come_back_from_the_batches(make, tokenizer, batching):
    made = make("tag", PAIRS, source="conll", tokenizer=tokenizer, batching=batching, vocab_size=40)
    assert sorted(read_back(made)) == sorted(PAIRS)


def test_long_sentences_are_split_between_words_where_no_text_may_be_lost(make):
    options = {"source": "conll", "max_source_length": 9}
    dropped, cut = (make("tag", PAIRS, **options, overlong=overlong) for overlong in ("drop", "cut"))
    split, evaluating = make("tag", PAIRS, **options, overlong="split"), make("tag", PAIRS, True, **options)
    words = [sum(len(pair.source.split()) for pair in read_back(made)) for made in (dropped, cut, split, evaluating)]
    assert words[0] < words[1] < words[2] == words[3] == sum(map(len, SENTENCES))
    assert dropped.corpus.counts["overlong examples dropped"] == cut.corpus.counts["overlong examples cut"] > 0
    assert split.corpus.counts["overlong examples split"] == cut.corpus.counts["overlong examples cut"]


def test_a_word_over_the_limit_keeps_its_tag_and_is_counted(make):
    made = make("tag", (Pair("a fabled be", "O B-y O"),), source="conll", max_source_length=6, overlong="split")
    assert sorted(read_back(made)) == [Pair("a", "O"), Pair("be", "O"), Pair("fabl", "B-y")]
    assert made.corpus.counts["words cut to the limit"] == 1


def test_words_without_room_or_tags_are_refused(make):
    with pytest.raises(UserError, match=r"data\.max_source_length=2 holds 2 symbols and no token"):
        make("tag", PAIRS, source="conll", max_source_length=2)
    with pytest.raises(UserError, match="2 words but 1 tags: give every word one: 'a'"):
        make("tag", (Pair("a be", "O"),), source="conll")


def test_scores_of_spans_by_hand():
    """Of the spans x and y only x is right; 3 of 4 words are, and the tag O in 2 of 2 and 3, B-x in 1 of 1."""
    examples = [Pair("a b c", "B-x O B-y"), Pair("d", "O")]
    scores = score(["B-x O O", "O"], examples, TOTALS)
    assert scores["span_f1"] == {"score": 2 / 3, "by_group": {"x": 1.0, "y": 0.0}}
    assert (scores["span_precision"]["score"], scores["span_recall"]["score"]) == (1.0, 0.5)
    assert scores["accuracy"] == {"score": 0.75}
    assert scores["macro_f1"]["score"] == pytest.approx((1 + 4 / 5 + 0) / 3)
    assert scores["exact_match"] == {"score": 0.5}
    assert scores["perplexity"]["score"] == pytest.approx(math.exp(2))


def test_parts_of_speech_have_no_scores_of_spans():
    assert "span_f1" not in score(["NOUN VERB"], [Pair("a b", "NOUN NOUN")], TOTALS)
    tags = LabelTokenizer("tag", "identity", ["NOUN", "VERB"])
    refuse_scores_of_spans(("macro_f1",), tags)
    with pytest.raises(UserError, match=r"evaluate\.during: span_f1 needs tags such as O, B-X and I-X"):
        refuse_scores_of_spans(("span_f1",), tags)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "labelled"}, r"data\.source='labelled' is not for task='tag': use 'conll'"),
        ({"source": "generated"}, r"data\.source='generated' is not for task='tag'"),
        ({"source": "conll", "tokenizer": "image"}, r"data\.tokenizer='image' is not for task='tag'"),
    ],
)
def test_text_without_tags_is_refused(data, message):
    with pytest.raises(UserError, match=message):
        make_task("tag", **data)
