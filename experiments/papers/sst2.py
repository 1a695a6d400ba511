"""Does an encoder trained from scratch on 6,920 sentences read their sentiment better than counting words does?

Multinomial naive Bayes against configs/sst2_bert.py with several seeds, on the 1,821 test sentences of SST-2. Seeds
that are trained already are not trained again.

Command:  python -m experiments.papers.sst2 --data=PATH/sst2 --workdir=runs/sst2 [--seeds=3] [--smoke]
"""

import statistics
from pathlib import Path
from typing import Any

from absl import app, flags

from configs import sst2_bert
from experiments.measure import smoke_sizes
from experiments.papers.naive_bayes import naive_bayes
from experiments.runs import read_split, results_of, small_training

SMOKE = {"train.eval_every": 2, "data.tokenizer": "char", "data.num_buckets": 1}
DATA = flags.DEFINE_string("data", None, "The folder of train.tsv, dev.tsv and test.tsv.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, one for each seed.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs, with seeds 0, 1, …", lower_bound=1)


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(seeds=1)
    workdirs = [Path(WORKDIR.value) / f"seed{seed}" for seed in range(SEEDS.value)]
    results = [train(seed, workdir) for seed, workdir in enumerate(workdirs)]
    accuracies = [result["test"]["accuracy"]["score"] for result in results]
    print(f"{'test accuracy':<28}{'percent':>8}{'minutes':>10}")
    known, asked = (read_split(sst2_bert, split, {"data.dir": DATA.value}) for split in ("train", "test"))
    print(f"{'naive Bayes':<28}{100 * naive_bayes(known, asked):>8.2f}")
    for seed, (accuracy, result) in enumerate(zip(accuracies, results, strict=True)):
        minutes = result["run"]["wall_seconds"] / 60
        print(f"{f'sst2_bert, seed {seed}':<28}{100 * accuracy:>8.2f}{minutes:>10.1f}")
    print(f"{'sst2_bert, mean':<28}{100 * statistics.mean(accuracies):>8.2f}")
    if len(accuracies) > 1:
        print(f"{'sst2_bert, deviation':<28}{100 * statistics.stdev(accuracies):>8.2f}")


def train(seed: int, workdir: Path) -> dict[str, Any]:
    """Return the results of one run, training it by its own command if needed."""
    options = {**small_training(), **SMOKE} if smoke_sizes() else {}
    return results_of(sst2_bert, workdir, {"data.dir": DATA.value, "seed": seed, **options})


if __name__ == "__main__":
    app.run(main)
