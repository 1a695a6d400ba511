"""The file of answers: overwritten, or continued where an earlier command stopped, with the same settings.

NAME.settings.json next to it records everything that its lines depend on.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from etils import epath

from jformer.data.text import STDIN
from jformer.errors import UserError
from jformer.integrity import parse_object
from jformer.storage import check_writable, is_special, refuse_special, replace_content, writing

RECORD = ".settings.json"


def input_path(source: str) -> Path:
    """Return the path of an input; "-" is standard input."""
    return Path(STDIN if source == "-" else source)


def refuse_input(source: Path, target: Path, recorded: bool = False) -> None:
    """Raise UserError if the output or, with `recorded`, its record is the input, even through a link.

    Writing would destroy the input.
    """
    for written in (target, _record(target))[: 1 + recorded]:
        if written.is_file() and source.exists() and source.samefile(written):
            also = f", which also writes {written}," if written != target else ""
            raise UserError(f"--output={target}{also} is the input itself and would overwrite it: name another file")


def check_files(source: Path, target: Path | None, whole: bool = False) -> None:
    """Raise UserError if the input does not exist, or the output cannot be written or, if `whole`, replaced."""
    if not source.exists() or source.is_dir():
        found = "is a folder" if source.is_dir() else "does not exist"
        raise UserError(f"--input={source} {found}: name a file with a line for each text")
    if target is None:
        return
    refuse_input(source, target, recorded=True)
    if target.is_dir() or not target.parent.is_dir():
        found = "is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise UserError(f"--output={target}: {found}; name a file in a folder that can be written")
    if whole:
        refuse_special(target)
    if not is_special(target):
        check_writable("--output", epath.Path(target.parent))
    if target.exists() and not os.access(target, os.W_OK):
        raise UserError(f"--output={target}: cannot be written; name a file that can")


def lines_to_keep(target: Path, settings: Mapping[str, object]) -> int:
    """Count the whole answers in a half-written file, and truncate it after the last one.

    An answer is a line, or for predict with decode.outputs='conll' the lines up to an empty one. Raises UserError if
    they were written with other settings, or if the record of the settings cannot be read. A setting that the record
    lacks, because an older version wrote it, counts as the same.
    """
    if not _is_begun(target):
        return 0
    try:
        before = parse_object(_record(target).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--resume: the settings of {target} cannot be read from {_record(target)} ({reason}); leave out --resume "
            "to overwrite it"
        ) from error
    now = json.loads(json.dumps(settings))
    for key, value in before.items():
        if now.get(key) != value:
            raise UserError(
                f"--resume: {target} was started with {key}={value!r}, this command has {now.get(key)!r}: "
                f"{'take that run' if key == 'model' else 'set it back'}, or leave out --resume to overwrite the file"
            )
    conll = settings["mode"] == "predict" and settings.get("decode.outputs") == "conll"
    return whole_lines(target, last="\n" if conll else "")


def whole_lines(path: Path, last: str = "") -> int:
    """Count the whole lines of a half-written file, or those equal to `last`, and truncate it after the last one."""
    count = read = end = 0
    with path.open("rb+") as file:
        for line in file:
            read += len(line)
            if line == last.encode() if last else line.endswith(b"\n"):
                count, end = count + 1, read
        file.truncate(end)
    return count


def open_output(target: Path, resume: bool, settings: Mapping[str, object]) -> IO[str]:
    """Open a file for appending or overwriting; a plain file begun anew gets its record first."""
    with writing(f"--output={target}"):
        if not (resume and _is_begun(target)) and not is_special(target):
            record = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            replace_content(epath.Path(_record(target)), record.encode())
        return target.open("a" if resume else "w", encoding="utf-8", newline="\n")


@contextlib.contextmanager
def whole_lines_only(target: Path) -> Iterator[None]:
    """Turn a full disk inside the context into a UserError, and cut off a half-written last line.

    Other errors, such as a closed pipe of standard output, pass.
    """
    try:
        yield
    except OSError as error:
        if not target.is_file():
            raise
        done, again = whole_lines(target), "free some space, then continue with --resume"
        raise UserError(
            f"--output={target}: writing failed after {done} lines ({error.strerror or error}); {again}"
        ) from error


def _is_begun(target: Path) -> bool:
    return target.is_file() and target.stat().st_size > 0


def _record(target: Path) -> Path:
    return target.with_name(target.name + RECORD)
