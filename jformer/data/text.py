"""Read text files line by line, and validate and clean the characters of a line.

A line ends at a line feed only. `str.splitlines` and text-mode files also break at carriage returns, form feeds, U+2028
and the like, which misaligns the two sides of a corpus; here those are characters of the line.
"""

import codecs
import contextlib
import gzip
import importlib
import lzma
import re
import sys
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from jformer.errors import UserError

T = TypeVar("T")

STDIN = "/dev/stdin"
BOM = "\ufeff"
BOMS_REMOVED = "byte order marks removed"
CARRIAGE_RETURNS_REMOVED = "carriage returns removed from line ends"
LINE_FEEDS_REPLACED = "line feeds within a text made spaces"  # JSON and TFDS texts can hold them, a line cannot
SEPARATORS_KEPT = "texts with unusual line separators, kept"
BOMS_KEPT = "texts with a byte order mark, kept"
INVALID_REPLACED = "texts with invalid characters, replaced by U+FFFD"
LONGEST_UNPACKED = 2**24  # bytes of a line of a compressed file, which itself may be a thousand times smaller
STRIDE = 2**12  # lines; the offset of every STRIDE-th line is kept, to start reading there
SKIPPED = 2**18  # most lines of a compressed file to skip in order to start at a later one
INVALID = ("refuse", "replace")  # what to do with invalid characters
UNKNOWN, UNKNOWN_SHOWN = "unknown: ", 20  # what a vocabulary lacks; the first 20 are counted separately
UNSPACED = (  # letters and marks of scripts without spaces between words: Han, Kana; Thai, Lao, Burmese, Khmer
    "\u3001-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
"""Ranges of a character class."""
MARKS = "".join(each for each in map(chr, range(0x300, 0xFE30)) if unicodedata.category(each)[0] == "M")
"""Accents, and vowels of many scripts: combining marks, which belong to the letter before them, though not `\\w`."""
UNSPACED_LANGUAGES = (  # by ISO 639-1 and 639-3
    *("zh", "zho", "chi", "cmn", "yue", "ja", "jpn", "th", "tha", "lo", "lao", "my", "mya", "km", "khm"),
)
_UNSPACED = re.compile(f"[{UNSPACED}]")
# Where a long text is best cut: after sentences; else at spaces, or at commas of scripts that need no spaces.
BREAKS = (
    re.compile(r"""[.!?…।؟۔]+["'”’»)\]]*\s+|[。！？｡．။។]+[」』”’）]*\s*"""),
    re.compile(r"[，、；：]+|\s+"),
)


def shown_unknown(reason: str, counts: Mapping[str, int]) -> str:
    """Return the reason that counts an unknown character or word: its own for the first ones, then a common one."""
    shown = reason in counts or sum(key.startswith(UNKNOWN) for key in counts) < UNKNOWN_SHOWN
    return reason if shown or not reason.startswith(UNKNOWN) else "further unknown"


def language_code(language: str) -> str:
    """Return the first part of a language's name.

    >>> language_code("zh-CN"), language_code("jpn_Jpan")
    ('zh', 'jpn')
    """
    return re.split("[-_]", language.lower())[0]


def join_pieces(texts: Iterable[str], language: str = "") -> str:
    """Join pieces of text by spaces, unless both adjacent characters (or one, in an unspaced language) are unspaced.

    >>> join_pieces(["我们去。", "好的"]), join_pieces(["我们去 Berlin", "好的"], "zh"), join_pieces(["Eins.", "Zwei."])
    ('我们去。好的', '我们去 Berlin好的', 'Eins. Zwei.')
    """
    joined, enough = "", any if language_code(language) in UNSPACED_LANGUAGES else all
    for text in filter(None, texts):
        joins = not joined or enough(_UNSPACED.match(each) for each in (joined[-1], text[0]))
        joined += text if joins else f" {text}"
    return joined


# Everything that str.splitlines breaks at, and invalid characters: NUL, which breaks sentencepiece models, and lone
# surrogates, which JSON can spell and UTF-8 cannot.
_SUSPECT = re.compile("[\0\n\r\v\f\x1c-\x1e\x85\u2028\u2029\ufeff\ud800-\udfff]")
_SEPARATOR = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def seekable(starts: Sequence[int], lines: int) -> bool:
    """Return whether `read_lines` may begin anywhere: a large compressed file is best read from its beginning."""
    return bool(starts) or lines <= SKIPPED


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacking one with a suffix of PACKED. Raise UserError if it cannot be read to its end."""
    kind, unpacked = PACKED.get(path.suffix, ("", contextlib.nullcontext))
    try:
        with _standard_input() if str(path) == STDIN else path.open("rb") as packed, unpacked(packed) as stream:
            yield stream
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path}: not a complete {kind} file ({error}); fetch or compress it again") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; data files must be readable") from error


@contextlib.contextmanager
def _standard_input() -> Iterator[IO[bytes]]:
    """Yield standard input from its current position; its path would open a file from the start, and no socket at all.

    A file is reset to that position, to be read again.
    """
    with open(0, "rb", closefd=False) as stream:
        start = stream.tell() if stream.seekable() else None
        try:
            yield stream
        finally:
            if start is not None:
                stream.seek(start)


@contextlib.contextmanager
def _zstd(packed: IO[bytes]) -> Iterator[IO[bytes]]:
    try:
        zstd: Any = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise UserError('a .zst file needs backports.zstd: pip install -e ".[zstd]" -c constraints.txt') from error
    try:
        with zstd.open(packed) as stream:
            yield stream
    except zstd.ZstdError as error:
        raise EOFError(error) from error


PACKED: dict[str, tuple[str, Callable[[IO[bytes]], contextlib.AbstractContextManager[Any]]]] = {
    ".gz": ("gzip", gzip.open),
    ".xz": ("xz", lzma.open),
    ".zst": ("zstd", _zstd),
}


def read_lines(
    path: Path,
    counts: Counter[str],
    first: int = 0,
    last: int | None = None,
    keepends: bool = False,
    invalid: str = "refuse",
    warn: Callable[[int, str], None] = lambda number, reason: None,
    starts: Sequence[int] = (),
) -> Iterator[str]:
    """Yield lines first to last - 1 of a UTF-8 file, counting what `admit` changes or finds in them.

    Args:
        path: the file, unpacked if its name ends in a key of PACKED.
        counts: receives the number of changes and findings by reason.
        first: the first line, from 0.
        last: the line after the last one; None = the end of the file.
        keepends: a line keeps its line feed.
        invalid: one of INVALID, for invalid UTF-8 and NUL.
        warn: called with the number of a line, from 1, and the reason, if characters are replaced.
        starts: byte offset of every STRIDE-th line, where reading can start.

    Raises:
        UserError: with file:line, for an invalid line.
    """
    with open_bytes(path) as stream:
        skipped = min(first // STRIDE, len(starts) - 1) if starts else 0
        if skipped:
            stream.seek(starts[skipped])
        numbered = enumerate(_lines(path, stream), start=skipped * STRIDE + 1)
        passed = skipped * STRIDE
        for number, line in islice(numbered, first - passed, None if last is None else max(last - passed, 0)):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line = line.removeprefix(codecs.BOM_UTF8)
                counts[BOMS_REMOVED] += 1
            body = line.removesuffix(b"\n")
            try:
                text = admit(decode(body), counts)
            except ValueError as error:
                if invalid == "refuse":
                    raise UserError(f"{path}:{number}: {error}") from error
                warn(number, str(error).partition(";")[0])
                text = admit(decode(body, invalid), counts, invalid)
            yield text + "\n" if keepends and len(body) < len(line) else text


def _lines(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of an open file. Raise UserError for an unpacked line that would fill the memory."""
    if path.suffix not in PACKED:
        yield from stream
        return
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_UNPACKED + 1), b""), start=1):
        if len(line) > LONGEST_UNPACKED and not line.endswith(b"\n"):
            most = f"a line of more than {LONGEST_UNPACKED:,} bytes in a compressed file"
            raise UserError(f"{path}:{number}: {most}; unpack the file if it is one")
        yield line


