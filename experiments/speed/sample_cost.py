"""What does a sample cost beside a few others of its sentence, and beside many? Work and time of a step, in turns.

transformer_tiny with random weights, 16 sentences of 16 tokens, 32 tokens each at most. Work is what XLA counts of one
step of the loop; the encoder's pass, which all samples of a sentence share, is among it.

Command:  python -m experiments.speed.sample_cost [--samples=8,32,128] [--smoke]
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments.measure import commit, median_and_range, processor_name, seconds_in_turns, smoke_sizes
from experiments.speed.steps_shapes import model_config
from jformer.data.tokenizers import Symbols
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference.compiled_searches import make_answer, make_key
from jformer.inference.inputs import prompts
from jformer.models import build_model, init_params

SAMPLES = flags.DEFINE_list("samples", ["8", "32", "128"], "Of a sentence.")
SENTENCES, LENGTH, ROOM, TURNS = 16, 16, 32, 5


def main(argv: Sequence[str]) -> None:
    """Print a row for each number of samples."""
    del argv
    smoke = smoke_sizes(samples=["1", "2"])
    model = build_model(model_config("smoke" if smoke else "tiny"))
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    searches = {int(count): search(model, params, int(count)) for count in SAMPLES.value}
    seconds = seconds_in_turns({count: run for count, (run, _) in searches.items()}, TURNS)
    print(f"{commit()}, {processor_name()}, JAX {jax.__version__}")
    print(f"{'samples':>8}{'MFLOP a step and sample':>26}   ms a sample of {ROOM} tokens")
    for count, (_, flops) in searches.items():
        each = [second / SENTENCES / count for second in seconds[count]]
        print(f"{count:>8}{flops / 1e6 / SENTENCES / count:>26.2f}   {median_and_range(each)}")


def search(model: Any, params: Any, samples: int) -> tuple[Any, float]:
    """Return the compiled search for so many samples of each sentence, and the FLOPs of a step."""
    size, source = model.config.vocab_size, np.full((SENTENCES, LENGTH), 5, np.int32)
    options = DecodeConfig(search="sample", samples=samples, min_length=ROOM)
    answer = make_answer(make_key([model], options, np.ones(size, bool), Symbols()), "text")
    batch = {
        "source": source, "source_segments": np.ones_like(source),
        "source_positions": np.tile(np.arange(LENGTH, dtype=np.int32), (SENTENCES, 1)),
        **prompts([[]] * SENTENCES, SENTENCES, 1, Symbols()),
        "limit": np.full(SENTENCES, ROOM, np.int32), "line": np.arange(SENTENCES, dtype=np.int32),
    }  # fmt: skip
    compiled = answer.lower([params], batch, ROOM).compile()
    costs = compiled.cost_analysis()
    assert costs
    return functools.partial(compiled, [params], batch), costs["flops"]


if __name__ == "__main__":
    app.run(main)
