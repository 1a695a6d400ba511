"""How fast does text become batches, how full are they, and does memory stay constant? On one core, without JAX.

Command:  taskset -c 1 python -m experiments.speed.data --config=configs/multi30k_tiny.py
          --config.data.dir=PATH/multi30k [--config.data.tokenizer=unigram] [--pairs=4500000] [--smoke]

First the run's own text, with a fresh cache: tokenizing beside sentencepiece alone on the same lines, one thread both.
Then batches of two populations of lengths, that text's and one like WMT's: sources log-normal with mean 27 and standard
deviation 18 tokens; targets that differ from them by a factor whose logarithm has deviation 0.64 / sqrt(source), as
Multi30k's have at their 15 tokens; pairs over 128 or 256 tokens on a side dropped, as data.overlong does.
Efficiency is that of an epoch: real tokens over computed positions of both sides, empty rows of its last batch too.
"At most" bounds one pair a row: what as many shapes would reach if the two sides of all pairs had the same ratio.
"""

import dataclasses
import gc
import itertools
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jformer import main as front
from jformer.data.corpus import Corpus, Tokens, open_corpus
from jformer.data.data_config import DataConfig
from jformer.data.encoders import ExampleEncoder
from jformer.data.pipeline import Batches, make_batches, prefetch
from jformer.data.plan import cheapest_cuts
from jformer.data.sources import open_split
from jformer.data.sources.split import Split
from jformer.data.tokenizers.subwords import SubwordTokenizer
from jformer.data.vocabularies import learn_tokenizers
from jformer.tasks.build import build_task
from jformer.tasks.denoise import corrupted_spans, infilled
from jformer.tasks.features import sequence_to_sequence
from jformer.tasks.lm import next_token
from jformer.tasks.mlm import masked

MARKS = (1_000, 11_000)  # batches between which memory is compared


def main() -> None:
    """Print the tables."""
    options = flags.FlagValues()
    flags.DEFINE_integer("pairs", 4_500_000, "Pairs like WMT's.", flag_values=options)
    flags.DEFINE_bool("smoke", False, "Only check that the command works, on few pairs.", flag_values=options)
    rest, marks = options(sys.argv, known_only=True), MARKS
    if options.smoke:
        options["pairs"].value, marks = 5_000, (5, 10)
        rest += ["--config=configs/quickstart.py", "--config.data.name=copy", "--config.data.num_pairs=500"]
        rest += ["--config.data.tokens_per_update=4096"]
    with tempfile.TemporaryDirectory() as folder:
        config = front.configure(*front.read_flags([*rest, f"--workdir={folder}/run"]))
        split = timed("open, check and fingerprint the text", open_split, config.data, config.data.train)
        task, directory = build_task(config), Path(folder) / "tokenizer"
        tokenizers = timed("learn the tokenizers", learn_tokenizers, directory, config.data, [split], task.vocabularies)
        encoder = task.encoder(*tokenizers)
        corpus = timed("read, tokenize and cache", open_corpus, split, encoder, folder)
        timed("reopen the cache", open_corpus, split, encoder, folder)
        print(f"{'pairs':<40}{len(corpus):>12,}")
        show_tokenizing(split, encoder)
        print(
            f"\n{'lengths':<14}{'batching':<10}{'shapes':>7}{'efficiency':>12}{'at most':>9}{'plan':>9}{'tokens/s':>14}"
        )
        show_batches("the text's", corpus, config.data)
        for limit in (128, 256):
            like_wmt = dataclasses.replace(config.data, tokens_per_update=25_000, packed_length=256)
            show_batches(f"WMT's to {limit}", random_corpus(options.pairs, limit), like_wmt)
        show_noise(corpus, config.data)
        show_growth(make_batches([corpus], [1.0], config.data, 0, sequence_to_sequence()), marks)


def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and print how long it took."""
    began = time.perf_counter()
    result = function(*arguments)
    print(f"{name:<40}{time.perf_counter() - began:>12.4f} s")
    return result


def show_tokenizing(split: Split, encoder: ExampleEncoder) -> None:
    """Print sentences a second of processor time: ours to token lists with their symbols, and the library's alone."""
    pairs = list(split.read(Counter()))
    chunks = [pairs[i : i + 2_048] for i in range(0, len(pairs), 2_048)]
    seconds = {"tokenize": fastest(lambda: [encoder.encode(chunk, Counter()) for chunk in chunks])}
    if isinstance(encoder.source.tokenizer, SubwordTokenizer):
        lines = [text for pair in pairs for text in pair[:2]]
        encode = encoder.source.tokenizer._processor.encode
        seconds["tokenize: sentencepiece alone"] = fastest(lambda: encode(lines, num_threads=1))
    for name, each in seconds.items():
        print(f"{name:<40}{2 * len(pairs) / each:>12,.0f} sentences/s/core")


