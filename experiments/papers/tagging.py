"""Do models trained from scratch on 3,394 sentences find names that looking up the training names does not?

Baselines against configs/wnut17_tag.py (a BERT) and configs/wnut17_lstm.py (a bidirectional LSTM) with several seeds,
on the 1,287 test sentences of WNUT-17, none of whose names is in training (Derczynski et al. 2017). Seeds that are
trained already are not trained again.

Command:  python -m experiments.papers.tagging --data=PATH/wnut17 --workdir=runs/wnut17 [--seeds=3] [--smoke]
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import app, flags

from configs import wnut17_lstm, wnut17_tag
from experiments.measure import smoke_sizes
from experiments.runs import read_split, results_of, small_training
from jformer.data.sources.split import Pair
from jformer.tasks.span_scores import find_spans
from jformer.tasks.sums import Sum
from jformer.tasks.tag import score

SMOKE = {"train.eval_every": 2, "data.tokenizer": "char", "data.num_buckets": 1, "evaluate.during_examples": 2}
MODELS: dict[str, tuple[ModuleType, Sequence[str]]] = {  # name → config, and options of small_run to leave out
    "BERT": (wnut17_tag, ()),
    "LSTM": (wnut17_lstm, ("model.d_ff", "model.num_heads")),
}
SHOWN = ("span_f1", "span_precision", "span_recall", "accuracy")
NO_SUMS = {"nll": Sum(0.0, 0.0), "correct": Sum(0.0, 0.0)}  # lookups give no probabilities
DATA = flags.DEFINE_string("data", None, "The folder of train.conll, dev.conll and test.conll.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, one for each model and seed.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each model, with seeds 0, 1, …", lower_bound=1)

Tagger = Callable[[Sequence[str]], list[str]]


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(seeds=1)
    train, test = (read_split(wnut17_tag, split, {"data.dir": DATA.value}) for split in ("train", "test"))
    baselines = {"all O": all_outside, "tag of the word": tag_of_word(train), "names of training": names_of(train)}
    print(f"{'percent':<20}" + "".join(f"{name:>16}" for name in (*SHOWN, "minutes")))
    for name, tagger in baselines.items():
        outputs = [" ".join(tagger(pair.source.split())) for pair in test]
        print(row(name, score(outputs, test, NO_SUMS), ""))
    for name, (config, unread) in MODELS.items():
        found = [run(config, unread, seed) for seed in range(SEEDS.value)]
        for seed, result in enumerate(found):
            print(row(f"{name}, seed {seed}", result["test"], f"{result['run']['wall_seconds'] / 60:.1f}"))
        means = {each: {"score": statistics.mean(r["test"][each]["score"] for r in found)} for each in SHOWN}
        print(row(f"{name}, mean", means, ""))


def row(name: str, scores: dict[str, Any], minutes: str) -> str:
    """Return a row of the table."""
    return f"{name:<20}" + "".join(f"{100 * scores[each]['score']:>16.2f}" for each in SHOWN) + f"{minutes:>16}"


def run(config: ModuleType, unread: Sequence[str], seed: int) -> dict[str, Any]:
    """Return the results of one run, training it by its own command if needed."""
    workdir = Path(WORKDIR.value) / f"{config.__name__.rpartition('.')[2]}_seed{seed}"
    small = {key: value for key, value in {**small_training(), **SMOKE}.items() if key not in unread}
    return results_of(config, workdir, {"data.dir": DATA.value, "seed": seed, **(small if smoke_sizes() else {})})


def all_outside(words: Sequence[str]) -> list[str]:
    """Return no name at all."""
    return ["O"] * len(words)


def tag_of_word(train: Sequence[Pair]) -> Tagger:
    """Return a tagger that gives each word the tag it had most often in training, and new words O."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair in train:
        for word, tag in zip(pair.source.split(), pair.target.split(), strict=True):
            counts[word][tag] += 1
    most = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    return lambda words: [most.get(word, "O") for word in words]


def names_of(train: Sequence[Pair]) -> Tagger:
    """Return a tagger that looks up training's names: at each word the longest one, with its most frequent type."""
    counts: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for pair in train:
        words = pair.source.split()
        for span in find_spans(pair.target.split()):
            counts[tuple(words[span.start : span.end])][span.type] += 1
    types = {name: found.most_common(1)[0][0] for name, found in counts.items()}
    longest = max(map(len, types), default=0)

    def tagger(words: Sequence[str]) -> list[str]:
        tags: list[str] = []
        while (i := len(tags)) < len(words):
            sizes = range(min(longest, len(words) - i), 0, -1)
            size = next((n for n in sizes if tuple(words[i : i + n]) in types), 0)
            kind = types.get(tuple(words[i : i + size]), "")
            tags += [f"B-{kind}", *[f"I-{kind}"] * (size - 1)] if size else ["O"]
        return tags

    return tagger


if __name__ == "__main__":
    app.run(main)
