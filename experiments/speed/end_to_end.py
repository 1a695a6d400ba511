"""How many real target tokens a second from a cold start, beside a plain padded JAX loop of our own model?

Command:  python -m experiments.speed.end_to_end --config=configs/multi30k_tiny.py --config.data.dir=PATH/multi30k
          [--tokens=437000] [--packed_length=64] [--sides=fixed,rounded,buckets,packed] [--smoke]

Every side is a process of its own that trains until it has seen the target tokens. Its time goes from tokenized text
to the end of the last update: planning, compiling, training and, for jformer, its rows and its checkpoint.

    packed    trainer.train with data.batching=packed
    buckets   trainer.train with data.batching=buckets
    fixed     a plain loop: shuffled pairs, as many as data.tokens_per_update holds of the corpus' longest, and all
              padded to that: one shape
    rounded   the same, but each batch is padded to its own longest, rounded up to a multiple of 8

The plain loops have the same model, parameters, loss and optimizer: jax.jit of value_and_grad and Optax.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import flags

from experiments.runs import small_run
from jformer import main as front
from jformer.config import save_config
from jformer.config.config_files import as_flags
from jformer.config.options import Config
from jformer.data.pipeline import Arrays, Batches, Rows
from jformer.data.plan import Shape
from jformer.models import init_params
from jformer.models.flops import Work, batch_work, total
from jformer.tasks.build import build_sized, build_task
from jformer.tasks.features import sequence_to_sequence
from jformer.trainer import train
from jformer.training.corpora import Data, open_data
from jformer.training.optim import build_optimizer

SIDES = ["fixed", "rounded", "buckets", "packed"]
COMPILE = "/jax/core/compile/backend_compile_duration"


def main() -> None:
    """Run each side in its process and print the table; a process that was given one side runs it."""
    options = flags.FlagValues()
    flags.DEFINE_integer("tokens", 437_000, "Real target tokens that each side trains on.", flag_values=options)
    flags.DEFINE_integer("packed_length", 64, "Length of packed rows.", flag_values=options)
    flags.DEFINE_list("sides", SIDES, "Sides to run; all are compared with fixed.", flag_values=options)
    flags.DEFINE_bool("smoke", False, "Only check that the command works, on few tokens.", flag_values=options)
    flags.DEFINE_string("side", None, "Run this side here, and print its figures as JSON.", flag_values=options)
    rest = options(sys.argv, known_only=True)
    if options.smoke:
        options["tokens"].value, options["sides"].value = 1_000, ["fixed", "packed"]
        rest = [*rest, "--config=configs/quickstart.py", *as_flags(small_run(1))]
    if options.side:
        with tempfile.TemporaryDirectory() as folder:
            config = front.configure(*front.read_flags([*rest, f"--workdir={folder}"]))
            print(json.dumps(run_side(options.side, config, Path(folder), options.tokens, options.packed_length)))
        return
    titles = ("updates", "shapes", "efficiency", "compiling", "in all", "tokens/s", "against fixed")
    print(f"{'':<9}" + "".join(f"{title:>14}" for title in titles))
    speeds: dict[str, float] = {}
    for side in sorted(options.sides, key=SIDES.index):
        command = [sys.executable, "-m", "experiments.speed.end_to_end", *sys.argv[1:], f"--side={side}"]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode:
            sys.exit(told.stderr)
        row = json.loads(told.stdout.splitlines()[-1])
        speeds[side] = row["tokens"] / row["seconds"]
        counted = f"{row['updates']:>14,}{row['shapes']:>14}{row['efficiency']:>14.3f}"
        timed = f"{row['compiling']:>12.1f} s{row['seconds']:>12.1f} s{speeds[side]:>14,.0f}"
        against = f"{speeds[side] / speeds['fixed']:>13.2f}x" if "fixed" in speeds else ""
        print(f"{side:<9}{counted}{timed}{against}", flush=True)


def run_side(side: str, config: Config, workdir: Path, tokens: int, packed_length: int) -> dict[str, float]:
    """Tokenize, then train until the target tokens are reached, and return the figures."""
    batching = side if side in ("packed", "buckets") else "buckets"
    data = {"cache_dir": str(workdir / "cache"), "batching": batching, "packed_length": packed_length}
    config = changed(config, data=data, train={"eval_every": 0, "patience": 0}, evaluate={"weights": "last"})
    opened = open_data(config.data, config.train, config.seed, build_task(config), workdir, learned=False)
    batches = our_batches(opened.batches) if side == batching else plain_batches(config, opened, side == "rounded")
    texts, rows, shapes = needed(batches, tokens)
    updates, real = len(texts), total(texts)
    train_options = {"num_steps": updates, "checkpoint_every": updates, "log_every": min(updates, 50)}
    warmup = min(config.optim.warmup_steps(config.train.num_steps), updates)
    config = changed(config, train=train_options, optim={"warmup": warmup})
    save_config(config, workdir / "config.json")  # as if stopped before the first update: its text is ready
    compiling: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE:
            compiling.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    began = time.perf_counter()
    if side == batching:
        train(config, workdir)
    else:
        plain_loop(config, opened, updates, side == "rounded")
    return {
        "seconds": time.perf_counter() - began,
        "compiling": sum(compiling),
        "updates": updates,
        "tokens": real.target,
        "efficiency": real.tokens / total(rows).tokens,
        "shapes": shapes,
    }


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the config with other values in some sections."""
    replaced = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **replaced)


