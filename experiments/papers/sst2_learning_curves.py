"""How many sentences would SST-2 need, and does masked-language pretraining on all text at hand replace some of them?

Design:   an eighth, a quarter, half and all of the training sentences, for naive Bayes, for configs/sst2_bert.py from
          scratch, and for a BERT of two layers of 128 that was trained before on masked pieces of Multi30k's English
          captions, Tiny Shakespeare, WNUT-17 and SST-2's training sentences. The test set is the same 1,821 sentences.
          What was trained already is not trained again.
Command:  python -m experiments.papers.sst2_learning_curves --data=PATH --workdir=runs/sst2_curves --output=curves.png
          [--updates=2000] [--seeds=3] [--smoke]
          PATH holds sst2, multi30k, tinyshakespeare and wnut17; of the last three, those that are there are read.
"""

import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from configs import multi30k_mlm, sst2_bert
from experiments.measure import smoke_sizes
from experiments.papers.naive_bayes import naive_bayes
from experiments.runs import read_split, results_of, small_training
from jformer.evaluation.statistics import Estimate, estimate
from jformer.tools.pages import plots

DATA = flags.DEFINE_string("data", None, "The folder of sst2, and of further text.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "What is trained gets directories in it.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "What to draw to (default: curves.png in the workdir).")
UPDATES = flags.DEFINE_integer("updates", 2_000, "Of masked-language training.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind and size.", lower_bound=1)
SHARES = flags.DEFINE_list("shares", ["0.125", "0.25", "0.5", "1"], "Of the training sentences.")

BERT = {"num_layers": 2, "d_model": 128, "d_ff": 512, "num_heads": 4, "max_length": 64}
TEXTS = {
    "multi30k": "train.lc.norm.tok.en.gz",
    "tinyshakespeare": "input.txt",
    "wnut17": "train.conll",
    "sst2": "train.tsv",
}
SMOKE = {"data.tokenizer": "char", "data.num_buckets": 1}
KINDS = NAIVE_BAYES, SCRATCH, PRETRAINED = "naive Bayes", "sst2_bert, from scratch", "BERT, pretrained"


def main(_: Sequence[str]) -> None:
    """Train what is missing, print the table and draw the curves."""
    smoke_sizes(updates=2, seeds=1, shares=["1"])
    folder = Path(WORKDIR.value)
    sizes = make_folders(folder)
    curves = []
    for kind in KINDS:
        found = [estimate(accuracies(folder, kind, size)) for size in sizes]
        for size, accuracy in zip(sizes, found, strict=True):
            margin = f" ± {100 * accuracy.margin:.2f}" if accuracy.margin else ""
            print(f"{kind}, {size:,} sentences: {100 * accuracy.mean:.2f}{margin} %", flush=True)
        print(f"{kind}: {gain(sizes, found):+.2f} points with each doubling", flush=True)
        margins = [None if accuracy.margin is None else 100 * accuracy.margin for accuracy in found]
        curves.append(plots.Line(kind, sizes, [100 * accuracy.mean for accuracy in found], margins))
    picture = Path(OUTPUT.value or folder / "curves.png")
    picture.write_bytes(plots.lines(curves, "training sentences", "test accuracy, %", logarithmic=True))


def make_folders(folder: Path) -> list[int]:
    """Write a data folder for each share, the larger hold the smaller, and return how many sentences each has."""
    data = Path(DATA.value) / "sst2"
    rows = (data / "train.tsv").read_text().splitlines()
    order = np.random.default_rng(0).permutation(len(rows))
    sizes = [round(float(share) * len(rows)) for share in SHARES.value]
    for size in sizes:
        part = folder / "data" / str(size)
        part.mkdir(parents=True, exist_ok=True)
        (part / "train.tsv").write_text("".join(rows[row] + "\n" for row in sorted(order[:size])))
        for name in ("dev.tsv", "test.tsv"):
            (part / name).write_text((data / name).read_text())
    return sizes


def accuracies(folder: Path, kind: str, size: int) -> list[float]:
    """Return the test accuracy of each seed; naive Bayes has one."""
    data = folder / "data" / str(size)
    if kind == NAIVE_BAYES:
        return [naive_bayes(*(read_split(sst2_bert, data, split) for split in ("train", "test")))]
    options: dict[str, object] = {"data.dir": data}
    if kind == PRETRAINED:
        options |= {"train.init_from": pretrained(folder), "optim.learning_rate": 3e-4, "model.dropout": 0.3}
        options |= {"model.norm": "post", "model.embedding_norm": True, "model.head.num_segments": 2}
        options |= {f"model.{key}": value for key, value in BERT.items()}
    if smoke_sizes():
        options |= {**SMOKE, **small_training("train"), "train.eval_every": 2}
    name = "scratch" if kind == SCRATCH else "pretrained"
    runs = [
        results_of(sst2_bert, folder / f"{name}-{size}-{seed}", {**options, "seed": seed})
        for seed in range(SEEDS.value)
    ]
    return [float(results["test"]["accuracy"]["score"]) for results in runs]


def pretrained(folder: Path) -> Path:
    """Return the run that learned masked pieces of all text, trained by its own command where it is not yet."""
    text = folder / "data" / "text"
    text.mkdir(exist_ok=True)
    (text / "train").write_text("\n".join(sentences()) + "\n")
    dev = read_split(sst2_bert, Path(DATA.value) / "sst2", "dev")
    (text / "valid").write_text("\n".join(pair.source for pair in dev) + "\n")
    options: dict[str, object] = {"data.dir": text, "data.train": "train", "data.valid": "valid", "data.test": "()"}
    options |= {f"model.{key}": value for key, value in BERT.items()} | {"data.overlong": "cut"}
    options |= {"model.dtype": "auto", "data.vocab_size": 8_000, "data.max_source_length": BERT["max_length"]}
    options |= {"train.num_steps": UPDATES.value, "train.checkpoint_every": 500, "train.eval_every": 500}
    if smoke_sizes():
        options |= {**SMOKE, **small_training("train")}
    results_of(multi30k_mlm, folder / "mlm", options)
    return folder / "mlm"


def sentences() -> Iterator[str]:
    """Yield lines of all text there is, in lower case, words apart."""
    for name, file in TEXTS.items():
        path = Path(DATA.value) / name / file
        if not path.exists():
            continue
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        if path.suffix == ".conll":
            text = text.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n")
            text = "\n".join(" ".join(line.split()[::2]) for line in text.splitlines())
        elif path.suffix == ".tsv":
            text = "\n".join(pair.source for pair in read_split(sst2_bert, path.parent, "train"))
        yield from (line.lower() for line in text.splitlines() if line.strip())


def gain(sizes: Sequence[int], found: Sequence[Estimate]) -> float:
    """Return the points of accuracy that a doubling of the sentences brings: the slope over the logarithm."""
    if len(sizes) < 2:
        return math.nan
    return 100 * float(np.polyfit(np.log2(sizes), [accuracy.mean for accuracy in found], 1)[0])


if __name__ == "__main__":
    app.run(main)
