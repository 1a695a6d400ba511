"""How much does monolingual text of the target language improve a translator of Multi30k?

Claims:   Sennrich et al. 2016 (Improving Neural Machine Translation Models with Monolingual Data): sources written by a
          model of the other direction turn target text into useful pairs. Caswell et al. 2019 (Tagged
          Back-Translation): a tag that distinguishes them from real pairs helps more.
Design:   English to German, as configs/multi30k_tiny.py but Pre-LN and in smaller updates. Half of the pairs stay; of
          the other half only the German lines, whose sources a German to English model of the first half writes with
          beams. Baseline, back-translated and tagged runs have the same updates, and one vocabulary each, learned from
          what they read. The test set is scored once; differences are within seeds. Finished work is not repeated.
Command:  python -m experiments.papers.back_translation --data=PATH/multi30k --workdir=runs/back [--seeds=3] [--smoke]
"""

import gzip
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from configs import multi30k_tiny
from experiments.measure import smoke_sizes
from experiments.papers.two_directions import FIXED
from experiments.runs import results_of, small_training
from jformer import main as front
from jformer.evaluation.statistics import estimate, paired_difference

DATA = flags.DEFINE_string("data", None, "The folder of Multi30k.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs and their data.", required=True)
UPDATES = flags.DEFINE_integer("updates", 2_400, "Updates of every run into German.", lower_bound=1)
REVERSE = flags.DEFINE_integer("reverse", 1_200, "Updates of the run into English.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind, with seeds 0, 1, …", lower_bound=1)
KINDS = BASELINE, BACK, TAGGED = "half", "back-translated", "tagged"
TRAIN, TAG = "train.lc.norm.tok", "<BT>"


class Score(NamedTuple):
    """A run's test BLEU, and the minutes that it took, with everything it depends on."""

    bleu: float
    minutes: float


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(updates=2, reverse=2, seeds=1)
    folder = Path(WORKDIR.value) / f"{UPDATES.value}-{REVERSE.value}"  # what it holds depends on both
    halve(folder)
    scores: dict[str, list[Score]] = {kind: [] for kind in KINDS}
    for seed in range(SEEDS.value):
        for kind in KINDS:
            scores[kind].append(score(folder, kind, seed))
    for line in table(scores):
        print(line, flush=True)


def halve(folder: Path) -> None:
    """Write a folder of Multi30k with every other training pair, and the German lines of the others beside it."""
    pairs, begun = folder / "pairs", folder / "pairs.begun"
    if pairs.exists():
        return
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    for path in Path(DATA.value).absolute().glob("*.lc.norm.tok.*"):
        if path.name.startswith(TRAIN):
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            name, lines = path.name.removesuffix(".gz"), text.splitlines(keepends=True)
            (begun / name).write_bytes(b"".join(lines[::2]))
            (folder / f"alone{Path(name).suffix}").write_bytes(b"".join(lines[1::2]))
        else:
            (begun / path.name).symlink_to(path)
    begun.rename(pairs)


def back_translate(folder: Path, seed: int) -> float:
    """Write the sources of the German lines, plain and tagged, and return the minutes that it took the first time."""
    reverse, written = folder / f"reverse-{seed}", folder / f"written-{seed}.en"
    into_english = {"data.source_language": "de", "data.target_language": "en"}
    minutes = trained(folder, "reverse", seed, REVERSE.value, into_english).minutes
    started, spent = time.monotonic(), folder / f"written-{seed}.minutes"
    if all((folder / f"{kind}-{seed}" / "results.json").exists() for kind in (BACK, TAGGED)):  # both have read them
        return minutes + (float(spent.read_text()) if spent.exists() else math.nan)
    words = ["--mode=predict", "--resume", f"--workdir={reverse}"]
    if code := front.main(["jformer", *words, f"--input={folder / 'alone.de'}", f"--output={written}"]):
        raise SystemExit(code)
    sources = written.read_text(encoding="utf-8").splitlines(keepends=True)
    for kind, tag in ((BACK, ""), (TAGGED, f"{TAG} ")):
        corpus = folder / f"{kind}-{seed}-pairs"
        corpus.mkdir(exist_ok=True)
        (corpus / "train.en").write_text("".join(tag + source for source in sources), encoding="utf-8")
        (corpus / "train.de").write_text((folder / "alone.de").read_text(encoding="utf-8"), encoding="utf-8")
    if not spent.exists():
        spent.write_text(str((time.monotonic() - started) / 60))
    return minutes + float(spent.read_text())


def score(folder: Path, kind: str, seed: int) -> Score:
    """Return the score of a run into German."""
    options: dict[str, object] = {}
    minutes = 0.0
    if kind != BASELINE:
        minutes = back_translate(folder, seed)
        options["data.mixture"] = ({"dir": str(folder / f"{kind}-{seed}-pairs")},)
    if kind == TAGGED:
        options["data.symbols"] = (TAG,)
    found = trained(folder, kind, seed, UPDATES.value, options)
    return found._replace(minutes=minutes + found.minutes)


def trained(folder: Path, name: str, seed: int, updates: int, options: Mapping[str, object]) -> Score:
    """Return a run's score, training it first if needed."""
    options = {**FIXED, "seed": seed, "data.dir": folder / "pairs", "train.num_steps": updates, **options}
    if updates == 2:
        options |= {**small_training("model", "optim"), "train.samples": 0, "decode.max_extra_length": 2}
    results = results_of(multi30k_tiny, folder / f"{name}-{seed}", options)
    return Score(results["test"]["bleu"]["score"], results["run"]["wall_seconds"] / 60)


def table(scores: dict[str, list[Score]]) -> Iterator[str]:
    """Report each kind's BLEU and minutes, and its differences from the baseline within seeds."""
    baseline = [found.bleu for found in scores[BASELINE]]
    for kind, found in scores.items():
        bleu = estimate([each.bleu for each in found])
        margin = "" if bleu.margin is None else f" ± {bleu.margin:.2f}"
        difference = paired_difference([each.bleu for each in found], baseline)
        gain = f"{difference.mean:+.2f}" + ("" if difference.margin is None else f" ± {difference.margin:.2f}")
        each = ", ".join(f"{value.bleu:.2f}" for value in found)
        yield f"{kind}: {bleu.mean:.2f}{margin} BLEU ({each}), {gain}, {found[0].minutes:.0f} minutes"


if __name__ == "__main__":
    app.run(main)
