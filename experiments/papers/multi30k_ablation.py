"""What moves a small translator of Multi30k, one change at a time, judged on the validation set alone?

Claim:    Pre-LN (Xiong et al. 2020), R-Drop (Liang et al. 2021, alpha 5), BPE-dropout (Provilkov et al. 2020, 0.1),
          label smoothing (Szegedy et al. 2016) and the size of the vocabulary each change what configs/multi30k_tiny.py
          reaches. Means of parameters (Vaswani et al. 2017, section 6.1; Polyak and Juditsky 1992) are compared by
          --mode=evaluate with --config.evaluate.weights=last, ema or best of the same runs.
Design:   the recipe in 1,600 updates, not some 6,500: its warm-up to 2.5e-3, then a cosine to zero. All but one arm
          have 4,000 pieces, whose updates take three quarters of the time. BLEU of the validation set by 5 beams.
          The test set is not read: what is chosen here is scored there once. R-Drop doubles the computation of an
          update.
Command:  python -m jformer.sweep --experiment=experiments/papers/multi30k_ablation.py --workdir=runs/multi30k_ablation
          --workers=2 --config.data.dir=PATH/multi30k
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/multi30k_tiny.py"
METRIC = "validation/bleu"
SEEDS = (0, 1)
FIXED = {
    "data.test": ("validation=val.lc.norm.tok",),
    "data.vocab_size": 4_000,
    "model.dtype": "auto",
    "optim.schedule": "cosine",
    "optim.learning_rate": 2.5e-3,  # at update 1,000, as in the recipe
    "optim.warmup": 1_000,
    "train.num_steps": 1_600,
    "train.log_every": 50,
    "train.eval_every": 100,
    "train.checkpoint_every": 50,
    "train.ema_decay": 0.99,
    "train.patience": 0,
    "evaluate.average_last": 5,
}
BASELINE = "the recipe in brief"
CHANGES: dict[str, Overrides] = {
    BASELINE: {},
    "Pre-LN": {"model.norm": "pre"},
    "BPE-dropout": {"data.bpe_dropout": 0.1},
    "no smoothing": {"optim.label_smoothing": 0.0},
    "vocabulary of 10,000": {"data.vocab_size": 10_000},
    "R-Drop": {"optim.r_drop": 5.0},
}


def sweep() -> dict[str, Overrides]:
    """Return the recipe and each change of it."""
    return CHANGES


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the BLEU of each arm, and what each change gains."""
    for arm, bleu in means(trials).items():
        yield f"{arm}: {bleu:.2f} BLEU on the validation set"
    for arm in list(CHANGES)[1:]:
        yield from versus(trials, arm, BASELINE)