def fastest(function: Callable[..., Any], times: int = 5) -> float:
    """Return the least processor time of some calls, over all threads."""
    seconds = []
    for _ in range(times):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return min(seconds)


def random_corpus(number: int, limit: int) -> Corpus:
    """Return pairs of WMT-like lengths, of random tokens."""
    rng = np.random.default_rng(0)
    spread = np.sqrt(np.log(1 + (18 / 27) ** 2))
    source = np.maximum(np.rint(rng.lognormal(np.log(27) - spread**2 / 2, spread, number)), 2).astype(np.int64)
    ratio = np.exp(0.02 + rng.standard_normal(number) * 0.64 / np.sqrt(source))
    target = np.maximum(np.rint(source * ratio), 2).astype(np.int64)
    usable = (source <= limit) & (target <= limit)
    return Corpus(random_tokens(source[usable]), random_tokens(target[usable]), {}, "")


def random_tokens(lengths: np.ndarray) -> Tokens:
    """Return one side of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens(np.full(offsets[-1], 7, np.uint16), offsets)


def show_batches(name: str, corpus: Corpus, config: DataConfig) -> None:
    """Print a row for buckets and one for packed rows."""
    for batching in ("buckets", "packed"):
        data = dataclasses.replace(config, batching=batching)
        began = time.perf_counter()
        batches = make_batches([corpus], [1.0], data, 0, sequence_to_sequence())
        planning = time.perf_counter() - began
        real = len(corpus.source.values) + len(corpus.target.values)
        shapes = [batch.shape for batch in batches.plan.epoch(0)]
        computed = sum(shape.rows * (shape.source_length + shape.target_length) for shape in shapes)
        bound = f"{most_efficient(corpus, data.num_buckets):.3f}" if batching == "buckets" else ""
        print(
            f"{name:<14}{batching:<10}{len(batches.plan.shapes):>7}{real / computed:>12.3f}{bound:>9}"
            f"{planning:>7.2f} s{tokens_per_second(batches):>14,.0f}"
        )


def most_efficient(corpus: Corpus, num_buckets: int) -> float:
    """Return the efficiency of the best shapes for sums of both sides, which no shapes for the sides can exceed."""
    sizes, count = np.unique(corpus.source.lengths + corpus.target.lengths, return_counts=True)
    ends = cheapest_cuts(sizes, count, num_buckets)
    padded = sizes[ends][np.searchsorted(ends, np.arange(len(sizes)))]
    return float(sizes @ count / (padded @ count))


def tokens_per_second(batches: Batches) -> float:
    """Return the real tokens of up to 200 batches over the time they take, one thread."""
    began, real = time.perf_counter(), 0
    for step in range(min(200, len(batches))):
        batch = batches[step]
        real += sum(int(np.count_nonzero(batch[f"{side}_segments"])) for side in ("source", "target"))
    return real / (time.perf_counter() - began)


def show_noise(corpus: Corpus, config: DataConfig) -> None:
    """Print how quickly the target side's texts become batches, plain and with each noise: tokens of them a second."""
    texts, words = Corpus(corpus.target, corpus.target, {}, ""), 8_000
    print(f"\n{'texts made into batches':<40}{'tokens/s':>12}")
    for name, features in {
        "as they are": next_token(),
        "masks (BERT)": masked(0.15, words),
        "corrupted spans (T5)": corrupted_spans(0.15, 3.0, words),
        "infilled spans (BART)": infilled(0.3, 3.0, words),
    }.items():
        batches = make_batches([texts], [1.0], dataclasses.replace(config, batching="buckets"), 0, features)
        steps = range(min(200, len(batches)))
        units = np.concatenate([batches.plan.batch(step).units for step in steps])
        tokens = int(texts.target.lengths[units[units >= 0]].sum())
        seconds = fastest(lambda made=batches, steps=steps: [made[step] for step in steps], times=3)
        print(f"{name:<40}{tokens / seconds:>12,.0f}")
    print()


def show_growth(batches: Batches, marks: tuple[int, int]) -> None:
    """Print by how much Python's memory grows while batches are made ahead, over many epochs."""
    tracemalloc.start()
    sizes = []
    for step, _ in enumerate(prefetch(batches[step] for step in itertools.count())):
        if step in marks:
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
        if step == marks[-1]:
            break
    tracemalloc.stop()
    print(f"memory after {marks[0]:,} and {marks[1]:,} batches: {sizes[0] / 1024:,.0f} and {sizes[1] / 1024:,.0f} KiB")


if __name__ == "__main__":
    main()
