"""How much does the last step learn of the first ones: RNN, LSTM, GRU and the Transformer, with clipping and without?

Claims:   Bengio et al. 1994 and Pascanu et al. 2013: a plain RNN's gradient vanishes (or explodes) with the distance,
          and clipping its norm mends what explodes, not what vanishes. Hochreiter and Schmidhuber 1997: an LSTM's
          does not. Vaswani et al. 2017, Table 1: in a Transformer every distance is one step.
Design:   gradients: language models of one layer of 64, freshly initialised, read 64 different tokens; the norm of
          the gradient of the loss of the last token with respect to each token's vector, mean of 16 texts and of the
          seeds. Training: encoders of the same size tell the first of LENGTH letters, after as many updates, with
          optim.clip_norm=1 and 0. A run that is there already is not trained again.
Command:  python -m experiments.vanishing_gradients --workdir=runs/vanishing_gradients [--seeds=3] [--smoke]
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jformer
from experiments.measure import smoke_sizes
from jformer.evaluation.plots import Line, lines
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks.losses import cross_entropy

WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, the table and the picture.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each model and run.", lower_bound=1)
LENGTHS = flags.DEFINE_list("lengths", ["20"], "Letters of a text, of which the first is to be told.")
UPDATES = flags.DEFINE_integer("updates", 500, "Of each run.")

KINDS = flags.DEFINE_list("kinds", ["RNN", "LSTM", "GRU", "Transformer"], "Models to compare.")

CELLS = {"RNN": "rnn", "LSTM": "lstm", "GRU": "gru", "Transformer": ""}
SIZE, READ, TEXTS, LETTERS = 64, 64, 16, "abcdefgh"
ROWS = 64  # of an update
OF_MODEL = {"family": "encoder", "d_model": SIZE, "num_layers": 1, "dropout": 0.0, "head": {"pooling": "last"}}
OF_BLOCKS: dict[str, Any] = {"d_ff": 4 * SIZE, "num_heads": 4, "norm": "pre"}  # of the Transformer alone
OF_DATA = {"source": "labelled", "tokenizer": "char", "num_buckets": 1}
OF_OPTIM = {"schedule": "constant", "learning_rate": 2e-3, "warmup": 50, "label_smoothing": 0.0}
TOLD = (1, 2, 4, 8, 16, 32, 63)  # distances that are printed


def main(_: list[str]) -> None:
    """Write gradients.csv and gradients.png; print both tables."""
    smoke_sizes(seeds=1, lengths=["6"], updates=4, kinds=["RNN", "Transformer"])
    kinds = {name: CELLS[name] for name in KINDS.value}
    folder = Path(WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: np.mean([by_distance(cell, seed) for seed in range(SEEDS.value)], 0) for name, cell in kinds.items()}
    write(folder, found)
    print(f"{'gradient at distance':<22}" + "".join(f"{distance:>10}" for distance in TOLD))
    for name, norms in found.items():
        print(f"{name:<22}" + "".join(f"{norms[distance] / norms[0]:>10.1e}" for distance in TOLD))
    print(f"\n{'first letter, accuracy':<22}{'letters':>8}{'clip':>6}{'mean':>9}   each seed; largest gradient norm")
    for length in map(int, LENGTHS.value):
        data = make_texts(folder / "data", length)
        for name, cell in kinds.items():
            for clip in (1.0, 0.0):
                runs = [train(folder, data, cell, clip, length, seed) for seed in range(SEEDS.value)]
                each = ", ".join(f"{accuracy:.0%}" for accuracy, _ in runs)
                mean = np.mean([accuracy for accuracy, _ in runs])
                largest = max(norm for _, norm in runs)
                print(f"{name:<22}{length:>8}{clip:>6.0f}{mean:>9.1%}   {each}; {largest:.2g}", flush=True)


def model_config(cell: str) -> ModelConfig:
    """Return a language model of one layer."""
    return ModelConfig(
        family="decoder",
        vocab_size=READ + 1,
        num_layers=1,
        d_model=SIZE,
        dropout=0.0,
        **({} if cell else OF_BLOCKS),
        tied_output=False,
        recurrent=RecurrentConfig(cell=cell),
        execution=ExecutionConfig(unroll=1),
    )


def by_distance(cell: str, seed: int) -> np.ndarray:
    """Return the mean norm [READ] of the last loss's gradient, by how many tokens ago a vector was read.

    No text holds a token twice, so that the gradient of a token's row of the table is that of its one place.
    """
    model = build_model(model_config(cell))
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(seed))

    @jax.jit
    def norms(text: jax.Array) -> jax.Array:
        def loss(table: jax.Array) -> Any:
            changed = {**params, "embedding": {"embedding": table}}
            ones, places = jnp.ones((1, READ), jnp.int32), jnp.arange(READ)[None]
            batch = {"target_in": text[None], "target_segments": ones, "target_positions": places}
            logits = model.apply({"params": changed}, batch)[:, -1:]
            return cross_entropy(logits, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))["loss"].total

        gradient = jax.grad(loss)(params["embedding"]["embedding"])
        return jnp.linalg.norm(gradient[text[::-1]], axis=-1)

    rng = np.random.default_rng(seed)
    return np.mean([norms(jnp.asarray(1 + rng.permutation(READ))) for _ in range(TEXTS)], axis=0)


def write(folder: Path, found: dict[str, np.ndarray]) -> None:
    """Write the norms of every distance as a table, and draw them relative to that of the last token."""
    rows = [",".join(["distance", *found])]
    rows += [",".join([str(t), *(f"{x[t]:.5g}" for x in found.values())]) for t in range(READ)]
    (folder / "gradients.csv").write_text("\n".join(rows) + "\n")
    ago, nothing = range(1, READ), [None] * (READ - 1)
    drawn = [Line(name, ago, np.log10(x[1:] / x[0] + 1e-30).tolist(), nothing) for name, x in found.items()]
    (folder / "gradients.png").write_bytes(lines(drawn, "tokens ago", "log10 of the gradient's norm, last token = 0"))


def make_texts(folder: Path, length: int) -> Path:
    """Write texts of so many letters with the first one as their label, and return their folder."""
    folder = folder / str(length)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(length)
    for split, count in (("train", 20_000), ("valid", 1_000), ("test", 1_000)):
        texts = ["".join(rng.choice(list(LETTERS), length)) for _ in range(count)]
        (folder / f"{split}.tsv").write_text("".join(f"{text}\t{text[0]}\n" for text in texts))
    return folder


def train(folder: Path, data: Path, cell: str, clip: float, length: int, seed: int) -> tuple[float, float]:
    """Return the test accuracy of a run and its largest gradient norm; train it where that has not been done."""
    workdir = folder / f"{cell or 'transformer'}-{length}-clip{clip:g}-{seed}"
    steps = UPDATES.value
    if not (workdir / "results.json").exists():
        config = {
            "task": "classify",
            "seed": seed,
            "model": {**OF_MODEL, **({"recurrent": {"cell": cell}} if cell else OF_BLOCKS)},
            "data": {**OF_DATA, "dir": str(data), "cache_dir": str(folder / "cache")}
            | {"tokens_per_update": ROWS * (length + 2)},
            "optim": {**OF_OPTIM, "clip_norm": clip},
            "train": {"num_steps": steps, "eval_every": 0, "checkpoint_every": steps, "samples": 0}
            | {"log_every": min(50, steps)},
        }
        jformer.train(config, workdir)
        jformer.evaluate(workdir)
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    largest = max(row["grad_norm"] for row in rows if row["split"] == "train")
    return json.loads((workdir / "results.json").read_text())["test"]["accuracy"]["score"], largest


if __name__ == "__main__":
    app.run(main)
