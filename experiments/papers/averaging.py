"""What is averaging of parameters worth, at a constant learning rate and at one that goes to 0?

Claim:    Vaswani et al. 2017, section 6.1, average the last 5 checkpoints. Popel and Bojar 2018 (Training Tips), 4.10:
          worth 0.2 BLEU and more late in training. Izmailov et al. 2018 (SWA): averaging is for rates that stay high.
          Polyak and Juditsky 1992: averages of iterates of constant rates.
Design:   letters to reverse. All arms of a schedule and seed train the same parameters, bit for bit, and differ in
          which of them are scored: the last, the best of ten evaluations, the mean of the last five checkpoints, a
          moving average (EMA) with decay 0.99.
Command:  python -m jformer.sweep --experiment=experiments/papers/averaging.py --workdir=runs/averaging --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "test/perplexity"
SEEDS = (0, 1, 2)
FIXED = {
    "train.ema_decay": 0.99,
    "train.num_steps": 600,
    "train.eval_every": 60,
    "train.checkpoint_every": 60,
    "train.keep_last": 5,
    "evaluate.average_last": 5,
}
BASELINE = "constant: last"
PLOTS = [("evaluate.weights", "optim.schedule")]
SCHEDULES, WEIGHTS = ("constant", "cosine"), ("last", "best", "average", "ema")


def sweep() -> dict[str, Overrides]:
    """Return which parameters are scored, after each schedule."""
    return {
        f"{schedule}: {weights}": {"optim.schedule": schedule, "evaluate.weights": weights}
        for schedule in SCHEDULES
        for weights in WEIGHTS
    }


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report what each choice gains over the last parameters, and whether an average makes up for the schedule."""
    for schedule in SCHEDULES:
        for weights in WEIGHTS[1:]:
            yield from versus(trials, f"{schedule}: {weights}", f"{schedule}: last")
            yield from versus(trials, f"{schedule}: {weights}", f"{schedule}: last", "test/exact_match")
    yield from versus(trials, "constant: average", "cosine: last")
