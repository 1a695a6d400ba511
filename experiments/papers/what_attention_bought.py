"""What did attention buy, and what did the Transformer buy after it? Translation by the length of the source.

Four models of as many parameters (their width follows from that), trained on as many tokens of Multi30k with the same
loss, batches, beams and average of checkpoints: an LSTM without attention that reads the source backwards (Sutskever et
al. 2014), a GRU with additive attention (Bahdanau et al. 2015), an LSTM with multiplicative attention and input feeding
(Luong et al. 2015), and the Transformer. The plot is that of Bahdanau et al. 2015, figure 2. No rate was tuned.
Decoding speed is that of the first 256 test sentences, after compilation, per second of CPU time, which other load
hardly affects; training speed is by the clock, the median over a run.

Command:  python -m experiments.papers.what_attention_bought --data=PATH/multi30k --workdir=runs/attention
          [--updates=600] [--tokens=2048] [--vocabulary=3000] [--seeds=3] [--only=NAME] [--smoke]
          Runs that WORKDIR/runs.csv has with these options are not trained again; its other rows are kept.
"""

import functools
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from absl import app, flags

import jformer
from configs import multi30k_tiny, quickstart
from experiments.measure import smoke_sizes
from experiments.runs import read_split, results_of, small_run
from jformer.config import default_config, resolve
from jformer.config.presets import PRESETS
from jformer.evaluation import records
from jformer.evaluation.statistics import estimate
from jformer.models import build_model, param_shapes
from jformer.tasks.metrics import text_scores
from jformer.tools.pages.plots import PlottedLine, lines

DATA = flags.DEFINE_string("data", "", "The folder of Multi30k; --smoke needs none.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Every run gets a directory in it, and the table and plot.", required=True
)
UPDATES = flags.DEFINE_integer("updates", 600, "Updates of each run.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 2_048, "Tokens of an update, padding included.", lower_bound=1)
VOCABULARY = flags.DEFINE_integer("vocabulary", 3_000, "Entries of the joint BPE.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each model, with seeds 0, 1, …", lower_bound=1)

REFERENCE = "Transformer"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name → preset, what else is set
    "no attention": ("luong_tiny", {"recurrent.attention": "none", "recurrent.input_feeding": False}),
    "additive attention": ("rnnsearch_tiny", {}),
    "multiplicative attention": ("luong_tiny", {}),
    REFERENCE: ("transformer_tiny", {"num_layers": 2}),
}
ONLY = flags.DEFINE_multi_enum("only", [*MODELS], [*MODELS], "A model to train; all of them unless one is named.")
RATES = {REFERENCE: 3e-3}
RATE, CLIP = 2e-3, 1.0  # of recurrent models
LENGTHS = ((1, 9), (10, 12), (13, 15), (16, 19), (20, 99))  # words of a source
SCORES = ("BLEU", *(f"{low}-{high}" for low, high in LENGTHS))
SPEEDS = ("tokens/s", "decoded/s")  # of both sides, in training; sentences that are written
KEYS = ("model", "d_model", "parameters", "updates", "tokens", "seed")  # parameters tell vocabularies apart
COLUMNS = (*KEYS, *SCORES, *SPEEDS)
TIMED = 256  # sentences
HEAD = f"{'model':<26}" + "".join(f"{name:>11}" for name in COLUMNS[1:])


def main(_: list[str]) -> None:
    """Train what is missing, print a row for each run, and draw the means by length."""
    smoke_sizes(updates=2, seeds=1)
    rows = 40 if smoke_sizes() else VOCABULARY.value
    wanted = parameters(*MODELS[REFERENCE], rows)
    print(HEAD, flush=True)
    drawn, means = [], []
    widths = {name: equal_width(*MODELS[name], rows, wanted) for name in ONLY.value}
    found: dict[str, list[list[float]]] = {name: [] for name in ONLY.value}
    folder = Path(WORKDIR.value)
    known = known_scores(folder / "runs.csv")
    for seed, name in itertools.product(range(SEEDS.value), ONLY.value):  # all models of a seed, then the next one
        preset, changes = MODELS[name]
        sized = {**changes, "d_model": widths[name]}
        cells = (widths[name], parameters(preset, sized, rows), UPDATES.value, TOKENS.value, seed)
        key = (name, *map(str, cells))
        known[key] = known.get(key) or score(name, preset, sized, seed)
        found[name].append(known[key])
        print(row(name, (*cells, *(f"{x:,.1f}" for x in found[name][-1]))), flush=True)
    for name, scores in found.items():
        each = [estimate(values) for values in zip(*scores, strict=True)]
        means.append(row(name, ("", "", "", "", "mean", *(f"{x.mean:,.1f}" for x in each))))
        means.append(row("  95 %", ("", "", "", "", "±", *(f"{x.margin or 0:,.1f}" for x in each))))
        middles = [(low + min(high, 24)) / 2 for low, high in LENGTHS]
        by_length = each[1 : len(SCORES)]
        drawn.append(PlottedLine(name, middles, [x.mean for x in by_length], [x.margin for x in by_length]))
    table = [(*key, *(f"{x:.6g}" for x in scores)) for key, scores in known.items()]
    (folder / "runs.csv").write_text("".join(",".join(cells) + "\n" for cells in [COLUMNS, *table]))
    (folder / "bleu_by_length.png").write_bytes(lines(drawn, "words of the source", "BLEU"))
    print("\n".join(("", HEAD, *means)))
    print(f"{folder}: runs.csv, bleu_by_length.png; means of {SEEDS.value} seeds with 95 % t intervals")


