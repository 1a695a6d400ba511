"""The quickstart corpus: English to German dates, times, amounts, numbers and names, generated offline.

Every pair renders the same content in both languages. The corpus needs no download and carries no licence but CLDR's
(see NOTICE). Translating it takes reordering, inflection and vocabulary, yet a small model learns it in minutes. This
module decides the contents of the corpus and its splits; `contents` draws the texts.
"""

import hashlib
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from jformer.data.sources.quickstart import contents
from jformer.errors import UserError


class QuickstartPair(NamedTuple):
    """A sentence pair of one family. The key is its language-independent content, and alone decides the split."""

    family: str
    source: str
    target: str
    key: str


# How to draw a content of each family, and its share of the corpus in percent.
FAMILIES: dict[str, tuple[Callable[[Random], contents.Drawn], int]] = {
    "date": (contents.draw_date, 12),
    "datetime": (contents.draw_datetime, 9),
    "time": (contents.draw_time, 5),
    "interval": (contents.draw_interval, 8),
    "duration": (contents.draw_duration, 8),
    "relative": (contents.draw_relative, 5),
    "money": (contents.draw_money, 11),
    "measure": (contents.draw_measure, 11),
    "worded_measure": (contents.draw_worded_measure, 5),
    "number": (contents.draw_number, 6),
    "number_words": (contents.draw_number_words, 9),
    "ordinal": (contents.draw_ordinal, 5),
    "countries": (contents.draw_countries, 6),
}


def build(seed: int = 0, size: int = 100_000) -> dict[str, list[QuickstartPair]]:
    """Generate about `size` distinct pairs: 96 % in "train", 1 % in "valid", 3 % in "test", each list shuffled.

    No source occurs twice, and no key in two splits: the hash of the key decides, not the seed, the size or the
    template. The pairs depend only on the arguments and the CLDR release in Babel.

    Raises:
        UserError: a family has too few contents for its share of `size`; 200,000 is safe.
    """
    examples: dict[str, QuickstartPair] = {}
    for name, (draw, percent) in FAMILIES.items():
        rng = Random(f"quickstart {seed} {name}")  # a string seeds through SHA-512, never through hash()
        share = size * percent // 100
        goal = len(examples) + share
        for _ in range(10 * share):
            if len(examples) == goal:
                break
            source, target, key = draw(rng)
            examples.setdefault(source, QuickstartPair(name, source, target, key))
        if len(examples) < goal:
            raise UserError(f"size={size}: family {name!r} has fewer than {share} distinct pairs; ask for less")
    splits: dict[str, list[QuickstartPair]] = {"train": [], "valid": [], "test": []}
    for example in sorted(examples.values(), key=lambda example: _digest(f"{seed} {example.source}")):
        splits[_split(example.key)].append(example)
    return splits


def _split(key: str) -> str:
    percent = _digest(key) % 100
    return "test" if percent < 3 else "valid" if percent < 4 else "train"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
