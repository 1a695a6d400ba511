"""How long does a training step take beside flax examples/wmt, PyTorch and the matrix products alone? In turns.

Command:  python -m experiments.speed.steps --size=base --peer_python=PYTHON_WITH_TORCH --flax_wmt=CHECKOUT/examples/wmt
          python -m experiments.speed.steps --growth [--smoke]

Every side is a process of its own that takes one step when asked and otherwise waits; all are given the same arrays
and the cores this command may use (`taskset` narrows them). A step is a forward and backward pass with dropout 0.1 and
label smoothing 0.1, and an update of Adam with the warmup of 2017; no side clips gradients. Dropout is that of the
2017 paper, on embeddings and sublayers' outputs: what the peers drop beyond it, attention weights and inside the
feed-forward, is off unless --extra_dropout, which drops it at every side. Masks of padding and of later tokens are on
everywhere, also in full rows. In bfloat16 each library uses its own option: model.dtype, TransformerConfig.dtype,
torch.autocast. Peers have their defaults; --keeping=jformer,floor,flax,torch gives them, too, the allocator's options
that every run of jformer sets, see jformer.training.malloc. The floor is the time of the step's matrix products, each
by itself.

--growth times jformer's tiny model from 2,048 to 32,768 tokens a side, in sentences of 32.
"""

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from experiments.measure import smoke_sizes
from experiments.speed.steps_race import Side, machine, race
from experiments.speed.steps_shapes import LENGTH, SIZES, make_batch, model_config, step_products
from jformer.evaluation.score_tables import aligned
from jformer.models import ModelConfig
from jformer.models.flops import batch_work, update_flops

SIZE = flags.DEFINE_enum("size", "tiny", list(SIZES), "The model.")
BATCH = flags.DEFINE_enum("batch", "full", ["full", "padded", "packed"], "Rows of one length, padded, or packed.")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Dtypes of activations.")
KINDS = flags.DEFINE_list("sides", ["jformer", "flax", "torch", "torch compiled", "floor"], "Sides that take steps.")
PYTHON = flags.DEFINE_string("python", sys.executable, "Runs jformer, flax and the floor.")
PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "Runs PyTorch.")
FLAX_WMT = flags.DEFINE_string("flax_wmt", None, "The folder examples/wmt of a checkout of flax, for that side.")
STEPS = flags.DEFINE_integer("steps", 9, "Timed steps of each side.")
EXTRA_DROPOUT = flags.DEFINE_bool("extra_dropout", False, "Also drop attention weights and inside the feed-forward.")
KEEPING = flags.DEFINE_list("keeping", ["jformer", "floor"], "Sides that keep freed memory as jformer's runs do.")
GROWTH = flags.DEFINE_bool("growth", False, "Time and memory of jformer over the number of tokens instead.")

WARMUP = 100  # updates; short, so that the losses of a few steps show that every side learns
MUST: dict[tuple[str, str], dict[str, tuple[float | None, float | None]]] = {
    # jformer's time as a share of a side's: the limit, and the goal.
    ("base", "float32"): {"torch": (0.95, 0.80), "flax": (0.80, None), "floor": (None, 1.10)},
    ("tiny", "float32"): {"torch": (0.75, 0.60), "flax": (0.75, None), "floor": (None, 1.35)},
    ("base", "bfloat16"): {"torch": (0.90, 0.55), "floor": (None, 1.25)},
    ("tiny", "bfloat16"): {"torch": (0.75, 0.35), "floor": (None, 1.6)},
}


def main(argv: list[str]) -> None:
    """Compare, or grow."""
    del argv
    smoke_sizes(size="smoke", dtypes=["float32"], sides=["jformer", "floor"], steps=2)
    with tempfile.TemporaryDirectory() as folder:
        if GROWTH.value:
            grow(Path(folder))
        else:
            compare(Path(folder))


