"""What is an imported translator worth to a small corpus? Multi30k from a model of Marian's shape.

A parent learns English to German from pairs of raw text, cased; `hf export` makes it a directory of Marian's, which
transformers loads and writes anew where it is installed, and `hf import` makes that a run. Children learn from few
other pairs, tokenised and lower-cased, that is another spelling: from that run, and from nothing, with subwords of
their own. What was done already is not done again.

Command:  python -m experiments.finetune_marian --data=PATH/multi30k --workdir=runs/finetune_marian
          [--parent_pairs=20000] [--pairs=4000] [--parent_updates=600] [--updates=100] [--test_pairs=1000] [--seeds=2] [--smoke]
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
from experiments.runs import flags_of, results_of, small_training
from jformer.checkpoints.hf.convert import Texts, import_model
from jformer.checkpoints.hf.export import export_model
from jformer.data.text import read_lines

DATA = flags.DEFINE_string("data", None, "Multi30k's folder: raw and tokenised texts, gzipped or not.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "What is made gets directories in it.", required=True)
PARENT_PAIRS = flags.DEFINE_integer("parent_pairs", 20_000, "The first of the training text, for the parent.")
PAIRS = flags.DEFINE_integer("pairs", 4_000, "The next ones, for the children.")
PARENT_UPDATES = flags.DEFINE_integer("parent_updates", 600, "Of the parent.")
UPDATES = flags.DEFINE_integer("updates", 100, "Of a child.")
TEST_PAIRS = flags.DEFINE_integer("test_pairs", 1_000, "The first of test_2016, which everything is scored by.")
SEEDS = flags.DEFINE_integer("seeds", 2, "Children of each kind, with seeds 0, 1, …")

RAW, TOKENISED = "", ".lc.norm.tok"  # what the two spellings of the texts add to their files' names
TEST = "test_2016_flickr"
MODEL: dict[str, Any] = {"num_layers": 2, "num_decoder_layers": 2, "norm_epsilon": 1e-5}  # the last as Marian has it
KINDS = {"the imported parent": 1e-3, "nothing": 3e-3}  # what a child begins with, and its learning rate


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(parent_pairs=20, pairs=20, parent_updates=2, updates=2, seeds=1)
    folder = Path(WORKDIR.value)
    parent = folder / "parent"
    train(folder, parent, RAW, PARENT_UPDATES.value, 3e-3, {"data.vocab_size": 4_000})
    imported = bring_in(folder, parent)
    rows = [("the parent, untouched", [untouched(folder, imported)], 0)]
    for kind, rate in KINDS.items():
        begins = {"train.init_from": imported} if kind != "nothing" else {"data.vocab_size": 2_000}
        name = kind.split()[-1]
        found = [
            train(folder, folder / f"from-{name}-{seed}", TOKENISED, UPDATES.value, rate, {**begins, "seed": seed})
            for seed in range(SEEDS.value)
        ]
        rows.append((f"from {kind}", found, UPDATES.value))
    for name, scores, updates in rows:
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        each = ", ".join(f"{score:.2f}" for score in scores)
        print(f"{name}, {updates} updates: BLEU {statistics.mean(scores):.2f}{spread} ({each})")


def train(folder: Path, workdir: Path, spelling: str, updates: int, rate: float, more: dict[str, Any]) -> float:
    """Return the BLEU of a run of Multi30k, trained by its own command where it is not trained yet."""
    options = {"data.train": "train", "data.valid": "valid", "data.test": "('test',)"} | text_options(folder, spelling)
    options |= {f"model.{key}": value for key, value in MODEL.items()}
    options |= {"data.tokens_per_update": 4_096, "data.num_buckets": 2, "optim.schedule": "linear", "optim.warmup": 0.1,
                "optim.learning_rate": rate, "train.num_steps": updates, "train.log_every": 50, "train.samples": 0,
                "train.eval_every": updates // 2, "train.checkpoint_every": updates // 2, "train.patience": 0,
                "evaluate.weights": "last", "evaluate.scores": "('bleu',)", "decode.beam_size": 1}  # fmt: skip
    if smoke_sizes():
        options |= {**small_training(), "model.num_decoder_layers": 1, "train.eval_every": 2, "decode.max_length": 4}
    results = results_of(multi30k_tiny, workdir, options | more)
    return float(results["test"]["bleu"]["score"])


def text_options(folder: Path, spelling: str) -> dict[str, Any]:
    """Write one spelling's part of the texts where it is not written yet, and return the options that read it."""
    target = folder / f"text{spelling}"
    target.mkdir(parents=True, exist_ok=True)
    first = 0 if spelling == RAW else PARENT_PAIRS.value
    last = first + (PARENT_PAIRS.value if spelling == RAW else PAIRS.value)
    if smoke_sizes():
        first, last = 0, PAIRS.value
    names = {"train": "train", "valid": "val", "test": TEST}
    for split, (begin, end) in {"train": (first, last), "valid": (0, None), "test": (0, TEST_PAIRS.value)}.items():
        for language in ("en", "de"):
            name = f"{names[split]}{spelling}.{language}"
            found = next(path for path in (Path(DATA.value, name), Path(DATA.value, f"{name}.gz")) if path.exists())
            lines = read_lines(found, Counter(), begin, end)
            (target / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return {"data.dir": target}


def bring_in(folder: Path, parent: Path) -> Path:
    """Return the parent as a run that was imported, by way of transformers where that is installed."""
    imported, directory = folder / "imported", folder / "marian"
    if (imported / "config.json").exists():
        return imported
    shutil.rmtree(directory, ignore_errors=True)
    print(export_model(str(parent), directory, "marian"), flush=True)
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        import transformers

        directory = folder / "marian-anew"
        transformers.MarianMTModel.from_pretrained(folder / "marian").save_pretrained(directory)
        transformers.AutoTokenizer.from_pretrained(folder / "marian").save_pretrained(directory)
        print(f"transformers {transformers.__version__} read {folder / 'marian'} and wrote {directory}", flush=True)
    print(import_model(directory, str(imported), Texts()), flush=True)
    return imported


def untouched(folder: Path, imported: Path) -> float:
    """Return the BLEU of the imported run itself on the children's test text."""
    from jformer import main as front
    from jformer.evaluation import records

    options = text_options(folder, TOKENISED) | {"evaluate.tokenize": "none", "evaluate.scores": "('bleu',)"}
    if not (imported / "results.json").exists():
        code = front.main(["jformer", f"--workdir={imported}", "--mode=evaluate", *flags_of(options)])
        if code:
            raise SystemExit(code)
    return float(records.results(imported)["test"]["bleu"]["score"])


if __name__ == "__main__":
    app.run(main)
