"""Plain text as a source: one file, an example being a line, a paragraph or all of it. No tokens.

The name of a split may end in a share of the file, as in "input[:90%]" and "input[90%:]", so that one file gives all
splits. The share [a%:b%] of n lines has those from n·a/100 up to n·b/100, both rounded down and the last one excluded:
shares that touch hold every line once. A paragraph that a border cuts gives an example to either side.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

from jformer.data.config import SourceConfig
from jformer.data.sources import Pair, Split, find, fingerprint
from jformer.data.text import digest, read_lines
from jformer.errors import UserError

_SHARE = re.compile(r"([^\[\]]+)(?:\[(?:(\d+)%)?:(?:(\d+)%)?\])?")


def open_split(config: SourceConfig, split: str) -> Split:
    """Open a text file, or a share of it. The fingerprint covers its bytes, the kind of document and the lines read.

    Raises UserError for a file that is missing and for a share that is misspelt or holds no line.
    """
    stem, start, end = _parse(split)
    (path,) = find(config.dir, stem, [[f"{stem}.txt"], [stem]])
    sha, lines = digest(path)
    first, last = lines * start // 100, lines * end // 100
    if first == last:
        raise UserError(f"{path}: split {split!r} holds none of its {lines} lines; give it a larger share or more text")

    def read(counts: Counter[str]) -> Iterator[Pair]:
        texts = read_lines(path, counts, first, last, keepends=config.document == "file")
        return (Pair("", document) for document in DOCUMENTS[config.document](texts))

    return Split(split, fingerprint("text 1", sha, config.document, first, last), read)


def _parse(split: str) -> tuple[str, int, int]:
    """Return the stem of a split's file, and where its share begins and ends in percent."""
    match = _SHARE.fullmatch(split)
    stem, start, end = match.groups() if match else ("", None, None)
    bounds = int(start or 0), int(end or 100)
    if not match or not 0 <= bounds[0] < bounds[1] <= 100:
        raise UserError(f"split {split!r}: a share is whole percents of a file's lines, as in 'input[90%:95%]'")
    return stem, *bounds


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """Join the lines between lines that are empty or white space."""
    for filled, block in itertools.groupby(lines, key=lambda line: bool(line.strip())):
        if filled:
            yield "\n".join(block)


def _whole(lines: Iterator[str]) -> Iterator[str]:
    yield "".join(lines)


DOCUMENTS: dict[str, Callable[[Iterator[str]], Iterator[str]]] = {
    "line": iter,
    "paragraph": _paragraphs,
    "file": _whole,
}
