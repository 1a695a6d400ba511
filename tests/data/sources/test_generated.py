import functools
from collections import Counter

import pytest

from jformer.data.data_config import SourceConfig
from jformer.data.sources import generated, generated_cache, open_split, quickstart
from jformer.data.sources.split import Pair
from jformer.errors import UserError


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine that has generated nothing yet."""
    monkeypatch.setattr(generated_cache, "own_folder", lambda name: tmp_path)
    generated._build.cache_clear()
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


def test_held_out_generated_pairs_do_not_depend_on_the_training_size():
    for split in ("valid", "test"):
        assert opened("copy", split, 100).fingerprint == opened("copy", split, 5_000).fingerprint
    assert opened("copy", "train", 100).fingerprint != opened("copy", "train", 5_000).fingerprint


def test_what_is_generated_is_the_same_wherever_and_whenever():
    expected = "011ab783db0343818d9a623a09e59cafc6ab89d131ff6fba26168c0e7125b502"
    assert opened("sort", "train").fingerprint == expected


def test_a_generated_split_named_after_its_lengths_is_longer_than_training():
    pairs = read("reverse", "21-23")
    assert len({tuple(source) for source, _ in pairs}) == 500
    assert {len(source) for source, _ in pairs} == {21, 22, 23}
    assert all(target == source[::-1] for source, target in pairs)


@pytest.mark.parametrize(("name", "split"), [("sort", "20-25"), ("sort", "30-29"), ("quickstart", "21-30")])
def test_lengths_that_no_generated_split_has_are_refused(name, split, monkeypatch):
    monkeypatch.setattr(quickstart, "build", lambda: dict.fromkeys(("train", "valid", "test"), ()))
    with pytest.raises(UserError, match=rf"no split '{split}'; choose one of: ([a-z]+, )*test"):
        opened(name, split, 9)
    generated._build.cache_clear()


def test_the_quickstart_is_grouped_by_family(monkeypatch):
    build = quickstart.build
    monkeypatch.setattr(quickstart, "build", lambda: build(size=2_000))
    generated._build.cache_clear()
    splits = {split: list(opened("quickstart", split).read(Counter())) for split in ("train", "test")}
    generated._build.cache_clear()
    assert {pair.group for pair in splits["train"]} == set(quickstart.FAMILIES)
    assert [pair.source for pair in splits["test"]] == [example.source for example in build(size=2_000)["test"]]


def test_a_corpus_is_generated_once_on_a_machine(machine, monkeypatch):
    first = {split: opened("sort", split, 20) for split in ("train", "test")}
    pairs = {split: list(each.read(Counter())) for split, each in first.items()}
    assert len({path.name for path in machine.iterdir()}) == 3
    generated._build.cache_clear()
    monkeypatch.setattr(generated, "_letters", None)  # which cannot be called
    again = {split: opened("sort", split, 20) for split in first}
    same = [[(each.fingerprint, each.size) for each in splits.values()] for splits in (first, again)]
    assert same[0] == same[1]
    assert {split: list(each.read(Counter())) for split, each in again.items()} == pairs
    with pytest.raises(TypeError):
        opened("sort", "train", 21)


def test_other_code_and_damage_make_a_corpus_anew(machine, monkeypatch):
    split = opened("sort", "valid")
    pairs, files = list(split.read(Counter())), {path.name for path in machine.iterdir()}
    for path in machine.iterdir():
        path.write_bytes(path.read_bytes().replace(b" a ", b" b ", 1))
        assert generated_cache.find(path) is None
    assert list(split.read(Counter())) == pairs
    assert opened("sort", "valid").fingerprint == split.fingerprint
    assert all(generated_cache.find(path) for path in machine.iterdir())
    monkeypatch.setattr(generated_cache, "code_of", lambda folder: "other")
    assert opened("sort", "valid").fingerprint == split.fingerprint
    assert len({path.name for path in machine.iterdir()} - files) == 3


def test_what_texts_cannot_say_is_kept(machine):
    pair = Pair("a\tb", "c", "kind", ("d",), start=3)
    path = generated_cache.path_of(["x"], opened)
    generated_cache.save(path, "1", [pair, Pair("e", "f")])
    assert list(generated_cache.find(path).pairs()) == [pair, Pair("e", "f")]


def test_a_machine_that_keeps_nothing_generates(monkeypatch):
    monkeypatch.setattr(generated_cache, "own_folder", lambda name: None)
    assert len(list(opened("sort", "valid").read(Counter()))) == 500


def test_the_code_of_a_corpus_is_told_by_its_files(tmp_path):
    before, changed = made(tmp_path, "x = 1"), made(tmp_path, "x = 2")
    assert before != changed
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "made.py").write_text("x = 2")
    (tmp_path / ".#made.py").symlink_to("user@host.1")  # a lock of Emacs
    assert len({made(tmp_path, "x = 1"), made(tmp_path, "x = 2"), changed}) == 3


def made(folder, code):
    """Write and import a module with a function, and return the digest of the function's code."""
    space, file = {}, folder / "made.py"
    file.write_text(f"{code}\ndef build(name, split, num_pairs):\n    return []\n")
    exec(compile(file.read_text(), str(file), "exec"), space)
    return generated_cache.code_of(space["build"])


def test_functions_of_a_notebook_are_called_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(generated_cache, "own_folder", lambda name: tmp_path)
    space = {}
    exec(compile("def build(name, split, num_pairs):\n    return []\n", "/tmp/ipykernel_1/2.py", "exec"), space)
    assert generated_cache.path_of(["x"], space["build"]) is None
    assert generated_cache.path_of(["x"], functools.partial(opened, "sort")) is None
    assert generated_cache.path_of(["x"], opened)


def test_further_references_are_part_of_a_fingerprint():
    one, two = (generated._identity([Pair("a", "b", others=others)]) for others in (("c",), ("d", "e")))
    assert len({one, two, generated._identity([Pair("a", "b")])}) == 3
