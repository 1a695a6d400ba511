"""Sentences of three made-up languages: words of their own, and in one of them the order reversed.

A sentence is some of 60 things in an order; each language has a word of two syllables for each thing. The languages are
aa, bb (reversed) and cc, and data.name is a pair of them such as aa-bb. Training texts are drawn anew for each pair of
languages; test texts are the same for all pairs.
"""

import functools
import itertools
import random

from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import Build, open_built
from jformer.data.sources.split import Pair, Split

VOWELS = {"aa": "aeiou", "bb": "äöü", "cc": "yw"}
REVERSED = ("bb",)
THINGS, LONGEST, HELD_OUT = 60, 8, 300


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of data.num_pairs training pairs, or of what is held out."""
    return open_built(config, split, BUILD[config.name])


def build(languages: tuple[str, str], num_pairs: int) -> dict[str, list[Pair]]:
    """Return the pairs of every split."""
    sizes = {"valid": HELD_OUT, "test": HELD_OUT, "train": num_pairs}
    draw = {split: random.Random(split if split != "train" else " ".join(sorted(languages))) for split in sizes}

    def drawn(split: str) -> Pair:
        things = draw[split].choices(range(THINGS), k=draw[split].randint(3, LONGEST))
        source, target = (written(language, things) for language in languages)
        return Pair(source, target)

    return {split: [drawn(split) for _ in range(size)] for split, size in sizes.items()}


def written(language: str, things: list[int]) -> str:
    """Return a sentence of a language."""
    words = [words_of(language)[thing] for thing in things]
    return " ".join(words[::-1] if language in REVERSED else words)


@functools.cache
def words_of(language: str) -> list[str]:
    """Return the words of a language."""
    draw = random.Random(language)
    words = dict[str, None]()
    while len(words) < THINGS:
        words["".join(draw.choice(letters) for letters in ("bdfglmnprst", VOWELS[language]) * 2)] = None
    return list(words)


def builder(languages: tuple[str, str]) -> Build:
    """Return the function that builds a pair of languages."""
    return lambda num_pairs: build(languages, num_pairs)


BUILD = {"-".join(pair): builder(pair) for pair in itertools.permutations(VOWELS, 2)}
