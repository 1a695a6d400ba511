"""Which tokens should text be split into: words, characters, bytes, or subwords, and how many of them?

Claim:    Sennrich et al. 2016 (Neural Machine Translation of Rare Words with Subword Units): subwords beat words, since
          nothing is unknown. Xue et al. 2022 (ByT5) and Al-Rfou et al. 2019: bytes and characters can compete, but take
          more computation for the same text.
Design:   a language model of Multi30k's English captions, compared by the bits it needs for a character of the test
          captions. Perplexities of tokens cannot be compared: tokens of different tokenizers hold different amounts of
          text. All arms compute the same number of positions; "twice as long" takes twice the updates. Words that
          training has not seen are one symbol, which costs less than spelling them: the figure of "word" is too good.
Command:  python -m jformer.sweep --experiment=experiments/papers/tokenizer_choice.py --workdir=runs/tokenizer_choice
          --workers=2 --config.data.dir=PATH/multi30k
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/multi30k_gpt.py"
METRIC = "test/bits_per_character"
SEEDS = (0, 1)
BASELINE = "bpe 2000"
PLOTS: list[tuple[str, str]] = []
STEPS = 500


def sweep() -> dict[str, Overrides]:
    """Return the tokenizers; words with all that training has."""
    sizes: dict[str, Overrides] = {f"bpe {size}": {"data.vocab_size": size} for size in (500, 2_000, 8_000)}
    symbols: dict[str, Overrides] = {name: {"data.tokenizer": name} for name in ("char", "byte")}
    arms: dict[str, Overrides] = {"word": {"data.tokenizer": "word", "data.vocab_size": 12_000}, **sizes, **symbols}
    longer: dict[str, Overrides] = {"char, twice as long": {**symbols["char"], "train.num_steps": 2 * STEPS}}
    return {name: {"train.num_steps": STEPS, **arm} for name, arm in {**arms, **longer}.items()}


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Rank the arms, and report how each compares with the middle size of subwords."""
    found = means(trials)
    if found:
        yield "bits per character, least first: " + ", ".join(
            f"{arm} {found[arm]:.3f}" for arm in sorted(found, key=found.__getitem__)
        )
    for arm in found:
        if arm != BASELINE:
            yield from versus(trials, arm, BASELINE)
