"""Read the config, rows, scores and outputs in a run's directory, without JAX; the run may still be training.

A run is given by the path of its directory. A file that is not written yet reads as empty. It is an error if a file
cannot be read, or if something requested by name is missing.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from etils.epath import Path

from jformer.config import load_config
from jformer.config.options import Config
from jformer.data.data_config import DataConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.evaluation.score_tables import means, scored_sets
from jformer.integrity import parse_object, refuse_newer, without_digest
from jformer.storage import content_of, run_path
from jformer.training.rows import is_figure, read_row, read_sample

SCHEMA = 2  # of results.json
RUN_FIGURES = ("parameters", "updates", "wall_seconds")
NO_OUTPUTS = "{}: there are no outputs; score the run again with --mode=evaluate"


def saved_config(run: Path) -> Config:
    """Return the config that the run was trained with; raise UserError if it is missing."""
    return load_config(run_path(run) / "config.json")


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without a last line that is still being written.

    Raises UserError for any other line that is not a row.
    """
    return _read(run_path(run) / "metrics.jsonl", read_row)


def samples(run: Path) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl, answers to the same validation examples over updates, as `rows` does."""
    return _read(run_path(run) / "samples.jsonl", read_sample)


def _read(path: Path, read: Callable[[bytes, str], dict[str, Any]]) -> list[dict[str, Any]]:
    lines = (content_of(path) or b"").split(b"\n")
    # The text after the last line feed is incomplete.
    return [read(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], start=1)]


def results(run: Path) -> dict[str, Any]:
    """Return results.json, or {} if the run is not scored yet; raise UserError if it is invalid."""
    path = run_path(run) / "results.json"
    content = content_of(path)
    if content is None:
        return {}
    try:
        found = without_digest(parse_object(content), str(path))
        refuse_newer(found.get("schema"), SCHEMA, str(path))
        _check_results(found)
    except UserError:  # a wrong digest or a newer schema, with a complete message
        raise
    except ValueError as error:
        raise UserError(
            f"{path}: cannot be read as results ({error}); score the run again with --mode=evaluate"
        ) from error
    return dict(found)


def _check_results(found: Mapping[str, Any]) -> None:
    """Raise ValueError if an object lacks the structure of results that readers rely on."""
    run, earlier, scored = found.get("run"), found.get("earlier", []), scored_sets(found)
    if not isinstance(run, Mapping) or not all(map(is_figure, [run.get(name) for name in RUN_FIGURES])):
        raise ValueError("`run` must be an object whose figures are numbers")
    if not all(map(is_figure, _values(run, "parameters_by_part"))) or not isinstance(run.get("data", []), list):
        raise ValueError("`run` must have its parameters as an object, its data as a list")
    if not isinstance(earlier, list) or not all(isinstance(entry, Mapping) and "set" in entry for entry in earlier):
        raise ValueError("`earlier` must be a list of objects, each with its `set`")
    if not all(isinstance(found[key].get("checksum"), str) for key in scored):
        raise ValueError("every test set must have the `checksum` of its text")
    scores = [score for entry in scored.values() for score in entry.values()]
    if not all(map(is_figure, (value for score in scores for value in [score["score"], *_values(score, "by_group")]))):
        raise ValueError("every `score`, and those `by_group`, must be numbers")
    if not all(isinstance(score.get("notes", []), list) for score in scores):
        raise ValueError("`notes` of a score must be a list")


def _values(entry: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values of an object within an object; anything else is returned as a single, invalid value."""
    inner = entry.get(key, {})
    return list(inner.values()) if isinstance(inner, Mapping) else [inner or ""]


def is_training(run: Path) -> bool:
    """Return whether the run is training, judging by its heartbeat; a killed run still appears to be."""
    path = run_path(run) / "heartbeat.json"
    if not path.exists():
        return False
    try:
        phase = parse_object(path.read_bytes()).get("phase")
        if not isinstance(phase, str):
            raise ValueError("it has no phase")
    except (OSError, ValueError) as error:
        print(f"{path}: cannot be read as a heartbeat ({error}); the run is treated as not training", file=sys.stderr)
        return False
    return phase != "ended"


def metrics(run: Path) -> dict[str, float]:
    """Return the figures that the run has, by name.

    "valid/loss" is from the last row of that split, "test/bleu" and "test/exact_match/GROUP" are scores of a test set,
    which replace a figure of a row with the same name, "mean/bleu" is that of several language pairs, and
    "run/updates" is of the run. Non-finite values are nan.
    """
    last = {row["split"]: row for row in rows(run)}
    figures = {f"{split}/{name}": value for split, row in last.items() for name, value in _numbers(row).items()}
    scored = results(run)
    for key, scores in [*scored_sets(scored).items(), *means(scored).items()]:
        for name, score in scores.items():
            figures[f"{key}/{name}"] = _number(score["score"])
            figures |= {f"{key}/{name}/{group}": _number(value) for group, value in score.get("by_group", {}).items()}
    facts = scored.get("run", {})
    return figures | {f"run/{name}": facts[name] for name in RUN_FIGURES if name in facts}


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of every row that has the figure, such as "valid/loss"; none for a score of a test set."""
    split, _, field = name.partition("/")
    return [(row["step"], _number(row[field])) for row in rows(run) if row["split"] == split and field in row]


def outputs(run: Path, key: str) -> list[str]:
    """Return the answers to a test set, line by line; raise UserError if the run has none."""
    path = run_path(run) / "outputs" / f"{key}.txt"
    lines = _lines(path)
    if lines is None:
        raise UserError(NO_OUTPUTS.format(path))
    return lines


def _lines(path: Path) -> list[str] | None:
    """Return the lines of a file of outputs, None if there is none; raise UserError if it is not text."""
    content = content_of(path)
    try:
        return None if content is None else content.decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise UserError(NO_OUTPUTS.format(path)) from error


def segment_scores(run: Path, key: str, name: str) -> list[float]:
    """Return the score of each answer to a test set by a command; [] if no command has this name."""
    path = run_path(run) / "outputs" / f"{key}.{name}.txt"
    lines = _lines(path)
    if lines is None:
        return []
    try:
        return [*map(float, lines)]
    except ValueError as error:
        raise UserError(f"{path}: {error}; score the run again with --mode=evaluate") from error


def examples(run: Path, key: str, data: DataConfig | None = None) -> list[Pair]:
    """Return a test set, read again from the data that the run's config, or `data`, names.

    Raises UserError if it no longer exists, or differs from the set that the run was scored on.
    """
    data, entry = data or saved_config(run).data, results(run).get(key)
    names = data.test_sets()
    if not isinstance(entry, Mapping):
        raise UserError(f"{run}: has no scores of a test set {key!r}; its config has {', '.join(names)}")
    if key not in names:
        raise UserError(f"{run}: {key!r} is not a test set of the config, which has {', '.join(names)}: name data.test")
    split = open_split(*names[key])
    if split.fingerprint != entry.get("checksum"):
        raise UserError(f"{run}: test set {key!r} has changed since the run was scored; score it again")
    return list(split.read(Counter()))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in row.items() if name not in ("step", "split")}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
