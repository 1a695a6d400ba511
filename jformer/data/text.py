"""Text as it lies in files: opening, hashing, lines, and what may stand in a line. No pairs and no tokens here.

A line ends at a line feed and nowhere else. `str.splitlines` and text-mode files also break at carriage returns, form
feeds, U+2028 and the like, which shifts one side of a corpus against the other; here those are characters of the line.
"""

import codecs
import contextlib
import gzip
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, cast

from jformer.errors import UserError

BOMS_REMOVED = "byte order marks removed"
CARRIAGE_RETURNS_REMOVED = "carriage returns removed from line ends"
LINE_FEEDS_REPLACED = "line feeds within a text made spaces"  # JSON and TFDS texts can hold them, a line cannot
SEPARATORS_KEPT = "texts with unusual line separators, kept"

# Everything str.splitlines would break at, and NUL, at which sentencepiece models break.
_SUSPECT = re.compile("[\0\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, gunzipping it if its name ends in .gz. Raise UserError if it cannot be read to its end."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast(IO[bytes], stream)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); fetch or compress it again") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; data files must be readable") from error


def digest(path: Path) -> tuple[str, int]:
    """Return the SHA-256 of a file's (gunzipped) bytes and its number of lines; a last line needs no line feed."""
    sha, line_feeds, end = hashlib.sha256(), 0, b"\n"
    with open_bytes(path) as stream:
        while chunk := stream.read(1 << 20):
            sha.update(chunk)
            line_feeds += chunk.count(b"\n")
            end = chunk[-1:]
    return sha.hexdigest(), line_feeds + (end != b"\n")


def read_lines(
    path: Path, counts: Counter[str], first: int = 0, last: int | None = None, keepends: bool = False
) -> Iterator[str]:
    """Yield lines first to last - 1 of a UTF-8 file, counting what `admit` alters or meets in them.

    With `keepends` a line keeps its line feed. Raises UserError with file:line for invalid UTF-8 and NUL.
    """
    with open_bytes(path) as stream:
        for number, line in islice(enumerate(stream, start=1), first, last):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line = line.removeprefix(codecs.BOM_UTF8)
                counts[BOMS_REMOVED] += 1
            body = line.removesuffix(b"\n")
            try:
                text = admit(decode(body), counts)
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from error
            yield text + "\n" if keepends and len(body) < len(line) else text


def decode(text: bytes) -> str:
    """Decode UTF-8. Raise ValueError naming the first bad byte, for the caller to add the place."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        bad = f"byte {text[error.start]:#04x} at offset {error.start}"
        raise ValueError(f"invalid UTF-8, {bad}; convert the text to UTF-8 or remove it") from error


def admit(text: str, counts: Counter[str]) -> str:
    """Return a text as it enters a pair: one line, every change to it counted, nothing else touched.

    A carriage return at its end goes (the rest of a CRLF), a line feed within becomes a space; other separators stay.
    Raises ValueError for NUL, for the caller to add the place.
    """
    if not _SUSPECT.search(text):
        return text
    if "\0" in text:
        raise ValueError(f"NUL character at offset {text.index(chr(0))}; remove it")
    if text.endswith("\r"):
        text = text.removesuffix("\r")
        counts[CARRIAGE_RETURNS_REMOVED] += 1
    if "\n" in text:
        text = text.replace("\n", " ")
        counts[LINE_FEEDS_REPLACED] += 1
    if _SUSPECT.search(text):
        counts[SEPARATORS_KEPT] += 1
    return text
