"""Images with captions: a table of paths and texts; `image_files` reads the images."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.image_files import file_of
from jformer.data.sources.split import Pair, Split, find, fingerprint
from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.storage import is_file


class CaptionLine(NamedTuple):
    """One line of the table."""

    number: int  # from 1
    image: str  # its path
    caption: str


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.tsv: a line is the path of an image relative to the folder, a TAB and a caption.

    Consecutive lines that name the same image are its references: each is an example in training, and all together are
    one example in any other split. The fingerprint covers the content of all images. Raises UserError for a malformed
    line and a missing image.
    """
    (table,) = find(config.dir, split, [[f"{split}.tsv"]], remote=False)
    met: Counter[str] = Counter()
    lines = list(_read(table, config.invalid, met))
    digests = {file: digest(file)[0] for file in dict.fromkeys(file_of(line.image) for line in lines)}
    pairs = [Pair(line.image, line.caption) for line in lines] if split == config.train else _together(lines)

    def read(counts: Counter[str]) -> Iterator[Pair]:
        counts.update(met)
        return iter(pairs)

    captions = [(line.image.removeprefix(str(table.parent)), line.caption) for line in lines]
    return Split(split, fingerprint("captions 1", list(digests.values()), captions, split == config.train), read)


def _read(table: Path, invalid: str, counts: Counter[str]) -> Iterator[CaptionLine]:
    for number, line in enumerate(read_lines(table, counts, invalid=invalid), start=1):
        parts = line.split("\t")
        if len(parts) != 2:
            raise UserError(
                f"{table}:{number}: {len(parts) - 1} TABs; a line is the path of an image, one TAB, its caption"
            )
        path, caption = parts
        if not caption.strip():
            raise UserError(f"{table}:{number}: the caption of {path!r} is empty; write one, or remove the line")
        place = str(table.parent / path)
        if not path.strip() or not is_file(file_of(place)):
            raise UserError(f"{table}:{number}: no image {path!r} in {table.parent}; paths are relative to that folder")
        yield CaptionLine(number, place, caption)


def _together(lines: list[CaptionLine]) -> list[Pair]:
    """Return a pair for each image, its further captions being further references."""
    pairs: list[Pair] = []
    for image, group in itertools.groupby(lines, key=lambda line: line.image):
        first, *others = (line.caption for line in group)
        pairs.append(Pair(image, first, others=tuple(others)))
    return pairs
