"""Is a deep encoder with a shallow decoder as good as two equal stacks, and how much faster does it decode?

Claim:    Kasai et al. 2021 (Deep Encoder, Shallow Decoder): a decoder of one layer under a deep encoder loses little
          or nothing, and decodes far faster, as only the decoder runs once a token.
Design:   Multi30k English to German by the recipe of two_directions.py: 4 + 4 layers, 8 + 1, of about as many
          parameters, and 4 + 1. Test BLEU with five beams. Speed is that of --mode=predict for the training text.
Command:  python -m jformer.sweep --experiment=experiments/papers/deep_encoder.py --workdir=runs/deep_encoder
          --workers=2 --config.data.dir=PATH/multi30k
"""

from collections.abc import Iterator, Sequence

from experiments.papers.contrasts import means, versus
from experiments.papers.two_directions import FIXED as RECIPE
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/multi30k_tiny.py"
METRIC = "test/bleu"
SEEDS = (0, 1, 2)
FIXED = RECIPE
EQUAL, DEEP, SHALLOW = "4 + 4", "8 + 1", "4 + 1"


def sweep() -> dict[str, Overrides]:
    """Return layers of the encoder and of the decoder."""
    return {
        EQUAL: {},
        DEEP: {"model.num_layers": 8, "model.num_decoder_layers": 1},
        SHALLOW: {"model.num_decoder_layers": 1},
    }


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report BLEU and parameters of each, and how they compare."""
    parameters = means(trials, "parameters")
    for arm, bleu in means(trials).items():
        yield f"{arm}: {bleu:.2f} BLEU" + (f", {parameters[arm]:,.0f} parameters" if arm in parameters else "")
    yield from versus(trials, DEEP, EQUAL)
    yield from versus(trials, SHALLOW, EQUAL)
    yield from versus(trials, DEEP, SHALLOW)