def tell(folder: Path, model: ModelConfig, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Write the batch and return the request to a worker."""
    path = folder / f"{len(batch['row'])}.npz"
    np.savez(path, **batch)  # type: ignore[arg-type]
    fields = {name: value for name, value in dataclasses.asdict(model).items() if not isinstance(value, dict)}
    lengths = (batch["source"].shape[1], batch["target_out"].shape[1])
    products = list(step_products(model, len(batch["row"]), *lengths).items())
    told: dict[str, Any] = {"model": fields, "batch": str(path), "packed": BATCH.value == "packed", "warmup": WARMUP}
    return told | {"products": products, "threads": len(os.sched_getaffinity(0)), "flax_wmt": FLAX_WMT.value}


def compare(folder: Path) -> None:
    """Print the table of one size and kind of batch; the sides of a dtype are there at the same time."""
    model = model_config(SIZE.value, EXTRA_DROPOUT.value)
    batch = make_batch(BATCH.value, SIZES[SIZE.value][2], model.vocab_size)
    kinds = [kind for kind in KINDS.value if kind != "flax" or FLAX_WMT.value]
    sides: dict[str, dict[str, Side]] = {}
    for dtype in DTYPES.value:
        told = tell(folder, dataclasses.replace(model, dtype=dtype), batch)
        sides[dtype] = {kind: open_side(kind, told) for kind in kinds}
        race(list(sides[dtype].values()), STEPS.value)
    each = [side for some in sides.values() for side in some.values()]
    print(machine(each), work_line(model, batch), sep="\n")
    tokens, flops = int(batch["weights"].sum()), update_flops(model, batch_work(batch)[1])
    heads = ["side", "ms a step", "quartiles", "cores", "tokens/s", "GFLOP/s", "jformer takes", "must", "aim"]
    heads += ["loss", "parameters", "s to the first step's end"]
    rows = [row(kind, dtype, sides[dtype], tokens, flops) for dtype in sides for kind in kinds]
    print(*aligned([heads, *rows], len(heads)), sep="\n")
    print(*(f"failed: {side.facts['error']}\n" for side in each if "error" in side.facts), sep="", end="")
    idle = max(max(side.timed("idle"), default=0.0) for side in each)
    biases = 4 * model.d_model * (model.num_layers + 2 * model.decoder_layers)
    print(
        f"loss: of the first step, of the last; log of the vocabulary is {np.log(model.vocab_size):.2f}. tokens: real "
        f"ones of the target side. cores: CPU time / time; between steps no side used more than {1e3 * idle:.0f} ms. "
        f"flax has no biases in attention, {-biases:,}, and norms after both stacks, +{4 * model.d_model:,} parameters."
    )


def row(kind: str, dtype: str, sides: dict[str, Side], tokens: int, flops: int) -> list[str]:
    """Return the cells of a side; its loss is marked where it begins elsewhere than jformer's, or does not fall."""
    side, ours = sides[kind], sides.get("jformer", sides[kind])
    if "error" in side.facts:
        return [f"{kind} {dtype}", "failed", *[""] * 10]
    cores = sum(side.timed("busy")) / sum(side.timed("seconds"))  # the floor's seconds are not what it took
    cells = [f"{kind} {dtype}", f"{1e3 * side.median:,.1f}", side.spread, "" if kind == "floor" else f"{cores:.2f}"]
    cells += [f"{tokens / side.median:,.0f}", f"{flops / side.median / 1e9:,.0f}"]
    cells += ["" if side is ours else f"{ours.median / side.median:.2f}"]
    must = MUST.get((SIZE.value, dtype), {}).get(kind.partition(" ")[0], (None, None))
    cells += ["" if limit is None else f"{limit:.2f}" for limit in must]
    if kind == "floor":
        return [*cells, "", "", f"{side.ready:.0f}"]
    first, last = side.steps[0]["loss"], side.steps[-1]["loss"]
    wrong = last >= first or abs(first / ours.steps[0]["loss"] - 1) > 0.05
    loss = f"{first:.2f} to {last:.2f}" + (" WRONG" if wrong else "")
    return [*cells, loss, f"{side.facts['parameters']:,}", f"{side.ready:.0f}"]


def open_side(kind: str, told: dict[str, Any]) -> Side:
    """Start the worker of a side."""
    python = PEER_PYTHON.value if kind.startswith("torch") else PYTHON.value
    return Side(kind, python, told, keep=kind in KEEPING.value)


def work_line(model: ModelConfig, batch: dict[str, np.ndarray]) -> str:
    """Return a line on the model, the batch and their cost."""
    rows, source = batch["source"].shape
    real, computed = (update_flops(model, work) / 1e9 for work in batch_work(batch))
    return (
        f"{SIZE.value}: {model.num_layers}+{model.decoder_layers} layers, d_model {model.d_model}, d_ff {model.d_ff}, "
        f"{model.num_heads} heads, vocabulary {model.vocab_size:,}; {BATCH.value}, {rows} rows of {source} + "
        f"{batch['target_out'].shape[1]}, real {batch['weights'].mean():.0%}; dropout {model.dropout}"
        f"{', also of attention weights and in the feed-forward' if EXTRA_DROPOUT.value else ''}; products "
        f"{computed:,.1f} GFLOP, {real:,.1f} of them for real tokens; {STEPS.value} steps each, in turns"
    )


def grow(folder: Path) -> None:
    """Print what a token costs in time and memory as there are more of them."""
    model = model_config("tiny")
    sides = {}
    for pairs in (64, 128, 256, 512, 1_024):
        sides[pairs * LENGTH] = open_side("jformer", tell(folder, model, make_batch("full", pairs, model.vocab_size)))
    race(list(sides.values()), STEPS.value)
    print(machine(list(sides.values())))
    print(f"tiny, rows of {LENGTH} + {LENGTH}, float32, {STEPS.value} steps each, in turns")
    cells = [["tokens a side", "ms a step", "quartiles", "us a token", "temporary MB", "bytes a further token"]]
    before: tuple[int, int] | None = None
    for tokens, side in sides.items():
        size = side.facts["temp_bytes"]
        line = [f"{tokens:,}", f"{1e3 * side.median:,.1f}", side.spread, f"{1e6 * side.median / tokens:.1f}"]
        more = f"{(size - before[1]) / (tokens - before[0]):,.0f}" if before else ""
        cells.append([*line, f"{size / 1e6:,.0f}", more])
        before = tokens, size
    print(*aligned(cells, len(cells[0])), sep="\n")
    each = [side.median / tokens for tokens, side in sides.items()]
    print(f"the costliest token takes {max(each) / min(each) - 1:.0%} longer than the cheapest, must be at most 15 %")


if __name__ == "__main__":
    app.run(main)
