"""Does a model that knows its training half by heart learn the rule afterwards, and does weight decay bring it there?

Claim:    Power et al. 2022 (Grokking), Figures 1 and 2: on division modulo 97 with half of the table, training accuracy
          is 100 % early, validation accuracy comes to 100 % long after, and weight decay makes that much sooner.
Design:   the config's model with a decay of 1, and with none as the control. The metric is the accuracy on the half
          that was not trained on, after as many updates for both.
Command:  python -m jformer.sweep --experiment=experiments/grokking.py --workdir=runs/grokking --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.contrasts import values, versus
from jformer.sweep import Trial
from jformer.sweep.space import Overrides

BASE = "configs/modular_division.py"
METRIC = "valid/accuracy"
SEEDS = (0, 1, 2)
BASELINE = "no decay"
PLOTS: list[tuple[str, str]] = []


def sweep() -> dict[str, Overrides]:
    """Return the control and the decay of the paper."""
    return {BASELINE: {"optim.weight_decay": 0.0}, "decay 1": {"optim.weight_decay": 1.0}}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Tell what each arm ends with on both halves, and the difference."""
    for arm in sweep():
        for metric, half in (("train/accuracy", "learned"), ("", "other")):
            found = values(trials, arm, metric)
            if found:
                yield f"{arm}, the {half} half: " + ", ".join(f"{value:.2%}" for value in found.values())
    yield from versus(trials, "decay 1", BASELINE)
