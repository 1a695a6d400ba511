"""Does one model translate between three languages, including pairs it was not trained on?

Claim:    Johnson et al. 2017: with the target language as a symbol before the source, one model has several pairs of
          languages, and pairs that it was not trained on (zero-shot). NLLB team 2022: the target language begins the
          target, and the source's own language the source. Wu et al. 2021 (Language Tags Matter for Zero-Shot Neural
          Machine Translation): where the tag stands matters for zero-shot translation, not for trained pairs.
Design:   three made-up languages, one of them reversed (experiments/sources/languages.py); from and to the first in
          four trained directions, zero-shot between the others in two. The share of sentences that are right from end
          to end, mean over directions. Beside it a model of the first direction alone, with a quarter of the updates,
          as the others spend there.
Command:  python -m jformer.sweep --experiment=experiments/papers/six_directions.py --workdir=runs/six_directions
          --workers=2
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs import letters
from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "experiments/papers/six_directions.py"
METRIC = "aa-bb/exact_match"
SEEDS = (0, 1, 2)
FIXED: Overrides = {}
SOURCE = "experiments.sources.languages:open_split"
TRAINED, UNTRAINED = ("bb-aa", "aa-cc", "cc-aa"), ("bb-cc", "cc-bb")  # beside aa-bb, the first corpus
ALONE = "aa to bb alone"
UPDATES = 2_400


def corpus(pair: str, **options: Any) -> dict[str, Any]:
    """Return a corpus of data.mixture, tested by the name of its pair of languages."""
    source, target = pair.split("-")
    languages = {"source_language": source, "target_language": target}
    return {"source": SOURCE, "name": pair, "num_pairs": 8_000, **languages, "test": (f"{pair}=test",), **options}


def get_config() -> ConfigDict:
    """Return the run of all pairs."""
    config = letters.get_config()
    config.data.update(corpus("aa-bb"), tokenizer="bpe", vocab_size=300, language_symbols="source")
    config.data.mixture = (*(corpus(pair) for pair in TRAINED), *(corpus(pair, train="") for pair in UNTRAINED))
    config.train.update(num_steps=UPDATES, eval_every=UPDATES // 4, checkpoint_every=UPDATES // 4)
    config.decode.update(max_extra_length=10)
    return config


def sweep() -> dict[str, Overrides]:
    """Return both places, and one direction alone."""
    places: dict[str, Overrides] = {place: {"data.language_symbols": place} for place in ("source", "target")}
    return {**places, ALONE: {"data.mixture": (), "train.num_steps": UPDATES // 4}}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the shares of right sentences, and how the places compare."""
    for arm, alone in means(trials).items():
        yield f"{arm}: aa to bb {alone:.1%}"
    for key in ("mean/exact_match", "zero-shot/exact_match"):
        for arm, share in means(trials, key).items():
            yield f"{arm}: {key} {share:.1%}"
        yield from versus(trials, "target", "source", key)
    yield from versus(trials, "source", ALONE)
