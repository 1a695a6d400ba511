"""Scores of answers against references: texts, labels, numbers, spans. Imports no JAX."""

import functools
import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from itertools import zip_longest
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np
from sacrebleu import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEUScore

from jformer import plugins
from jformer.config.options import Config
from jformer.data.progress import counted
from jformer.data.sources.split import Pair
from jformer.data.text import UNSPACED_LANGUAGES, language_code
from jformer.errors import UserError
from jformer.plugins import is_own


class ScoreEntry(TypedDict):
    """A score in results.json."""

    score: float
    signature: NotRequired[str]  # sacreBLEU's, which makes scores comparable
    details: NotRequired[str]
    by_group: NotRequired[dict[str, float]]  # if examples, or spans in them, are of several kinds
    segments: NotRequired[list[float]]  # that a command gave each output; stored in a file of the run's outputs
    notes: NotRequired[list[str]]  # what a reader of the score should know, shown once


Scores = dict[str, ScoreEntry]
"""Name of a score → its entry in results.json."""


class TextOptions(TypedDict, total=False):
    """Options of `text_scores`."""

    tokenize: str  # that of BLEU, as `tokenization` gives it; "none" is for tokenized text
    lowercase: bool  # for BLEU and chrF; sacreBLEU's TER ignores case anyway
    names: Sequence[str]  # of the scores


class OwnScore(Protocol):
    """A user-defined score, which evaluate.scores names as `package.module:function`."""

    def __call__(self, hypotheses: Sequence[str], references: "References") -> float:
        """Score texts, one for each example, against one or several lists of references, as in `text_scores`."""


References = Sequence[Sequence[Any]]
"""One or several whole texts; None for a line without that many references."""

TOKENIZATIONS = {  # language, by ISO 639-1 and 639-3 → sacreBLEU's tokenizations for it, the first that works here
    **dict.fromkeys(UNSPACED_LANGUAGES, ("char",)),  # flores200 is a download
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), ("zh",)),
    **dict.fromkeys(("ja", "jpn"), ("ja-mecab", "char")),
    **dict.fromkeys(("ko", "kor"), ("ko-mecab", "char")),
}
ASIAN = ("zh", "ja-mecab", "ko-mecab", "char")  # tokenizations with which TER splits Han and Kana
NEAR_ZERO, FAR_FROM_ZERO = 1.0, 20.0  # scores of BLEU and chrF that contradict each other
NO_WORDS = (
    "BLEU is near 0 and chrF is not: tok:{} finds few 4-grams in these texts; if they are written without "
    "spaces, set data.target_language, or evaluate.tokenize=zh, ja-mecab or char"
)
NO_4_GRAMS = "BLEU is 0.00 because no output has four words: read chrF or exact match instead"
TOKENIZED = (
    "{} outputs end in a space and a period: BLEU expects detokenized text; for tokenized text set "
    "evaluate.tokenize=none"
)
MANY = 100  # sacreBLEU's limit for the same warning


