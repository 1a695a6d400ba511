"""How large are gradients at initialisation, layer by layer, with Post-LN and with Pre-LN, and how does depth matter?

Claim:    Xiong et al. 2020 (On Layer Normalization in the Transformer Architecture), Theorem 1 and Figure 3: in the
          feed-forward of the last layer they are large with Post-LN, whatever the depth L, and shrink as 1 / sqrt(L)
          with Pre-LN; Post-LN's grow towards the output.
Design:   models of 2 to 12 layers in each stack, d_model 64, the 2017 initialisation, no dropout; 64 pairs of 32 + 32
          random tokens of 1,000; norm of the gradient of each feed-forward, mean of three initialisations. No training.
Command:  python -m experiments.papers.gradient_norms --output=runs/gradient_norms [--smoke]
"""

import csv
import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from experiments.layerwise import make_norms
from experiments.measure import smoke_sizes
from experiments.papers.contrasts import power_law
from experiments.speed.steps_shapes import make_batch
from jformer.data.data_config import DataConfig
from jformer.models import ExecutionConfig, ModelConfig, build_model, init_params
from jformer.tasks.build import TASKS
from jformer.tasks.task import make_loss
from jformer.tools.pages.plots import PlottedLine, lines

OUTPUT = flags.DEFINE_string("output", None, "The folder of the table and the pictures.", required=True)

NORMS, DEPTHS, SEEDS = ("post", "pre"), (2, 4, 6, 8, 12), (0, 1, 2)
STACKS, VOCABULARY = ("encoder", "decoder"), 1_000
Found = dict[tuple[str, int], dict[str, np.ndarray]]
"""(norm, depth) → stack → norm of the gradient of the feed-forward, [seeds l]."""


def main(_: list[str]) -> None:
    """Write layers.csv and layers.png (the deepest decoder), last.png (the last layer by depth); print the fits."""
    folder = Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    depths, seeds = ((1, 2, 3), SEEDS[:1]) if smoke_sizes() else (DEPTHS, SEEDS)
    found = {(norm, depth): feed_forward_norms(norm, depth, seeds) for norm in NORMS for depth in depths}
    write(folder / "layers.csv", found)
    (folder / "layers.png").write_bytes(by_layer(found))
    (folder / "last.png").write_bytes(by_depth(found))
    print("\n".join(conclude(found)))


def feed_forward_norms(norm: str, depth: int, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Return stack → gradients' norms [seeds l] of freshly initialised models."""
    shape = ModelConfig(
        num_layers=depth, d_model=64, d_ff=256, num_heads=4, norm=norm, dropout=0.0, execution=ExecutionConfig(unroll=1)
    )
    model = build_model(shape.with_vocabulary(VOCABULARY, VOCABULARY))
    task = TASKS["translate"](DataConfig(), label_smoothing=0.1, scores=(), tokenize="13a", lowercase=False)
    probe, batch = make_norms(model, make_loss(model, task.loss)), make_batch("full", 64, VOCABULARY)
    init = jax.jit(functools.partial(init_params, model))
    rows = [probe(init(jax.random.key(seed)), batch).gradients for seed in seeds]
    return {stack: np.stack([row[f"{stack}/feed_forward"] for row in rows]) for stack in STACKS}


def write(path: Path, found: Found) -> None:
    """Write a row for each norm, depth, stack, layer and seed."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["norm", "layers", "stack", "layer", "seed", "gradient_norm"])
        for (norm, depth), stacks in found.items():
            for stack, norms in stacks.items():
                for (row, layer), value in np.ndenumerate(norms):
                    table.writerow([norm, depth, stack, layer + 1, SEEDS[row], f"{value:.5g}"])


def by_layer(found: Found) -> bytes:
    """Draw the norms of the deepest models, layer by layer."""
    depth = depths_of(found)[-1]
    drawn = [
        PlottedLine(
            f"{norm}, {stack}", range(1, depth + 1), found[norm, depth][stack].mean(axis=0).tolist(), [None] * depth
        )
        for norm, stack in itertools.product(NORMS, STACKS)
    ]
    return lines(drawn, "layer", "norm of the gradient of a feed-forward")


def by_depth(found: Found) -> bytes:
    """Draw the norms of last layers against depth."""
    depths = depths_of(found)
    drawn = [
        PlottedLine(f"{norm}, {stack}", depths, last_layers(found, norm, stack), [None] * len(depths))
        for norm, stack in itertools.product(NORMS, STACKS)
    ]
    return lines(drawn, "layers of each stack", "norm in the last layer", logarithmic=True)


def depths_of(found: Found) -> list[int]:
    """Return the depths there are, the deepest last."""
    return sorted({depth for _, depth in found})


def last_layers(found: Found, norm: str, stack: str) -> list[float]:
    """Return the mean norm in the last layer, for each depth."""
    return [float(found[norm, depth][stack][:, -1].mean()) for depth in depths_of(found)]


def conclude(found: Found) -> Iterable[str]:
    """Print how last layers vary with depth, and how much larger they are than first ones in the deepest model."""
    depths = depths_of(found)
    for stack, norm in itertools.product(STACKS, NORMS):
        law = power_law(depths, last_layers(found, norm, stack))
        ratio = found[norm, depths[-1]][stack].mean(axis=0)
        yield (
            f"{stack}, {norm}: last layer {law.a:.3g} · L^-b with b = {law.b:.2f} ± {law.margin:.2f}; "
            f"of {depths[-1]} layers the last has {ratio[-1] / ratio[0]:.2f} times the first's"
        )


if __name__ == "__main__":
    app.run(main)
