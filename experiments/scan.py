"""Do relative positions let a Transformer write longer outputs than it was trained on?

Claim:    Csordás et al. 2021: trained on SCAN's commands of up to 26 actions, a Transformer with the relative positions
          of Dai et al. 2019 has 100 % of the longer ones right, one with absolute positions few or none. At 22 actions,
          the split of Lake and Baroni 2018, neither has any.
Design:   positions, both scales of absolute ones (embeddings times sqrt(d_model), or positions over it), both cutoffs;
          the share of test commands right from end to end. Of the recipe in configs/scan_transformer.py the updates,
          the tokens of one and the dropout are less, so that it fits two cores.
Command:  python -m jformer.sweep --experiment=experiments/scan.py --workdir=runs/scan --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.contrasts import means, versus
from jformer.sweep import Trial
from jformer.sweep.space import Overrides

BASE = "configs/scan_transformer.py"
METRIC = "test/exact_match"
SEEDS = (0, 1, 2)
FIXED = {
    "model.dropout": 0.1,
    "model.execution.unroll": 1,
    "data.tokens_per_update": 1_024,
    "train.num_steps": 1_500,
    "train.log_every": 50,
}
CUTOFFS = {"22": "length", "26": "length26"}
KINDS = {
    "relative": {"model.positions": "transformer_xl"},
    "absolute": {"model.positions": "sinusoidal", "model.embedding_scale": "positions"},
    "absolute, embeddings scaled": {"model.positions": "sinusoidal", "model.embedding_scale": "input"},
}


def sweep() -> dict[str, Overrides]:
    """Return kinds of positions, at each cutoff."""
    return {
        f"{kind}, {cutoff}": {**options, "data.train": f"{split}_train", "data.test": (f"test={split}_test",)}
        for cutoff, split in CUTOFFS.items()
        for kind, options in KINDS.items()
    }


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Tell the accuracies, and how each kind compares with relative positions."""
    for arm, accuracy in means(trials, METRIC).items():
        yield f"{arm} actions: {accuracy:.1%} of the longer commands"
    for cutoff in CUTOFFS:
        for kind in list(KINDS)[1:]:
            yield from versus(trials, f"relative, {cutoff}", f"{kind}, {cutoff}", METRIC)
