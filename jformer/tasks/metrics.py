"""Scores of generated text against references. Imports no JAX."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sacrebleu import BLEU, CHRF, TER

from jformer.data.sources.split import Pair
from jformer.errors import UserError


def text_scores(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    names: Sequence[str] = ("bleu", "chrf", "ter"),
) -> dict[str, dict[str, Any]]:
    """Score a corpus with sacreBLEU; each name gets its score (0 to 100) and the signature that makes it comparable.

    `references` holds one or several whole texts, as `reference_texts` gives them. `tokenize` is that of BLEU; "none"
    takes text as it is tokenized already. `lowercase` is for BLEU and chrF: TER, as sacreBLEU defines it, ignores case
    anyway. Raises UserError for a tokenization that is not to be had, ValueError for lists that are empty or do not
    belong together.
    """
    for text in references:
        _check_lengths(hypotheses, text)
    if not hypotheses:
        raise ValueError("no text to score")
    scores: dict[str, dict[str, Any]] = {}
    for name in names:
        metric = text_metric(name, tokenize, lowercase)
        result = metric.corpus_score(hypotheses, references)
        scores[name] = {"score": result.score, "signature": str(metric.get_signature())}
        if name == "bleu":
            precisions = "/".join(f"{precision:.1f}" for precision in result.precisions)
            lengths = f"hyp_len = {result.sys_len} ref_len = {result.ref_len}"
            scores[name]["details"] = f"{precisions} (BP = {result.bp:.3f} ratio = {result.ratio:.3f} {lengths})"
    return scores


def reference_texts(examples: Sequence[Pair]) -> list[list[str]]:
    """Return the targets of all examples, and then each further reference of them, text by text."""
    return [[pair.target for pair in examples], *map(list, zip(*(pair.others for pair in examples), strict=True))]


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
    if name != "bleu":
        raise ValueError(f"no text metric {name!r}")
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


def _check_lengths(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references")


def _mean(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else math.nan
