"""How far do rules without learning get on the generated questions, beside configs/facts_qa.py?

Three baselines on 1,000 test questions: a random word of the context; a random one of those training answers to the
same question about anybody that are in the context; and the same in the sentence that shares most words with the
question. Without a candidate, they answer that there is none. The model is trained first unless it has results.

Command:  python -m experiments.papers.question_answering --workdir=runs/facts_qa [--seed=0] [--smoke]
"""

import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from configs import facts_qa
from experiments.measure import smoke_sizes
from experiments.runs import read_split, results_of, small_training
from jformer.data.sources.split import Pair
from jformer.data.spans import words_of
from jformer.tasks.metrics import answer_scores

WORKDIR = flags.DEFINE_string("workdir", None, "The directory of the run.", required=True)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the run.", lower_bound=0)
SMOKE = {"data.tokenizer": "word", "data.num_pairs": 200, "data.test": "('test',)"}


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes()
    results = train(Path(WORKDIR.value))
    training, test = (read_split(facts_qa, split) for split in ("train", "test"))
    answers = known_answers(training)
    rules = {
        "a word of the context": [a_word(pair) for pair in test],
        "an answer of such questions": [of_such(pair, answers, context_of(pair)) for pair in test],
        "the same in the nearest sentence": [of_such(pair, answers, nearest(pair)) for pair in test],
    }
    scores = {name: answer_scores(said, test) for name, said in rules.items()} | {"facts_qa": results["test"]}
    print(f"{'test':<36}{'exact match':>12}{'F1':>8}")
    for name, found in scores.items():
        print(f"{name:<36}{found['exact_match']['score']:>12.1%}{found['f1']['score']:>8.1%}")
    for group, score in results["test"]["exact_match"].get("by_group", {}).items():
        print(f"{f'  facts_qa: {group}':<36}{score:>12.1%}")
    print(f"minutes of training: {results['run']['wall_seconds'] / 60:.1f}")


def train(workdir: Path) -> dict[str, Any]:
    """Return the results of the run, training it by its own command if needed."""
    options = {**small_training(), **SMOKE, "evaluate.during": "()"} if smoke_sizes() else {}
    options |= {"train.best_by": "loss", "evaluate.weights": "last"} if smoke_sizes() else {}
    return results_of(facts_qa, workdir, {"seed": SEED.value, **options})


def context_of(pair: Pair) -> str:
    """Return the context of a question."""
    return pair.source.partition("\t")[2]


def asked_of_somebody(pair: Pair) -> str:
    """Return a question without names: its first word, and those without a capital letter."""
    first, *others = words_of(pair.source.partition("\t")[0])
    return " ".join([first, *(word for word in others if not word[0].isupper())])


def known_answers(pairs: Sequence[Pair]) -> Mapping[str, set[str]]:
    """Return the answers that training has to each question without its names."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        found[asked_of_somebody(pair)] |= {pair.target} - {""}
    return found


def a_word(pair: Pair) -> str:
    """Return a random word of the context."""
    return random.Random(pair.source).choice(words_of(context_of(pair)))


def of_such(pair: Pair, answers: Mapping[str, set[str]], text: str) -> str:
    """Return a random one of the known answers that a text contains, the longest of those that overlap; or ""."""
    there = [
        answer
        for answer in sorted(answers.get(asked_of_somebody(pair), ()))
        if re.search(rf"\b{re.escape(answer)}\b", text)
    ]
    longest = [answer for answer in there if not any(answer in other and answer != other for other in there)]
    return random.Random(pair.source).choice(longest) if longest else ""


def nearest(pair: Pair) -> str:
    """Return the sentence of the context that shares most words with the question, the first of equals."""
    asked = set(words_of(pair.source.partition("\t")[0]))
    return max(context_of(pair).split("."), key=lambda sentence: len(asked & set(words_of(sentence))))


if __name__ == "__main__":
    app.run(main)
