"""Does a model that captions new pictures do more than look up the ones it was trained on?

configs/scenes_caption.py with several seeds, beside two baselines without a model: the most frequent caption, and that
of the nearest training picture, by squared differences of pixels. Seeds that are trained already are not trained again.

Command:  python -m experiments.papers.captions --workdir=runs/captions [--seeds=3] [--smoke]
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from configs import scenes_caption
from experiments.measure import smoke_sizes
from experiments.runs import read_split, results_of, small_run
from jformer.data.image_files import read_images
from jformer.data.sources.split import Pair
from jformer.evaluation import records
from jformer.tasks.cider import cider_d
from jformer.tasks.metrics import exact_match, text_scores

WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the runs, one for each seed.", required=True)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs, with seeds 0, 1, …", lower_bound=1)
SMOKE = {"data.num_pairs": 100, "data.tokenizer": "word", "data.tokens_per_update": 8 * 32 * 32}
HEAD = f"{'held-out scenes':<32}{'exact match':>12}{'BLEU':>8}{'CIDEr-D':>9}{'minutes':>9}"


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(seeds=1)
    options = {**small_run(2), **SMOKE, "data.test": "('test',)", "evaluate.during": "()"} if smoke_sizes() else {}
    train, test = (read_split(scenes_caption, split, options) for split in ("train", "test"))
    references = [pair.target for pair in test]
    print(HEAD, flush=True)
    frequent = Counter(pair.target for pair in train).most_common(1)[0][0]
    print(scored("the most frequent caption", [frequent] * len(test), references), flush=True)
    print(scored("the nearest training picture's", nearest_captions(train, test), references), flush=True)
    known = {pair.target for pair in train}
    rows = []
    for seed in range(SEEDS.value):
        workdir = Path(WORKDIR.value) / f"seed{seed}"
        minutes = results_of(scenes_caption, workdir, {"seed": seed, **options})["run"]["wall_seconds"] / 60
        outputs = records.outputs(workdir, "test")
        rows.append(scored(f"scenes_caption, seed {seed}", outputs, references) + f"{minutes:>9.1f}")
        new = [i for i, pair in enumerate(test) if pair.target not in known]
        rows.append(scored("  captions new to training", [outputs[i] for i in new], [references[i] for i in new]))
    print("\n".join([HEAD, *rows]))
    print(
        f"{len(test) - len([pair for pair in test if pair.target in known]):,} of {len(test):,} test captions are new"
    )


def nearest_captions(train: Sequence[Pair], test: Sequence[Pair]) -> list[str]:
    """Return the caption of each test picture's nearest training picture."""
    known, asked = (pixels_of(pairs) for pairs in (train, test))
    squares, found = (known**2).sum(axis=1, keepdims=True), list[str]()
    for some in np.array_split(asked, -(-len(asked) // 100)):  # the squares of the query are the same for all
        found += [train[i].target for i in np.argmin(squares - 2 * known @ some.T, axis=0)]
    return found


def pixels_of(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the pixels of pictures, float32 [n h·w·c]."""
    return np.stack([image.ravel() for image in read_images(pair.source for pair in pairs)]).astype(np.float32)


def scored(name: str, outputs: Sequence[str], references: Sequence[str]) -> str:
    """Return a row of the table."""
    exact = exact_match(outputs, references)["score"]
    bleu = text_scores(outputs, [references], names=("bleu",))["bleu"]["score"]
    cider = sum(cider_d(outputs, [[text] for text in references])) / len(outputs)
    return f"{name:<32}{exact:>12.2%}{bleu:>8.1f}{cider:>9.2f}"


if __name__ == "__main__":
    app.run(main)
