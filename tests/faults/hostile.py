"""Files that somebody made to harm: seeded mutations of every kind of file that is read, in one process.

Each is read or refused with a UserError. Nothing is opened outside the folder but what libraries bring along, and the
process never holds more than so much beyond what it held after reading the whole files.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from jformer.errors import UserError
from tests.faults.corruptions import CHANGES, held
from tests.faults.readers import Reader, readers

ALLOWED = 64 << 20  # bytes, and twice the file, which is small here
BOMBS = (b"../../../etc/passwd", b"/etc/passwd", b"99999999999999999999", b"-1", b"1e999", b"NaN", b"[" * 9_999, b"\0")
LIBRARIES = tuple({sys.prefix, sys.base_prefix, "/usr", "/proc", "/sys", "/dev", *filter(None, sys.path)})


def plant(content: bytearray, draw: Random) -> None:
    """Put a path, a number or a nesting that should not be there into the place of some bytes."""
    begin = draw.randrange(len(content))
    content[begin : begin + draw.choice((0, 1, 4))] = draw.choice(BOMBS)


def claim(content: bytearray, draw: Random) -> None:
    """Write a large number of 1 to 8 bytes, as headers of binary files have."""
    size = draw.choice((1, 2, 4, 8))
    begin = draw.randrange(max(1, len(content) - size))
    content[begin : begin + size] = draw.choice((b"\xff", b"\x7f")) * size


MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (*CHANGES, plant, plant, claim)


def mutate(reader: Reader, draw: Random) -> tuple[str, str]:
    """Read a file that was changed one to three times; return what was done to it and how reading it ended."""
    whole = reader.path.read_bytes()
    changed, done = bytearray(whole), []
    for _ in range(draw.choice((1, 1, 2, 3))):
        if changed:
            change = draw.choice(MUTATIONS)
            change(changed, draw)
            done.append(change.__name__)
    reader.path.write_bytes(changed)
    try:
        reader.read()
        ended = "read"
    except UserError as error:
        ended = "refused" if "\n" not in str(error) else "refused in several lines"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"[:200]
    finally:
        reader.path.write_bytes(whole)
    return " ".join(done), ended


def attack(number: int, seed: int) -> dict[str, Any]:
    """Try so many mutations, all kinds in turn; return how they ended, what escaped, and how much was held."""
    opened: set[tuple[str, bool]] = set()
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = Path(name).resolve()
        kinds = readers(folder)
        for reader in kinds.values():
            reader.read()
        watch(opened)
        before, ends, defects = held(), Counter[str](), []
        for i in range(number):
            kind = list(kinds)[i % len(kinds)]
            done, ended = mutate(kinds[kind], Random(f"{seed} {i}"))
            ends[ended if ended in ("read", "refused") else "defect"] += 1
            if ended not in ("read", "refused"):
                defects.append(f"{i}: {kind}: {done}: {ended}")
        grown = held() - before
        escaped = sorted({path for path, writes in opened if outside(path, folder, writes)})
    return {"ends": dict(ends), "defects": defects, "escaped": escaped, "grown": grown, "kinds": len(kinds)}


def watch(opened: set[tuple[str, bool]]) -> None:
    """Note every file that Python opens from now on, and whether to write."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode(errors="replace")
            opened.add((path, any(letter in str(arguments[1]) for letter in "wax+")))

    sys.addaudithook(note)


def outside(path: str, folder: Path, writes: bool) -> bool:
    """Tell whether a file that was opened lies neither in the folder nor, to be read, among the libraries.

    Python may keep what it compiled of a library in a folder of its own.
    """
    place = str(Path(path).resolve())
    if place.startswith((str(folder), "/dev/null", *filter(None, [sys.pycache_prefix]))):
        return False
    return writes or not place.startswith(LIBRARIES)


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]), int(sys.argv[2]))))
