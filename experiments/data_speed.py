"""How long until the first batch, and how fast are batches made? Any run's data, a fresh cache, then a reopened one.

Command:  python -m experiments.data_speed --config=configs/multi30k_tiny.py --config.data.dir=PATH/multi30k
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jformer import main as front
from jformer.data.corpus import open_corpus
from jformer.data.pipeline import make_batches
from jformer.data.sources import open_split
from jformer.data.vocabularies import learn_tokenizers
from jformer.flops import batch_work
from jformer.restore import build_task


def timed(name: str, function: Callable, *arguments: Any) -> Any:
    """Call a function and print how long it took."""
    began = time.perf_counter()
    result = function(*arguments)
    print(f"{name:<40}{time.perf_counter() - began:>10.4f} s")
    return result


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        _, config = front.parse([*sys.argv, f"--workdir={folder}/run"])
        split = timed("open, check and fingerprint the text", open_split, config.data, config.data.train)
        task, directory = build_task(config), Path(folder) / "tokenizer"
        learned = (config.data, [split], task.vocabularies)
        tokenizers = timed("learn the tokenizers", learn_tokenizers, directory, *learned)
        encoder, features = task.encoder(*tokenizers), task.features(*tokenizers)
        corpus = timed("tokenize and cache", open_corpus, split, encoder, folder)
        timed("reopen the cache", open_corpus, split, encoder, folder)
        print(f"{'examples':<40}{len(corpus):>10,}")
        for batching in ("buckets", "packed"):
            data = dataclasses.replace(config.data, batching=batching)
            batches = timed(f"{batching}: plan", make_batches, [corpus], [1.0], data, 0, features)
            began, real, computed = time.perf_counter(), 0, 0
            for step in range(len(batches)):
                texts, rows = batch_work(batches[step])
                real += texts.tokens
                computed += rows.tokens
            seconds = time.perf_counter() - began
            print(f"{batching + ': shapes':<40}{len(batches.plan.shapes):>10}")
            print(f"{batching + ': real tokens / computed':<40}{real / computed:>10.3f}")
            print(f"{batching + ': real tokens a second':<40}{real / seconds:>10,.0f}")


if __name__ == "__main__":
    main()
