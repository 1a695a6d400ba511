"""The quickstart corpus: what it promises to a model, to an evaluation and to a second run."""

import collections
import hashlib
from random import Random

import babel
import pytest

from jformer.data.sources.quickstart import FAMILIES, QuickstartPair, build
from jformer.errors import UserError

Corpus = dict[str, list[QuickstartPair]]

GOLDEN = {
    "date": [
        ("6/7/41", "07.06.41"),
        ("1/29/1970", "29.1.1970"),
        ("Mar 21, 2048", "21. März 2048"),
        ("Wed, Sep 6, 1950", "Mi., 6. Sept. 1950"),
        ("Thursday, November 12, 1959", "Donnerstag, 12. November 1959"),
    ],
    "datetime": [
        ("6/15/66, 12:52 AM", "15.06.66, 00:52"),
        ("Aug 11, 1971, 12:40:30 AM", "11.08.1971, 00:40:30"),
        ("March 8, 1963, 9:27 AM", "8. März 1963, 09:27"),
        ("Saturday, August 27, 2044, 11:41 PM", "Samstag, 27. August 2044, 23:41"),
    ],
    "time": [("12:14 AM", "00:14"), ("12:34 PM", "12:34"), ("8:14:55 AM UTC", "08:14:55 UTC")],
    "interval": [
        ("Sep 12 – 22, 2004", "12.–22. Sept. 2004"),
        ("Jun 13 – Aug 26, 2002", "13. Juni – 26. Aug. 2002"),
        ("March – December 1996", "März–Dezember 1996"),
        ("12:59 – 8:28 PM", "12:59–20:28 Uhr"),
        ("12:44 AM – 10:03 PM", "00:44–22:03 Uhr"),
    ],
    "duration": [
        ("11 weeks and 6 days", "11 Wochen und 6 Tage"),
        ("5 days, 1 hour, and 21 minutes", "5 Tage, 1 Stunde und 21 Minuten"),
    ],
    "relative": [("in 1 week", "in 1 Woche"), ("1 day ago", "vor 1 Tag"), ("in 903 years", "in 903 Jahren")],
    "money": [
        ("€211,828.81", "211.828,81 €"),
        ("A$6,373.34", "6.373,34 AU$"),
        ("¥3,708", "3.708 ¥"),
        ("286.20 Swiss francs", "286,20 Schweizer Franken"),
    ],
    "measure": [
        ("1 year", "1 Jahr"),
        ("10,943 feet", "10.943 Fuß"),
        ("1.65 kilometers per hour", "1,65 Kilometer pro Stunde"),
    ],
    "worded_measure": [
        ("one hundred two pounds", "einhundertzwei Pfund"),
        ("one hundred fifty-one kilowatt-hours", "einhunderteinundfünfzig Kilowattstunden"),
    ],
    "number": [("262.8%", "262,8 %"), ("64.09 billion", "64,09 Milliarden"), ("865.5", "865,5")],
    "number_words": [
        ("seven", "sieben"),
        ("eighty-four thousand five hundred one", "vierundachtzigtausendfünfhunderteins"),
    ],
    "ordinal": [
        ("1,151st", "1.151."),
        ("6,411th", "6.411."),
        ("three hundred fifty-first", "dreihunderteinundfünfzigste"),
    ],
    "countries": [
        ("Spain and United States", "Spanien und Vereinigte Staaten"),
        ("Austria, Japan, or Portugal", "Österreich, Japan oder Portugal"),
    ],
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build()


@pytest.fixture(scope="module")
def examples(corpus: Corpus) -> list[QuickstartPair]:
    return [example for split in corpus.values() for example in split]


@pytest.mark.slow
def test_splits_have_the_promised_sizes(corpus: Corpus) -> None:
    sizes = {split: len(examples) for split, examples in corpus.items()}
    assert sum(sizes.values()) == 100_000
    assert sizes["test"] == pytest.approx(3_000, rel=0.1)
    assert sizes["valid"] == pytest.approx(1_000, rel=0.1)


@pytest.mark.slow
def test_every_family_has_its_share_and_can_be_scored_alone(corpus: Corpus, examples: list[QuickstartPair]) -> None:
    assert sum(percent for _, percent in FAMILIES.values()) == 100
    counts = collections.Counter(example.family for example in examples)
    assert counts == {name: 1_000 * percent for name, (_, percent) in FAMILIES.items()}
    tested = collections.Counter(example.family for example in corpus["test"])
    assert min(tested[name] for name in FAMILIES) >= 100


def test_no_content_is_in_two_splits(corpus: Corpus, examples: list[QuickstartPair]) -> None:
    keys = {split: {example.key for example in examples} for split, examples in corpus.items()}
    assert keys["train"].isdisjoint(keys["test"])
    assert keys["train"].isdisjoint(keys["valid"])
    assert keys["valid"].isdisjoint(keys["test"])
    assert sum(map(len, keys.values())) < 0.95 * len(examples), "families that share keys make this test bite"


def test_no_source_occurs_twice(examples: list[QuickstartPair]) -> None:
    assert len({example.source for example in examples}) == len(examples)


@pytest.mark.slow
def test_a_source_never_has_two_targets() -> None:
    """Drawn across all families, before `build` drops what it has seen."""
    targets: dict[str, str] = {}
    rng = Random(1)
    for name, (draw, _) in FAMILIES.items():
        for _ in range(2_000):
            source, target, _ = draw(rng)
            assert targets.setdefault(source, target) == target, f"{name}: {source!r}"


def test_copying_and_swapping_comma_with_point_translate_almost_nothing(corpus: Corpus) -> None:
    swap = str.maketrans(",.", ".,")
    copied = [source == target for _, source, target, _ in corpus["test"]]
    swapped = [source.translate(swap) == target for _, source, target, _ in corpus["test"]]
    assert sum(copied) <= 0.01 * len(copied)
    assert sum(swapped) <= 0.06 * len(swapped)


def test_texts_have_one_kind_of_blank_and_stay_short(examples: list[QuickstartPair]) -> None:
    for _, source, target, _ in examples:
        for text in (source, target):
            assert text.isprintable(), ascii(text)  # of all blanks, only the plain space is printable
            assert text == " ".join(text.split())
            assert len(text) <= 80


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_pairs(examples: list[QuickstartPair], family: str) -> None:
    targets = {example.source: example.target for example in examples if example.family == family}
    for source, target in GOLDEN[family]:
        assert targets[source] == target


def test_corpus_is_the_same_everywhere(corpus: Corpus) -> None:
    digest = hashlib.sha256()
    for split, examples in corpus.items():
        for example in examples:
            digest.update("\t".join((split, *example)).encode() + b"\n")
    assert digest.hexdigest() == "ec4b8f2f292ea00a7049a1e3578a075577bdd6e44663b0794301adee89c9b7e3", (
        f"the corpus changed under Babel {babel.__version__}: if Babel brings a new CLDR, judge the new texts, "
        "then update this digest and say so in the changelog: scores on the two corpora do not compare"
    )


def test_seed_chooses_the_examples_but_never_their_split() -> None:
    first, second = build(seed=1, size=4_000), build(seed=2, size=4_000)
    assert first == build(seed=1, size=4_000)
    assert first != second
    assert {e.key for e in first["train"]}.isdisjoint({e.key for e in second["test"]})


def test_too_large_a_size_names_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "date", (lambda rng: ("one", "eins", "1"), 12))
    with pytest.raises(UserError, match="size=100: family 'date' has fewer than 12 distinct pairs; ask for less"):
        build(size=100)
