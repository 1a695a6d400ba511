"""SCAN: commands in a small English and the actions they ask for (Lake and Baroni 2018), from its grammar.

    command   phrase | phrase and phrase | phrase after phrase
    phrase    motion | motion twice | motion thrice
    motion    verb | turned | turned with "opposite" or "around" before its side
    turned    verb side | turn side

All 20,910 commands follow from it; what is held out of training decides what a split tests. Each split has a training
and a test part, such as "simple_train" and "simple_test":

    simple    a random fifth is held out; the draw is ours (Experiment 1 of the paper)
    length    commands of more than 22 actions are held out (Experiment 2)
    length26  of more than 26, and so for every number of actions that there is from 22 on (Csordás et al. 2021)
    jump      all that "jump" is combined with is held out (Experiment 3)
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split

VERBS = ("walk", "look", "run", "jump")
SIDES = ("left", "right")
LONGEST = 22  # actions of a training pair of the length split
TRAINING_SHARE = 0.8  # of the simple split
JUMP_SHARE = 0.1  # of the command "jump" alone in the training pairs of the jump split

Command = tuple[str, tuple[str, ...]]
"""Its words, and its actions."""


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split such as "simple_train"."""
    return open_built(config, split, build)


def build(_num_pairs: int = 0) -> dict[str, list[Pair]]:
    """Return the training and test pairs of every split."""
    pairs = [Pair(words, " ".join(actions)) for words, actions in commands()]
    order = np.random.default_rng(0).permutation(len(pairs)).tolist()
    shuffled = [pairs[i] for i in order]
    border = int(TRAINING_SHARE * len(pairs))
    simple = {"simple_train": shuffled[:border], "simple_test": shuffled[border:]}
    without = [pair for pair in pairs if "jump" not in pair.source]
    alone = [pair for pair in pairs if pair.source == "jump"]
    times = round(JUMP_SHARE / (1 - JUMP_SHARE) * len(without))
    jump = {
        "jump_train": without + alone * times,
        "jump_test": [pair for pair in pairs if "jump" in pair.source and pair.source != "jump"],
    }
    return {**simple, **_by_length(pairs), **jump}


def _by_length(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    lengths = [len(pair.target.split()) for pair in pairs]
    splits = {}
    for cutoff in sorted(set(lengths) - {max(lengths)}):
        if cutoff >= LONGEST:
            name = "length" if cutoff == LONGEST else f"length{cutoff}"
            splits[f"{name}_train"] = [pair for pair, length in zip(pairs, lengths, strict=True) if length <= cutoff]
            splits[f"{name}_test"] = [pair for pair, length in zip(pairs, lengths, strict=True) if length > cutoff]
    return splits


def commands() -> list[Command]:
    """Return every command, in the order of the grammar."""
    phrases = _phrases()
    pairs = list(itertools.product(phrases, repeat=2))
    joined = [(f"{first[0]} and {second[0]}", first[1] + second[1]) for first, second in pairs]
    swapped = [(f"{first[0]} after {second[0]}", second[1] + first[1]) for first, second in pairs]
    return phrases + joined + swapped


def _phrases() -> list[Command]:
    times = (("", 1), (" twice", 2), (" thrice", 3))
    return [(words + word, actions * n) for words, actions in _motions() for word, n in times]


def _motions() -> list[Command]:
    """Return what can be repeated: a verb, or a turn to a side, as often as the word before the side asks for."""
    acts: list[Command] = [(verb, (f"I_{verb.upper()}",)) for verb in VERBS]
    found = list(acts)
    for (verb, act), side in itertools.product([*acts, ("turn", ())], SIDES):
        turn = (f"I_TURN_{side.upper()}",)
        found += [
            (f"{verb} {side}", turn + act),
            (f"{verb} opposite {side}", turn + turn + act),
            (f"{verb} around {side}", (turn + act) * 4),
        ]
    return found
