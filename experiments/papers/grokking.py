"""Does a model that has memorized its training half learn the rule afterwards, and does weight decay make it?

Claim:    Power et al. 2022 (Grokking), Figures 1 and 2: on division modulo 97 with half of the table, training accuracy
          is 100 % early, validation accuracy reaches 100 % long after, and much sooner with weight decay.
Design:   the config's model with a decay of 1, and with none as the control. The metric is the accuracy on the half
          that was not trained on, after as many updates for both.
Command:  python -m jformer.sweep --experiment=experiments/papers/grokking.py --workdir=runs/grokking --workers=2
          python -m experiments.papers.grokking --workdir=runs/grokking --output=accuracy.png [--smoke]
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from experiments.measure import smoke_sizes
from experiments.papers.contrasts import values, versus
from jformer.evaluation import records
from jformer.tools.compare.comparison import mean_curve
from jformer.tools.pages import plots
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/modular_division.py"
METRIC = "valid/accuracy"
SEEDS = (0, 1, 2)
BASELINE = "no decay"
PLOTS: list[tuple[str, str]] = []
HALVES = {"train": "learned", "valid": "other"}
KNOWN = 0.99


def sweep() -> dict[str, Overrides]:
    """Return the control and the decay of the paper."""
    return {BASELINE: {"optim.weight_decay": 0.0}, "decay 1": {"optim.weight_decay": 1.0}}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the final accuracy of each arm on both halves, and the difference."""
    for arm in sweep():
        for split, half in HALVES.items():
            found = values(trials, arm, f"{split}/accuracy")
            if found:
                yield f"{arm}, the {half} half: " + ", ".join(f"{value:.2%}" for value in found.values())
    yield from versus(trials, "decay 1", BASELINE)


def lines(workdir: Path, most: int | None = None) -> list[plots.PlottedLine]:
    """Return accuracy over updates, for each arm and half the mean of its seeds; arms without a row have no line.

    Of the sweep's trials, `most` are read.
    """
    runs: dict[str, list[Path]] = {}
    for config in sorted(workdir.glob("trials/*/config.json"))[:most]:
        decay = records.saved_config(config.parent).optim.weight_decay
        arm = next(label for label, keys in sweep().items() if keys["optim.weight_decay"] == decay)
        runs.setdefault(arm, []).append(config.parent)
    found = []
    for arm, of_seeds in runs.items():
        for split, half in HALVES.items():
            line = mean_curve(f"{arm}, {half} half", of_seeds, f"{split}/accuracy")
            if line.x:
                found.append(line._replace(margins=[None] * len(line.x)))
    return found


def main(_: Sequence[str]) -> None:
    """Draw the curves of a sweep, and print when each of them reaches KNOWN, and where it ends."""
    found = lines(Path(WORKDIR.value), 1 if smoke_sizes() else None)
    Path(OUTPUT.value).write_bytes(plots.curves(found, "updates", "accuracy", logarithmic=True))
    for line in found:
        first = next((step for step, accuracy in zip(line.x, line.y, strict=True) if accuracy >= KNOWN), None)
        reached = f"{KNOWN:.0%} at update {first:,.0f}" if first else f"never {KNOWN:.0%}"
        print(f"{line.label}: {reached}; {line.y[-1]:.2%} at update {line.x[-1]:,.0f}")


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the sweep.", required=True)
    OUTPUT = flags.DEFINE_string("output", "accuracy.png", "The picture to write.")
    app.run(main)