def unpacked_name(name: str) -> str:
    """Return the name of a file without the suffix of its compression."""
    suffix = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def packed_forms(path: Path) -> list[Path]:
    """Return a path and those of its compressed forms."""
    return [path, *(path.with_name(path.name + suffix) for suffix in PACKED)]


def is_jsonl(path: Path) -> bool:
    """Return whether a file is JSONL, by its name."""
    return unpacked_name(path.name).endswith(".jsonl")


def read_objects(
    path: Path,
    counts: Counter[str],
    invalid: str,
    read: Callable[[str], T],
    first: int = 0,
    starts: Sequence[int] = (),
) -> Iterator[T]:
    """Yield the result of `read` for each line of a JSONL file.

    Args:
        path: the file.
        counts: receives replacements of characters outside an object's texts.
        invalid: one of INVALID.
        read: reads a line; raises ValueError for an invalid one.
        first, starts: as for `read_lines`.

    Raises:
        UserError: with file:line, for an invalid line.
    """
    around: Counter[str] = Counter()
    lines = read_lines(path, around, first, invalid=invalid, starts=starts)
    for number, line in enumerate(lines, start=first + 1):
        if replaced := around.pop(INVALID_REPLACED, 0):
            counts[INVALID_REPLACED] += replaced
        try:
            yield read(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from error


def not_text(text: str) -> str:
    """Describe the first invalid character of a text (NUL or a lone surrogate) and its offset; "" if none."""
    if not (found := _NO_TEXT.search(text)):
        return ""
    what = "NUL character" if found[0] == "\0" else "lone surrogate"
    return f"{what} at offset {found.start()}"


def decode(text: bytes, invalid: str = "refuse") -> str:
    """Decode UTF-8. Raise ValueError naming the first bad byte, for the caller to add the place.

    With `invalid="replace"`, bad bytes become lone surrogates, which `admit` replaces and counts.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        if invalid == "replace":
            return text.decode(errors="surrogateescape")
        bad = f"byte {text[error.start]:#04x} at offset {error.start}"
        raise ValueError(
            f"invalid UTF-8, {bad}; convert the text to UTF-8, remove it or (of data) set data.invalid='replace'"
        ) from error


def admit(text: str, counts: Counter[str], invalid: str = "refuse", lines: bool = False) -> str:
    """Return a text cleaned up to be one line of a pair, counting every change.

    A trailing carriage return is removed. A text that may have several `lines` ends them with line feeds; elsewhere
    each character of a line break becomes a space. Other separators stay. NUL and lone surrogates become U+FFFD, or
    raise ValueError, for the caller to add the place.
    """
    if not _SUSPECT.search(text):
        return text
    if fault := not_text(text):
        if invalid == "refuse":
            raise ValueError(f"{fault}; remove it")
        text = _NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
        counts[INVALID_REPLACED] += 1
    if "\r\n" in text or text.endswith("\r"):
        # Where a line feed becomes a space, so does its carriage return: offsets in the text do not change.
        text = text.replace("\r\n", "\n" if lines else " \n").removesuffix("\r")
        counts[CARRIAGE_RETURNS_REMOVED] += 1
    if "\n" in text and not lines:
        text = text.replace("\n", " ")
        counts[LINE_FEEDS_REPLACED] += 1
    if _SEPARATOR.search(text):
        counts[SEPARATORS_KEPT] += 1
    if BOM in text:
        counts[BOMS_KEPT] += 1
    return text
