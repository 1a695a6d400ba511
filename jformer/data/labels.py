"""The labels of examples as the arrays `target_out` and `weights`: one label, several labels, or a number.

Letters in shapes: b rows of a batch, v labels.
"""

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.features import Arrays, Labels, Rows, chosen, fill_rows
from jformer.data.plan import Shape
from jformer.data.tokenizers import NUM_SYMBOLS, LabelTokenizer


def one_label(weights: np.ndarray | None = None) -> Labels:
    """Return classes 0, 1, … [b 1], one a row, weighted by `weights` [v] (default 1)."""

    def arrays(rows: Rows, labels: Tokens, shape: Shape) -> Arrays:
        filled = fill_rows(labels, rows, shape, 1)
        real = filled["segments"] > 0
        classes = np.where(real, filled["tokens"] - NUM_SYMBOLS, 0)
        each = real.astype(np.float32) if weights is None else np.where(real, weights[classes], 0).astype(np.float32)
        return {"target_out": classes, "weights": each}

    return arrays


def several_labels(count: int) -> Labels:
    """Return for each of `count` labels whether a row has it (1) or not (0) [b v]; all weigh 1."""

    def arrays(rows: Rows, labels: Tokens, shape: Shape) -> Arrays:
        found = np.zeros((shape.rows, count), np.int32)
        each = chosen(labels, rows)
        found[np.repeat(rows.rows, each.lengths), each.values.astype(int) - NUM_SYMBOLS] = 1
        weights = np.zeros((shape.rows, count), np.float32)
        weights[rows.rows] = 1
        return {"target_out": found, "weights": weights}

    return arrays


def one_number(rows: Rows, labels: Tokens, shape: Shape) -> Arrays:
    """Return the bits of a float32 as i32 [b 1], because target_out holds integers in every batch."""
    filled = fill_rows(labels, rows, shape, 1)
    return {"target_out": filled["tokens"], "weights": (filled["segments"] > 0).astype(np.float32)}


def balanced(labels: LabelTokenizer) -> np.ndarray:
    """Return the weight [v] of each label's examples, so that all labels weigh alike: n / (v · examples of the label).

    Their mean over the training text is 1 (King and Zeng 2001, section 3.2, with every label equally frequent).
    """
    counts = np.array(labels.counts, np.float64)
    return (counts.sum() / (len(counts) * counts)).astype(np.float32)
