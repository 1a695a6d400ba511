from collections import Counter

import pytest

from jformer.data.data_config import SourceConfig
from jformer.data.sources import generated, open_split, quickstart
from jformer.data.sources import generated_cache as kept
from jformer.errors import UserError


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine that has generated nothing yet."""
    monkeypatch.setattr(kept, "own_folder", lambda name: tmp_path)
    generated._generate.cache_clear()
    return tmp_path


def opened(name, split, num_pairs=2_000):
    return open_split(SourceConfig(source="generated", name=name, num_pairs=num_pairs), split)


def read(name, split, num_pairs=2_000):
    """Return pairs of lists of words."""
    return [(pair.source.split(" "), pair.target.split(" ")) for pair in opened(name, split, num_pairs).read(Counter())]


@pytest.mark.parametrize("name", ["copy", "reverse", "sort"])
def test_generated_tasks_do_what_they_say_on_disjoint_splits(name):
    splits = {split: read(name, split) for split in ("train", "valid", "test")}
    assert [len(pairs) for pairs in splits.values()] == [2_000, 500, 500]
    pairs = [pair for split in splits.values() for pair in split]
    assert len({tuple(source) for source, _ in pairs}) == len(pairs)
    expected = {"copy": list, "reverse": lambda letters: letters[::-1], "sort": sorted}[name]
    assert all(target == expected(source) for source, target in pairs)
    assert {len(source) for source, _ in pairs} == set(range(1, 21))


def test_numbers_are_reversed_as_the_tutorial_of_joeynmt_says():
    """0 to 49, 1 to 25 of them in training and 1 to 30 in the 1,000 pairs of valid and of test."""
    splits = {split: read("reverse_numbers", split) for split in ("train", "valid", "test")}
    assert [len(pairs) for pairs in splits.values()] == [2_000, 1_000, 1_000]
    for split, pairs in splits.items():
        assert all(target == source[::-1] for source, target in pairs)
        assert {len(source) for source, _ in pairs} == set(range(1, 26 if split == "train" else 31))
        assert {number for source, _ in pairs for number in source} == {str(i) for i in range(50)}
    long = [{tuple(source) for source, _ in pairs if len(source) > 3} for pairs in splits.values()]
    assert sum(map(len, long)) == len(set.union(*long))


@pytest.mark.parametrize("name", ["copy", "reverse_numbers"])
def test_held_out_generated_pairs_do_not_depend_on_the_training_size(name):
    for split in ("valid", "test"):
        assert opened(name, split, 100).fingerprint == opened(name, split, 5_000).fingerprint
    assert opened(name, "train", 100).fingerprint != opened(name, "train", 5_000).fingerprint


DIGESTS = {
    ("sort", "train"): "011ab783db0343818d9a623a09e59cafc6ab89d131ff6fba26168c0e7125b502",
    ("reverse_numbers", "valid"): "6cc1966ed444af27bdf9965b24687deb87161b75670219b57eb43575d4436a52",
    ("scan", "simple_test"): "8865f92b94fc16d906deafabd36dbeb5b4e8cb1a1ff23a3b1904b6b11bdaef8c",
    ("scan", "jump_test"): "5a91f9545a8070b44b8cc8b5ef4b455249587717780dcac096147d1d54785063",
    ("modular_division", "valid"): "9ece68fc9deb525f0b6e78c8828289f1190d7510f96517c4e17cc463252c1482",
}


@pytest.mark.parametrize(("name", "split"), DIGESTS)
def test_what_is_generated_is_the_same_wherever_and_whenever(name, split):
    assert opened(name, split).fingerprint == DIGESTS[name, split]


def test_a_generated_split_named_after_its_lengths_is_longer_than_training():
    pairs = read("reverse", "21-23")
    assert len({tuple(source) for source, _ in pairs}) == 500
    assert {len(source) for source, _ in pairs} == {21, 22, 23}
    assert all(target == source[::-1] for source, target in pairs)


@pytest.mark.parametrize(
    ("name", "split"), [("sort", "20-25"), ("sort", "30-29"), ("quickstart", "21-30"), ("reverse_numbers", "31-40")]
)
def test_lengths_that_no_generated_split_has_are_refused(name, split, monkeypatch):
    monkeypatch.setattr(quickstart, "build", lambda: dict.fromkeys(("train", "valid", "test"), ()))
    with pytest.raises(UserError, match=rf"no split '{split}'; choose one of: ([a-z]+, )*test"):
        opened(name, split, 9)
    generated._generate.cache_clear()


def test_the_quickstart_is_grouped_by_family(monkeypatch):
    build = quickstart.build
    monkeypatch.setattr(quickstart, "build", lambda: build(size=2_000))
    generated._generate.cache_clear()
    splits = {split: list(opened("quickstart", split).read(Counter())) for split in ("train", "test")}
    generated._generate.cache_clear()
    assert {pair.group for pair in splits["train"]} == set(quickstart.FAMILIES)
    assert [pair.source for pair in splits["test"]] == [example.source for example in build(size=2_000)["test"]]


def test_a_corpus_is_generated_once_on_a_machine(machine, monkeypatch):
    first = {split: opened("facts", split, 20) for split in ("train", "test")}
    pairs = {split: list(each.read(Counter())) for split, each in first.items()}
    assert len({path.name for path in machine.iterdir()}) == 3
    assert any(pair.start is None for pair in pairs["train"])
    generated._generate.cache_clear()
    monkeypatch.setitem(generated.CORPORA, "facts", None)  # which cannot be called
    again = {split: opened("facts", split, 20) for split in first}
    same = [[(each.fingerprint, each.size) for each in splits.values()] for splits in (first, again)]
    assert same[0] == same[1]
    assert {split: list(each.read(Counter())) for split, each in again.items()} == pairs
    with pytest.raises(TypeError):
        opened("facts", "train", 21)


def test_other_code_and_damage_make_a_corpus_anew(machine, monkeypatch):
    split = opened("modular_division", "valid")
    pairs = list(split.read(Counter()))
    for path in machine.iterdir():
        path.write_bytes(path.read_bytes().replace(b" / 9", b" / 8", 1))
    assert kept.find(("modular_division", 2_000, "valid")) is None
    assert list(split.read(Counter())) == pairs
    assert opened("modular_division", "valid").fingerprint == split.fingerprint
    assert kept.find(("modular_division", 2_000, "valid"))
    monkeypatch.setattr(kept, "code", lambda: "other")
    assert kept.find(("modular_division", 2_000, "valid")) is None


def test_a_machine_that_keeps_nothing_generates(monkeypatch):
    monkeypatch.setattr(kept, "own_folder", lambda name: None)
    assert len(list(opened("modular_division", "valid").read(Counter()))) == 4_656


def test_the_code_of_a_corpus_is_told_by_its_files(tmp_path, monkeypatch):
    before = kept.code()
    assert before == kept.code()
    kept.code.cache_clear()
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "kept.py"))
    (tmp_path / "kept.py").write_text("x = 1")
    assert kept.code() != before
    kept.code.cache_clear()
