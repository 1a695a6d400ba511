"""A generated text about things of several kinds, one or many of each, in which it is known who is alike.

What experiments/papers/word_vectors.py and the tests of word vectors share.
"""

from pathlib import Path

import numpy as np

from jformer.tools.skipgram import Options

KINDS, THINGS = 6, 8  # of things, and of each kind
SIZES = Options(size=64, window=4, negatives=5, min_count=5, epochs=10)


def generated(count: int, rng: np.random.Generator) -> list[str]:
    """Return lines about things, one or many of them."""
    lines = []
    for _ in range(count):
        kind, thing, many = rng.integers(KINDS), rng.integers(THINGS), rng.integers(2)
        colour, verb = f"colour{kind}{rng.integers(3)}", f"does{kind}{rng.integers(3)}"
        before = ("many", "several", "all")[rng.integers(3)] if many else ("one", "a", "this")[rng.integers(3)]
        lines.append(f"{before} {colour} {name(kind, thing, many)} {('is', 'are')[many]} what {verb} here")
    return lines


def name(kind: int | np.integer, thing: int | np.integer, many: int | np.integer) -> str:
    """Return the word for a thing, or for many of it."""
    return f"thing{kind}{'abcdefgh'[thing]}{'s' * many}"


def neighbours(found: dict[str, np.ndarray]) -> float:
    """Return how often the nearest thing to a thing is of its kind and form."""
    names = [(k, t, m) for k in range(KINDS) for t in range(THINGS) for m in range(2)]
    table = np.stack([found[name(*each)] for each in names])
    near = table @ table.T - 2 * np.eye(len(names))
    return float(np.mean([names[i][::2] == each[::2] for each, i in zip(names, near.argmax(1), strict=True)]))


def analogies(found: dict[str, np.ndarray], count: int, rng: np.random.Generator) -> float:
    """Return how often many : one holds from one thing to another: the nearest of all words is the kind's many.

    Things of one kind are alike but for their letter, which the text says nothing about: any of the kind is right.
    """
    words = list(found)
    table, right = np.stack(list(found.values())), 0
    for _ in range(count):
        a, b = rng.choice(KINDS, 2, replace=False)
        one, many, other = (name(a, rng.integers(THINGS), 0), name(a, rng.integers(THINGS), 1), name(b, 0, 0))
        scores = table @ (found[many] - found[one] + found[other])
        best = next(i for i in np.argsort(-scores) if words[i] not in (one, many, other))
        right += words[best].startswith(f"thing{b}") and words[best].endswith("s")
    return right / count


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the vectors of a file, each of length 1."""
    rows = [line.split(" ") for line in path.read_text().splitlines()[1:]]
    vectors = {word: np.array(numbers, float) for word, *numbers in rows}
    return {word: vector / np.linalg.norm(vector) for word, vector in vectors.items()}
