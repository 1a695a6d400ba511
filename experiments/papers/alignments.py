"""Do the heads of a Transformer's cross-attention point at the words that IBM model 1 would link them to?

Claim:    Bahdanau et al. 2015, section 5.2.1: attention aligns the words of both sides. Model 1 (Brown et al. 1993)
          learns from the same training text which source word each target word comes from, without a network and
          without positions.
Design:   words as the text has them, one direction: each target word is linked to one source word, by model 1 to the
          one with the largest t(target | source), without an empty word; by attention to the one with the largest sum
          over its pieces, averaged over the target word's pieces as they are written. The head that agrees best on
          SENTENCES validation pairs is tested on as many test pairs. Beside it: the word at the same place.
Command:  python -m experiments.papers.alignments --data=PATH/multi30k
          --workdir=runs/attention/Transformer-600x2048-3000-0 [--iterations=8] [--sentences=300] [--smoke]
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

import jformer
from experiments.measure import smoke_sizes
from experiments.runs import results_of, small_run
from jformer.data.data_config import DataConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.inference.predict import Predictor

WORKDIR = flags.DEFINE_string("workdir", None, "A trained translator; --smoke trains one.", required=True)
DATA = flags.DEFINE_string("data", "", "The folder of its training text, if that has moved.")
ITERATIONS = flags.DEFINE_integer("iterations", 8, "Iterations of expectation maximization.", lower_bound=1)
SENTENCES = flags.DEFINE_integer("sentences", 300, "Validation pairs, and test pairs.", lower_bound=1)
WORD = "\u2581"  # starts the pieces that begin a word

Linker = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""(source words, target words) → the source word i64 [t] of each target word."""


def main(_: list[str]) -> None:
    """Print how many words the best head links as model 1 does, and the agreement of every head."""
    smoke_sizes(sentences=2, iterations=1)
    if smoke_sizes() and not (Path(WORKDIR.value) / "results.json").exists():
        from configs import quickstart

        results_of(quickstart, Path(WORKDIR.value), {**small_run(2), "data.tokenizer": "bpe", "data.vocab_size": 99})
    predictor = jformer.load(WORKDIR.value)
    data = dataclasses.replace(predictor.config.data, dir=DATA.value or predictor.config.data.dir)
    read = {"train": data.train, "valid": data.valid, "test": next(iter(data.test_splits().values()), data.valid)}
    train, valid, test = (pairs_of(data, split) for split in read.values())
    linked = model_1(train, ITERATIONS.value)
    heads = agreement(predictor, valid[: SENTENCES.value], linked)
    best = np.unravel_index(np.argmax(heads), heads.shape)
    print(f"validation, agreement of each head with model 1, a layer a line:\n{np.round(heads, 3)}")
    some = test[: SENTENCES.value]
    print(f"test: layer {best[0] + 1}, head {best[1] + 1}: {agreement(predictor, some, linked)[best]:.3f}")
    both = [(linked(*words), np.minimum(np.arange(len(words[1])), len(words[0]) - 1)) for words in map(words_of, some)]
    print(f"test: the word at the same place: {np.mean(np.concatenate([a == b for a, b in both])):.3f}")


def pairs_of(data: DataConfig, split: str) -> list[Pair]:
    """Return the pairs of a split that have words on both sides."""
    return [pair for pair in open_split(data, split).read(Counter()) if all(words_of(pair))]


def words_of(pair: Pair) -> tuple[list[str], list[str]]:
    """Return the words of both sides."""
    return pair.source.split(), pair.target.split()


def model_1(pairs: Sequence[Pair], iterations: int) -> Linker:
    """Learn t(target | source) by expectation maximization (Brown et al. 1993, section 4.1); return its linker.

    All possible links, about 150 a pair, are numbered by the two words: an iteration is four sums.
    """
    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    links, groups, place = [], [], 0
    for pair in pairs:
        s, t = (
            [ids.setdefault(word, len(ids)) for word in side] for ids, side in zip(numbers, words_of(pair), strict=True)
        )
        links.append(np.stack([np.tile(s, len(t)), np.repeat(t, len(s))]))
        groups.append(place + np.repeat(np.arange(len(t)), len(s)))
        place += len(t)
    (source, target), group = np.concatenate(links, axis=1), np.concatenate(groups)
    keys, which = np.unique(source * len(numbers[1]) + target, return_inverse=True)
    table = np.ones(len(keys))
    for _ in range(iterations):
        shares = table[which]
        counts = np.bincount(which, shares / np.bincount(group, shares)[group])
        table = counts / np.bincount(keys // len(numbers[1]), counts)[keys // len(numbers[1])]
    learned = dict(zip(keys.tolist(), table.tolist(), strict=True))

    def link(source: Sequence[str], target: Sequence[str]) -> np.ndarray:
        s, t = ([ids.get(word, -1) for word in side] for ids, side in zip(numbers, (source, target), strict=True))
        values = [[learned.get(i * len(numbers[1]) + j, 0.0) if min(i, j) >= 0 else 0.0 for i in s] for j in t]
        return np.array(values).argmax(axis=1)

    return link


def agreement(predictor: Predictor, pairs: Sequence[Pair], linked: Linker) -> np.ndarray:
    """Return the share [l h] of target words that every head links as `linked` does."""
    same, count = np.zeros(1), 0
    for attended, pair in zip(predictor.attend([pair[:2] for pair in pairs]), pairs, strict=True):
        cross = attended.cross
        assert cross is not None
        source, target = words_of(pair)
        columns, rows = (
            np.cumsum([piece.startswith(WORD) for piece in side]) - 1 for side in (cross.columns, cross.rows)
        )
        if columns[-1] + 1 != len(source) or rows[-1] + 1 != len(target):
            continue  # a truncated side, or a word that contains the mark
        of_words = cross.weights[..., :-1, :-1] @ (columns[:-1, None] == np.arange(len(source)))  # without EOS
        of_words = np.einsum("tw,lhts->lhws", rows[:-1, None] == np.arange(len(target)), of_words)
        same = same + (of_words.argmax(-1) == linked(source, target)).sum(-1)
        count += len(target)
    if not count:
        raise SystemExit(
            f"{WORKDIR.value}: no pair has whole words that begin with {WORD}: take a run of BPE or unigram"
        )
    return same / count


if __name__ == "__main__":
    app.run(main)