def known_scores(path: Path) -> dict[tuple[str, ...], list[float]]:
    """Return the scores of an earlier table by KEYS."""
    head, *rows = path.read_text().splitlines() if path.exists() else [",".join(COLUMNS)]
    if head != ",".join(COLUMNS):
        raise SystemExit(f"{path} does not tell the options of its rows: name another --workdir")
    cells = [line.split(",") for line in rows]
    return {tuple(row[: len(KEYS)]): [float(cell) for cell in row[len(KEYS) :]] for row in cells}


def row(name: str, cells: Sequence[object]) -> str:
    """Return a line of the table."""
    return f"{name:<26}" + "".join(f"{cell:>11}" for cell in cells)


def score(name: str, preset: str, changes: dict[str, Any], seed: int) -> list[float]:
    """Train and score one run if needed; return BLEU overall and by length, and both speeds."""
    options = options_of(name, preset, changes) | {"seed": seed}
    sizes = f"{UPDATES.value}x{TOKENS.value}-{VOCABULARY.value}"
    workdir = Path(WORKDIR.value) / f"{name.replace(' ', '_')}-{sizes}-{seed}"
    results_of(base(), workdir, options)
    outputs = records.outputs(workdir, "test")
    test = read_split(base(), "test", options)
    sources, references = [pair.source for pair in test], [pair.target for pair in test]
    found = [bleu(outputs, references)]
    for low, high in LENGTHS:
        some = [i for i, source in enumerate(sources) if low <= len(source.split()) <= high]
        found.append(bleu([outputs[i] for i in some], [references[i] for i in some]) if some else 0.0)
    pace = statistics.median(pace for _, pace in records.curve(workdir, "train/tokens_per_second"))
    return [*found, pace, decoded_a_second(workdir, sources[:TIMED])]


def decoded_a_second(workdir: Path, sources: Sequence[str]) -> float:
    """Return how many sentences a run writes in a second of the CPU's time, measured once."""
    path = workdir / "decoded_a_second.json"
    if not path.exists():
        predictor = jformer.load(workdir)
        predictor.predict(sources)  # compiles
        began = time.process_time()
        predictor.predict(sources)
        path.write_text(json.dumps(len(sources) / (time.process_time() - began)))
    return float(json.loads(path.read_text()))


def base() -> ModuleType:
    """Return the config that all models change."""
    return quickstart if smoke_sizes() else multi30k_tiny


def bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU of texts that are tokens already."""
    return float(text_scores(outputs, [references], tokenize="none", names=("bleu",))["bleu"]["score"])


def options_of(name: str, preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return what a model sets in the config of the Transformer's run."""
    plain, given = (flat(each.model.to_dict()) for each in (default_config(), base().get_config()))
    unset = {key: value for key, value in plain.items() if given[key] != value}  # what the config file sets
    options = {f"model.{key}": value for key, value in {**unset, **flat(PRESETS[preset]), **changes}.items()}
    options |= {"model.dropout": 0.1, "optim.warmup": 150.0, "optim.learning_rate": RATES.get(name, RATE)}
    options |= {} if name in RATES else {"optim.clip_norm": CLIP}
    if smoke_sizes():
        small = {key: value for key, value in small_run(UPDATES.value).items() if not key.startswith("model.")}
        return {**options, **small, "model.execution.unroll": 1, "data.test": "('test',)"}
    updates = UPDATES.value
    return {**options, "data.dir": DATA.value, "train.num_steps": updates, "train.patience": 0,
            "train.eval_every": updates // 2, "train.checkpoint_every": updates // 20, "model.dtype": "auto",
            "data.tokens_per_update": TOKENS.value, "data.vocab_size": VOCABULARY.value, "data.num_buckets": 3,
            "evaluate.average_last": 5}  # fmt: skip


def flat(preset: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a preset with dots between the names."""
    return {
        f"{key}.{inner}" if inner else key: value
        for key, given in preset.items()
        for inner, value in (given.items() if isinstance(given, dict) else [("", given)])
    }


@functools.cache
def _count(preset: str, changes: tuple[tuple[str, Any], ...], rows: int) -> int:
    config = default_config(preset)
    config.model.update_from_flattened_dict(dict(changes))
    config.model.update(vocab_size=rows, target_vocab_size=rows)
    model = build_model(resolve(config).model)
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model)))


def parameters(preset: str, changes: dict[str, Any], rows: int) -> int:
    """Return the number of parameters of a model with `rows` entries in its vocabulary."""
    return _count(preset, tuple(changes.items()), rows)


def equal_width(preset: str, changes: dict[str, Any], rows: int, wanted: int) -> int:
    """Return the width, a multiple of 4, that brings a model nearest to `wanted` parameters."""
    return min(
        range(32, 257, 4), key=lambda width: abs(parameters(preset, {**changes, "d_model": width}, rows) - wanted)
    )


if __name__ == "__main__":
    app.run(main)
