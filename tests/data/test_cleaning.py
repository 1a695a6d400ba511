import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from etils import epath

from jformer.data import repeats
from jformer.data.cleaning import EMPTY, cleaned, make_rules, write_examples
from jformer.data.corpus import open_corpus
from jformer.data.data_config import DataConfig, SourceConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.repeats import repeated_places
from jformer.data.sources.split import Pair, Split
from jformer.data.tokenizers.lists import ByteTokenizer
from jformer.errors import UserError

GOOD = Pair("a house", "ein Haus")
BAD = {
    "characters=3-20": [Pair("ab", "abc"), Pair("abc", "x" * 21)],
    "ratio=2.5": [Pair("abcd", "abcdefghijk")],
    "identical": [Pair("the same ", "the same")],
    "invalid": [Pair("caf\ufffd", "ein Café"), Pair("a café", "ein Caf\ufffd")],
    "control": [
        Pair("a\x00b", "a b"),
        Pair("a b", "a\u202eb"),
        Pair("a\x1fb", "a b"),
        Pair("a b", "a\u2028b"),
        Pair("a\rb", "a b"),
    ],
    "source_script=LATIN": [Pair("это не то", "das nicht")],
    "target_script=CJK+HIRAGANA": [Pair("a house", "ein 家")],
}
FINE = {
    "characters=3-20": [GOOD, Pair("", "abc")],
    "ratio=2.5": [Pair("abcd", "abcdefghij"), Pair("", "a text without a source")],
    "identical": [GOOD, Pair("", "")],
    "invalid": [GOOD, Pair("a\x00b", "⁇")],
    "control": [GOOD, Pair("a\tb", "ä €\u00a0…"), Pair("", "one\ntwo\r\n\nthree")],
    "source_script=LATIN": [Pair("über 100 µm, π", ""), Pair("12 – 7", "")],
    "target_script=CJK+HIRAGANA": [Pair("x", "家にいる DNA")],
}


@pytest.mark.parametrize("rule", BAD)
def test_a_rule_drops_what_it_names_and_nothing_else(rule):
    (drops,) = make_rules([rule]).values()
    assert [drops(pair) for pair in [*BAD[rule], *FINE[rule]]] == [True] * len(BAD[rule]) + [False] * len(FINE[rule])


@pytest.mark.parametrize("rule", ["ratio", "ratio=x", "characters=5", "short", "duplicate"])
def test_a_rule_that_cannot_be_read_is_named(rule):
    with pytest.raises(UserError, match=rf"^data\.mixture\[0\]\.clean: '{rule}' is not one of "):
        DataConfig(mixture=(SourceConfig(clean=("identical", rule)),)).check()
    DataConfig(clean=(*BAD, "duplicates")).check()
    lacking = [("text", "ratio=3"), ("captions", "characters=1-9"), ("images", "source_script=LATIN")]
    lacking += [("images", "duplicates"), ("images", "control")]
    for source, rule in (*lacking, ("labelled", "identical"), ("conll", "target_script=LATIN"), ("squad", "ratio=3")):
        with pytest.raises(UserError, match=rf"^data\.clean: '{rule}' reads a text that source='{source}' lacks"):
            DataConfig(source=source, clean=(rule,)).check()
    DataConfig(source="text", clean=("characters=1-9", "target_script=LATIN", "control", "duplicates")).check()
    DataConfig(source="captions", clean=("target_script=LATIN", "control", "duplicates")).check()


def test_dropped_pairs_are_counted_and_shown_and_the_others_trained_on(tmp_path):
    pairs = [GOOD, Pair("b", "B"), GOOD, Pair("same", "same"), Pair("", "leer"), GOOD, *[Pair("same", "same")] * 5]
    rules = ("identical", "duplicates")
    split = Split("train", "1", lambda counts: iter(pairs), len(pairs))
    seekable = Split("train", "2", lambda counts, first=0: iter(pairs[first:]), len(pairs), seekable=True)
    assert cleaned(split, (), str(tmp_path)) is split
    for each in (split, seekable):
        kept = cleaned(each, rules, str(tmp_path))
        assert kept.fingerprint != each.fingerprint
        expected = [GOOD, pairs[1], EMPTY, EMPTY, pairs[4], *[EMPTY] * 6]
        assert list(kept.read(Counter())) == expected
        encoder = PairEncoder(*[Side(ByteTokenizer("identity"), 30)] * 2, "drop")
        assert open_corpus(kept, encoder, str(tmp_path)).counts == {
            "examples read": 11, "pairs dropped by identical": 6, "pairs dropped by duplicates": 2,
            "empty examples dropped": 1, "examples used": 2,
        }  # fmt: skip
    assert [list(kept.read(Counter(), first)) for first in (2, 3, 11)] == [expected[2:], expected[3:], []]
    write_examples(split, cleaned(split, rules, str(tmp_path)), epath.Path(tmp_path / "cleaned.jsonl"))
    shown = [json.loads(line) for line in (tmp_path / "cleaned.jsonl").read_text().splitlines()]
    assert [(each["rule"], each["pair"]) for each in shown] == [
        ("duplicates", 3), ("identical", 4), ("duplicates", 6), ("identical", 7), ("identical", 8),
    ]  # fmt: skip
    assert shown[1]["texts"] == ["same", "same"]


def test_labels_are_no_texts(tmp_path):
    pairs = [Pair("a good film", "positive"), Pair("ok", "negative"), Pair("a good film", "negative")]
    split = Split("train", "1", lambda counts: iter(pairs), len(pairs))
    kept = cleaned(split, ("characters=3-20", "duplicates"), str(tmp_path), labels=True)
    assert list(kept.read(Counter())) == [pairs[0], EMPTY, pairs[2]]
    limits = ("characters=9-20",)  # longer than any label
    assert list(cleaned(split, limits, str(tmp_path), labels=True).read(Counter())) == [pairs[0], EMPTY, pairs[2]]
    assert list(cleaned(split, limits, str(tmp_path)).read(Counter())) == [EMPTY] * 3


def test_texts_of_several_lines_that_were_once_dropped_are_another_corpus(tmp_path):
    for rule, corpora in (("control", 2), ("identical", 1)):
        found = {cleaned(Split("train", "1", iter), (rule,), str(tmp_path), False, each).fingerprint for each in (0, 1)}
        assert len(found) == corpora
    kept = [("text", {"document": "paragraph"}), ("tables", {"source_language": ""}), ("tfds", {"source_language": ""})]
    assert [SourceConfig(source=name, **options).several_lines() for name, options in kept] == [True] * 3
    assert not any(SourceConfig(source=name).several_lines() for name, _ in (*kept, ("files", {})))


@pytest.mark.parametrize("at_once", [7, 2**23])
def test_repeated_pairs_are_found_in_a_bounded_number_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(repeats, "SORTED_AT_ONCE", at_once)
    numbers = np.random.default_rng(0).integers(0, 60, 200).tolist()
    pairs = [Pair(f"{n}", "x") if n else EMPTY for n in numbers]
    expected = [i for i, n in enumerate(numbers) if n and n in numbers[:i]]
    assert repeated_places(pairs).tolist() == expected
    assert repeated_places([]).tolist() == []


def test_repeated_pairs_are_looked_for_once_by_all_that_need_them(tmp_path):
    readings = []

    def read(counts):
        readings.append(time.sleep(0.1))
        return iter([GOOD, GOOD])

    kept = cleaned(Split("train", "1", read, 2), ("duplicates",), str(tmp_path))
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda _: [*kept.read(Counter())], range(3))] == [[GOOD, EMPTY]] * 3
    assert len(readings) == 1 + 3
