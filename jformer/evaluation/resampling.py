"""Scores of a test set recomputed from a run's outputs, with intervals by bootstrap (Koehn 2004). No JAX."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
from etils.epath import Path

from jformer.config.options import TEXT_SCORES, Config
from jformer.data.sources.split import Pair
from jformer.data.tokenizers.lists import NORMALIZATIONS, label_set
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.results import SETTINGS
from jformer.evaluation.score_tables import scored_sets
from jformer.evaluation.statistics import Ratios, Resampled, paired_bootstrap, paired_bootstrap_of_ratios
from jformer.tasks.cider import cider_d
from jformer.tasks.metrics import answer_values, reference_texts, text_metric, tokenization
from jformer.tasks.span_scores import span_counts

SHARES = ("exact_match", "accuracy", "retrieval_accuracy")  # of lines, or of words, that are correct
OF_LABELS = ("micro_f1", "macro_f1")
OF_SPANS: Mapping[str, tuple[int, ...]] = {  # name → what its denominator counts: 1 = found, 2 = reference spans
    "span_f1": (1, 2),
    "span_precision": (1,),
    "span_recall": (2,),
}
RESAMPLED = (*TEXT_SCORES, "cider", "f1", *OF_LABELS, *OF_SPANS, *SHARES)
TOO_SLOW = ("ter",)  # to resample for every report


def is_resampled(config: Config, name: str) -> bool:
    """Return whether a score of the config's task is computed from the lines of the outputs."""
    return name in RESAMPLED and config.task != "mlm"  # accuracy of mlm counts tokens and has no outputs


def resample(config: Config, name: str, outputs: Sequence[Sequence[str]], pairs: Sequence[Pair]) -> list[Resampled]:
    """Score the outputs of several runs for one test set, with intervals, and p against the first run.

    The config, from `of_test_set`, has the task, the language and the score options. Returns [] for a score that these
    outputs do not determine.
    """
    if name in TEXT_SCORES:
        metric = text_metric(name, tokenization(config), config.evaluate.lowercase)
        return paired_bootstrap(metric, outputs[0], outputs[1:], reference_texts(pairs))
    systems = [ratios for each in outputs if (ratios := ratios_of(config, name, each, pairs))]
    return paired_bootstrap_of_ratios(len(pairs), systems) if len(systems) == len(outputs) else []


def as_scored(config: Config, key: str, entry: Mapping[str, Any]) -> Config:
    """Return the config of a test set with the score options that its entry in results.json was computed with."""
    used = entry.get(SETTINGS, {}).get("evaluate", {})
    options = {name: used[name] for name in ("tokenize", "lowercase") if name in used}
    own = config.of_test_set(key)
    return dataclasses.replace(own, evaluate=dataclasses.replace(own.evaluate, **options))


def resample_segments(segments: Sequence[Sequence[float]]) -> list[Resampled]:
    """Return the mean scores by a command, as `resample` does, given the score of each answer; [] if runs lack them."""
    if not all(segments):
        return []
    return paired_bootstrap_of_ratios(len(segments[0]), [*map(_mean, segments)])


def intervals(config: Config, run: Path, results: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return (test set, score) → half width of its 95 % interval, for scores that can be recomputed from the outputs.

    Sentences are drawn with a fixed seed. A run without its outputs or data has none.
    """
    found = {}
    for key, scores in scored_sets(results).items():
        try:
            outputs, pairs = records.outputs(run, key), records.examples(run, key, config.data)
        except (UserError, OSError):
            continue
        if not outputs or len(outputs) != len(pairs):
            continue
        for name, entry in scores.items():
            resampled = resample_segments([records.segment_scores(run, key, name)])
            if is_resampled(config, name) and name not in TOO_SLOW:
                with contextlib.suppress(UserError):  # a tokenizer of BLEU may not be installed here
                    resampled = resample(as_scored(config, key, results[key]), name, [outputs], pairs)
            for again in resampled:
                if math.isclose(again.score, entry["score"] or 0.0, abs_tol=1e-6):
                    found[key, name] = again.margin
    return found


def ratios_of(config: Config, name: str, outputs: Sequence[str], pairs: Sequence[Pair]) -> Ratios | None:
    """Return what each line contributes to a score of the config's task; None if the score is not a ratio of sums."""
    if name == "cider":  # document frequencies stay those of the whole test set
        return _mean(cider_d(outputs, [pair.references for pair in pairs]))
    if config.task == "qa":
        values = answer_values(outputs, pairs)
        return _mean(values[name]) if name in values else None
    if config.task == "tag":
        return _of_tags(name, [text.split() for text in outputs], [pair.target.split() for pair in pairs])
    if config.task == "classify":
        normalize = NORMALIZATIONS[config.data.normalization]
        return _of_labels(config.data.labels, name, outputs, [normalize(pair.target) for pair in pairs])
    if name in SHARES:
        return _mean([out in pair.references for out, pair in zip(outputs, pairs, strict=True)])
    return None


def _of_labels(kind: str, name: str, outputs: Sequence[str], targets: Sequence[str]) -> Ratios | None:
    parted = (lambda text: set(label_set(text))) if kind == "several" else (lambda text: {text} - {""})
    found, wanted = [parted(text) for text in outputs], [parted(text) for text in targets]
    if name in SHARES:
        return _mean([ours == theirs for ours, theirs in zip(found, wanted, strict=True)])
    if name in OF_LABELS and kind != "number":
        return _f1(name, [[labels] for labels in found], [[labels] for labels in wanted])
    return None


def _of_tags(name: str, found: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> Ratios | None:
    both = list(zip(found, wanted, strict=True))
    if name == "exact_match":
        return _mean([ours == theirs for ours, theirs in both])
    if name == "accuracy":
        right = [sum(map(str.__eq__, ours, theirs)) for ours, theirs in both]
        return _ratio(right, [len(theirs) for _, theirs in both])
    if name in OF_LABELS:
        return _f1(name, *([[{tag} for tag in tags] for tags in side] for side in (found, wanted)))
    if name in OF_SPANS:
        by = OF_SPANS[name]
        counts = [[each.total() for each in span_counts(ours, theirs)] for ours, theirs in both]
        return _ratio([len(by) * each[0] for each in counts], [sum(each[i] for i in by) for each in counts])
    return None


def _f1(name: str, found: Sequence[Sequence[AbstractSet[str]]], wanted: Sequence[Sequence[AbstractSet[str]]]) -> Ratios:
    """Return F1 of labels; a line has one set of labels for each labelled item, such as a word."""
    entries = [
        (line, label, label in ours & theirs)
        for line, sets in enumerate(zip(found, wanted, strict=True))
        for ours, theirs in zip(*sets, strict=True)
        for label in (*ours, *theirs)
    ]
    lines, labels, shared = zip(*entries, strict=True) if entries else ((), (), ())
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    classes = [number[label] if name == "macro_f1" else 0 for label in labels]
    return Ratios(
        lines=np.array(lines, int),
        classes=np.array(classes, int),
        parts=np.array(shared, float),
        wholes=np.ones(len(lines)),
        empty=1.0,
    )


def _mean(values: Sequence[float]) -> Ratios:
    return _ratio(values, np.ones(len(values)))


def _ratio(parts: Sequence[float], wholes: Sequence[float] | np.ndarray) -> Ratios:
    lines = np.arange(len(parts))
    return Ratios(
        lines=lines,
        classes=np.zeros_like(lines),
        parts=np.array(parts, float),
        wholes=np.asarray(wholes, float),
    )
