"""Does the result depend on how many devices share an update, or on how many microbatches make it?

Claim:    ours (docs/map.md; decision 0004): it does not, to rounding, dropout included: sums are divided once, by the
          global count, and noise is a function of the row of the global update.
Design:   the same 50 updates on 1, 2 and 4 devices of one processor, and in 1, 2 and 4 microbatches. Warm-up is long,
          since Adam amplifies rounding errors; rows are those of the letters, half of each padding.
Command:  python -m jformer.sweep --experiment=experiments/papers/batch_invariance.py --workdir=runs/batch_invariance
          --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import values
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "valid/loss"
SEEDS = (0, 1, 2)
ENVIRONMENT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
FIXED = {
    "model.dropout": 0.1,
    "data.row_multiple": 16,
    "data.tokens_per_update": 1_024,
    "optim.warmup": 50,
    "train.num_steps": 50,
    "train.log_every": 10,
    "train.eval_every": 10,
    "train.checkpoint_every": 10,
    "data.test": (),
}
BASELINE = "1 device"
PLOTS = [("mesh.data", "train.accumulation")]
FIGURES = ("valid/loss", "train/loss", "train/grad_norm")


def sweep() -> dict[str, Overrides]:
    """Return ways to compute the same updates."""
    return {
        "1 device": {"mesh.data": 1},
        "2 devices": {"mesh.data": 2},
        "4 devices": {"mesh.data": 4},
        "2 microbatches": {"mesh.data": 1, "train.accumulation": 2},
        "4 microbatches": {"mesh.data": 1, "train.accumulation": 4},
        "4 devices, 4 microbatches": {"mesh.data": 4, "train.accumulation": 4},
    }


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the largest relative difference of each figure from one device, over all seeds."""
    for arm in sweep():
        for figure in FIGURES if arm != BASELINE else ():
            one, other = values(trials, BASELINE, figure), values(trials, arm, figure)
            apart = [abs(other[seed] / one[seed] - 1) for seed in one.keys() & other.keys()]
            if apart:
                yield f"{arm}: {figure} within {max(apart):.1e} of one device, {len(apart)} seeds"
