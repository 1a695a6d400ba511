"""English sentences of a small grammar, each word with its part of speech; many words have two or three of them.

The tags are the universal ones (Petrov et al. 2012; Universal Dependencies). What a word is follows from where it
stands: "light" is a noun, an adjective or a verb, "that" points, refers or joins, "to" leads to a place or to a verb.
The whole sentence leaves no tag in doubt, except in some questions that end in "back": "did that fish back ?".
"""

from experiments.sources.templates import Draws, dealt, one
from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split

NOUNS = (
    "dog", "nurse", "pilot", "river", "garden", "letter", "child", "teacher", "bridge", "market",
    "watch", "light", "duck", "walk", "plant", "play", "guard", "paint", "can", "will", "saw", "fish",
)  # fmt: skip
VERBS = (
    "find", "carry", "help", "follow", "build", "watch", "light", "duck", "walk", "plant", "play", "guard", "paint",
    "fish", "back", "clean", "open", "dry", "warm",
)  # fmt: skip
PAST = ("saw", "found", "helped", "followed", "watched", "felt", "left", "lit", "painted", "opened")
ADJECTIVES = ("old", "red", "quiet", "small", "light", "clean", "open", "dry", "warm", "fast", "early", "back", "left")
ADVERBS = ("quickly", "often", "never", "early", "fast", "back", "well", "there")
DETERMINERS = ("the", "a", "every", "this", "that", "her", "his")
PRONOUNS = ("she", "he", "they", "it", "this", "that")
OBJECTS = ("her", "him", "them", "it", "this", "that")
AUXILIARIES = ("can", "will", "must", "may", "did")
PLACES = ("in", "near", "to", "on", "with", "behind")
THINKS = ("thinks", "says", "knows", "hopes")

Words = list[tuple[str, str]]


def open_split(config: SourceConfig, split: str) -> Split:
    """Open one split of data.num_pairs training pairs, or of what is held out."""
    return open_built(config, split, build)


def build(num_pairs: int) -> dict[str, list[Pair]]:
    """Return sentences and their tags."""
    return dealt(num_pairs, _pair)


def _pair(draws: Draws) -> Pair:
    text, tags = (" ".join(column) for column in zip(*_sentence(draws), strict=True))
    return Pair(text, tags)


def _sentence(draws: Draws) -> Words:
    """Draw a statement, two of them, one within another, or a question."""
    kind = next(draws)
    if kind < 0.15:
        asked = [("did", "AUX"), *_subject(draws), *_verb_phrase(draws)]
        return [*asked, ("?", "PUNCT")]
    words = _clause(draws)
    if kind < 0.35:
        words += [(one(draws, ("and", "but", "or")), "CCONJ"), *_clause(draws)]
    elif kind < 0.55:
        joins = one(draws, ("that", "because", "if"))
        thinks = [*_subject(draws), (one(draws, THINKS), "VERB")] if joins == "that" else _clause(draws)
        words = [*thinks, (joins, "SCONJ"), *words]
    return [*words, (".", "PUNCT")]


def _clause(draws: Draws) -> Words:
    """Draw a subject and what it does: now with an auxiliary, or in the past."""
    subject = _subject(draws)
    if next(draws) < 0.5:
        often = [(one(draws, ("often", "never", "early")), "ADV")] if next(draws) < 0.2 else []
        return [*subject, (one(draws, AUXILIARIES), "AUX"), *often, *_verb_phrase(draws)]
    return [*subject, (one(draws, PAST), "VERB"), *_object(draws), *_end(draws)]


def _verb_phrase(draws: Draws) -> Words:
    """Draw a verb, whom it does something to, and where; or a verb that wants another one."""
    if next(draws) < 0.2:
        wants = [(one(draws, ("want", "need", "try")), "VERB"), ("to", "PART")]
        return [*wants, (one(draws, VERBS), "VERB"), *_object(draws)]
    whom = _object(draws) if next(draws) < 0.7 else []
    return [(one(draws, VERBS), "VERB"), *whom, *_end(draws)]


def _end(draws: Draws) -> Words:
    """Draw where, how, both or nothing."""
    where = [(one(draws, PLACES), "ADP"), *_things(draws)] if next(draws) < 0.4 else []
    return [*where, *([(one(draws, ADVERBS), "ADV")] if next(draws) < 0.3 else [])]


def _subject(draws: Draws) -> Words:
    return [(one(draws, PRONOUNS), "PRON")] if next(draws) < 0.3 else _things(draws)


def _object(draws: Draws) -> Words:
    return [(one(draws, OBJECTS), "PRON")] if next(draws) < 0.25 else _things(draws)


def _things(draws: Draws) -> Words:
    determiner = one(draws, DETERMINERS)
    described = [(one(draws, ADJECTIVES), "ADJ")] if next(draws) < 0.4 else []
    return [(determiner, "PRON" if determiner in ("her", "his") else "DET"), *described, (one(draws, NOUNS), "NOUN")]
