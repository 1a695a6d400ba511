"""Can Pre-LN do without the warm-up that Post-LN needs, the more so the deeper the model?

Claim:    Xiong et al. 2020 (On Layer Normalization in the Transformer Architecture), sections 3 and 4: Post-LN without
          warm-up does not learn, since its gradients near the output are large at initialisation; Pre-LN learns as
          well without. Gradients by layer: experiments/papers/gradient_norms.py.
Design:   letters to sort; Adam at a large rate, no clipping. Depth is that of the encoder and of the decoder.
Command:  python -m jformer.sweep --experiment=experiments/papers/pre_vs_post_ln.py --workdir=runs/pre_vs_post_ln
          --workers=2
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import versus
from jformer.tools.sweep import Trial, product
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "valid/loss"
SEEDS = (0, 1, 2)
FIXED = {
    "model.d_model": 32,
    "model.d_ff": 128,
    "model.execution.unroll": 1,  # compiles as quickly at any depth
    "data.name": "sort",
    "optim.learning_rate": 4e-3,
    "optim.clip_norm": 0.0,
    "train.num_steps": 300,
    "train.eval_every": 300,
    "train.checkpoint_every": 300,
    "data.test": (),
}
PLOTS = [("model.num_layers", "model.norm"), ("optim.warmup", "model.norm")]
DEPTHS, WARMUP = (2, 6, 12), 100


def sweep() -> dict[str, Overrides]:
    """Return the norms with and without warm-up, at each depth."""
    arms = product({"model.num_layers": DEPTHS, "model.norm": ["post", "pre"], "optim.warmup": [WARMUP, 0]})
    return {label(arm["model.norm"], arm["optim.warmup"], arm["model.num_layers"]): arm for arm in arms}


def label(norm: str, warmup: int, depth: int) -> str:
    """Return the name of an arm."""
    return f"{norm}, {'warm-up' if warmup else 'no warm-up'}, {depth} layers"


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report what doing without warm-up costs each norm at each depth, and how the norms compare with it."""
    for depth in DEPTHS:
        for norm in ("post", "pre"):
            yield from versus(trials, label(norm, 0, depth), label(norm, WARMUP, depth))
        yield from versus(trials, label("pre", WARMUP, depth), label("post", WARMUP, depth))
