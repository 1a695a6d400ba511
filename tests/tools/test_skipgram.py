"""Word vectors: pairs and the loss against a plain reading of the paper, and vectors that say what the text says."""

import dataclasses

import numpy as np
import pytest

from experiments.papers.things import SIZES, analogies, generated, neighbours, read
from jformer.data.word_vectors import match
from jformer.errors import UserError
from jformer.tools.skipgram import Options, batches, learn, main, negative_sampling, pairs

RNG = np.random.default_rng(0)


def test_a_word_predicts_those_within_its_reach_and_none_of_another_line():
    lines = [RNG.integers(0, 9, n).astype(np.int32) for n in (5, 0, 1, 7)]
    reach = np.split(np.random.default_rng(3).integers(1, 4, 13), [5, 5, 6])
    expected = [
        (int(line[i]), int(line[j]))
        for line, most in zip(lines, reach, strict=True)
        for i in range(len(line))
        for j in range(len(line))
        if 0 < abs(i - j) <= most[i]
    ]
    assert sorted(map(tuple, pairs(lines, 3, np.random.default_rng(3)).tolist())) == sorted(expected)


def test_the_loss_is_equation_4():
    v, u = RNG.normal(size=(2, 7, 4)).astype(np.float32)
    center, context, drawn = np.array([0, 3, 3]), np.array([1, 2, 6]), RNG.integers(0, 7, (3, 5))
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    expected = np.mean([
        -np.log(sigmoid(u[o] @ v[c])) - sum(np.log(sigmoid(-u[n] @ v[c])) for n in some)
        for c, o, some in zip(center, context, drawn, strict=True)
    ])  # fmt: skip
    np.testing.assert_allclose(negative_sampling((v, u), center, context, drawn), expected, rtol=1e-5)


def test_words_are_drawn_by_their_counts_to_the_three_quarters():
    counts = np.array([81, 16, 1])
    noise = np.cumsum(counts**0.75) / (counts**0.75).sum()
    lines = [RNG.integers(0, 3, 9).astype(np.int32) for _ in range(400)]
    found = [drawn for _, _, drawn in batches(lines, np.ones(3), noise, 64, Options(), 0)]
    share = np.bincount(np.concatenate(found).ravel(), minlength=3) / np.concatenate(found).size
    np.testing.assert_allclose(share, [27 / 36, 8 / 36, 1 / 36], atol=0.01)
    again = [drawn for _, _, drawn in batches(lines, np.ones(3), noise, 64, Options(), 0)]
    assert all(map(np.array_equal, found, again))
    assert not np.array_equal(found[0], next(batches(lines, np.ones(3), noise, 64, Options(), 1))[2])


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Write a text and return its path, and that of the vectors that the command learned from it."""
    folder = tmp_path_factory.mktemp("vectors")
    (folder / "text").write_text("\n".join(generated(3_000, np.random.default_rng(0))) + "\n")
    sizes = [f"--{key}={value}" for key, value in dataclasses.asdict(SIZES).items()]
    assert main([f"--input={folder / 'text'}", f"--output={folder / 'vectors.txt'}", *sizes]) == 0
    return folder / "text", folder / "vectors.txt"


def test_vectors_say_who_is_alike_and_which_analogies_hold(learned):
    found = read(learned[1])
    assert neighbours(found) > 0.9
    assert analogies(found, 100, np.random.default_rng(1)) > 0.9


def test_a_run_finds_the_vectors_of_its_words(learned):
    words = ["<pad>", "<s>", "</s>", "<unk>", "many", "thing0as", "unheard"]
    matched = match(words, learned[1], SIZES.size)
    assert matched.ids.tolist() == [4, 5]


@pytest.mark.parametrize(("flags", "says"), [
    (["--size=0"], "--size=0 must be at least 1"),
    (["--sample=2"], "--sample=2.0 must be above 0 and at most 1"),
    (["--seed=-1"], "--seed=-1 must be at least 0"),
    (["--output=."], "is a folder: name a file"),
    (["--min_count=9000"], "of which 0 stand there --min_count=9000 times"),
    (["--input=nowhere"], "nowhere: No such file"),
    ([f"--output={'x' * 300}"], "is longer than names of files can be: shorten it"),
    (["--output=INPUT"], "is --input: name another file"),
])  # fmt: skip
def test_what_cannot_be_learned_is_one_line(learned, tmp_path, capsys, flags, says):
    text = str(learned[0])
    given = [f"--input={text}", f"--output={tmp_path / 'out'}", *(flag.replace("INPUT", text) for flag in flags)]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert told.startswith("jformer: ")
    assert told.count("\n") == 1
    assert says in told
    assert not (tmp_path / "out").exists()


def test_options_are_checked_by_the_library_too(learned):
    with pytest.raises(UserError, match="--epochs=0"):
        learn([learned[0]], Options(epochs=0), say=print)


def test_a_text_of_few_pairs_is_learned_and_one_without_any_is_refused(tmp_path, capsys):
    (tmp_path / "few").write_text("a b\n" * 6)
    flags = [f"--output={tmp_path / 'new' / 'v'}", "--size=4", "--epochs=2", "--sample=1"]
    assert main([f"--input={tmp_path / 'few'}", *flags]) == 0
    assert "nan" not in capsys.readouterr().out
    assert (tmp_path / "new" / "v").read_text().startswith("2 4\n")
    (tmp_path / "none").write_text("a\nb\n" * 6)
    assert main([f"--input={tmp_path / 'none'}", *flags]) == 2
    assert "no two frequent words stand in one line" in capsys.readouterr().err
