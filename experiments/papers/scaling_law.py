"""Is the loss a power law of parameters and of compute, at the smallest sizes that learn anything?

Claim:    Kaplan et al. 2020 (Scaling Laws for Neural Language Models): loss falls as a power of the parameters without
          embeddings, exponent 0.076, and of compute, exponent 0.050, over many orders of magnitude, if data does not
          limit it. Hoffmann et al. 2022 (Chinchilla): each length of training with its own schedule.
Design:   characters of Tiny Shakespeare; d_model 16 to 128 at two layers, N = 12 · layers · d_model²; 250 to 1,000
          updates of 1,024 characters, each with its own cosine; C = 6 · N · characters FLOPs. Two orders of magnitude.
Command:  python -m jformer.sweep --experiment=experiments/papers/scaling_law.py --workdir=runs/scaling_law --workers=2
          --config.data.dir=PATH/tinyshakespeare
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.papers.contrasts import means, power_law
from jformer.tools.sweep import Trial, product
from jformer.tools.sweep.space import Overrides

BASE = "configs/shakespeare_gpt.py"
METRIC = "valid/loss"
SEEDS = (0, 1)
LAYERS, TOKENS = 2, 1_024
FIXED = {
    "model.num_layers": LAYERS,
    "model.dropout": 0.0,
    "data.tokens_per_update": TOKENS,
    "data.test": (),
    "optim.weight_decay": 0.0,
    "train.eval_every": 250,
    "train.checkpoint_every": 250,
    "train.samples": 0,
}
WIDTHS, LENGTHS = (16, 32, 64, 96, 128), (250, 500, 1_000)
BASELINE = f"d_model {WIDTHS[-1]}, {LENGTHS[-1]:,} updates"
PLOTS = [("model.d_model", "train.num_steps"), ("train.num_steps", "model.d_model")]


def sweep() -> dict[str, Overrides]:
    """Return all widths at all lengths of training, four heads each."""
    arms = product({"model.d_model": WIDTHS, "train.num_steps": LENGTHS})
    return {
        f"d_model {arm['model.d_model']}, {arm['train.num_steps']:,} updates": {
            **arm,
            "model.d_ff": 4 * arm["model.d_model"],
        }
        for arm in arms
    }


def parameters(arm: Mapping[str, Any]) -> int:
    """Return N: parameters without embeddings, biases and norms (Kaplan et al. 2020, Table 1)."""
    return 12 * LAYERS * arm["model.d_model"] ** 2


def flops(arm: Mapping[str, Any]) -> int:
    """Return C: the FLOPs of training, 6 per parameter and token (Kaplan et al. 2020, section 2.1)."""
    return 6 * parameters(arm) * TOKENS * arm["train.num_steps"]


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Fit loss against N at each length of training, and against C where no cheaper arm is as good."""
    arms, found = sweep(), means(trials)
    for length in LENGTHS:
        points = [(parameters(arms[name]), found[name]) for name in found if arms[name]["train.num_steps"] == length]
        yield from fit(points, "N", f"after {length:,} updates")
    yield from fit(frontier([(flops(arms[name]), loss) for name, loss in found.items()]), "C", "at the best width")


def frontier(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points that are better than all cheaper ones, cheapest first."""
    best: list[tuple[int, float]] = []
    for cost, loss in sorted(points):
        if not best or loss < best[-1][1]:
            best.append((cost, loss))
    return best


def fit(points: Sequence[tuple[int, float]], letter: str, where: str) -> Iterator[str]:
    """Report the power law of some points (x, loss), and its largest error."""
    if len(points) < 3:
        return
    x, losses = zip(*points, strict=True)
    law = power_law(x, losses)
    off = max(abs(law.a * value**-law.b / loss - 1) for value, loss in points)
    yield (
        f"{where}: loss = {law.a:.3g} · {letter}^-b with b = {law.b:.4f} ± {law.margin:.4f}, "
        f"{len(points)} points, off by {off:.1%} at most"
    )
