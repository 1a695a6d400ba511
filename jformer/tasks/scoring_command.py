"""Scores of texts by a user's command, such as one that runs COMET; cached by content.

evaluate.command reads a line `{"source": …, "answer": …, "references": […]}` for each text on standard input, and
writes a number, or `{"score": number}`, for each on standard output; larger is better. It is started once for all texts
that are scored together, by the main process alone.
"""

import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jformer import plugins
from jformer.config.options import BESIDE_SCORES, Config, score_commands
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair
from jformer.errors import BrokenRunError, UserError
from jformer.integrity import parse_json
from jformer.parallel import processes
from jformer.tasks.metrics import Scores
from jformer.tasks.sums import Sums
from jformer.tasks.task import Score

KEY = "evaluate.command"
SHOWN = 200  # characters of a command's output, in an error
CREATE = "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL) WITHOUT ROWID"
SELECT, INSERT = "SELECT score FROM scores WHERE key = ?", "INSERT OR REPLACE INTO scores VALUES (?, ?)"


class Segment(NamedTuple):
    """A text to score."""

    source: str
    answer: str
    references: Sequence[str] = ()  # empty for reference-free quality estimation


def check_commands(config: Config) -> None:
    """Raise UserError early for a command that `segment_scores` cannot start."""
    for name, command in score_commands(config.evaluate).items():
        if name in BESIDE_SCORES:
            raise UserError(f"{KEY}={command!r}: no score may be named {name!r}: rename its file")
        plugins.check_command(KEY, command)
        if processes.is_main_process() and not shutil.which(program := shlex.split(command)[0]):
            raise UserError(f"{KEY}={command!r} cannot be started: there is no program {program!r}")


def with_commands(config: Config, score: Score) -> Score:
    """Return a task's scores with those of every command: its mean, and its score of each output."""

    def scored(outputs: Sequence[str], examples: Sequence[Pair], sums: Sums) -> Scores:
        found = score(outputs, examples, sums)
        both = zip(outputs, examples, strict=True)
        segments = [Segment(pair.source, text, pair.references) for text, pair in both]
        for name, command in score_commands(config.evaluate).items():
            each = segment_scores(config, name, segments)
            found[name] = {"score": math.fsum(each) / len(each), "signature": command, "segments": each}
        return found

    return scored


def segment_scores(config: Config, name: str, segments: Sequence[Segment]) -> list[float]:
    """Return the score of every segment from the command of that name; all processes get the scores of the main one.

    Scores cached in data.cache_dir are reused, unless a file that the command names has changed.

    Raises UserError for a command from a saved config, and BrokenRunError for one that fails or takes too long, and for
    invalid scores.
    """
    check_commands(config)
    command = score_commands(config.evaluate)[name]
    lines = [json.dumps(segment._asdict()) for segment in segments]

    def score() -> list[float]:
        files = [Path(word) for word in shlex.split(command) if os.path.isfile(word)]  # noqa: PTH113 - words may be long
        identity = " ".join([command, *(digest(path).sha256 for path in files)])
        with _open_cache(Path(config.data.cache_dir).expanduser() / "scores.sqlite") as cache:
            keys = {line: hashlib.sha256(f"{identity} {line}".encode()).digest() for line in lines}
            found = {line: row[0] for line, key in keys.items() if (row := cache.execute(SELECT, [key]).fetchone())}
            missing = [line for line in keys if line not in found]
            if missing:
                found |= zip(missing, _run(command, missing, config.evaluate.command_seconds), strict=True)
                with cache:
                    cache.executemany(INSERT, [(keys[line], found[line]) for line in missing])
        return [found[line] for line in lines]

    return processes.from_main_process(score)


@contextlib.contextmanager
def _open_cache(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the table of scores, which several runs may share."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as cache:
            cache.execute(CREATE)
            yield cache
    except (OSError, sqlite3.Error) as error:
        raise BrokenRunError(f"{path}: cannot be used as a cache of scores ({error}): delete it") from error


def _run(command: str, lines: Sequence[str], seconds: float) -> list[float]:
    """Return the number that a command writes for every line; `seconds` is its time limit, 0 = none."""
    try:
        text = "".join(line + "\n" for line in lines).encode()
        with processes.working_elsewhere():
            done = subprocess.run(shlex.split(command), input=text, capture_output=True, timeout=seconds or None)
    except OSError as error:
        raise BrokenRunError(f"{KEY}={command!r} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        why = f"took longer than evaluate.command_seconds={seconds:g} for {len(lines)} texts: raise it, or set 0"
        raise BrokenRunError(f"{KEY}={command!r} {why}{_last_words(error.stderr)}") from error
    if done.returncode:
        raise BrokenRunError(f"{KEY}={command!r} ended with exit status {done.returncode}{_last_words(done.stderr)}")
    answers = [line.decode(errors="replace") for line in done.stdout.splitlines()]  # not at U+2028, as a str would
    scores = [*map(_number, answers)]
    wrong = next((i for i, score in enumerate(scores) if not math.isfinite(score)), None)
    if wrong is not None:
        what = f"line {wrong + 1} of its output is {answers[wrong][:SHOWN]!r}, not a finite number"
    elif len(scores) != len(lines):
        what = f"it wrote {len(scores)} numbers for {len(lines)} texts, not one for each"
    else:
        return scores
    raise BrokenRunError(f"{KEY}={command!r}: {what}{_last_words(done.stderr)}")


def _number(line: str) -> float:
    """Return the number in a line of a command; NaN for anything else."""
    try:
        value = parse_json(line)
        score = value["score"] if isinstance(value, dict) else value
        return math.nan if isinstance(score, bool) else float(score)
    except (ValueError, TypeError, KeyError, OverflowError):
        return math.nan


def _last_words(stderr: bytes | None) -> str:
    lines = (stderr or b"").decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; it wrote: {last[-SHOWN:]}" if last else ""
