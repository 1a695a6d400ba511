"""Scores as tables of text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

FRACTIONS = (  # scores from 0 to 1, shown as percentages
    *("exact_match", "token_accuracy", "accuracy", "macro_f1", "micro_f1", "f1"),
    *("span_f1", "span_precision", "span_recall", "retrieval_accuracy"),
)


def score_table(results: Mapping[str, Any]) -> str:
    """Return the scores of results.json as plain text: a column for each test set, then the signatures and notes."""
    sets = scored_sets(results)
    columns = {key: _cells(scores) for key, scores in [*sets.items(), *means(results).items()]}
    labels = list(dict.fromkeys(label for cells in columns.values() for label in cells))
    rows = [["", *columns], *([label, *(cells.get(label, "-") for cells in columns.values())] for label in labels)]
    signatures = {
        f"{name}: {score['signature']}": None
        for scores in sets.values()
        for name, score in scores.items()
        if "signature" in score
    }
    every = ((key, score) for key, scores in sets.items() for score in scores.values())
    notes = {f"{key}: {note}": None for key, score in every for note in score.get("notes", ())}
    return "\n".join([*aligned(rows, 1), *signatures, *notes])


def scored_sets(results: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return key of a test set → name → score, for the entries of results.json that have scores."""
    sets = {
        key: {name: value for name, value in entry.items() if isinstance(value, Mapping) and "score" in value}
        for key, entry in results.items()
        if isinstance(entry, Mapping)
    }
    return {key: scores for key, scores in sets.items() if scores}


def means(results: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the mean of each score over the test sets of several language pairs: trained ones, and "zero-shot"."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for title, trained in (("mean", True), ("zero-shot", False)):
        sets = [scores for key, scores in scored_sets(results).items() if results[key].get("trained") is trained]
        names = [name for name in sets[0] if all(name in scores for scores in sets)] if len(sets) > 1 else []
        mean = {name: [scores[name]["score"] for scores in sets] for name in names}
        found[title] = {name: {"score": _mean(values)} for name, values in mean.items()}
    return {title: scores for title, scores in found.items() if scores}


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(filter(None, values)) / len(values)


def formatted(name: str, value: float | None) -> str:
    """Return the value of a score as text; "nan" if it was not finite."""
    return ("{:.2%}" if name in FRACTIONS else "{:.2f}").format(math.nan if value is None else value)


def aligned(cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table, the first `left` columns aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def _cells(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the cells of a test set's column, by the label of their rows."""
    cells = {}
    for name, score in scores.items():
        label = name.replace("_", " ")
        cells[label] = formatted(name, score["score"])
        for group, value in score.get("by_group", {}).items():
            cells[f"  {label}: {group}"] = formatted(name, value)
    return cells
