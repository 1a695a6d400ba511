import gzip
import json
from collections import Counter

import pytest

from jformer.data.data_config import DataConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.data.text import BOMS_REMOVED
from jformer.errors import UserError

CONTEXT = "In 1998, Ada\tLee\nmoved to “Old Ham”."


def question(name="q1", text="Who moved?", answers=(("Ada\tLee", 9),), **more):
    answers = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": text, "answers": answers, **more}


def write(folder, *questions, name="dev.json", context=CONTEXT):
    content = json.dumps(
        {"version": "2.0", "data": [{"title": "T", "paragraphs": [{"context": context, "qas": questions}]}]}
    )
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return DataConfig(source="squad", dir=str(folder))


@pytest.mark.parametrize("name", ["dev.json", "dev.json.gz"])
def test_questions_come_with_their_contexts_and_all_answers_in_their_places(tmp_path, name):
    several = question("q2", "When?", answers=(("1998", 3), ("In 1998", 0), ("1998", 3)))
    impossible = question("q3", "Why\tnow?", answers=(), is_impossible=True, plausible_answers=[{"text": "x"}])
    config, counts = write(tmp_path, question(), several, impossible, name=name), Counter()
    context = "In 1998, Ada Lee moved to “Old Ham”."
    pairs = list(open_split(config, "dev").read(counts))
    assert pairs == [
        Pair(f"Who moved?\t{context}", "Ada Lee", "answerable", (), 9),
        Pair(f"When?\t{context}", "1998", "answerable", ("In 1998", "1998"), 3),
        Pair(f"Why now?\t{context}", "", "unanswerable"),
    ]
    assert counts == {"texts with TABs, made spaces": 3, "line feeds within a text made spaces": 1}
    for pair in pairs[:2]:
        assert pair.source.split("\t")[1][pair.start :].startswith(pair.target)


def test_a_crlf_keeps_the_places_of_answers(tmp_path):
    config = write(tmp_path, question(answers=(("Lee", 6),)), context="Ada\r\n\tLee")
    (pair,) = open_split(config, "dev").read(Counter())
    assert (pair.source, pair.start) == ("Who moved?\tAda   Lee", 6)


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    plain = open_split(write(tmp_path, question()), "dev")
    (tmp_path / "dev.json").unlink()
    zipped = open_split(write(tmp_path, question(), name="dev.json.gz"), "dev")
    other = open_split(write(tmp_path, question("other"), name="test.json"), "test")
    assert plain.fingerprint == zipped.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (question(answers=(("Ada\tLee", 10),)),
         "question 'q1': the context has 'da Lee ' at answer_start=10, not 'Ada Lee': fix the start or the text"),
        (question(answers=(("Ada", -1),)),
         "question 'q1': the context has 'In ' at answer_start=-1, not 'Ada': fix the start or the text"),
        (question(answers=((" ", 2),)),
         "question 'q1': the answer is blank; write its text, or 'is_impossible': true"),
        (question(answers=(("Ada", "9"),)),
         "question 'q1': needs a whole number under 'answer_start', as in SQuAD"),
        ({"id": "q7", "answers": []}, "question 'q7': needs a text under 'question', as in SQuAD"),
        ({"id": "q7", "question": "?"}, "question 'q7': needs a list under 'answers', as in SQuAD"),
        ({"question": "?", "answers": []}, "data[0].paragraphs[0].qas[1]: needs a text under 'id', as in SQuAD"),
        ("x", "data[0].paragraphs[0].qas[1]: needs a text under 'id', as in SQuAD"),
        (question(text="\0"), "question 'q1': NUL character at offset 0; remove it"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_file_and_the_question(tmp_path, asked, line):
    config = write(tmp_path, question("fine"), asked)
    with pytest.raises(UserError) as error:
        open_split(config, "dev")
    assert str(error.value) == f"{tmp_path}/dev.json: {line}"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", "the file: needs a list under 'data', as in SQuAD"),
        ('{"data": [{"title": "T"}]}', "data[0]: needs a list under 'paragraphs', as in SQuAD"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}',
         "data[0].paragraphs[0]: needs a text under 'context', as in SQuAD"),
        ('{"data": ', "Expecting value: line 1 column 10 (char 9)"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_squad_says_what_it_lacks(tmp_path, content, line):
    (tmp_path / "dev.json").write_text(content)
    with pytest.raises(UserError) as error:
        open_split(DataConfig(source="squad", dir=str(tmp_path)), "dev")
    assert str(error.value) == f"{tmp_path}/dev.json: {line}"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no split 'dev': looked for dev\.json \(or \.gz, \.xz, \.zst\)"):
        open_split(DataConfig(source="squad", dir=str(tmp_path)), "dev")


def test_a_byte_order_mark_is_removed_and_counted(tmp_path):
    config, counts = write(tmp_path, question()), Counter()
    path = tmp_path / "dev.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(list(open_split(config, "dev").read(counts))) == 1
    assert counts[BOMS_REMOVED] == 1
