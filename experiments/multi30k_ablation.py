"""What moves a small translator of Multi30k, one change at a time, judged on the validation set alone?

Claim:    Pre-LN (Xiong et al. 2020), R-Drop (Liang et al. 2021, alpha 5), BPE-dropout (Provilkov et al. 2020, 0.1),
          label smoothing (Szegedy et al. 2016), means of parameters (Vaswani et al. 2017, section 6.1; Polyak and
          Juditsky 1992) and the size of the vocabulary each change what configs/multi30k_tiny.py reaches.
Design:   the recipe with an eighth of its updates, each of half the tokens (6 epochs), a warm-up that fits and a rate
          that it bears; BLEU of the validation set by 5 beams. The test set is not read: what is chosen here is scored
          there once. An arm of R-Drop computes twice as much for as many updates.
Command:  python -m jformer.sweep --experiment=experiments/multi30k_ablation.py --workdir=runs/multi30k_ablation
          --workers=2 --config.data.dir=PATH/multi30k
"""

from collections.abc import Iterator, Sequence

from experiments.contrasts import means, versus
from jformer.sweep import Trial
from jformer.sweep.space import Overrides

BASE = "configs/multi30k_tiny.py"
METRIC = "validation/bleu"
SEEDS = (0, 1, 2)
FIXED = {
    "data.test": ("validation=val.lc.norm.tok",),
    "data.tokens_per_update": 4_096,
    "data.num_buckets": 4,
    "model.dtype": "auto",
    "optim.learning_rate": 3e-3,
    "optim.warmup": 300,
    "train.num_steps": 1_000,
    "train.eval_every": 100,
    "train.checkpoint_every": 100,
    "train.patience": 0,
    "evaluate.average_last": 5,
}
BASELINE = "the recipe"
CHANGES: dict[str, Overrides] = {
    BASELINE: {},
    "Pre-LN": {"model.norm": "pre"},
    "R-Drop": {"optim.r_drop": 5.0},
    "BPE-dropout": {"data.bpe_dropout": 0.1},
    "vocabulary of 4,000": {"data.vocab_size": 4_000},
    "no smoothing": {"optim.label_smoothing": 0.0},
    "smoothing of 0.2": {"optim.label_smoothing": 0.2},
    "the last parameters": {"evaluate.weights": "last"},
    "moving average": {"train.ema_decay": 0.995, "evaluate.weights": "ema"},
}


def sweep() -> dict[str, Overrides]:
    """Return the recipe and each change of it."""
    return CHANGES


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Tell the BLEU of each arm, and what each change gains."""
    for arm, bleu in means(trials).items():
        yield f"{arm}: {bleu:.2f} BLEU on the validation set"
    for arm in list(CHANGES)[1:]:
        yield from versus(trials, arm, BASELINE)