def text_scores(
    hypotheses: Sequence[str],
    references: References,
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    names: Sequence[str] = ("bleu", "chrf", "ter"),
) -> Scores:
    """Score a corpus with sacreBLEU; each name gets its score (0 to 100) and the signature that makes it comparable.

    Args:
        hypotheses: one a line.
        references: one or several whole texts, as `reference_texts` gives them.
        tokenize: that of BLEU, as `tokenization` gives it; "none" is for tokenized text.
        lowercase: for BLEU and chrF; sacreBLEU's TER ignores case anyway.
        names: of scores, or user-defined ones: `package.module:function` (hypotheses, references) → float.

    Raises UserError for a tokenization that is not available, ValueError for lists that are empty or do not belong
    together.
    """
    for text in references:
        _check_lengths(hypotheses, text)
    if not hypotheses:
        raise ValueError("no text to score")
    scores: Scores = {}
    for name in names:
        if is_own(name):
            own: OwnScore = plugins.find("evaluate.scores", name, {})
            scores[name] = {"score": float(own(hypotheses, references))}
            continue
        metric = text_metric(name, tokenize, lowercase)
        result = metric.corpus_score(hypotheses, references)
        scores[name] = {"score": result.score, "signature": str(metric.get_signature())}
        if isinstance(result, BLEUScore):
            precisions = "/".join(f"{precision:.1f}" for precision in result.precisions)
            lengths = f"hyp_len = {result.sys_len} ref_len = {result.ref_len}"
            scores[name]["details"] = f"{precisions} (BP = {result.bp:.3f} ratio = {result.ratio:.3f} {lengths})"
            notes = []
            near = result.score < NEAR_ZERO and CHRF().corpus_score(hypotheses, references).score > FAR_FROM_ZERO
            if not result.totals[-1] and any(hypotheses) and (not near or any(" " in text for text in hypotheses)):
                notes.append(NO_4_GRAMS)
            elif near:
                notes.append(NO_WORDS.format(tokenize))
            if tokenize != "none" and (count := sum(text.endswith(" .") for text in hypotheses)) >= MANY:
                notes.append(TOKENIZED.format(count))
            if notes:
                scores[name]["notes"] = notes
    return scores


def reference_texts(examples: Sequence[Pair]) -> list[list[str | None]]:
    """Return the first reference of all examples, then each further one of them, text by text; None where missing."""
    return [list(text) for text in zip_longest(*(pair.references for pair in examples))]


def reference_notes(examples: Sequence[Pair]) -> list[str]:
    """Return lines about blank references: how many are left out, and how many examples have no others."""
    written = [pair for pair in examples if pair.references[0].strip()]
    missing, blank = sum(1 + len(pair.others) - len(pair.references) for pair in written), len(examples) - len(written)
    notes = [f"{counted(missing, 'blank references')} left out: their examples have others"] if missing else []
    if blank:
        notes.append(f"{counted(blank, 'examples')} whose only reference is blank: an answer there is wrong")
    return notes


def tokenization(config: Config, language: str = "") -> str:
    """Return evaluate.tokenize; for "auto" what sacreBLEU recommends for a language, by default data.target_language.

    MeCab's are replaced by "char" if it is not installed. An unknown language gets "13a".
    """
    if config.evaluate.tokenize != "auto":
        return config.evaluate.tokenize
    names = TOKENIZATIONS.get(language_code(language or config.data.target_language), ("13a",))
    return next((name for name in names[:-1] if _is_available(name)), names[-1])


@functools.cache
def _is_available(tokenize: str) -> bool:
    try:
        text_metric("bleu", tokenize, lowercase=False)
    except UserError:
        return False
    return True


def check_scores(names: Sequence[str], tokenize: str, lowercase: bool) -> None:
    """Raise UserError early for a score that `text_scores` cannot compute."""
    for name in names:
        if not is_own(name):
            text_metric(name, tokenize, lowercase)


def text_metric(name: str, tokenize: str, lowercase: bool) -> Metric:
    """Return sacreBLEU's metric of that name; raise UserError for a tokenization that is not available."""
    if name == "chrf":
        return CHRF(lowercase=lowercase)
    if name == "ter":
        return TER(normalized=tokenize in ASIAN, asian_support=tokenize in ASIAN)
    if name != "bleu":
        raise ValueError(f"no text metric {name!r}")
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"evaluate.tokenize={tokenize!r}; choose one of: {', '.join(BLEU.TOKENIZERS)}")
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize, force=True)  # `text_scores` notes tokenized text once
    except (ImportError, OSError, RuntimeError) as error:  # some need another package or a download
        reason = " ".join(str(error).split())
        raise UserError(f"evaluate.tokenize={tokenize!r} is not available here: {reason}") from error


def exact_match(
    hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
) -> ScoreEntry:
    """Return the fraction of hypotheses that equal their references, overall and in each group of lines."""
    _check_lengths(hypotheses, references)
    right = [hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True)]
    return _in_groups(right, groups)


