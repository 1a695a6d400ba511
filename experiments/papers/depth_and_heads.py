"""How do depth and the number of heads matter, other things equal?

Claim:    Vaswani et al. 2017, Table 3: more layers are better (C: 2, 4, 6, 8); one head is 0.9 BLEU worse than the
          best number, and too many are worse too (A: 1, 4, 8, 16, 32, at constant computation).
Design:   letters to reverse, d_model 64. Depth at four heads; heads at two layers, each of 64 / heads features, so that
          parameters and computation stay the same.
Command:  python -m jformer.sweep --experiment=experiments/papers/depth_and_heads.py --workdir=runs/depth_and_heads
          --workers=2
"""

from collections.abc import Iterator, Sequence

from scipy import stats

from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "valid/perplexity"
SEEDS = (0, 1, 2)
FIXED = {
    "model.execution.unroll": 1,  # compiles as quickly at any depth
    "train.num_steps": 400,
    "train.eval_every": 100,
    "train.checkpoint_every": 100,
    "data.test": (),
}
BASELINE = "N 2, 4 heads"
DEPTHS, HEADS = (1, 2, 4, 8), (1, 2, 4, 8, 16)
PLOTS = [("model.num_layers", "model.num_heads"), ("model.num_heads", "model.num_layers")]


def sweep() -> dict[str, Overrides]:
    """Return depths at four heads, and heads at two layers."""
    sizes = dict.fromkeys([*((depth, 4) for depth in DEPTHS), *((2, heads) for heads in HEADS)])
    return {label(*size): {"model.num_layers": size[0], "model.num_heads": size[1]} for size in sizes}


def label(depth: int, heads: int) -> str:
    """Return the name of an arm."""
    return f"N {depth}, {heads} head{'s' * (heads > 1)}"


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report whether every added layer helps, and which number of heads is best."""
    found = means(trials)
    depths = [depth for depth in DEPTHS if label(depth, 4) in found]
    if len(depths) > 2:
        order = stats.spearmanr(depths, [found[label(depth, 4)] for depth in depths])
        yield f"depth and perplexity: Spearman's rho {order.statistic:+.2f} over {len(depths)} depths"
    for depth in DEPTHS:
        if depth != 2:
            yield from versus(trials, label(depth, 4), BASELINE)
    heads = {count: found[label(2, count)] for count in HEADS if label(2, count) in found}
    if heads:
        yield f"least perplexity of two layers: {label(2, min(heads, key=heads.__getitem__))}"
    for count in HEADS:
        if count != 4:
            yield from versus(trials, label(2, count), BASELINE)
