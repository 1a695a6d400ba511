"""Generated corpora, without files: the quickstart and tasks of letters; `open_built` opens your own.

Besides train, valid and test, the tasks of letters have a split for any range of lengths beyond those of training: the
split "21-30" has HELD_OUT pairs of 21 to 30 letters.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jformer.data.data_config import SourceConfig
from jformer.data.sources import generated_cache as cache
from jformer.data.sources import quickstart
from jformer.data.sources.split import Pair, Split, fingerprint
from jformer.errors import UserError, check_choice

FORMAT = 2  # of cached fingerprints
MAX_LETTERS = 20
HELD_OUT = 500  # pairs of "valid", and of "test"

TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda letters: letters,
    "reverse": lambda letters: letters[::-1],
    "sort": lambda letters: "".join(sorted(letters)),
}

Build = Callable[[int], Mapping[str, list[Pair]]]
"""data.num_pairs → the pairs of every split."""


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of the corpus that data.name names."""
    check_choice("data.name", config.name, tuple(CORPORA))
    lengths = re.fullmatch(r"(\d{1,3})-(\d{1,3})", split)
    if config.name in TASKS and lengths and MAX_LETTERS < int(lengths[1]) <= int(lengths[2]):
        shortest, longest = map(int, lengths.groups())
        return open_built(
            config, split, lambda _: {split: _solved(config.name, _draw_letters(HELD_OUT, shortest, longest))}
        )
    return open_built(config, split, CORPORA[config.name])


def open_built(config: SourceConfig, split: str, build: Build) -> Split:
    """Open one split of the pairs that `build` makes, cached on the machine; the fingerprint covers the pairs.

    The pairs may depend on data.source, data.name and data.num_pairs, and on the code in the folder of `build`.
    Raises UserError for an unknown split.
    """
    asked = FORMAT, config.source, config.name, config.num_pairs
    path = cache.path_of([*asked, split], build)

    def read(_counts: Counter[str]) -> Iterator[Pair]:
        found = cache.find(path)
        return found.pairs() if found else iter(_build(build, config.num_pairs)[split])

    if found := cache.find(path):
        return Split(split, found.fingerprint, read, size=found.size)
    built = _build(build, config.num_pairs)
    if not built.get(split):
        more = f", or lengths such as {MAX_LETTERS + 1}-{2 * MAX_LETTERS}" if config.name in TASKS else ""
        corpus = f"data.name={config.name!r}" if config.name else f"data.source={config.source!r}"
        raise UserError(f"{corpus} has no split {split!r}; choose one of: {', '.join(built)}{more}")
    for name, pairs in built.items():
        cache.save(cache.path_of([*asked, name], build), _identity(pairs), pairs)
    return Split(split, _identity(built[split]), read, size=len(built[split]))


def _identity(pairs: list[Pair]) -> str:
    starts = [pair.start for pair in pairs if pair.start is not None]
    others = [pair.others for pair in pairs] if any(pair.others for pair in pairs) else []
    return fingerprint("generated", [pair[:3] for pair in pairs], *(each for each in (starts, others) if each))


@functools.lru_cache(maxsize=1)  # a run opens train, valid and test one after the other
def _build(build: Build, num_pairs: int) -> Mapping[str, list[Pair]]:
    return build(num_pairs)


def _quickstart(_num_pairs: int) -> dict[str, list[Pair]]:
    corpus = quickstart.build()
    return {split: [Pair(e.source, e.target, e.family) for e in examples] for split, examples in corpus.items()}


def _letters(name: str, num_pairs: int) -> dict[str, list[Pair]]:
    pairs = _solved(name, _draw_letters(2 * HELD_OUT + num_pairs, 1, MAX_LETTERS))
    return {"train": pairs[2 * HELD_OUT :], "valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT]}


CORPORA: dict[str, Build] = {
    "quickstart": _quickstart,
    "copy": lambda num_pairs: _letters("copy", num_pairs),
    "reverse": lambda num_pairs: _letters("reverse", num_pairs),
    "sort": lambda num_pairs: _letters("sort", num_pairs),
}


def _solved(name: str, sources: Iterable[str]) -> list[Pair]:
    return [Pair(" ".join(letters), " ".join(TASKS[name](letters))) for letters in sources]


def _draw_letters(number: int, shortest: int, longest: int) -> list[str]:
    """Draw distinct strings of letters; the first ones do not depend on how many are drawn."""
    rng = np.random.default_rng(0)
    drawn: dict[str, None] = {}
    while len(drawn) < number:
        lengths = rng.integers(shortest, longest + 1, size=4096)
        letters = rng.integers(ord("a"), ord("z") + 1, size=(4096, longest), dtype=np.uint8)
        drawn |= {row[:length].tobytes().decode(): None for row, length in zip(letters, lengths, strict=True)}
    return list(drawn)[:number]
