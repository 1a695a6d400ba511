"""Generated corpora as a source: the quickstart, tasks of letters, pictures, and tasks others define. No files.

Beside train, valid and test, the tasks of letters have a split for any range of lengths beyond those of training, named
after it: "21-30" is HELD_OUT pairs of 21 to 30 letters. For the splits of SCAN, of modular division and of pictures
see `scan`, `modular` and `scenes`.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jformer.data import drawings
from jformer.data.data_config import SourceConfig
from jformer.data.sources import facts, modular, parts_of_speech, quickstart, scan, scenes
from jformer.data.sources import generated_cache as kept
from jformer.data.sources import synthetic_labels as judged
from jformer.data.sources.split import Pair, Split, fingerprint
from jformer.errors import UserError, check_choice

MAX_LETTERS = 20
HELD_OUT = 500  # pairs of "valid", and of "test"

NUMBERS = 50  # JoeyNMT's tutorial, "Synthetic Data": 0 to 49, the lengths below, and 1,000 pairs for valid and for test
MAX_NUMBERS, MAX_NUMBERS_HELD_OUT, NUMBERS_HELD_OUT = 25, 30, 1_000

TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda letters: letters,
    "reverse": lambda letters: letters[::-1],
    "sort": lambda letters: "".join(sorted(letters)),
}


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of a generated corpus, which is made once on a machine (see `kept`).

    The fingerprint is that of the pairs themselves.
    """
    check_choice("data.name", config.name, tuple(CORPORA))
    asked = config.name, config.num_pairs, split

    def read(_counts: Counter[str]) -> Iterator[Pair]:
        found = kept.find(asked)
        return found.pairs() if found else iter(_make(config.name, config.num_pairs, split)[split])

    found = kept.find(asked)
    if found:
        return Split(split, found.fingerprint, read, found.size)
    made = {name: (_identity(config.name, pairs), pairs) for name, pairs in _make(*asked).items()}
    for name, (identity, pairs) in made.items():
        kept.keep((config.name, config.num_pairs, name), identity, pairs)
    return Split(split, made[split][0], read, len(made[split][1]))


def _make(name: str, num_pairs: int, split: str) -> dict[str, list[Pair]]:
    """Generate a split with those that are made at once, or raise UserError where there is no such split."""
    made = {split: longer} if (longer := _longer(name, split)) else _generate(name, num_pairs)
    if not made.get(split):
        more = f", or lengths such as {MAX_LETTERS + 1}-{2 * MAX_LETTERS}" if name in TASKS else ""
        raise UserError(f"data.name={name!r} has no split {split!r}; choose one of: {', '.join(made)}{more}")
    return made


def _identity(name: str, pairs: list[Pair]) -> str:
    drawn = [drawings.digest()] if name == "scenes" else []  # what is trained on are pixels, and not these names
    starts = [pair.start for pair in pairs if pair.start is not None]
    return fingerprint("generated", [pair[:3] for pair in pairs], *drawn, *([starts] if starts else []))


@functools.lru_cache(maxsize=1)  # a run opens train, valid and test one after the other
def _generate(name: str, num_pairs: int) -> dict[str, list[Pair]]:
    return CORPORA[name](num_pairs)


def _quickstart(_num_pairs: int) -> dict[str, list[Pair]]:
    corpus = quickstart.build()
    return {split: [Pair(e.source, e.target, e.family) for e in examples] for split, examples in corpus.items()}


def _letters(name: str, num_pairs: int) -> dict[str, list[Pair]]:
    pairs = _solved(name, _draw_letters(2 * HELD_OUT + num_pairs, 1, MAX_LETTERS))
    return {"train": pairs[2 * HELD_OUT :], "valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT]}


def _reverse_numbers(num_pairs: int) -> dict[str, list[Pair]]:
    """Return sequences of numbers and their reverses, as JoeyNMT's tutorial defines the task.

    What is tested on may be longer than training. As there, each sequence is drawn by itself: all of one number, and
    many of two, are in several splits.
    """
    rng = np.random.default_rng(0)
    sizes = {"valid": NUMBERS_HELD_OUT, "test": NUMBERS_HELD_OUT, "train": num_pairs}

    def drawn(split: str) -> Pair:
        longest = MAX_NUMBERS if split == "train" else MAX_NUMBERS_HELD_OUT
        words = rng.integers(NUMBERS, size=rng.integers(1, longest + 1)).astype(str).tolist()
        return Pair(" ".join(words), " ".join(reversed(words)))

    return {split: [drawn(split) for _ in range(size)] for split, size in sizes.items()}


CORPORA: dict[str, Callable[[int], dict[str, list[Pair]]]] = {
    "quickstart": _quickstart,
    **{name: functools.partial(_letters, name) for name in TASKS},
    "reverse_numbers": _reverse_numbers,
    "scan": lambda _num_pairs: scan.build(),
    "facts": facts.build,
    "modular_division": lambda _num_pairs: modular.build(),
    "scenes": scenes.build,
    "parts_of_speech": parts_of_speech.build,
    "subjects": judged.subjects,
    "likeness": judged.likeness,
}
"""data.name → function of data.num_pairs that makes the pairs of every split."""


def _longer(name: str, split: str) -> list[Pair]:
    """Return the pairs of a split named after its lengths, or none where the name is not that of one."""
    lengths = re.fullmatch(r"(\d{1,3})-(\d{1,3})", split)
    if name not in TASKS or not lengths or not MAX_LETTERS < int(lengths[1]) <= int(lengths[2]):
        return []
    return _solved(name, _draw_letters(HELD_OUT, int(lengths[1]), int(lengths[2])))


def _solved(name: str, sources: Iterable[str]) -> list[Pair]:
    return [Pair(" ".join(letters), " ".join(TASKS[name](letters))) for letters in sources]


def _draw_letters(number: int, shortest: int, longest: int) -> list[str]:
    """Draw distinct strings of so many letters; the first ones do not depend on how many are drawn."""
    rng = np.random.default_rng(0)
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        lengths = rng.integers(shortest, longest + 1, size=4096)
        letters = rng.integers(ord("a"), ord("z") + 1, size=(4096, longest), dtype=np.uint8)
        drawn |= {row[:length].tobytes().decode(): None for row, length in zip(letters, lengths, strict=True)}
    return list(drawn)[:number]
