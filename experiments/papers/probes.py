"""Which layer knows what a word is, and what "it" stands for? Linear probes of every layer of a Transformer encoder.

Claims:   Tenney et al. 2019 (BERT Rediscovers the Classical NLP Pipeline): parts of speech are there in lower layers
          than what a pronoun refers to. Alain and Bengio 2016: probes are linear, and trained on frozen vectors.
Design:   parts of speech: a small BERT of masked words reads the sentences of experiments.sources.parts_of_speech, half
          of whose words have several; a ridge regression reads a word's tag from its vector. "it": generated sentences,
          "the dog did not cross the road because it was too tired" or "wide", in which the last adjective decides; an
          encoder learns from a token in front which noun is meant; the probe reads from the vector of "it" whether it
          is the first or the second noun. Held-out sentences, 95 % t intervals over seeds; layer 0 is the input.
Command:  python -m experiments.papers.probes --workdir=runs/probes [--seeds=3] [--smoke]
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

import jformer
from experiments.measure import smoke_sizes
from experiments.sources import parts_of_speech
from jformer.data.tokenizers import BOS
from jformer.errors import STOPPED
from jformer.evaluation.statistics import estimate
from jformer.tools.pages.plots import PlottedLine, lines

WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, the table and the picture.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each run.", lower_bound=1)
UPDATES = flags.DEFINE_integer("updates", 400, "Updates of each run; five times as many for masked words.")
PROBED = flags.DEFINE_integer("probed", 300, "Sentences to train the probes on, and as many to test them on.")

ACTORS, THINGS = (
    ("dog", "nurse", "child", "pilot", "cat", "horse"),
    ("road", "river", "bridge", "field", "lake", "wall"),
)
OF_ACTOR, OF_THING = ("tired", "hungry", "afraid", "ill"), ("wide", "long", "deep", "old")
VERBS = ("cross", "reach", "leave", "pass")
ORDERS = ("the {0} did not {2} the {1} because it was too {3}", "the {1} was not for the {0} to {2} because it was {3}")
LAYERS = 4
MODEL: dict[str, Any] = {
    "family": "encoder", "num_layers": LAYERS, "d_model": 48, "d_ff": 96, "num_heads": 4, "norm": "pre", "dropout": 0.0,
}  # fmt: skip
NAMES = ("input/output", "encoder/block/output")


def main(_: list[str]) -> None:
    """Print accuracy by layer, and draw it."""
    smoke_sizes(seeds=1, updates=4, probed=20)
    folder = Path(WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, probe in {"what it stands for": referent, "part of speech": speech}.items():
        found = np.array([probe(folder, seed) for seed in range(SEEDS.value)])  # [seeds, layers + 1 and the baseline]
        shown = [estimate((100 * column).tolist()) for column in found.T]
        for layer, one in enumerate(shown[:-1]):
            margin = "" if one.margin is None else f" ± {one.margin:.1f}"
            print(f"{name}, layer {layer}: {one.mean:.1f}{margin} %")
        print(f"{name}, without a model: {shown[-1].mean:.1f} %", flush=True)
        each = shown[:-1]
        drawn.append(PlottedLine(name, range(LAYERS + 1), [one.mean for one in each], [one.margin for one in each]))
    (folder / "probes.png").write_bytes(lines(drawn, "layer", "accuracy of the probe, %"))


def speech(folder: Path, seed: int) -> list[float]:
    """Return the accuracy of tags of words with several, by layer, and that of each word's most frequent tag."""
    pairs = parts_of_speech.build(2_000)
    texts = {name: [pair.source for pair in found] for name, found in pairs.items()}
    run = train(folder, "mlm", texts, {"source": "text", "tokenizer": "word", "vocab_size": 200}, seed, passes=5)
    tags = {pair.source: pair.target.split() for found in pairs.values() for pair in found}
    kinds: dict[str, Counter[str]] = {}
    for text in texts["train"]:
        for word, tag in zip(text.split(), tags[text], strict=True):
            kinds.setdefault(word, Counter())[tag] += 1
    sets = []
    for split in ("train", "test"):
        chosen = texts[split][: PROBED.value]
        states, begin = read(run, chosen)
        words = [
            (row, begin + place, word, tag)
            for row, text in enumerate(chosen)
            for place, (word, tag) in enumerate(zip(text.split(), tags[text], strict=True))
            if len(kinds.get(word, ())) > 1
        ]
        vectors = np.stack([states[:, row, place] for row, place, *_ in words], axis=1)
        sets.append((vectors, [tag for *_, tag in words], [word for _, _, word, _ in words]))
    (x, y, _), (test_x, test_y, test_words) = sets
    frequent = np.mean([kinds[word].most_common(1)[0][0] == tag for word, tag in zip(test_words, test_y, strict=True)])
    return [*(probed(x[i], y, test_x[i], test_y) for i in range(LAYERS + 1)), float(frequent)]