def needed(batches: Iterator[Arrays], tokens: int) -> tuple[list[Work], list[Work], int]:
    """Return the work of texts and of rows in as many batches as reach the target tokens, and the number of shapes."""
    texts, rows, shapes, seen = [], [], set(), 0
    while seen < tokens:
        batch = next(batches)
        of_texts, of_rows = batch_work(batch)
        texts.append(of_texts)
        rows.append(of_rows)
        shapes.add((batch["source"].shape, batch["target_out"].shape))
        seen += of_texts.target
    return texts, rows, len(shapes)


def our_batches(batches: Batches) -> Iterator[Arrays]:
    """Yield the batches that jformer trains on."""
    step = 0
    while True:
        yield batches[step]
        step += 1


def plain_batches(config: Config, data: Data, rounded: bool) -> Iterator[Arrays]:
    """Yield shuffled pairs, always as many, padded to the longest of the corpus or of the batch."""
    (corpus,), arrays = data.corpora, sequence_to_sequence().arrays
    sides = (corpus.source.lengths, corpus.target.lengths)
    longest = [int(lengths.max()) for lengths in sides]
    rows = config.data.tokens_per_update // max(longest) // 8 * 8
    rng = np.random.default_rng(config.seed)
    while True:
        order = rng.permutation(len(corpus))
        for pairs in order[: len(order) // rows * rows].reshape(-1, rows):
            lengths = [-int(lengths[pairs].max()) // 8 * -8 for lengths in sides] if rounded else longest
            one_a_row = Rows(pairs, np.arange(rows), np.ones(rows, np.int64), np.arange(rows))
            laid = arrays(one_a_row, corpus.source, corpus.target, Shape(rows, *lengths), (0, 0))
            yield {"row": np.arange(rows, dtype=np.int32), **laid}


def plain_loop(config: Config, data: Data, updates: int, rounded: bool) -> None:
    """Train as a short script would."""
    model = build_sized(config, build_task(config), data.tokenizers)
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(config.seed))
    tx = build_optimizer(model, config.optim, config.train.num_steps).transform
    opt_state, key = tx.init(params), jax.random.key(config.seed)
    smoothing = config.optim.label_smoothing

    def loss_of(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch, True, rngs={"dropout": key})
        log_probs = jax.nn.log_softmax(logits)
        of_target = jax.numpy.take_along_axis(log_probs, batch["target_out"][..., None], axis=-1)[..., 0]
        loss = -(1 - smoothing) * of_target - smoothing * log_probs.mean(axis=-1)
        return (loss * batch["weights"]).sum() / batch["weights"].sum()

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, batch, key)
        moved, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, moved), opt_state, loss

    compiled: Callable[..., Any] = jax.jit(step, donate_argnums=(0, 1))
    batches = plain_batches(config, data, rounded)
    for number in range(updates):
        params, opt_state, loss = compiled(params, opt_state, next(batches), jax.random.fold_in(key, number))
    print(f"loss {float(loss):.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
