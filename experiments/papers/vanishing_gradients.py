"""How far back do gradients reach, with clipping and without: in RNN, LSTM, GRU and the Transformer?

Claims:   Bengio et al. 1994 and Pascanu et al. 2013: a plain RNN's gradient vanishes (or explodes) with the distance,
          and clipping its norm fixes what explodes, not what vanishes. Hochreiter and Schmidhuber 1997: an LSTM's
          does not. Vaswani et al. 2017, Table 1: in a Transformer every distance is one step.
Design:   gradients: language models of one layer of 64, freshly initialised, read 128 different tokens; the norm of
          the gradient of the loss of the last token with respect to the state after each token (of a Transformer, which
          has none, to the vector of each token), mean of 16 texts, with 95 % t intervals over the seeds. A plain RNN
          begins with an orthogonal kernel, and with that times 1.5 and 0.7, too; a GRU with an update gate whose bias
          is 0, and 3. Training: encoders of the same size classify texts of LENGTH letters by the first, with
          optim.clip_norm=1 and 0; --lengths= leaves it out. Runs that are trained already are not trained again.
Command:  python -m experiments.papers.vanishing_gradients --workdir=runs/vanishing_gradients [--seeds=3] [--smoke]
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
from jformer.errors import STOPPED
from jformer.evaluation.statistics import estimate
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks.losses import cross_entropy
from jformer.tools.pages.plots import PlottedLine, curves

WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, the table and the picture.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of each model and run.", lower_bound=1)
LENGTHS = flags.DEFINE_list("lengths", ["20"], "Letters of a text, the first of which is its label.")
UPDATES = flags.DEFINE_integer("updates", 500, "Updates of each run.")

KINDS = {
    "RNN": ("rnn", 1.0, 0.0),
    "RNN x 1.5": ("rnn", 1.5, 0.0),
    "RNN x 0.7": ("rnn", 0.7, 0.0),
    "LSTM": ("lstm", 1.0, 0.0),
    "GRU": ("gru", 1.0, 0.0),
    "GRU + 3": ("gru", 1.0, 3.0),
    "Transformer": ("", 1.0, 0.0),
}
"""Name → its cell, the initial scale of its orthogonal recurrent kernel, the initial bias of its update gate."""
WANTED = flags.DEFINE_list("kinds", [*KINDS], "Models to compare.")
SIZE, READ, TEXTS, LETTERS = 64, 128, 16, "abcdefgh"
ROWS = 64  # of an update
OF_MODEL = {"family": "encoder", "d_model": SIZE, "num_layers": 1, "dropout": 0.0, "head": {"pooling": "last"}}
OF_BLOCKS: dict[str, Any] = {"d_ff": 4 * SIZE, "num_heads": 4, "norm": "pre"}  # of the Transformer alone
OF_DATA = {"source": "labelled", "tokenizer": "char", "num_buckets": 1}
OF_OPTIM = {"schedule": "constant", "learning_rate": 2e-3, "warmup": 50, "label_smoothing": 0.0}
TOLD = (1, 2, 4, 8, 16, 32, 64, 127)  # distances that are printed


def main(_: list[str]) -> None:
    """Write gradients.csv and gradients.png; print both tables."""
    smoke_sizes(seeds=1, lengths=["6"], updates=4, kinds=["RNN", "Transformer"])
    kinds = {name: KINDS[name] for name in WANTED.value}
    folder = Path(WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: np.array([by_distance(name, seed) for seed in range(SEEDS.value)]) for name in kinds}
    write(folder, found)
    print(f"{'gradient at distance':<22}" + "".join(f"{distance:>10}" for distance in TOLD))
    for name, norms in found.items():
        shares = np.exp(np.log(norms / norms[:, :1] + 1e-37).mean(0))
        print(f"{name:<22}" + "".join(f"{shares[distance]:>10.1e}" for distance in TOLD))
    print(f"\n{'first letter, accuracy':<22}{'letters':>8}{'clip':>6}{'mean':>9}   each seed; largest gradient norm")
    for length in map(int, LENGTHS.value):
        data = make_texts(folder / "data", length)
        for name in kinds:
            for clip in (1.0, 0.0) if KINDS[name][1] == 1 else ():  # no option begins with another kernel
                runs = [train(folder, data, name, clip, length, seed) for seed in range(SEEDS.value)]
                each = ", ".join(f"{accuracy:.0%}" for accuracy, _ in runs)
                mean = np.mean([accuracy for accuracy, _ in runs])
                largest = max(norm for _, norm in runs)
                print(f"{name:<22}{length:>8}{clip:>6.0f}{mean:>9.1%}   {each}; {largest:.2g}", flush=True)


def model_config(cell: str, bias: float) -> ModelConfig:
    """Return a language model of one layer."""
    return ModelConfig(
        family="decoder",
        vocab_size=READ + 1,
        num_layers=1,
        d_model=SIZE,
        dropout=0.0,
        **({} if cell else OF_BLOCKS),
        tied_output=False,
        recurrent=RecurrentConfig(cell=cell, update_bias=bias),
        execution=ExecutionConfig(unroll=1),
    )


def by_distance(kind: str, seed: int) -> np.ndarray:
    """Return the mean norm [READ] of the last loss's gradient, by how many tokens ago a state was.

    That of a state is what its h and c get together. A Transformer has no state: what it has of a token in its place is
    the vector that enters its block.
    """
    cell, gain, bias = KINDS[kind]
    model = build_model(model_config(cell, bias))
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(seed))
    if cell:
        layer = params["decoder"]["forward_0"]
        changed = {**layer, "state_kernel": gain * layer["state_kernel"]}
        params = {**params, "decoder": {"forward_0": changed}}
    norms = jax.jit(functools.partial(of_states if cell else of_vectors, model, params))
    rng = np.random.default_rng(seed)
    return np.mean([norms(jnp.asarray(1 + rng.permutation(READ)))[::-1] for _ in range(TEXTS)], axis=0)


def of_states(model: Any, params: Any, text: jax.Array) -> jax.Array:
    """Return the norms [READ] of the gradient with respect to the state after each token of a text."""
    apply, places = functools.partial(model.apply, {"params": params}), jnp.arange(READ)
    begin = apply({}, 1, 0, method="start")

    def read(state: jax.Array, valid: jax.Array) -> tuple[jax.Array, Any]:
        cache = {**begin, "self": {"layers": state}}
        hidden, after = apply(cache, text[None], valid[None], method="extend")
        return hidden, after["self"]["layers"]

    def of_place(place: jax.Array) -> jax.Array:
        _, state = read(begin["self"]["layers"], places <= place)
        gradient = jax.grad(lambda state: last_loss(apply(read(state, places > place)[0], method="logits")))(state)
        largest = jnp.abs(gradient).max()  # squares of vanished gradients underflow in float32
        return largest * jnp.linalg.norm(gradient / jnp.maximum(largest, 1e-37))

    return jax.lax.map(of_place, places)


def of_vectors(model: Any, params: Any, text: jax.Array) -> jax.Array:
    """Return the norms [READ] of the gradient with respect to each token's vector; no text holds a token twice."""
    ones, places = jnp.ones((1, READ), jnp.int32), jnp.arange(READ)[None]

    def loss(table: jax.Array) -> Any:
        changed = {**params, "embedding": {"embedding": table}}
        batch = {"target_in": text[None], "target_segments": ones, "target_positions": places}
        return last_loss(model.apply({"params": changed}, batch))

    return jnp.linalg.norm(jax.grad(loss)(params["embedding"]["embedding"])[text], axis=-1)


