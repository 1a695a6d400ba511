"""How do time and memory grow with the tokens of an update, the sentences of a batch, and the pairs of a corpus?

updates   transformer_tiny from 2,048 to 65,536 tokens a side, sentences of 32, float32; an update of more than --most
          tokens is made of microbatches of so many, as train.accumulation does
decoding  greedy, sentences of 15 tokens and outputs of exactly 15, 16 to 1,024 a batch, random weights
corpus    lines of the quickstart joined two by two at random, in two files: opened, a vocabulary learned of them,
          tokenized and cached by the code that a run does it by

Seconds are the processor's, medians of --turns (of the corpus one), which other work beside it does not lengthen much;
so one core is to be used. Tables come as CSV, to standard output and to --output, where the pictures are drawn, too.

Command:  taskset -c 0 python -m experiments.speed.growth --of=updates --output=FOLDER [--counts=2048,4096] [--smoke]
          taskset -c 0 python -m experiments.speed.growth --of=decoding --size=tiny --dtype=bfloat16 --output=FOLDER
          taskset -c 0 python -m experiments.speed.growth --of=corpus --output=FOLDER
"""

import dataclasses
import functools
import itertools
import random
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from experiments.measure import commit, mean_seconds, processor_name, smoke_sizes
from experiments.speed.steps_jformer import stepper
from experiments.speed.steps_shapes import LENGTH, make_batch, model_config
from experiments.untrained import write_untrained
from jformer.config import default_config, load_config, resolve
from jformer.data.corpus import open_corpus
from jformer.data.sources import open_split
from jformer.data.tokenizers.symbols import NUM_SYMBOLS
from jformer.data.vocabularies import learn_tokenizers, load_tokenizers
from jformer.inference.predict import load
from jformer.tasks.build import build_task
from jformer.tools.pages import plots
from jformer.training.malloc import keep_freed_memory

