"""Plain text as a source: one file, in which an example is a line, a paragraph or the whole file.

The name of a split may end in a share of the file, as in "input[:90%]" and "input[90%:]", so that one file holds all
splits. The share [a%:b%] of n lines has lines n·a/100 up to but excluding n·b/100, both rounded down, so adjacent
shares hold every line once. A paragraph that a boundary cuts becomes an example on either side. With
`data.share_of=characters` a whole file is divided by characters in the same way; all of it must then be valid text.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, find, fingerprint
from jformer.data.text import read_lines, seekable
from jformer.errors import UserError

_SHARE = re.compile(r"([^\[\]]+)(?:\[(?:(\d+)%)?:(?:(\d+)%)?\])?")


def open_split(config: SourceConfig, split: str) -> Split:
    """Open a text file or a share of it. The fingerprint covers its bytes, the kind of document and the share.

    Raises UserError for a missing file and for a share that is malformed or empty.
    """
    stem, start, end = _parse(split)
    (path,) = find(config.dir, stem, [[f"{stem}.txt"], [stem]])
    sha, size, starts = digest(path)
    lines_of = functools.partial(
        read_lines, path, keepends=config.document == "file", invalid=config.invalid, starts=starts
    )
    if config.share_of == "characters":
        size = sum(map(len, lines_of(Counter())))
    first, last = size * start // 100, size * end // 100
    if first == last:
        unit = config.share_of
        raise UserError(f"{path}: split {split!r} holds none of its {size} {unit}; give it a larger share or more text")
    identity = fingerprint("text 3", sha, config.document, config.share_of, first, last, config.invalid)
    if config.document == "line":
        read_lines_of = functools.partial(_read_lines, lines_of, range(first, last))
        return Split(split, identity, read_lines_of, size=last - first, seekable=seekable(starts, last))

    def read(counts: Counter[str]) -> Iterator[Pair]:
        if config.share_of == "characters":
            texts = _characters(lines_of(counts), first, last)
        else:
            texts = lines_of(counts, first, last)
        return (Pair("", document) for document in DOCUMENTS[config.document](texts))

    return Split(split, identity, read)


def _read_lines(
    lines_of: Callable[..., Iterator[str]], share: range, counts: Counter[str], number: int = 0
) -> Iterator[Pair]:
    return (Pair("", line) for line in lines_of(counts, share.start + number, share.stop))


def _parse(split: str) -> tuple[str, int, int]:
    """Return the stem of a split's file, and the start and end of its share in percent."""
    match = _SHARE.fullmatch(split)
    stem, start, end = match.groups() if match else ("", None, None)
    bounds = int(start or 0), int(end or 100)
    if not match or not 0 <= bounds[0] < bounds[1] <= 100:
        raise UserError(f"split {split!r}: a share is whole percents of a file's lines, as in 'input[90%:95%]'")
    return stem, *bounds


def _characters(lines: Iterator[str], first: int, last: int) -> Iterator[str]:
    """Yield the parts of lines within characters first to last - 1 of the file, without reading further lines."""
    end = 0
    for line in lines:
        start, end = end, end + len(line)
        yield line[max(0, first - start) : max(0, last - start)]
        if end >= last:
            return


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """Join the lines between blank lines."""
    for filled, block in itertools.groupby(lines, key=lambda line: bool(line.strip())):
        if filled:
            yield "\n".join(block)


DOCUMENTS: dict[str, Callable[[Iterator[str]], Iterator[str]]] = {
    "paragraph": _paragraphs,
    "file": lambda lines: iter(["".join(lines)]),
}
