"""Check that scored runs are comparable: the same test text, the same metric, the same training budget.

Each kind of difference can be allowed by name (`compare --despite`), and is then reported as a caution.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UserError, check_choice
from jformer.evaluation import records
from jformer.evaluation.score_tables import scored_sets
from jformer.storage import run_path

KINDS = ("signature", "data", "budget")
TOKENS = (
    *("tokenizer", "vocab_size", "vocab_shared", "vocab_temperature", "vocabulary", "character_coverage", "symbols"),
    *("byte_fallback", "normalization", "split_digits", "bpe_dropout", "segmentations", "language_symbols"),
)


@dataclasses.dataclass(frozen=True)
class ScoredRun:
    """A run to compare."""

    path: Path
    config: Config
    results: Mapping[str, Any]
    metrics: Mapping[str, float]


def allowed_kinds(despite: str) -> list[str]:
    """Return the kinds that a comma-separated list names; raise UserError for an unknown one."""
    allowed = list(filter(None, despite.split(",")))
    for kind in allowed:
        check_choice("--despite", kind, KINDS)
    return allowed


def refuse_few(paths: Sequence[str]) -> None:
    """Raise UserError for fewer than two runs, and for one that is named twice."""
    if len(paths) < 2 or len({run_path(path) for path in paths}) < len(paths):
        raise UserError(f"{' '.join(paths)}: name two or more runs to compare, each once")


def read(path: str) -> ScoredRun:
    """Return a run; raise UserError if it is missing or not scored."""
    where = run_path(path)
    config, results = records.saved_config(where), records.results(where)
    if not results:
        raise UserError(f"{path}: is not scored yet: python -m jformer.main --workdir={path} --mode=evaluate")
    return ScoredRun(where, config, results, records.metrics(where))


def refuse_apart(runs: Sequence[ScoredRun], allowed: Sequence[str]) -> list[str]:
    """Return cautions about allowed differences from the first run; raise UserError for the others."""
    apart = {(kind, text): None for run in runs[1:] for kind, text in obstacles(runs[0], run)}
    refused = [f"{kind} ({text})" for kind, text in apart if kind not in allowed]
    if refused:
        kinds = ",".join(dict.fromkeys([*allowed, *(kind for kind, _ in apart)]))
        raise UserError(f"these runs differ in {'; '.join(refused)}: --despite={kinds} compares them anyway")
    return [f"compared although the {kind} differs: {text}" for kind, text in apart]


def obstacles(first: ScoredRun, other: ScoredRun) -> Iterator[tuple[str, str]]:
    """Yield (kind, description) of the differences that make two runs not comparable."""
    against = " against ".join(named_runs([other, first]))
    ours, theirs = scored_sets(first.results), scored_sets(other.results)
    if not ours.keys() & theirs.keys():
        yield "data", f"{against}: no test set in common"
    for key in sorted(ours.keys() & theirs.keys()):
        if first.results[key]["checksum"] != other.results[key]["checksum"]:
            yield "data", f"{against}: {key!r} is not the same text"
        for name in sorted(ours[key].keys() & theirs[key].keys()):
            signatures = [scores[key][name].get("signature", "") for scores in (theirs, ours)]
            if signatures[0] != signatures[1]:
                yield "signature", f"{against}: {key}/{name} {' against '.join(signatures)}"
    budgets = [(run.results["run"].get("updates") or 0, run.config.data.tokens_per_update) for run in (other, first)]
    if math.prod(budgets[0]) != math.prod(budgets[1]):
        yield "budget", f"{against}: {' against '.join(f'{n:,} updates of {size:,} tokens' for n, size in budgets)}"
    tokens = {name: [getattr(run.config.data, name) for run in (other, first)] for name in TOKENS}  # tokenization
    apart = {name: values for name, values in tokens.items() if values[0] != values[1]}
    for name, values in apart.items():
        yield "budget", f"{against}: tokens of data.{name}={values[0]} against {values[1]}"
    trained = [trained_on(run) for run in (other, first)]
    if not apart and trained[0] != trained[1]:  # another tokenization implies other data
        yield "data", f"{against}: trained on {' against '.join(trained)}"


def trained_on(run: ScoredRun) -> str:
    """Return the short fingerprints of the training text; "" for a run that is not scored."""
    return ", ".join(str(text)[:8] for text in run.results.get("run", {}).get("data", []))


def named_runs(runs: Sequence[ScoredRun]) -> dict[str, ScoredRun]:
    """Return the runs by name, or by their whole paths if names are not unique."""
    named = {run.path.name or str(run.path): run for run in runs}
    return named if len(named) == len(runs) else {str(run.path): run for run in runs}
