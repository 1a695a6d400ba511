"""Does a translator of Multi30k lose by translating both ways?

Claim:    Johnson et al. 2017: one model of both directions of a pair of languages is about as good as two models. Here
          the model is as large as one of the two.
Design:   configs/multi30k_tiny.py, but Pre-LN and in smaller updates, from English to German, from German to English,
          and both in one model, which takes twice the updates. BLEU of test_2016, as there.
Command:  python -m jformer.sweep --experiment=experiments/papers/two_directions.py --workdir=runs/two_directions
          --workers=2 --config.data.dir=PATH/multi30k
"""

import dataclasses
from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/multi30k_tiny.py"
METRIC = "test/bleu"
SEEDS = (0, 1, 2)
UPDATES = 2_400  # of a direction alone: 19 epochs
TRAIN, VALID, TEST = "train.lc.norm.tok", "val.lc.norm.tok", "test_2016_flickr.lc.norm.tok"
FIXED: Overrides = {
    "model.norm": "pre",
    "model.dropout": 0.1,
    "model.dtype": "bfloat16",
    "data.vocab_size": 4_000,
    "data.tokens_per_update": 4_096,
    "data.num_buckets": 3,
    "optim.schedule": "cosine",
    "optim.learning_rate": 2.5e-3,
    "optim.warmup": 400,
    "train.num_steps": UPDATES,
    "train.eval_every": 400,
    "train.checkpoint_every": 100,
    "train.patience": 0,
    "evaluate.average_last": 5,
}
GERMAN, ENGLISH, BOTH = "into German", "into English", "both"


def sweep() -> dict[str, Overrides]:
    """Return each direction alone, and both."""
    german = {"source_language": "de", "target_language": "en"}
    back = {f"data.{key}": language for key, language in german.items()}
    other = {**german, "train": TRAIN, "valid": VALID, "test": (f"back={TEST}",)}
    both: Overrides = {"data.language_symbols": "source", "data.mixture": (other,), "train.num_steps": 2 * UPDATES}
    return {GERMAN: {}, ENGLISH: back, BOTH: both}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the BLEU of each direction, alone and in one model, and the difference within seeds."""
    for arm, bleu in means(trials).items():
        yield f"{arm}: {bleu:.2f} BLEU" + (" into German" if arm == BOTH else "")
    for bleu in means([trial for trial in trials if trial.arm == BOTH], "back/bleu").values():
        yield f"{BOTH}: {bleu:.2f} BLEU into English"
    yield from versus(trials, BOTH, GERMAN)
    renamed = [t if t.arm != BOTH else dataclasses.replace(t, value=t.metrics.get("back/bleu")) for t in trials]
    yield from versus(renamed, BOTH, ENGLISH)
