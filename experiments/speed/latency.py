"""How long does a short sentence take, alone and warm? Median, 95th percentile, and what the first one takes.

Command:  python -m experiments.speed.latency [--sizes=tiny,base] [--beams=1,5] [--dtypes=float32,bfloat16] [--smoke]

Models of random weights and 10,000 characters translate one sentence after the other, of 8 to 14 tokens, into exactly
10 tokens each; from text to text, through Predictor.predict. The goal is that of GOAL, and a 95th percentile within 1.5
times the median.
"""

import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags, logging

import jformer
from experiments.measure import commit, processor_name, smoke_sizes
from experiments.untrained import write_untrained
from jformer.data.tokenizers.symbols import NUM_SYMBOLS

SIZES = flags.DEFINE_list("sizes", ["tiny", "base"], "Models.")
BEAMS = flags.DEFINE_list("beams", ["1", "5"], "Beam sizes; 1 is greedy.")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Dtypes of activations.")
COUNT = flags.DEFINE_integer("count", 200, "Timed sentences of each kind.", lower_bound=1)

VOCABULARY, TOKENS = 10_000, 10
GOAL = {"tiny": 8.0, "base": 60.0}  # ms, the median
SPREAD = 1.5  # the 95th percentile, in medians


def main(_: list[str]) -> None:
    """Print a line for each model, beam and dtype."""
    smoke_sizes(sizes=["tiny"], beams=["1"], dtypes=["float32"], count=2)
    logging.set_verbosity(logging.WARNING)
    print(f"{COUNT.value} sentences each; {processor_name()}, {commit()}")
    print(f"{'model':<8}{'beam':>5}  {'dtype':<10}{'first, s':>9}{'p50, ms':>9}{'p95, ms':>9}  verdict")
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES.value:
            workdir = write_untrained(Path(folder) / size, size, VOCABULARY)
            for beam, dtype in itertools.product(BEAMS.value, DTYPES.value):
                first, half, most = time_sentences(workdir, int(beam), dtype)
                met = half <= GOAL[size] and most <= SPREAD * half
                said = "met" if met else f"missed ({GOAL[size]:g} ms, {SPREAD})"
                print(f"{size:<8}{beam:>5}  {dtype:<10}{first:>9.2f}{half:>9.1f}{most:>9.1f}  {said}", flush=True)


def time_sentences(workdir: Path, beam: int, dtype: str) -> tuple[float, float, float]:
    """Return the seconds of the first sentence, and the median and 95th percentile of warm ones in milliseconds."""
    predictor = jformer.load(workdir, beam_size=beam, dtype=dtype, min_length=TOKENS, max_length=TOKENS)
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(COUNT.value + 10):
        text = "".join(chr(0x4E00 + i) for i in rng.integers(0, VOCABULARY - NUM_SYMBOLS, rng.integers(8, 15)))
        began = time.perf_counter()
        predictor.predict([text])
        seconds.append(time.perf_counter() - began)
    half, most = np.percentile(seconds[10:], (50, 95)) * 1_000  # the first ones compile
    return seconds[0], half, most


if __name__ == "__main__":
    app.run(main)
