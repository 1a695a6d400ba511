"""Does the best learning rate stay where it is as a model grows: maximal update parametrization, and the standard one?

Claim:    Yang et al. 2022 (Tensor Programs V), Figure 1: with mup the best rate of a narrow Transformer is that of a
          wide one; with the standard parametrization it falls as the width grows. Appendix D.1, the coordinate check:
          after a few updates activations are as large at every width, or something is scaled wrongly.
Design:   coordinates: encoder–decoders of 2 + 2 layers, d_model 64 to 1,024, four heads, Pre-LN; mean |x| of what
          layers give after each of 4 updates of Adam at one rate, over texts of random tokens, mean of the seeds.
          Rates: the same models, d_model 32 to 256, trained on Multi30k with every rate; the validation loss. The base
          of mup is the narrowest model, so that both parametrizations begin with the same line.
          Runs that are trained already are not trained again.
Command:  python -m experiments.papers.mup --data=PATH/multi30k --workdir=runs/mup [--updates=300] [--seeds=3] [--smoke]
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from configs import multi30k_tiny, quickstart
from experiments.measure import smoke_sizes
from experiments.runs import results_of, small_run
from jformer.config.options import OptimConfig
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.models.mup_config import MupConfig
from jformer.tools.pages.plots import PlottedLine, lines
from jformer.training.optim import make_optimizer

DATA = flags.DEFINE_string("data", "", "The folder of Multi30k; --smoke needs none.")
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs and pictures.", required=True)
WIDTHS = flags.DEFINE_list("widths", ["64", "128", "256", "512", "1024"], "d_model of the coordinate check.")
TRAINED = flags.DEFINE_list("trained", ["32", "64", "128", "256"], "d_model of the trained models.")
RATES = flags.DEFINE_list("rates", ["1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3.2e-2"], "Peak rates of training.")
UPDATES = flags.DEFINE_integer("updates", 300, "Updates of each run.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of the coordinate check.", lower_bound=1)

KINDS = STANDARD, MUP = "standard", "mup"
LAYERS, HEADS, VOCABULARY = 2, 4, 1_000
ROWS, LENGTH, RATE, STEPS = 16, 16, 0.004, 4  # of the coordinate check
SITES = ("attention", "feed-forward", "logits")


def main(_: list[str]) -> None:
    """Print both tables and draw both pairs of pictures."""
    smoke_sizes(widths=["16", "32"], trained=["16", "32"], rates=["1e-3"], updates=2, seeds=1)
    folder = Path(WORKDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        check_coordinates(kind, folder / f"coordinates-{kind}.png")
    for kind in KINDS:
        find_rates(kind, folder)


def check_coordinates(kind: str, picture: Path) -> None:
    """Print how large activations are by width before and after the updates, and draw them."""
    widths = [int(width) for width in WIDTHS.value]
    found = [
        np.mean([coordinates(model_of(kind, w, widths[0]), seed) for seed in range(SEEDS.value)], 0) for w in widths
    ]
    sizes = np.array(found)  # [width update site]
    print(f"\n{kind}: mean |x| by d_model\n{'':<28}" + "".join(f"{width:>9}" for width in widths) + "    growth")
    for site, name in enumerate(SITES):
        for step in (0, STEPS):
            cells = "".join(f"{size:>9.3f}" for size in sizes[:, step, site])
            growth = sizes[-1, step, site] / sizes[0, step, site]
            print(f"{name + f', after {step} updates':<28}{cells}{growth:>10.2f}", flush=True)
    nothing = [None] * len(widths)
    drawn = [
        PlottedLine(
            f"{name}, {step} updates", widths, np.log2(sizes[:, step, site] / sizes[0, step, site]).tolist(), nothing
        )
        for site, name in enumerate(SITES)
        for step in (0, STEPS)
    ]
    picture.write_bytes(lines(drawn, "d_model", f"log2 of mean |x|, {widths[0]} = 0", logarithmic=True))


def model_of(kind: str, width: int, base: int) -> Any:
    """Return the encoder–decoder of a width."""
    return build_model(
        ModelConfig(
            vocab_size=VOCABULARY,
            num_layers=LAYERS,
            d_model=width,
            d_ff=4 * width,
            num_heads=HEADS,
            norm="pre",
            dropout=0.0,
            parametrization=kind,
            mup=MupConfig(base) if kind == MUP else MupConfig(),
            execution=ExecutionConfig(unroll=1),
        )
    )


def coordinates(model: Any, seed: int) -> np.ndarray:
    """Return the mean |x| [update site] of what the decoder's last layer gives, and of the logits."""
    rng = np.random.default_rng(seed)
    tokens = {
        name: jnp.asarray(rng.integers(1, VOCABULARY, (ROWS, LENGTH))) for name in ("source", "target_in", "labels")
    }
    ones, places = jnp.ones((ROWS, LENGTH), jnp.int32), jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    batch = {**tokens, "source_segments": ones, "target_segments": ones}
    batch |= {"source_positions": places, "target_positions": places}
    tx = make_optimizer(OptimConfig(clip_norm=0.0), lambda step: RATE, None, model.config.mup_width_ratio)

    def loss(params: Any) -> Any:
        logits = model.apply({"params": params}, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def sizes(params: Any) -> jax.Array:
        calls = {"capture_intermediates": lambda _, name: name == "__call__", "mutable": "intermediates"}
        logits, seen = model.apply({"params": params}, batch, **calls)
        block = seen["intermediates"]["decoder"]["block"]  # [layer row position feature]
        layer = [block[name]["__call__"][0][-1] for name in ("self_attn", "feed_forward")]
        return jnp.stack([jnp.abs(x).mean() for x in (*layer, logits)])

    params = init_params(model, jax.random.key(seed))
    found, state = [sizes(params)], tx.init(params)
    for _ in range(STEPS):
        params, state = update(params, state)
        found.append(sizes(params))
    return np.array(found)


def find_rates(kind: str, folder: Path) -> None:
    """Train every width with every rate, print the losses and the best rate of each width, and draw them."""
    widths, rates = [int(width) for width in TRAINED.value], [float(rate) for rate in RATES.value]
    print(f"\n{kind}: validation loss by rate\n{'d_model':<10}" + "".join(f"{rate:>9g}" for rate in rates) + "   best")
    drawn = []
    for width in widths:
        losses = [train(kind, width, rate, folder) for rate in rates]
        best = rates[losses.index(min(losses))]
        print(f"{width:<10}" + "".join(f"{loss:>9.3f}" for loss in losses) + f"{best:>9g}", flush=True)
        drawn.append(PlottedLine(f"d_model {width}", rates, losses, [None] * len(rates)))
    (folder / f"rates-{kind}.png").write_bytes(lines(drawn, "peak learning rate", "validation loss", logarithmic=True))


def train(kind: str, width: int, rate: float, folder: Path) -> float:
    """Return the validation loss at the end of a run, training it if needed; infinity if it diverged."""
    base = int(TRAINED.value[0])
    scaled = kind == MUP and width != base  # the base is the same in both
    name = f"{f'{MUP}{base}' if scaled else STANDARD}-{width}-{rate:g}-{UPDATES.value}"
    options: dict[str, object] = {"model.num_layers": LAYERS, "model.d_model": width, "model.d_ff": 4 * width}
    options |= {"model.num_heads": HEADS, "model.norm": "pre", "model.dropout": 0.0, "optim.learning_rate": rate}
    if scaled:
        options |= {"model.parametrization": MUP, "model.mup.base_width": base}
    if smoke_sizes():
        small = {key: value for key, value in small_run(UPDATES.value).items() if not key.startswith("model.")}
        return valid_loss(quickstart, folder / name, {**small, "model.execution.unroll": 1, **options})
    options |= {
        "data.dir": DATA.value,
        "data.vocab_size": 2_000,
        "data.tokens_per_update": 2_048,
        "data.num_buckets": 2,
    }
    options |= {"data.test": "()", "optim.schedule": "cosine", "optim.warmup": 0.1, "optim.label_smoothing": 0.0}
    options |= {"train.num_steps": UPDATES.value, "train.checkpoint_every": UPDATES.value, "train.patience": 0}
    return valid_loss(multi30k_tiny, folder / name, {**options, "train.keep_last": 10, "train.samples": 0})


def valid_loss(config: Any, workdir: Path, options: dict[str, object]) -> float:
    """Return the last validation loss of a run."""
    results_of(config, workdir, {**options, "train.eval_every": UPDATES.value})
    rows: Sequence[dict[str, Any]] = [json.loads(row) for row in (workdir / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if row["split"] == "valid"]
    return math.inf if found[-1] is None else float(found[-1])


if __name__ == "__main__":
    app.run(main)
