"""Images with captions: a table of paths and texts; `image_files` reads the images."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.image_files import file_of
from jformer.data.sources.split import Pair, Split, find, fingerprint, listed
from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.storage import is_file


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.tsv: a line is the path of an image relative to the folder, a TAB and a caption.

    Consecutive lines that name the same image are its references: each is an example in training, and all together are
    one example in any other split. The fingerprint covers the content of all images. Raises UserError for a malformed
    line and a missing image.
    """
    (table,) = find(config.dir, split, [[f"{split}.tsv"]], remote=False)
    table = table if table.parent.parts else table.absolute()  # paths in "." do not begin with that folder
    met: Counter[str] = Counter()
    lines, trained = list(_read(table, config.invalid, met)), split == config.train
    digests = [digest(file)[0] for file in dict.fromkeys(file_of(line.source) for line in lines)]
    captions = [(line.source.removeprefix(str(table.parent)), line.target) for line in lines]
    identity = fingerprint("captions 1", digests, captions, trained)
    return listed(split, identity, lines if trained else _together(lines), met)


def _read(table: Path, invalid: str, counts: Counter[str]) -> Iterator[Pair]:
    """Yield the place of the image and the caption of each line."""
    for number, line in enumerate(read_lines(table, counts, invalid=invalid), start=1):
        parts = line.split("\t")
        if len(parts) != 2:
            reason = f"{len(parts) - 1} TABs; a line is the path of an image, one TAB, its caption"
            raise UserError(f"{table}:{number}: {reason}")
        path, caption = parts
        if not caption.strip():
            raise UserError(f"{table}:{number}: the caption of {path!r} is empty; write one, or remove the line")
        place = str(table.parent / path)
        if not path.strip() or not is_file(file_of(place)):
            raise UserError(f"{table}:{number}: no image {path!r} in {table.parent}; paths are relative to that folder")
        yield Pair(place, caption)


def _together(lines: Sequence[Pair]) -> list[Pair]:
    """Return a pair for each image, with its further captions as further references."""
    pairs: list[Pair] = []
    for _, group in itertools.groupby(lines, key=lambda line: line.source):
        first, *others = group
        pairs.append(first._replace(others=tuple(line.target for line in others)))
    return pairs
