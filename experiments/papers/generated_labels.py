"""Three generated sets that counting words does not solve: tags, several labels, a number. How far do small models get?

configs/parts_of_speech_lstm.py beside the tag that each word has most often; configs/subjects_lstm.py beside the labels
that most training texts with a word have; configs/likeness_bert.py beside the share of words that both sentences hold.
Seeds that are trained already are not trained again. Intervals are 95 % t intervals over the seeds.

Command:  python -m experiments.papers.generated_labels --workdir=runs/generated_labels [--seeds=3] [--smoke]
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from absl import app, flags

from configs import likeness_bert, parts_of_speech_lstm, subjects_lstm
from experiments.measure import smoke_sizes
from experiments.runs import read_split, results_of, small_training
from jformer.config import resolve
from jformer.data.sources.split import Pair
from jformer.evaluation.statistics import estimate
from jformer.tasks.build import build_task
from jformer.tasks.sums import Sum

WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, one for each model and seed.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each model, with seeds 0, 1, …", lower_bound=1)
NO_SUMS = {"nll": Sum(0.0, 0.0), "correct": Sum(0.0, 0.0)}  # word counts give no probabilities

Pairs = Sequence[Pair]


class Question(NamedTuple):
    """A data set with its config, its baseline that counts words, and the scores to report."""

    config: ModuleType
    baseline: str
    answers: Callable[[Pairs, Pairs], list[str]]  # (training, test) → the baseline's
    scores: tuple[str, ...]


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(seeds=1)
    print(f"{'':<42}{'score':<16}{'test':>8}{'±':>8}   minutes")
    for config, baseline, answers, names in QUESTIONS:
        name = config.__name__.rpartition(".")[2]
        train, test = (read_split(config, split) for split in ("train", "test"))
        told = score(config, answers(train, test), test)
        found = [run(name, config, seed) for seed in range(SEEDS.value)]
        minutes = ", ".join(f"{result['run']['wall_seconds'] / 60:.1f}" for result in found)
        for key in names:
            print(f"{baseline:<42}{key:<16}{told[key]['score']:>8.4f}")
            mean, margin, _n = estimate([result["test"][key]["score"] for result in found])
            print(f"{name:<42}{key:<16}{mean:>8.4f}{margin or 0:>8.4f}   {minutes}", flush=True)


def run(name: str, config: ModuleType, seed: int) -> dict[str, Any]:
    """Return the results of one run, training it by its own command if needed."""
    unread = ("model.d_ff", "model.num_heads") if name.endswith("lstm") else ()
    small = {key: value for key, value in small_training().items() if key not in unread}
    small |= {"train.best_by": "loss", "evaluate.during": "()", "evaluate.weights": "last", "data.num_pairs": 200}
    options = {"seed": seed, **(small if smoke_sizes() else {})}
    return results_of(config, Path(WORKDIR.value) / f"{name}-{seed}", options)


def score(config: ModuleType, outputs: Sequence[str], test: Pairs) -> dict[str, Any]:
    """Return the scores that a run's task gives these answers."""
    scores: dict[str, Any] = build_task(resolve(config.get_config())).score(outputs, test, NO_SUMS)
    return scores


def most_frequent_tags(train: Pairs, test: Pairs) -> list[str]:
    """Give every word the tag that it has most often in training, and a new one that of nouns."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair in train:
        for word, tag in zip(pair.source.split(), pair.target.split(), strict=True):
            counts[word][tag] += 1
    most = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    return [" ".join(most.get(word, "NOUN") for word in pair.source.split()) for pair in test]


def labels_of_words(train: Pairs, test: Pairs) -> list[str]:
    """Give a text the labels that more than half of the training texts with one of its words have."""
    texts: Counter[str] = Counter()
    labelled: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair in train:
        for word in set(pair.source.split()):
            texts[word] += 1
            labelled[word].update(pair.target.split(",") if pair.target else ())

    def labels(words: Iterable[str]) -> set[str]:
        return {label for word in words for label, n in labelled[word].items() if 2 * n > texts[word]}

    return [",".join(sorted(labels(pair.source.split()))) for pair in test]


def shared_words(_: Pairs, test: Pairs) -> list[str]:
    """Give two sentences five times the share of their words that are in both (Jaccard)."""
    sides = [[set(text.split()) for text in pair.source.split("\t")] for pair in test]
    return [f"{5 * len(a & b) / len(a | b):.4f}" for a, b in sides]


QUESTIONS = (
    Question(parts_of_speech_lstm, "most frequent tag of the word", most_frequent_tags, ("accuracy", "exact_match")),
    Question(subjects_lstm, "labels of most texts with the word", labels_of_words, ("exact_match", "micro_f1")),
    Question(likeness_bert, "share of words in both", shared_words, ("pearson", "spearman")),
)

if __name__ == "__main__":
    app.run(main)
