"""Do the variations of Table 3 rank at toy size as they do in the paper?

Claim:    Vaswani et al. 2017, Table 3, perplexities on newstest2013 after 100,000 updates of WMT14 English to German:
          PAPER below, rows A to E by what they change.
Design:   every size divided by 8, layers by 2: d_model 64, 8 heads of 8, d_ff 256, N 3, Post-LN as there; 20,000
          sequences of letters to sort in place of WMT14; 400 updates. So little training cannot overfit: the benefit
          of row D (dropout, label smoothing) cannot show, and ranks say nothing about WMT14. At paper scale:
          configs/wmt14_en_de_table3.py.
Command:  python -m jformer.sweep --experiment=experiments/papers/table3.py --workdir=runs/table3 --workers=2
"""

from collections.abc import Iterator, Sequence

from scipy import stats

from experiments.papers.contrasts import means
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/letters.py"
METRIC = "valid/perplexity"
SEEDS = (0, 1, 2)
FIXED = {
    "model.norm": "post",
    "model.execution.unroll": 1,  # compiles as quickly at any depth
    "data.name": "sort",
    "optim.warmup": 100,
    "train.num_steps": 400,
    "train.eval_every": 100,
    "train.checkpoint_every": 100,
    "data.test": (),
}
PLOTS: list[tuple[str, str]] = []
TABLE = {
    "model.num_layers": 3,
    "model.d_model": 64,
    "model.d_ff": 256,
    "model.num_heads": 8,
    "model.d_k": 8,
    "model.d_v": 8,
    "model.dropout": 0.1,
    "optim.label_smoothing": 0.1,
    "model.positions": "sinusoidal",
}
ROWS: dict[str, Overrides] = {
    "base": {},
    "A h 1": {"model.num_heads": 1, "model.d_k": 64, "model.d_v": 64},
    "A h 4": {"model.num_heads": 4, "model.d_k": 16, "model.d_v": 16},
    "A h 16": {"model.num_heads": 16, "model.d_k": 4, "model.d_v": 4},
    "A h 32": {"model.num_heads": 32, "model.d_k": 2, "model.d_v": 2},
    "B d_k 16": {"model.d_k": 2},
    "B d_k 32": {"model.d_k": 4},
    "C N 2": {"model.num_layers": 1},
    "C N 4": {"model.num_layers": 2},
    "C N 8": {"model.num_layers": 4},
    "C d_model 256": {"model.d_model": 32, "model.d_k": 4, "model.d_v": 4},
    "C d_model 1024": {"model.d_model": 128, "model.d_k": 16, "model.d_v": 16},
    "C d_ff 1024": {"model.d_ff": 128},
    "C d_ff 4096": {"model.d_ff": 512},
    "D dropout 0.0": {"model.dropout": 0.0},
    "D dropout 0.2": {"model.dropout": 0.2},
    "D smoothing 0.0": {"optim.label_smoothing": 0.0},
    "D smoothing 0.2": {"optim.label_smoothing": 0.2},
    "E learned positions": {"model.positions": "learned"},
}
PAPER = dict(
    zip(
        ROWS,
        [
            *(4.92, 5.29, 5.00, 4.91, 5.01, 5.16, 5.01, 6.11, 5.19, 4.88),
            *(5.75, 4.66, 5.12, 4.75, 5.77, 4.95, 4.67, 5.47, 4.92),
        ],
        strict=True,
    )
)


def sweep() -> dict[str, Overrides]:
    """Return the rows under the paper's names."""
    return {row: {**TABLE, **change} for row, change in ROWS.items()}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report how well the ranks agree, over all rows and over those that change only the architecture."""
    found = means(trials)
    for name, rows in (("all rows", list(ROWS)), ("rows A, B, C and E", [row for row in ROWS if row[0] != "D"])):
        there = [row for row in rows if row in found]
        if len(there) > 2:
            rho, p = stats.spearmanr([found[row] for row in there], [PAPER[row] for row in there])
            yield f"{name}: Spearman's rho {rho:+.2f} with the paper's, p = {p:.2g}, {len(there)} rows"
    for row in found:
        yield f"{row}: {found[row]:.3f}, in the paper {PAPER[row]}"