def referent(folder: Path, seed: int) -> list[float]:
    """Return the accuracy of which noun "it" is, by layer, and that of the more frequent one."""
    drawn = sentences()
    split = {"train": drawn[:1_600], "valid": drawn[1_600:1_800], "test": drawn[1_800:]}
    texts = {name: [f"{text}\t{noun}" for text, noun, _ in found] for name, found in split.items()}
    run = train(folder, "classify", texts, {"source": "labelled", "tokenizer": "word", "vocab_size": 200}, seed)
    sets = []
    for name in ("train", "test"):
        chosen = split[name][: PROBED.value]
        states, begin = read(run, [text for text, _, _ in chosen])
        vectors = [states[:, row, begin + text.split().index("it")] for row, (text, _, _) in enumerate(chosen)]
        sets.append((np.stack(vectors, axis=1), [first for _, _, first in chosen]))
    (x, y), (test_x, test_y) = sets
    frequent = max(Counter(test_y).values()) / len(test_y)
    return [*(probed(x[i], y, test_x[i], test_y) for i in range(LAYERS + 1)), frequent]


def sentences() -> list[tuple[str, str, str]]:
    """Return all sentences in a random order, the noun that "it" is in each, and whether that is the first."""
    everything = list(itertools.product(ORDERS, ACTORS, THINGS, VERBS, (*OF_ACTOR, *OF_THING)))
    found = []
    for i in np.random.default_rng(0).permutation(len(everything)).tolist():
        order, actor, thing, verb, adjective = everything[i]
        noun = actor if adjective in OF_ACTOR else thing
        first = (order == ORDERS[0]) == (noun == actor)
        found.append((order.format(actor, thing, verb, adjective), noun, "first" if first else "second"))
    return found


def train(
    folder: Path, task: str, texts: dict[str, list[str]], data: dict[str, Any], seed: int, passes: int = 1
) -> Any:
    """Return the Predictor of a run on these lines, training it first if needed, `passes` times as long."""
    steps = passes * UPDATES.value
    lines_of, workdir = folder / task, folder / f"{task}-{steps}-{seed}"
    lines_of.mkdir(exist_ok=True)
    ending = "tsv" if task == "classify" else "txt"
    for name, found in texts.items():
        (lines_of / f"{name}.{ending}").write_text("".join(f"{line}\n" for line in found))
    named = {} if task == "classify" else {"train": "train.txt", "valid": "valid.txt", "test": ("test=test.txt",)}
    head = {"pooling": "first"} if task == "classify" else {}
    config = {
        "task": task,
        "seed": seed,
        "model": {**MODEL, "head": head},
        "data": {**data, **named, "dir": str(lines_of), "cache_dir": str(folder / "cache"), "num_buckets": 1}
        | {"tokens_per_update": 1_024},
        "optim": {"schedule": "constant", "learning_rate": 3e-3, "warmup": 50, "label_smoothing": 0.0},
        "train": {"num_steps": steps, "eval_every": 0, "checkpoint_every": steps, "samples": 0, "log_every": steps},
    }
    if not jformer.train(config, workdir):
        raise SystemExit(STOPPED)
    return jformer.load(workdir)


def read(run: Any, texts: Sequence[str]) -> tuple[np.ndarray, int]:
    """Return the vectors [layers + 1, n, t, d_model] of texts, nothing of them hidden, and where the first word is."""
    encoded = [list(ids) for ids in run.inputs.encoder.source.encode(texts)]
    length = max(map(len, encoded))
    ids = np.array([[*each, *[0] * (length - len(each))] for each in encoded], np.int32)
    real = np.array([[i < len(each) for i in range(length)] for each in encoded], np.int32)
    places = np.tile(np.arange(length, dtype=np.int32), (len(ids), 1))
    batch: Any = {"source": ids, "source_segments": real, "source_positions": places, "source_types": 0 * ids}
    seen = jax.jit(lambda params, batch: jformer.activations(run.model, params, batch, NAMES))(run.params, batch)
    return np.concatenate([seen[NAMES[0]][None], seen[NAMES[1]]]), int(encoded[0][0] == BOS)


def probed(x: np.ndarray, y: Sequence[str], test_x: np.ndarray, test_y: Sequence[str]) -> float:
    """Return the accuracy on test vectors [n d] of a ridge regression onto the classes of y."""
    classes = sorted({*y, *test_y})
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    ones = lambda z: np.c_[(z - mean) / deviation, np.ones(len(z))]  # noqa: E731
    targets = np.eye(len(classes))[[classes.index(each) for each in y]]
    design = ones(x)
    weights = np.linalg.solve(design.T @ design + 1.0 * np.eye(design.shape[1]), design.T @ targets)
    found = (ones(test_x) @ weights).argmax(1)
    return float(np.mean([classes[i] == each for i, each in zip(found, test_y, strict=True)]))


if __name__ == "__main__":
    app.run(main)
