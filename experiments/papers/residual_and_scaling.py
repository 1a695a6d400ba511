"""Which parts of the Transformer does it need to reverse or sort letters?

Claim:    Vaswani et al. 2017: without 1/sqrt(d_k) large dot products saturate the softmax (section 3.2.1); without
          positions the model cannot use the order (3.5). He et al. 2016: deep stacks need residuals. Dong et al. 2021
          (Attention is not all you need): attention without residuals and feed-forward loses rank with depth.
Design:   one part is removed at a time. "no feed-forward" leaves one hidden unit, the least that the model allows.
          The scale is removed from heads of 16, where little is expected of it, and from heads of 128.
Command:  python -m jformer.sweep --experiment=experiments/papers/residual_and_scaling.py
          --workdir=runs/residual_and_scaling --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "valid/loss"
SEEDS = (0, 1, 2)
FIXED = {
    "train.num_steps": 400,
    "train.eval_every": 400,
    "train.checkpoint_every": 400,
    "data.test": (),
}
PLOTS = [("data.name", "")]
TASKS = ("reverse", "sort")
PARTS: dict[str, Overrides] = {
    "whole": {},
    "no residuals": {"model.residual": False},
    "no feed-forward": {"model.d_ff": 1},
    "no positions": {"model.positions": "none"},
    "no scale": {"model.attention_scale": "off"},
    "heads of 128": {"model.d_k": 128},
    "heads of 128, no scale": {"model.d_k": 128, "model.attention_scale": "off"},
}


def sweep() -> dict[str, Overrides]:
    """Return every change on every task."""
    return {f"{task}: {part}": {"data.name": task, **change} for task in TASKS for part, change in PARTS.items()}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report what each part is worth: the loss without it minus the loss with it."""
    for task in TASKS:
        for part in PARTS:
            if part != "whole":
                other = "heads of 128" if part == "heads of 128, no scale" else "whole"
                yield from versus(trials, f"{task}: {part}", f"{task}: {other}")
