"""Drop training pairs by the rules of data.clean, and count the dropped pairs by rule.

A dropped pair becomes an empty one, which encoders skip: pairs keep their numbers, so any process can start at any
pair.
"""

import dataclasses
import functools
import io
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from etils import epath

from jformer.data.corpus import locked
from jformer.data.repeats import repeated_places
from jformer.data.sources.split import Pair, Split, fingerprint
from jformer.storage import replace_content

Drops = Callable[[Pair], bool]
EMPTY = Pair("", "")
DUPLICATES = "duplicates"
DROPPED = "pairs dropped by "
SHOWN, LOOKED_AT = 3, 2**17  # examples of each rule in cleaned.jsonl, and pairs searched for them
# A text may have several lines, which end in \n or \r\n.
CONTROL = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffe\uffff]"
)


def _characters(limits: str) -> Drops:
    least, most = map(int, limits.split("-"))
    return lambda pair: any(text and not least <= len(text) <= most for text in (pair.source, pair.target))


def _ratio(most: str) -> Drops:
    limit = float(most)

    def drops(pair: Pair) -> bool:
        shorter, longer = sorted((len(pair.source), len(pair.target)))
        return 0 < shorter * limit < longer

    return drops


def _script(side: str, names: str) -> Drops:
    scripts = tuple(names.upper().split("+"))

    def drops(pair: Pair) -> bool:
        letters = [unicodedata.name(each, "") for each in getattr(pair, side) if each.isalpha()]
        return 2 * sum(name.startswith(scripts) for name in letters) < len(letters)

    return drops


RULES: dict[str, Callable[[str], Drops]] = {
    "characters": _characters,
    "ratio": _ratio,
    "identical": lambda _: lambda pair: bool(pair.source.strip()) and pair.source.strip() == pair.target.strip(),
    "invalid": lambda _: lambda pair: "\ufffd" in pair.source or "\ufffd" in pair.target,
    "control": lambda _: lambda pair: bool(CONTROL.search(pair.source) or CONTROL.search(pair.target)),
    "source_script": functools.partial(_script, "source"),
    "target_script": functools.partial(_script, "target"),
}


def make_rules(rules: Sequence[str]) -> dict[str, Drops]:
    """Map the text of each rule of data.clean for single pairs to its function; DataConfig has validated the rules."""
    parts = [rule.partition("=") for rule in rules if rule != DUPLICATES]
    return {"".join(part): RULES[part[0]](part[2]) for part in parts}


def cleaned(
    split: Split, rules: Sequence[str], cache_dir: str, labels: bool = False, several_lines: bool = False
) -> Split:
    """Return the split with every pair that a rule drops replaced by an empty one.

    Args:
        split: the pairs.
        rules: data.clean.
        cache_dir: where the numbers of duplicates are kept.
        labels: whether targets are labels: rules then read sources only, except that duplicates must agree in both.
        several_lines: whether a text may have several lines.
    """
    if not rules:
        return split
    marks = ["labels"] * labels + ["lines"] * (several_lines and "control" in rules)  # older versions dropped them
    identity = fingerprint("cleaned 1", split.fingerprint, rules, *marks)
    repeats = Path(cache_dir).expanduser() / f"{identity[:32]}.repeats.npy" if DUPLICATES in rules else None
    numbers = functools.partial(_repeats, split.read, repeats)
    read = functools.partial(_clean, split.read, rules, numbers, labels)
    return dataclasses.replace(split, fingerprint=identity, read=read)


def _clean(
    read: Callable[..., Iterator[Pair]],
    rules: Sequence[str],
    numbers: Callable[[], np.ndarray],
    labels: bool,
    counts: Counter[str],
    *first: int,
) -> Iterator[Pair]:
    drops, repeats = make_rules(rules), numbers()
    place, *_ = (*first, 0)
    ahead = int(np.searchsorted(repeats, place))
    for number, pair in enumerate(read(counts, *first), start=place):
        texts = pair._replace(target="") if labels else pair
        reason = next((rule for rule, drop in drops.items() if drop(texts)), "")
        if ahead < len(repeats) and repeats[ahead] == number:
            ahead, reason = ahead + 1, reason or DUPLICATES
        if reason:
            counts[f"{DROPPED}{reason}"] += 1
            counts["empty examples dropped"] -= 1  # as the encoder will count this one
        yield EMPTY if reason else pair


def _repeats(read: Callable[[Counter[str]], Iterator[Pair]], path: Path | None) -> np.ndarray:
    """Return the sorted numbers of the pairs that repeat an earlier one, cached in a file."""
    if path is None:
        return np.zeros(0, np.int64)
    if not path.exists():
        with locked(path, "waiting for another process that looks for duplicates"):
            if not path.exists():
                content = io.BytesIO()
                np.save(content, repeated_places(read(Counter())))
                replace_content(path, content.getvalue())
    found: np.ndarray = np.load(path)
    return found


def write_examples(split: Split, cleaned_split: Split, path: epath.Path) -> None:
    """Write the first pairs that each rule drops as JSONL, if the split is cleaned at all."""
    if cleaned_split is split:
        return
    lines, counts = list[str](), Counter[str]()
    both = zip(split.read(Counter()), cleaned_split.read(counts), strict=True)
    before = dict[str, int]()
    for number, (pair, kept) in enumerate(itertools.islice(both, LOOKED_AT), start=1):
        if kept == pair:
            continue
        for key in (key for key in counts if key.startswith(DROPPED) and counts[key] > before.get(key, 0)):
            before[key] = counts[key]
            if counts[key] <= SHOWN:
                example = {"rule": key.removeprefix(DROPPED), "pair": number, "texts": [pair.source, pair.target]}
                lines.append(json.dumps(example, ensure_ascii=False))
    replace_content(path, "".join(f"{line}\n" for line in lines).encode())
