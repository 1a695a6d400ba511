"""Sentences of words and tags come back as they stand, repaired where spans begin; others are named by their line."""

import gzip
from collections import Counter

import pytest

from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.conll import COMMENTS, DOCUMENTS, REPAIRED, repaired
from jformer.data.sources.split import Pair
from jformer.errors import UserError


def opened(folder, text, name="train.conll"):
    (folder / name).write_text(text)
    return open_split(SourceConfig(source="conll", dir=str(folder)), "train")


def pairs(folder, text, name="train.conll"):
    counts = Counter()
    return list(opened(folder, text, name).read(counts)), counts


@pytest.mark.parametrize("separator", ["\t", " ", "\t_\t", " _ _ ", "\t" + "x\t" * 8])
def test_first_and_last_column_become_a_pair(tmp_path, separator):
    lines = ["Ada", "B-person"], ["#", "O"], [], [], ["Paris", "B-place"]
    found, counts = pairs(tmp_path, "\n".join(separator.join(cells) for cells in lines))
    assert found == [Pair("Ada #", "B-person O"), Pair("Paris", "B-place")]
    assert not counts


def test_comments_and_document_marks_are_skipped_and_counted(tmp_path):
    text = "-DOCSTART- O\n\n# sent_id = 1\n# text = a\na\tO\n#\tO\n \t \n#tag\tO\n"
    found, counts = pairs(tmp_path, text)
    assert found == [Pair("a #", "O O"), Pair("#tag", "O")]
    assert (counts[COMMENTS], counts[DOCUMENTS]) == (2, 1)


def test_a_document_mark_inside_a_sentence_is_refused(tmp_path):
    with pytest.raises(UserError, match=r":2: -DOCSTART- inside a sentence: put an empty line before it"):
        pairs(tmp_path, "a O\n-DOCSTART- O\nb O\n")


def test_tags_inside_that_begin_a_span_are_repaired_and_counted(tmp_path):
    iob1 = "a I-x\nb I-x\nc B-x\nd I-y\ne O\nf I-x\n"
    found, counts = pairs(tmp_path, iob1)
    assert [pair.target for pair in found] == ["B-x I-x B-x B-y O B-x"]
    assert counts[REPAIRED] == 3
    found, counts = pairs(tmp_path, iob1 + "\ng NOUN\n")  # no longer tags of spans only
    assert found[0].target == "I-x I-x B-x I-y O I-x"
    assert REPAIRED not in counts
    assert repaired([]) == []


def test_jsonl_and_gzip_hold_the_same_sentences(tmp_path):
    text = '{"words": ["Ada", "l\u00e4uft"], "tags": ["I-x", "O"]}\n{"tags": ["O"], "words": ["x"], "id": 3}\n'
    found, counts = pairs(tmp_path, text, "train.jsonl")
    assert found == [Pair("Ada l\u00e4uft", "B-x O"), Pair("x", "O")]
    assert counts == {REPAIRED: 1}
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.conll.gz").write_bytes(gzip.compress("Ada\tI-x\nl\u00e4uft\tO\n\nx\tO".encode()))
    assert list(open_split(SourceConfig(source="conll", dir=str(tmp_path)), "train").read(Counter())) == found


def test_the_fingerprint_follows_the_text(tmp_path):
    one, again, other = (opened(tmp_path, text).fingerprint for text in ("a O\n", "a O\n", "a B-x\n"))
    assert one == again != other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tO\nb\n", r"train\.conll:2: 'b' is not a word and its tag"),
        ("a\tO\nb\t\n", r"train\.conll:2: 'b\\t' is not a word and its tag"),
        ("a\tO\n\tO\n", r"train\.conll:2: '\\tO' is not a word and its tag"),
        ("a O\n\nb _ O\n", r"train\.conll:3: 3 columns, but earlier lines have 2"),
        ("a b\tO\n", r"train\.conll:1: 'a b' contains white space"),
        ("a\u00a0b\tO\n", r"train\.conll:1: 'a\\xa0b' contains white space"),
        ("a\tB x\n", r"train\.conll:1: 'B x' contains white space"),
        ("# text = A\n1\tA" + "\t_" * 8 + "\n", r"train\.conll:2: looks like CoNLL-U, .* such as its columns 2 and 4"),
    ],
)
def test_a_line_that_is_no_word_and_tag_is_named_when_the_split_is_opened(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"words": ["a", "b"], "tags": ["O"]}', r"train\.jsonl:1: 2 words but 1 tags"),
        ('{"words": ["a b"], "tags": ["O"]}', r"train\.jsonl:1: 'a b' is not a word or tag"),
        ('{"words": [""], "tags": ["O"]}', r"train\.jsonl:1: '' is not a word or tag"),
        ('{"words": "a", "tags": ["O"]}', r"train\.jsonl:1: not an object with a list of texts under each"),
        ('{"words": ["a"], "tags": [1]}', r"train\.jsonl:1: not an object with a list of texts"),
        ("[]", r"train\.jsonl:1: not an object with"),
        ("{", r"train\.jsonl:1: "),
    ],
)
def test_an_object_that_is_no_tagged_sentence_is_named(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, line, "train.jsonl")
