"""Questions about invented people, answered by some words of a few sentences, or by none; all made up by templates.

A context states one to three facts about each of two people, each in a sentence of its own; the question asks for one
of them. Both people have the same kinds of facts, so that only the name distinguishes the answers: models learn this
first on short contexts, and not at all on long ones alone. Splits share parts of names, but no whole name.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.sources.templates import HELD_OUT, Draws, one
from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split

T = TypeVar("T")

UNANSWERABLE = 0.15  # of the questions ask what the context does not tell of a person that it names
PEOPLE, MOST_FACTS = 2, 3  # of a context, and of each of its people

FIRST_NAMES = ("Mira", "Jon", "Alba", "Tesfa", "Olek", "Rosa", "Bao", "Ines", "Kofi", "Yuki")
FAMILY_NAMES = ("Tolman", "Bersen", "Karley", "Ashova", "Morini", "Vinberg", "Lundby", "Halder", "Dorsel", "Wenrad")
SUMS = {"valid": (0,), "test": (1,), "train": (2, 3, 4, 5, 6, 7, 8, 9)}
"""Split → what the numbers of a first and of a family name add up to, modulo ten; so whole names are of one split."""

TOWN_BEFORE = ("", "", "New ", "Port ", "Upper ")
TOWN_STARTS = ("Green", "Stone", "Ald", "Riv", "Fair", "Nor", "Lake", "Mill")
TOWN_ENDS = ("ford", "ham", "wick", "by")
JOBS = (
    "baker", "glass blower", "judge", "night nurse", "pilot", "roof builder", "singer", "tailor", "school teacher",
    "clock maker", "bee keeper", "painter",
)  # fmt: skip
THINGS = (
    "violin",
    "fine harp",
    "grey horse",
    "blue boat",
    "sailing ship",
    "telescope",
    "small vineyard",
    "red bicycle",
)


class Kind(NamedTuple):
    """A kind of fact: how it is stated and asked about a {who}, with the {what} that answers."""

    told: tuple[str, ...]
    asked: tuple[str, ...]


KINDS = {
    "year": Kind(
        ("{who} was born in {what}.", "{who} came to the world in {what}.", "The birth of {who} was in {what}."),
        ("In which year was {who} born?", "When did {who} come to the world?", "When was {who} born?"),
    ),
    "town": Kind(
        ("{who} lives in {what}.", "{who} has a house in {what}.", "The home of {who} is {what}."),
        ("Where does {who} live?", "In which town is the home of {who}?", "Where is the house of {who}?"),
    ),
    "job": Kind(
        ("{who} works as a {what}.", "{who} earns money as a {what}.", "Many know {who} as a {what}."),
        ("What does {who} work as?", "What is the job of {who}?", "How does {who} earn money?"),
    ),
    "thing": Kind(
        ("{who} owns a {what}.", "{who} takes care of a {what}.", "To {who} belongs a {what}."),
        ("What does {who} own?", "What belongs to {who}?", "Which thing does {who} take care of?"),
    ),
}


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of data.num_pairs training pairs, or of what is held out."""
    return open_built(config, split, build)


def build(num_pairs: int) -> dict[str, list[Pair]]:
    """Return the training pairs, and those held out; the first ones do not depend on how many there are."""
    rng = np.random.default_rng(0)
    sizes = {**HELD_OUT, "train": num_pairs}
    return {split: [_pair(iter(rng.random(64).tolist()), SUMS[split]) for _ in range(n)] for split, n in sizes.items()}


def _pair(draws: Draws, sums: Sequence[int]) -> Pair:
    """Draw people who share no part of their names, facts of each and a question about one of them."""
    total = one(draws, sums)
    numbers = _some(draws, range(len(FIRST_NAMES)), PEOPLE)
    names = [f"{FIRST_NAMES[i]} {FAMILY_NAMES[(total - i) % len(FAMILY_NAMES)]}" for i in numbers]
    told = _some(draws, list(KINDS), 1 + int(next(draws) * MOST_FACTS))
    facts = [(name, kind, _what(draws, kind)) for name in names for kind in told]
    facts = _some(draws, facts, len(facts))
    sentences = [one(draws, KINDS[kind].told).format(who=name, what=what) for name, kind, what in facts]
    number = int(next(draws) * len(facts))
    who, kind, what = facts[number]
    unanswerable = next(draws) < UNANSWERABLE
    if unanswerable:
        kind = one(draws, [each for each in KINDS if each not in told])
    source = f"{one(draws, KINDS[kind].asked).format(who=who)}\t{' '.join(sentences)}"
    if unanswerable:
        return Pair(source, "", "unanswerable")
    before = sum(len(sentence) + 1 for sentence in sentences[:number])
    return Pair(source, what, kind, start=before + sentences[number].index(what))


def _what(draws: Draws, kind: str) -> str:
    if kind == "year":
        return str(1850 + int(next(draws) * 150))
    if kind == "town":
        return one(draws, TOWN_BEFORE) + one(draws, TOWN_STARTS) + one(draws, TOWN_ENDS)
    return one(draws, JOBS if kind == "job" else THINGS)


def _some(draws: Draws, choices: Sequence[T], count: int) -> list[T]:
    """Draw `count` of the choices without replacement, in random order."""
    left = list(range(len(choices)))
    return [choices[left.pop(int(next(draws) * len(left)))] for _ in range(count)]
