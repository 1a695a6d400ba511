"""Strict JSON, and digests that show whether a file has changed since it was written."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from etils.epath import Path

from jformer.errors import UserError
from jformer.storage import replace_content

DIGESTS = "digests.json"  # the file with the digests of a folder's files
DIGEST = "digest"  # the key of a JSON object's own digest
DEEPEST = 100  # levels of nested lists and objects; jformer's own files have fewer than ten


class NewerError(UserError):
    """A file has a schema number that this version does not know; a newer one can read it."""


def parse_json(text: str | bytes, constants: bool = False) -> Any:
    """Return the content of a JSON text; raise ValueError if it is invalid, nested too deep or repeats a key.

    Use this for every JSON file that affects behaviour, and `parse_object` where it must hold an object. With
    `constants`, for files that libraries write with Python's json, NaN and Infinity are numbers.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        refuse = None if constants else _no_constant
        content = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(content):
        raise ValueError("nested too deep")
    return content


def parse_object(text: str | bytes, constants: bool = False) -> dict[str, Any]:
    """Return the object in a JSON text. Raise ValueError as `parse_json` does, and for any other value."""
    content = parse_json(text, constants)
    if not isinstance(content, dict):
        raise ValueError("it must be a JSON object")
    return content


def _is_deep(content: Any) -> bool:
    """Return whether JSON is nested too deep to be copied or written recursively."""
    level = [content]
    for _ in range(DEEPEST + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for some in inner for each in some]
    return bool(level)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {max(counts, key=counts.__getitem__)!r} occurs twice in one object; keep one")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a number or null")


def refuse_newer(schema: object, known: int, where: str) -> None:
    """Raise NewerError if the schema number in a file is larger than the one that this version writes.

    None, for a file without a schema number, means 1. The number goes up when older code would misread the file. Raises
    UserError if it is not a valid number.
    """
    if schema is not None and (type(schema) is not int or not 1 <= schema <= known):
        newer = type(schema) is int and schema > known
        raise (NewerError if newer else UserError)(
            f"{where}: schema={schema!r:.40}, and this version of jformer reads up to {known}: upgrade jformer"
        )


def with_digest(content: Mapping[str, object]) -> dict[str, object]:
    """Return a JSON object with its digest as the last key; `without_digest` checks it."""
    return {**content, DIGEST: digest_of(content)}


def without_digest(content: Any, where: str) -> Any:
    """Return an object without its digest. One that has none, such as one written by hand, is returned unchanged.

    Raises UserError if the digest does not match.
    """
    if not isinstance(content, dict) or DIGEST not in content:
        return content
    rest = {key: value for key, value in content.items() if key != DIGEST}
    if content[DIGEST] != digest_of(rest):
        raise UserError(
            f"{where} is damaged: its content does not match its digest; restore it, or remove the digest to accept it"
        )
    return rest


def digest_of(content: object) -> str:
    """Return the digest of plain JSON, 16 hexadecimal digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def seal(folder: Path) -> None:
    """Record the SHA-256 of every file in a folder, for `damaged`."""
    found = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != DIGESTS}
    replace_content(folder / DIGESTS, (json.dumps(found, indent=1) + "\n").encode())


def damaged(folder: Path, unchanged: Collection[str] = ()) -> list[str]:
    """Return the names of files that are missing or have changed since the folder was sealed; none if it never was.

    Files that are known to be `unchanged` are not read.
    """
    if not (folder / DIGESTS).exists():
        return []
    try:
        expected = parse_object((folder / DIGESTS).read_bytes())
    except ValueError:
        return [DIGESTS]
    read = {name: digest for name, digest in expected.items() if name not in unchanged}
    return [name for name, digest in read.items() if _sha256(folder / Path(name).name) != digest]


def _sha256(path: Path) -> str:
    """Return the digest of a file, or "" if there is none."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
