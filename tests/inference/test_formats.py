"""A line asks and a line answers, whatever characters its texts hold."""

import json
import math
from collections import Counter

import pytest

from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.inference.answers import Alignment, Output, Request, Scored, TaggedWord
from jformer.inference.formats import Question, read_question, read_request, write_outputs, write_scored

LINKS = Alignment(((0, 0), (2, 1)), ("the", "old", "house"), ("das", "Haus"))
OUTPUTS = [
    Output("das\tHaus", (7, 8, 2), -1.25, alignment=LINKS),
    Output("ein „Haus“", (9, 2), -2.000004, alignment=Alignment((), LINKS.source, ("ein", "„Haus“"))),
]


def test_a_request_is_a_line_or_a_json_object():
    assert read_request(4, '{"source": "a"}', "text", Counter()) == Request('{"source": "a"}', line=4)
    line = '{"source": "a\\nb", "prefix": "Das", "constraints": ["Haus", "grüne Tür"]}'
    counts = Counter()
    assert read_request(4, line, "jsonl", counts) == Request("a b", "Das", ("Haus", "grüne Tür"), 4)
    assert counts == {"line feeds within a text made spaces": 1}
    assert read_request(0, '{"source": ""}', "jsonl", Counter()) == Request("", line=0)
    counts.clear()
    assert read_request(0, r'{"source": "a\u0000\ud800", "prefix": "\udfff"}', "jsonl", counts) == Request(
        "a\ufffd\ufffd", "\ufffd", line=0
    )
    assert counts == {"texts with invalid characters, replaced by U+FFFD": 2}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Expecting value"),
        ('["a"]', "not a JSON object with 'source'"),
        ('{"prefix": "a"}', "not a JSON object with 'source'"),
        ('{"source": "a", "prefx": "b"}', "'prefx' is not one of 'source', 'prefix', 'constraints'"),
        ('{"source": 3}', "'source' must be a text"),
        ('{"source": "a", "constraints": "b"}', "'constraints' must be a list of texts"),
        ('{"source": "a", "constraints": [3]}', "'constraints' must be a list of texts"),
    ],
)
def test_what_is_no_request_says_why(line, said):
    with pytest.raises(ValueError, match=said):
        read_request(0, line, "jsonl", Counter())


def test_tagged_words_are_written_as_conll_reads_them(tmp_path):
    words = (("Ada", "B-person"), ("#", "O"), ("sleeps", "O"))
    tagged = Output("B-person O O", (), tags=tuple(TaggedWord(*word, 0.5, 0.5) for word in words))
    answers = [write_outputs([output], "conll", False, False) for output in (tagged, Output("", ()), tagged)]
    (tmp_path / "train.conll").write_text("".join(answer + "\n" for answer in answers))
    split = open_split(SourceConfig(source="conll", dir=str(tmp_path)), "train")
    assert [*split.read(Counter())] == [Pair("Ada # sleeps", "B-person O O")] * 2


def test_a_question_has_one_target_or_several():
    assert read_question("a b\tc d", "text", False, Counter()) == Question("a b", ("c d",))
    assert read_question("a b", "text", True, Counter()) == Question("", ("a b",))
    assert read_question('{"source": "a", "target": "b"}', "jsonl", False, Counter()) == Question("a", ("b",))
    several = read_question('{"source": "a", "targets": ["b", "c"]}', "jsonl", False, Counter())
    assert several == Question("a", ("b", "c"), ranked=True)
    assert read_question('{"target": "b"}', "jsonl", True, Counter()) == Question("", ("b",))
    for line, form, said in [
        ("a", "text", "0 TABs"),
        ("a\tb\tc", "text", "2 TABs"),
        ('{"source": "a"}', "jsonl", "needs either"),
        ('{"source": "a", "target": "b", "targets": []}', "jsonl", "needs either"),
        ('{"target": "b"}', "jsonl", "with 'source'"),
    ]:
        with pytest.raises(ValueError, match=said):
            read_question(line, form, False, Counter())


def test_outputs_are_text_columns_or_json():
    assert write_outputs(OUTPUTS, "text", False, False) == "das\tHaus"
    assert write_outputs(OUTPUTS, "tsv", False, False) == "das Haus\tein „Haus“"
    assert write_outputs(OUTPUTS, "tsv", True, True) == "das Haus\t-1.25\t0-0 2-1\tein „Haus“\t-2.0\t"
    found = write_outputs(OUTPUTS, "jsonl", True, True)
    assert "„" in found
    assert json.loads(found) == {
        "outputs": [
            {"text": "das\tHaus", "score": -1.25, "alignment": "0-0 2-1", "tokens": ["das", "Haus"]},
            {"text": "ein „Haus“", "score": -2.0, "alignment": "", "tokens": ["ein", "„Haus“"]},
        ],
        "source_tokens": ["the", "old", "house"],
    }
    assert json.loads(write_outputs(OUTPUTS[:1], "jsonl", False, False)) == {"outputs": [{"text": "das\tHaus"}]}
    assert json.loads(write_outputs([Output("", score=-math.inf)], "jsonl", True, False))["outputs"][0]["score"] is None
    assert (
        write_outputs([Output("a\nb")], "text", False, False)
        == write_outputs([Output("a\nb")], "tsv", False, False)
        == "a b"
    )
    assert json.loads(write_outputs([Output("a\nb")], "jsonl", False, False))["outputs"] == [{"text": "a\nb"}]


def test_each_number_of_an_output_has_a_name_of_its_own():
    def written(form, **numbers):
        return write_outputs([Output("a", **numbers)], form, True, False)

    assert json.loads(written("jsonl", log_prob=-2.5, utility=40.0))["outputs"] == [
        {"text": "a", "log_prob": -2.5, "utility": 40.0}
    ]
    assert written("tsv", log_prob=-2.5, utility=40.0) == "a\t40.0"  # what they are ranked by
    labels = json.loads(written("jsonl", log_prob=-0.5, labels={"a": 0.6065306, "b": 0.3934694}))["outputs"][0]
    assert labels == {"text": "a", "log_prob": -0.5, "labels": {"a": 0.60653, "b": 0.39347}}
    assert written("tsv") == "a\t"  # an estimated number has no probability


def test_scores_are_a_number_columns_or_json():
    scored = Scored(-3.5, (-3.0, -0.5), ("▁b", "</s>"))
    one = Question("a", ("b",))
    assert write_scored(one, [scored], "text", False) == "-3.5"
    assert write_scored(one, [scored], "tsv", False) == "-3.5\t2"
    assert write_scored(one, [scored], "tsv", True) == "-3.5\t2\t-3.0 -0.5"
    assert json.loads(write_scored(one, [scored], "jsonl", False)) == {"log_prob": -3.5, "length": 2}
    assert json.loads(write_scored(one, [scored], "jsonl", True))["tokens"] == ["▁b", "</s>"]
    several = Question("a", ("b", "c"), ranked=True)
    both = [scored, Scored(-1.0, (-1.0,), ("</s>",))]
    assert write_scored(several, both, "tsv", False) == "c\t-1.0\t1\tb\t-3.5\t2"
    assert [one["text"] for one in json.loads(write_scored(several, both, "jsonl", True))["outputs"]] == ["c", "b"]


def test_a_text_to_be_continued_keeps_its_line_breaks():
    line, counts = '{"source": "a\\nb"}', Counter()
    assert read_request(0, line, "jsonl", counts, continues=True).text == "a\nb"
    assert not counts
    assert read_request(0, line, "jsonl", counts).text == "a b"
    assert read_question('{"target": "a\\nb"}', "jsonl", True, Counter()).targets == ("a\nb",)
