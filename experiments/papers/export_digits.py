"""Write scikit-learn's handwritten digits as a source of images: 1,797 of 8 x 8 gray pixels, ten labels.

They are the test set of the UCI Optical Recognition of Handwritten Digits. Every tenth image of a label goes to the
validation split and two of ten to the test split, drawn with seed 0: 1,257 train, 180 valid, 360 test.

Command:  python -m experiments.papers.export_digits --output=DIR [--smoke]
"""

from pathlib import Path

import numpy as np
from absl import app, flags

from experiments.measure import smoke_sizes

OUTPUT = flags.DEFINE_string("output", None, "The folder to write into.", required=True)


def main(_: list[str]) -> None:
    """Write SPLIT.npy (u8 [n 8 8], 0 to 240) and SPLIT.labels.txt for each split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit('The digits come with scikit-learn: pip install -e ".[experiments]"') from None
    digits = load_digits()
    few = 200 if smoke_sizes() else None
    images = (15 * digits.images[:few]).astype(np.uint8)  # 17 levels of gray, 0 to 16
    labels = digits.target[:few]
    output = Path(OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    for split, rows in stratify(labels).items():
        np.save(output / f"{split}.npy", images[rows])
        (output / f"{split}.labels.txt").write_text("".join(f"{label}\n" for label in labels[rows]))
        print(f"{split}: {len(rows):,} images")


def stratify(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows of each split, in their old order: a tenth, two tenths and the rest of every label."""
    shuffled = np.random.default_rng(0).permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    place = np.arange(len(labels)) % 10
    chosen = {"train": place > 2, "valid": place == 0, "test": (place == 1) | (place == 2)}
    return {split: np.sort(by_label[rows]) for split, rows in chosen.items()}


if __name__ == "__main__":
    app.run(main)
