"""Does a model that knows its training half by heart learn the rule afterwards, and does weight decay bring it there?

Claim:    Power et al. 2022 (Grokking), Figures 1 and 2: on division modulo 97 with half of the table, training accuracy
          is 100 % early, validation accuracy comes to 100 % long after, and weight decay makes that much sooner.
Design:   the config's model with a decay of 1, and with none as the control. The metric is the accuracy on the half
          that was not trained on, after as many updates for both.
Command:  python -m jformer.sweep --experiment=experiments/grokking.py --workdir=runs/grokking --workers=2
          python -m experiments.grokking --workdir=runs/grokking --output=accuracy.png
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from experiments.contrasts import values, versus
from jformer.evaluation import plots, records
from jformer.evaluation.statistics import estimate
from jformer.sweep import Trial
from jformer.sweep.space import Overrides

BASE = "configs/modular_division.py"
METRIC = "valid/accuracy"
SEEDS = (0, 1, 2)
BASELINE = "no decay"
PLOTS: list[tuple[str, str]] = []
HALVES = {"train": "learned", "valid": "other"}


def sweep() -> dict[str, Overrides]:
    """Return the control and the decay of the paper."""
    return {BASELINE: {"optim.weight_decay": 0.0}, "decay 1": {"optim.weight_decay": 1.0}}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Tell what each arm ends with on both halves, and the difference."""
    for arm in sweep():
        for split, half in HALVES.items():
            found = values(trials, arm, f"{split}/accuracy")
            if found:
                yield f"{arm}, the {half} half: " + ", ".join(f"{value:.2%}" for value in found.values())
    yield from versus(trials, "decay 1", BASELINE)


def draw(workdir: Path) -> bytes:
    """Return a picture of both accuracies over updates, for each arm the mean of its seeds."""
    runs: dict[str, list[Path]] = {}
    for trial in sorted(workdir.glob("trials/*/config.json")):
        decay = records.saved_config(trial.parent).optim.weight_decay
        arm = next(label for label, keys in sweep().items() if keys["optim.weight_decay"] == decay)
        runs.setdefault(arm, []).append(trial.parent)
    lines = []
    for arm, found in runs.items():
        for split, half in HALVES.items():
            curves = [dict(records.curve(run, f"{split}/accuracy")) for run in found]
            steps = sorted(set.intersection(*map(set, curves)))
            means = [estimate([curve[step] for curve in curves]) for step in steps]
            label = f"{arm}, {half} half"
            lines.append(plots.Line(label, steps, [each.mean for each in means], [each.margin for each in means]))
    return plots.curves(lines, "updates", "accuracy", logarithmic=True)


def main(_: Sequence[str]) -> None:
    """Write the picture of a sweep."""
    Path(OUTPUT.value).write_bytes(draw(Path(WORKDIR.value)))


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the sweep.", required=True)
    OUTPUT = flags.DEFINE_string("output", "accuracy.png", "What to draw to.")
    app.run(main)
