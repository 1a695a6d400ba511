"""The command that trains word vectors: they reflect the text, a run reads them, mistakes are one line."""

import errno
import os
import sys

import numpy as np
import pytest

from jformer.checkpoints.word_vectors import match, read_vectors
from jformer.errors import UserError
from jformer.tools import skipgram
from jformer.tools.skipgram import SkipGramOptions, main, train_vectors

KINDS, THINGS = 6, 8  # of things, and of each kind
SIZES = ["--size=64", "--window=4"]


def name(kind, thing, many):
    return f"thing{kind}{'abcdefgh'[thing]}{'s' * many}"


def generated(count, rng):
    """Return lines about things of several kinds, one or many of them, each kind with colours and verbs of its own."""
    for _ in range(count):
        kind, thing, many = rng.integers(KINDS), rng.integers(THINGS), rng.integers(2)
        before = ("many", "several", "all")[rng.integers(3)] if many else ("one", "a", "this")[rng.integers(3)]
        colour, verb = f"colour{kind}{rng.integers(3)}", f"does{kind}{rng.integers(3)}"
        yield f"{before} {colour} {name(kind, thing, many)} {('is', 'are')[many]} what {verb} here"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Write a text and return its path, and that of the vectors that the command makes of it."""
    folder = tmp_path_factory.mktemp("vectors")
    (folder / "text").write_text("\n".join(generated(3_000, np.random.default_rng(0))) + "\n")
    assert main([f"--input={folder / 'text'}", f"--output={folder / 'vectors.txt'}", *SIZES]) == 0
    return folder / "text", folder / "vectors.txt"


def test_the_nearest_vector_is_of_a_word_used_alike(trained):
    words = [(kind, thing, many) for kind in range(KINDS) for thing in range(THINGS) for many in range(2)]
    found = read_vectors(trained[1], [name(*each) for each in words], 64).found
    table = np.stack([found[name(*each)] for each in words])
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    nearest = (table @ table.T - 2 * np.eye(len(words))).argmax(1)
    assert np.mean([words[i][::2] == each[::2] for each, i in zip(words, nearest, strict=True)]) > 0.9


def test_a_run_finds_the_vectors_of_its_words(trained):
    words = ["<pad>", "<s>", "</s>", "<unk>", "many", "thing0as", "unheard"]
    assert match(words, trained[1], 64).ids.tolist() == [4, 5]


def test_the_same_seed_gives_the_same_vectors(trained):
    def vectors(seed):
        return train_vectors([trained[0]], SkipGramOptions(size=8, epochs=2, seed=seed), log=print)[1]

    np.testing.assert_array_equal(vectors(0), vectors(0))
    assert not np.array_equal(vectors(0), vectors(1))


def test_the_lowest_rates_differ_too(trained):
    learned = [train_vectors([trained[0]], SkipGramOptions(size=8, epochs=1, rate=rate), log=print)[1]
               for rate in (1e-5, 5e-5)]  # fmt: skip
    assert not np.array_equal(*learned)


def test_all_of_a_long_line_is_trained_on(tmp_path):
    (tmp_path / "text").write_text("a b " * 5_000 + "c d " * 1_000)  # gensim drops what follows the first 10,000 words
    options = SkipGramOptions(size=4, epochs=2, sample=1)
    words, vectors = train_vectors([tmp_path / "text"], options, log=print)
    assert np.abs(vectors[words.index("c")]).max() > 1 / 4  # the largest initial value


@pytest.mark.parametrize(("flags", "message"), [
    (["--size=0"], "--size=0 must be at least 1"),
    (["--sample=2"], "--sample=2.0 must be above 0 and at most 1"),
    (["--seed=-1"], "--seed=-1 must be at least 0"),
    (["--output=."], "is a folder: name a file"),
    (["--output=gs://bucket/vectors.txt"], "vectors are written to a disk"),
    (["--min_count=9000"], "of which 0 occur --min_count=9000 times"),
    (["--input=nowhere"], "nowhere: No such file"),
    ([f"--output={'x' * 300}"], "is longer than a file name can be: shorten it"),
    (["--output=INPUT"], "is --input: name another file"),
])  # fmt: skip
def test_a_mistake_is_one_line(trained, tmp_path, capsys, flags, message):
    text = str(trained[0])
    given = [f"--input={text}", f"--output={tmp_path / 'out'}", *(flag.replace("INPUT", text) for flag in flags)]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("jformer: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_vectors_do_not_take_the_place_of_a_pipe(trained, tmp_path, capsys):
    os.mkfifo(tmp_path / "out")
    assert main([f"--input={trained[0]}", f"--output={tmp_path / 'out'}"]) == 2
    assert "is not a plain file and would be replaced by one: name another" in capsys.readouterr().err


def test_storage_that_is_away_is_not_a_mistake(tmp_path, capsys, monkeypatch):
    def away(path, content):
        raise OSError(errno.ESTALE, "Stale file handle")

    (tmp_path / "text").write_text("a b\n" * 6)
    monkeypatch.setattr(skipgram, "replace_content", away)
    assert main([f"--input={tmp_path / 'text'}", f"--output={tmp_path / 'out'}", "--size=4", "--epochs=1"]) == 75
    assert "out: could not be written now (Stale file handle); rerun the same command" in capsys.readouterr().err


def test_options_are_checked_by_the_library_too(trained):
    with pytest.raises(UserError, match="--epochs=0"):
        train_vectors([trained[0]], SkipGramOptions(epochs=0), log=print)


def test_without_gensim_the_extra_is_named(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    with pytest.raises(UserError, match=r'pip install "jformer\[skipgram\]"'):
        train_vectors([trained[0]], SkipGramOptions(), log=print)


def test_a_text_of_two_words_is_enough_and_one_without_pairs_is_refused(tmp_path, capsys):
    (tmp_path / "few").write_text("a b\n" * 6)
    flags = [f"--output={tmp_path / 'new' / 'v'}", "--size=4", "--epochs=2", "--sample=1"]
    assert main([f"--input={tmp_path / 'few'}", *flags]) == 0
    assert (tmp_path / "new" / "v").read_text().startswith("2 4\n")
    (tmp_path / "rare").write_text("a b\n" * 2)
    assert main([f"--input={tmp_path / 'rare'}", *flags, "--min_count=2"]) == 0
    (tmp_path / "none").write_text("a\nb\n" * 6)
    assert main([f"--input={tmp_path / 'none'}", *flags]) == 2
    assert "no line has two frequent words" in capsys.readouterr().err
