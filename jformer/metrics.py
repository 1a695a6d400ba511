"""Numbers that say how well a model does: means of sums, scores of generated text, and their table. No arrays here."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sacrebleu import BLEU, CHRF, TER

from jformer.errors import UserError

FRACTIONS = ("exact_match", "token_accuracy", "accuracy", "macro_f1")  # scores from 0 to 1, shown as percentages


def summarize(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Divide every sum by its count; `correct` becomes accuracy, and `nll` (nats) is given as perplexity too.

    The mean of nothing is nan, which is never better than any loss. A perplexity beyond floats is inf.
    """
    means = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    if "correct" in means:
        means["accuracy"] = means.pop("correct")
    if "nll" in means:
        means["perplexity"] = math.inf if means["nll"] > 700 else math.exp(means["nll"])
    return means


def text_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    names: Sequence[str] = ("bleu", "chrf", "ter"),
) -> dict[str, dict[str, Any]]:
    """Score a corpus with sacreBLEU; each name gets its score (0 to 100) and the signature that makes it comparable.

    `tokenize` is that of BLEU; "none" takes text as it is tokenized already. `lowercase` is for BLEU and chrF: TER, as
    sacreBLEU defines it, ignores case anyway. Raises UserError for a tokenization that is not to be had, ValueError
    for lists that are empty or do not belong together.
    """
    _check_lengths(hypotheses, references)
    if not hypotheses:
        raise ValueError("no text to score")
    scores: dict[str, dict[str, Any]] = {}
    for name in names:
        metric = text_metric(name, tokenize, lowercase)
        result = metric.corpus_score(hypotheses, [references])
        scores[name] = {"score": result.score, "signature": str(metric.get_signature())}
        if name == "bleu":
            precisions = "/".join(f"{precision:.1f}" for precision in result.precisions)
            lengths = f"hyp_len = {result.sys_len} ref_len = {result.ref_len}"
            scores[name]["details"] = f"{precisions} (BP = {result.bp:.3f} ratio = {result.ratio:.3f} {lengths})"
    return scores


def check_scores(names: Sequence[str], tokenize: str, lowercase: bool) -> None:
    """Raise UserError now for a score that `text_scores` could not give later."""
    for name in names:
        text_metric(name, tokenize, lowercase)


def text_metric(name: str, tokenize: str, lowercase: bool) -> Any:
    """Return sacreBLEU's metric of that name; raise UserError for a tokenization that is not to be had."""
    if name == "chrf":
        return CHRF(lowercase=lowercase)
    if name == "ter":
        return TER()
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"evaluate.tokenize={tokenize!r}; choose one of: {', '.join(BLEU.TOKENIZERS)}")
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize, force=tokenize == "none")
    except (ImportError, OSError, RuntimeError) as error:  # some need another package or a download
        reason = " ".join(str(error).split())
        raise UserError(f"evaluate.tokenize={tokenize!r} is not to be had here: {reason}") from error


def exact_match(
    hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the fraction of hypotheses that equal their references, overall and in each group of lines."""
    _check_lengths(hypotheses, references)
    right = [hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True)]
    result: dict[str, Any] = {"score": _mean(right)}
    if groups is not None:
        members: defaultdict[str, list[bool]] = defaultdict(list)
        for group, equal in zip(groups, right, strict=True):
            members[group].append(equal)
        result["by_group"] = {group: _mean(members[group]) for group in sorted(members)}
    return result


def score_table(results: Mapping[str, Any]) -> str:
    """Return the scores of results.json as plain text: a column for each test set, then the signatures."""
    sets = scored_sets(results)
    columns = {key: _cells(scores) for key, scores in sets.items()}
    labels = list(dict.fromkeys(label for cells in columns.values() for label in cells))
    rows = [["", *columns], *([label, *(cells.get(label, "-") for cells in columns.values())] for label in labels)]
    signatures = {
        f"{name}: {score['signature']}": None
        for scores in sets.values()
        for name, score in scores.items()
        if "signature" in score
    }
    return "\n".join([*aligned(rows, 1), *signatures])


def scored_sets(results: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return key of a test set → name → score, for those entries of results.json that have scores."""
    sets = {
        key: {name: value for name, value in entry.items() if isinstance(value, Mapping) and "score" in value}
        for key, entry in results.items()
        if isinstance(entry, Mapping)
    }
    return {key: scores for key, scores in sets.items() if scores}


def aligned(cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table: its first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def _check_lengths(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references")


def _mean(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else math.nan


def _cells(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return what a test set's column says, by the label of its row."""
    cells = {}
    for name, score in scores.items():
        label, form = name.replace("_", " "), "{:.2%}" if name in FRACTIONS else "{:.2f}"
        cells[label] = form.format(score["score"])
        for group, value in score.get("by_group", {}).items():
            cells[f"  {label}: {group}"] = form.format(value)
    return cells
