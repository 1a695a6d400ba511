"""Sets that templates make: the same on every machine, no source in two splits, and no easier than they say."""

import hashlib
from collections import Counter, defaultdict

import pytest

from experiments.sources import labels, parts_of_speech

SETS = {"parts_of_speech": parts_of_speech.build, "subjects": labels.subjects, "likeness": labels.likeness}
DIGESTS = {
    "parts_of_speech": "67597ceac7900232acf84554c9fa9e275e1a2cb4877b213b7c6eac6f8373ec71",
    "subjects": "96f1192bc96d990bdb660d3338cc64ad5c10327e3964201956703a1a5fcecd05",
    "likeness": "11bbd545f5a70fc9883d07622b3b7e9b281e9d25f6b305563fd17559452bc4bf",
}


@pytest.fixture(scope="module")
def corpora():
    return {name: build(3_000) for name, build in SETS.items()}


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_the_same_everywhere(corpora, name):
    lines = [f"{split}\t{p.source}\t{p.target}\n" for split, pairs in corpora[name].items() for p in pairs]
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize("name", SETS)
def test_no_source_is_in_two_splits_or_twice_in_one(corpora, name):
    sources = Counter(pair.source for pairs in corpora[name].values() for pair in pairs)
    assert {split: len(pairs) for split, pairs in corpora[name].items()} == {
        "valid": 500,
        "test": 1_000,
        "train": 3_000,
    }
    assert set(sources.values()) == {1}


@pytest.mark.parametrize("name", SETS)
def test_more_training_pairs_change_nothing_of_the_others(corpora, name):
    fewer = SETS[name](100)
    assert fewer["test"] == corpora[name]["test"]
    assert fewer["train"] == corpora[name]["train"][:100]


def test_many_words_are_several_parts_of_speech(corpora):
    tags = defaultdict(set)
    for pair in corpora["parts_of_speech"]["train"]:
        for word, tag in zip(pair.source.split(), pair.target.split(), strict=True):
            tags[word].add(tag)
    assert sum(len(each) > 1 for each in tags.values()) >= 20
    assert tags["light"] == {"NOUN", "VERB", "ADJ"}
    assert tags["that"] == {"DET", "PRON", "SCONJ"}


def test_a_subject_that_is_denied_is_no_label(corpora):
    for pair in corpora["subjects"]["train"]:
        told = set()
        for clause in pair.source.split(" and "):
            denied = any(word in clause.split() for word in ("nobody", "no")) or "not care" in clause
            words = () if denied else labels.SUBJECTS.items()
            told |= {subject for subject, names in words if set(names) & set(clause.split())}
        assert pair.target == ",".join(sorted(told))


def test_sentences_that_say_the_same_are_five_alike(corpora):
    assert {pair.target for pair in corpora["likeness"]["train"]} == set("012345")
    words = {word: (key, i) for key, sets in labels.SAME.items() for i, same in enumerate(sets) for word in same}
    longest_first = sorted(words, key=len, reverse=True)  # "half a dozen" holds "a dozen"

    def things(text):
        found, text = set(), f" {text} "
        for word in longest_first:
            if f" {word} " in text:
                found.add(words[word])
                text = text.replace(f" {word} ", " ")
        return found

    for pair in corpora["likeness"]["test"]:
        first, second = map(things, pair.source.split("\t"))
        assert (len(first), len(second), len(first & second)) == (5, 5, int(pair.target))
