"""Combine lists of overrides into the arms of an experiment: plain lists of plain dicts, no classes."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Overrides = dict[str, Any]


def product(*factors: Mapping[str, Sequence[object]] | Sequence[Overrides]) -> list[Overrides]:
    """Return all combinations of the values of each key of a mapping, and of the members of each list.

    The last factor changes fastest. `product({"model.norm": ["pre", "post"]}, zipped({…}))` combines every norm with
    every row of the other.
    """
    axes: list[list[Overrides]] = []
    for factor in factors:
        if isinstance(factor, Mapping):
            axes += [[{key: value} for value in values] for key, values in factor.items()]
        else:
            axes.append(list(factor))
    return [_merged(parts) for parts in itertools.product(*axes)]


def zipped(factors: Mapping[str, Sequence[object]]) -> list[Overrides]:
    """Return a row for each index of the lists, which are equally long: the first values, the second, …"""
    return [dict(zip(factors, row, strict=True)) for row in zip(*factors.values(), strict=True)]


def chain(*lists: Sequence[Overrides]) -> list[Overrides]:
    """Return the members of all lists in order, without duplicates."""
    members = list(itertools.chain(*lists))
    return [member for i, member in enumerate(members) if member not in members[:i]]


def sample(members: Sequence[Overrides], count: int, seed: int = 0) -> list[Overrides]:
    """Return `count` of the members, drawn at random without replacement: a random search over a grid."""
    return random.Random(seed).sample(list(members), count)


def _merged(parts: Sequence[Overrides]) -> Overrides:
    merged: Overrides = {}
    for part in parts:
        for key in part:
            if key in merged:
                raise ValueError(f"{key} is in two factors of a product")
        merged |= part
    return merged