OF = flags.DEFINE_list("of", ["updates", "decoding", "corpus"], "What grows.")
COUNTS = flags.DEFINE_list("counts", [], "How many; none = as above.")
TURNS = flags.DEFINE_integer("turns", 3, "Timed turns after a first one.")
OUTPUT = flags.DEFINE_string("output", "", "A folder for tables and pictures; none = only print.")
MOST = flags.DEFINE_integer("most", 32_768, "Tokens a side of a microbatch.")
SIZE = flags.DEFINE_enum("size", "tiny", ["tiny", "base"], "Which model decodes.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "In which it does.")
SENTENCES = flags.DEFINE_integer("sentences", 1_024, "Decoded in a turn, in batches of any size.")

TOKENS, VOCABULARY = 15, 10_000  # of a sentence and of an output; entries
DEFAULTS = {
    "updates": [2_048, 4_096, 8_192, 16_384, 32_768, 65_536],
    "decoding": [16, 32, 64, 128, 256, 512, 1_024],
    "corpus": [100_000, 300_000, 1_000_000, 3_000_000],
}


class Growth(NamedTuple):
    """Rows of a table, and what its first two columns are in the picture."""

    heads: Sequence[str]
    rows: Iterator[Sequence[float]]
    xlabel: str
    ylabel: str


def median_seconds(call: Callable[[], Any]) -> float:
    """Return the processor seconds of a call that has compiled, the median of some."""
    return statistics.median(mean_seconds(call, clock=time.process_time) for _ in range(TURNS.value))


def updates(counts: Sequence[int]) -> Growth:
    """Time updates."""

    def rows() -> Iterator[Sequence[float]]:
        model = model_config("smoke" if flags.FLAGS.smoke else "tiny")
        for tokens in counts:
            arrays = make_batch("full", tokens // LENGTH, model.vocab_size)
            parts = max(1, tokens // MOST.value)
            update = stepper(model, arrays, 100, microbatches=parts)
            jax.block_until_ready(update())  # compiles
            middle = median_seconds(update)
            yield tokens, 1e6 * middle / tokens, 1e3 * middle, parts

    heads = ("tokens a side", "us a token", "ms an update", "microbatches")
    return Growth(heads, rows(), "tokens of an update, a side", "microseconds a token")


def decoding(counts: Sequence[int]) -> Growth:
    """Time passes over the same sentences in batches of other sizes."""

    def rows() -> Iterator[Sequence[float]]:
        with tempfile.TemporaryDirectory() as folder:
            run = write_untrained(Path(folder) / "run", SIZE.value, VOCABULARY)
            saved, tokenizer = load_config(run / "config.json"), load_tokenizers(run / "tokenizer")[0]
            rng, number = np.random.default_rng(0), max(*counts, SENTENCES.value)
            lines = [tokenizer.decode(ids) for ids in rng.integers(NUM_SYMBOLS, VOCABULARY, (number, TOKENS)).tolist()]
            exactly: dict[str, Any] = {
                "max_length": TOKENS,
                "max_extra_length": TOKENS,
                "forbid": ("</s>",),
                "beam_size": 1,
            }
            for batch in counts:
                decode = dataclasses.replace(saved.decode, batch_size=batch, dtype=DTYPE.value, **exactly)
                predictor = load(run, dataclasses.replace(saved, decode=decode))
                predictor.predict(lines[:batch])  # compiles
                middle = median_seconds(functools.partial(predictor.predict, lines))
                yield batch, number / middle, 1e3 * middle * batch / number / TOKENS

    return Growth(
        ("sentences a batch", "sentences/s", "ms a step of a batch"), rows(), "sentences of a batch", "sentences/s"
    )


def corpus(counts: Sequence[int]) -> Growth:
    """Time the preparation of corpora."""
    settings = default_config("transformer_tiny")
    settings.data.update(source="generated", name="copy" if flags.FLAGS.smoke else "quickstart")
    pairs = list(open_split(resolve(settings).data, "train").read(Counter()))

    def rows() -> Iterator[Sequence[float]]:
        for count in counts:
            with tempfile.TemporaryDirectory() as folder:
                write_pairs(Path(folder), pairs, count)
                text = sum(path.stat().st_size for path in Path(folder).iterdir())
                settings.data.update(source="files", dir=folder, tokenizer="bpe", vocab_size=500, cache_dir=folder)
                config = resolve(settings)
                began = [time.process_time()]
                split, task = open_split(config.data, "train"), build_task(config)
                began.append(time.process_time())
                tokenizers = learn_tokenizers(Path(folder) / "tokenizer", config.data, [split], task.vocabularies)
                began.append(time.process_time())
                assert len(open_corpus(split, task.encoder(*tokenizers), folder)) > 0
                began.append(time.process_time())
                each = [b - a for a, b in itertools.pairwise(began)]
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                yield count, sum(each), *each, 1e6 * sum(each) / count, text / 2**20, peak

    heads = ("pairs", "s", "open", "learn", "tokenize and cache", "us a pair", "MiB of text", "MiB resident at most")
    return Growth(heads, rows(), "pairs", "processor seconds")


def write_pairs(folder: Path, pairs: Sequence[Any], count: int) -> None:
    """Write so many lines of either language, each of two examples."""
    rng = random.Random(0)
    with (folder / "train.en").open("w") as sources, (folder / "train.de").open("w") as targets:
        for _ in range(count):
            one, other = rng.choices(pairs, k=2)
            sources.write(f"{one.source} {other.source}\n")
            targets.write(f"{one.target} {other.target}\n")


def show(of: str, growth: Growth) -> None:
    """Print the table, keep it and draw it."""
    lines, found = [",".join(growth.heads)], []
    print(lines[0])
    for row in growth.rows:
        lines.append(",".join(f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in row))
        print(lines[-1], flush=True)
        found.append(row)
    if OUTPUT.value:
        path, (xs, ys, *_) = Path(OUTPUT.value) / of, zip(*found, strict=True)
        path.with_suffix(".csv").write_text("\n".join([*lines, ""]))
        line = plots.Line(growth.ylabel, xs, ys, [None] * len(xs))
        path.with_suffix(".png").write_bytes(plots.lines([line], growth.xlabel, growth.ylabel, logarithmic=True))


def main(argv: Sequence[str]) -> None:
    """Measure what is asked for."""
    del argv
    if smoke_sizes(turns=1, most=64, sentences=4):
        DEFAULTS.update(updates=[64, 128], decoding=[2, 4], corpus=[200, 400])
    if OUTPUT.value:
        Path(OUTPUT.value).mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    if "decoding" not in OF.value:
        keep_freed_memory()  # as a run that trains does, and one that only answers does not
    print(f"{commit()}, {processor_name()}, jax {jax.__version__}, decoding by {SIZE.value} in {DTYPE.value}")
    for of in OF.value:
        counts = [int(count) for count in COUNTS.value] or DEFAULTS[of]
        show(of, {"updates": updates, "decoding": decoding, "corpus": corpus}[of](counts))


if __name__ == "__main__":
    app.run(main)