def last_loss(logits: jax.Array) -> Any:
    """Return the loss of the last token, whatever comes next being token 0."""
    return cross_entropy(logits[:, -1:], jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))["loss"].total


def write(folder: Path, found: dict[str, np.ndarray]) -> None:
    """Write the norms [seeds READ] by distance over those of the last state, and draw them with their intervals."""
    rows, drawn = ["kind,tokens ago,log10 of the norm,95 %"], []
    for name, norms in found.items():
        logs = np.log10(norms / norms[:, :1] + 1e-37)
        each = [estimate(column.tolist()) for column in logs.T]
        rows += [f"{name},{ago},{one.mean:.4f},{one.margin or 0:.4f}" for ago, one in enumerate(each)]
        drawn.append(
            PlottedLine(name, range(1, READ), [one.mean for one in each[1:]], [one.margin for one in each[1:]])
        )
    (folder / "gradients.csv").write_text("\n".join(rows) + "\n")
    (folder / "gradients.png").write_bytes(curves(drawn, "tokens ago", "log10 of the norm, last state 0"))


def make_texts(folder: Path, length: int) -> Path:
    """Write texts of `length` letters with the first one as their label, and return their folder."""
    folder = folder / str(length)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(length)
    for split, count in (("train", 20_000), ("valid", 1_000), ("test", 1_000)):
        texts = ["".join(rng.choice(list(LETTERS), length)) for _ in range(count)]
        (folder / f"{split}.tsv").write_text("".join(f"{text}\t{text[0]}\n" for text in texts))
    return folder


def train(folder: Path, data: Path, kind: str, clip: float, length: int, seed: int) -> tuple[float, float]:
    """Return the test accuracy of a run and its largest gradient norm, training it if needed."""
    (cell, _, bias), steps = KINDS[kind], UPDATES.value
    name = f"{cell or 'transformer'}{f'-bias{bias:g}' if bias else ''}"
    workdir = folder / f"{name}-{length}-clip{clip:g}-{steps}-{seed}"
    if not (workdir / "results.json").exists():
        config = {
            "task": "classify",
            "seed": seed,
            "model": {**OF_MODEL, **({"recurrent": {"cell": cell, "update_bias": bias}} if cell else OF_BLOCKS)},
            "data": {**OF_DATA, "dir": str(data), "cache_dir": str(folder / "cache")}
            | {"tokens_per_update": ROWS * (length + 2)},
            "optim": {**OF_OPTIM, "clip_norm": clip},
            "train": {"num_steps": steps, "eval_every": 0, "checkpoint_every": steps, "samples": 0}
            | {"log_every": min(50, steps)},
        }
        if not jformer.train(config, workdir):
            raise SystemExit(STOPPED)
        jformer.evaluate(workdir)
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    largest = max(row["grad_norm"] for row in rows if row["split"] == "train")
    return json.loads((workdir / "results.json").read_text())["test"]["accuracy"]["score"], largest


if __name__ == "__main__":
    app.run(main)