def f1_scores(outputs: Sequence[Set[str]], labels: Sequence[Set[str]]) -> dict[str, float]:
    """Return F1, the harmonic mean of precision and recall, of sets of labels.

    `micro_f1` counts all labels together; `macro_f1` is the mean over labels that occur on either side, 1 if none does.
    """
    right = Counter(label for output, wanted in zip(outputs, labels, strict=True) for label in output & wanted)
    met = Counter(label for each in (*outputs, *labels) for label in each)
    each = [2 * right[label] / count for label, count in met.items()]
    micro = 2 * right.total() / met.total() if met else 1.0
    return {"micro_f1": micro, "macro_f1": sum(each) / len(each) if each else 1.0}


def agreement(found: Sequence[float], wanted: Sequence[float]) -> dict[str, float]:
    """Return the correlation of numbers (Pearson) and of their ranks (Spearman), and the mean squared error.

    A correlation with a constant is nan, and so are all values if any number is.
    """
    from scipy.stats import rankdata  # takes half a second to import, and few runs need it

    a, b = np.array(found), np.array(wanted)
    return {
        "pearson": _correlation(a, b),
        "spearman": _correlation(rankdata(a, nan_policy="propagate"), rankdata(b, nan_policy="propagate")),
        "mean_squared_error": float(np.mean((a - b) ** 2)),
    }


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt((a @ a) * (b @ b)) if np.ptp(a) and np.ptp(b) else 0.0  # a rounded mean differs from a constant
    return float(a @ b) / norm if norm else math.nan


def answer_scores(answers: Sequence[str], examples: Sequence[Pair]) -> Scores:
    """Return SQuAD's exact match and F1 (Rajpurkar et al. 2016, section 6; 2018 for questions without an answer).

    Both are means over examples of `answer_values`, overall and in each group of examples where there are several.
    """
    groups = [pair.group for pair in examples] if len({pair.group for pair in examples}) > 1 else None
    return {name: _in_groups(values, groups) for name, values in answer_values(answers, examples).items()}


def answer_values(answers: Sequence[str], examples: Sequence[Pair]) -> dict[str, list[float]]:
    """Return exact match and F1 of every answer: the best value over an example's answers.

    Answers that normalize to nothing are ignored if there are others.
    """
    _check_lengths(answers, [pair.target for pair in examples])
    references = [[text for text in (pair.target, *pair.others) if normalized(text)] or [""] for pair in examples]
    measures: dict[str, Callable[[str, str], float]] = {
        "exact_match": lambda answer, reference: float(normalized(answer) == normalized(reference)),
        "f1": token_f1,
    }
    return {
        name: [max(measure(answer, each) for each in texts) for answer, texts in zip(answers, references, strict=True)]
        for name, measure in measures.items()
    }


def normalized(answer: str) -> str:
    """Return an answer in lower case, without ASCII punctuation and articles, with single spaces between words.

    >>> normalized("The  U.S.-led “force”")
    'usled “force”'
    """
    kept = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def token_f1(answer: str, reference: str) -> float:
    """Return F1, the harmonic mean of precision and recall, of the bag of an answer's words.

    If either side has no words, F1 is 1 if neither has any, else 0.
    """
    found, right = normalized(answer).split(), normalized(reference).split()
    if not found or not right:
        return float(found == right)
    return 2 * (Counter(found) & Counter(right)).total() / (len(found) + len(right))


def _in_groups(values: Sequence[float], groups: Sequence[str] | None) -> ScoreEntry:
    """Return the mean of the values, overall and in each group if there are groups."""
    found: ScoreEntry = {"score": _mean(values)}
    if groups is not None:
        members: defaultdict[str, list[float]] = defaultdict(list)
        for group, value in zip(groups, values, strict=True):
            members[group].append(value)
        found["by_group"] = {group: _mean(members[group]) for group in sorted(members)}
    return found


def _check_lengths(hypotheses: Sequence[str], references: Sequence[str | None]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references")


def _mean(right: Sequence[float]) -> float:
    return sum(right) / len(right) if right else math.nan
