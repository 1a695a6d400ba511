"""What is an imported translator worth to a small corpus? Multi30k from a model of Marian's shape.

A parent learns English to German from pairs of raw text, cased; `hf export` makes it a directory of Marian's, which
transformers loads and writes anew where it is installed, and `hf import` makes that a run. Children learn from few
other pairs, tokenised and lower-cased, that is another spelling: from that run, and from one that went the same way
after a single update. All have one vocabulary, so that their losses can be compared. What was done already is not done
again.

Command:  python -m experiments.papers.finetune_marian --data=PATH/multi30k --workdir=runs/finetune_marian
          [--parent_pairs=20000] [--pairs=4000] [--parent_updates=600] [--updates=100] [--seeds=2] [--smoke]
"""

import importlib.util
import shutil
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from absl import app, flags

from configs import multi30k_tiny
from experiments.measure import smoke_sizes
from experiments.runs import results_of, small_training
from jformer.data.text import read_lines
from jformer.evaluation import records
from jformer.tools.hf.convert import Texts, import_model
from jformer.tools.hf.write_model import export_model

DATA = flags.DEFINE_string("data", None, "Multi30k's folder: raw and tokenised texts, gzipped or not.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "What is made gets directories in it.", required=True)
PARENT_PAIRS = flags.DEFINE_integer("parent_pairs", 20_000, "The first of the training text, for the parent.")
PAIRS = flags.DEFINE_integer("pairs", 4_000, "The next ones, for the children.")
PARENT_UPDATES = flags.DEFINE_integer("parent_updates", 600, "Of the parent.")
UPDATES = flags.DEFINE_integer("updates", 100, "Of a child.")
SEEDS = flags.DEFINE_integer("seeds", 2, "Children of each kind, with seeds 0, 1, …")

RAW, TOKENISED = "", ".lc.norm.tok"  # what the two spellings of the texts add to their files' names
SPLITS = {"train": "train", "valid": "val"}  # our name of a split → that of the files
MODEL: dict[str, Any] = {"num_layers": 2, "num_decoder_layers": 2, "norm_epsilon": 1e-5}  # the last as Marian has it
TRAINED, UNTRAINED = "trained", "untrained"  # what a child begins with


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(parent_pairs=20, pairs=20, parent_updates=2, updates=2, seeds=1)
    folder, rows = Path(WORKDIR.value), []
    for kind, updates in ((TRAINED, PARENT_UPDATES.value), (UNTRAINED, 1)):
        parent = train(folder, f"parent-{kind}", RAW, updates, {"data.vocab_size": 4_000})
        imported = bring_in(folder, parent, kind)
        found = []
        for seed in range(SEEDS.value):
            child = train(
                folder, f"{kind}-{seed}", TOKENISED, UPDATES.value, {"train.init_from": imported, "seed": seed}
            )
            found.append(records.metrics(child)["valid/nll"])
        spread = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
        each = ", ".join(f"{loss:.3f}" for loss in found)
        rows.append(
            f"from the {kind} parent, {UPDATES.value} updates: {statistics.mean(found):.3f}{spread} nats ({each})"
        )
    print("\n".join(rows))


def train(folder: Path, name: str, spelling: str, updates: int, more: dict[str, Any]) -> Path:
    """Return the directory of a run of Multi30k, trained by its own command where it is not trained yet."""
    options = text_options(folder, spelling) | {f"model.{key}": value for key, value in MODEL.items()}
    options |= {"data.train": "train", "data.valid": "valid", "data.test": "()", "evaluate.scores": "()",
                "data.tokens_per_update": 4_096, "data.num_buckets": 2, "optim.schedule": "linear", "optim.warmup": 0.1,
                "optim.learning_rate": 3e-3, "train.num_steps": updates, "train.log_every": 20, "train.samples": 0,
                "train.eval_every": max(1, updates // 2), "train.checkpoint_every": max(1, updates // 2),
                "train.patience": 0, "evaluate.weights": "last"}  # fmt: skip
    if smoke_sizes():
        options |= {**small_training(), "model.num_decoder_layers": 1, "train.eval_every": 2}
    results_of(multi30k_tiny, folder / name, options | more)
    return folder / name


def text_options(folder: Path, spelling: str) -> dict[str, Any]:
    """Write one spelling's part of the texts where it is not written yet, and return the options that read it."""
    target = folder / f"text{spelling}"
    target.mkdir(parents=True, exist_ok=True)
    first = 0 if spelling == RAW else PARENT_PAIRS.value
    last = first + (PARENT_PAIRS.value if spelling == RAW else PAIRS.value)
    if smoke_sizes():
        first, last = 0, PAIRS.value
    for split, name in SPLITS.items():
        begin, end = (first, last) if split == "train" else (0, None)
        for language in ("en", "de"):
            stem = f"{name}{spelling}.{language}"
            found = next(path for path in (Path(DATA.value, stem), Path(DATA.value, f"{stem}.gz")) if path.exists())
            lines = read_lines(found, Counter(), begin, end)
            (target / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return {"data.dir": target}


def bring_in(folder: Path, parent: Path, kind: str) -> Path:
    """Return the parent as a run that was imported, by way of transformers where that is installed."""
    imported, directory = folder / f"imported-{kind}", folder / f"marian-{kind}"
    if (imported / "config.json").exists():
        return imported
    shutil.rmtree(directory, ignore_errors=True)
    print(export_model(str(parent), directory, "marian"), flush=True)
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        import transformers

        anew = folder / f"marian-{kind}-anew"
        transformers.MarianMTModel.from_pretrained(directory).save_pretrained(anew)
        transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(anew)
        print(f"transformers {transformers.__version__} read {directory} and wrote {anew}", flush=True)
        directory = anew
    print(import_model(directory, str(imported), Texts()), flush=True)
    return imported


if __name__ == "__main__":
    app.run(main)
