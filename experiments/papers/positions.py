"""Which positional encodings learn best, and which extrapolate to sequences longer than those trained on?

Claim:    Vaswani et al. 2017, Table 3 E: learned as good as sinusoidal. Press et al. 2022 (ALiBi): sinusoidal positions
          do not extrapolate, rotary ones a little, T5's and ALiBi's do. Su et al. 2021: rotary learns faster than
          sinusoidal. Kazemnejad et al. 2023: a decoder can do without, as its mask reveals positions.
Design:   letters to reverse, 1 to 20 in training; test sets of 1 to 20, of 21 to 25 and of 26 to 40 letters. Here
          positions also matter to an encoder, which has no causal mask, and to cross-attention.
Command:  python -m jformer.sweep --experiment=experiments/papers/positions.py --workdir=runs/positions --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "longer/token_accuracy"
SEEDS = (0, 1, 2)
BASELINE = "sinusoidal"
FIXED = {
    "train.num_steps": 600,
    "train.eval_every": 150,
    "train.checkpoint_every": 150,
    "data.test": ("test", "longer=21-25", "longest=26-40"),
}
SETS = ("test", "longer", "longest")


def sweep() -> dict[str, Overrides]:
    """Return the kinds of positions."""
    kinds = ("sinusoidal", "learned", "relative", "rotary", "alibi", "none")
    return {kind: {"model.positions": kind} for kind in kinds}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the accuracies on all lengths, and how each kind compares with sinusoidal ones."""
    tables = {name: means(trials, f"{name}/token_accuracy") for name in SETS}
    exact = means(trials, "test/exact_match")
    for kind in exact:
        accuracies = ", ".join(f"{name} {tables[name].get(kind, float('nan')):.1%}" for name in SETS)
        yield f"{kind}: token accuracy {accuracies}; exact match on test {exact[kind]:.1%}"
    for kind in exact:
        if kind != BASELINE:
            yield from versus(trials, kind, BASELINE, "test/token_accuracy")
            yield from versus(trials, kind, BASELINE, "longer/token_accuracy")
