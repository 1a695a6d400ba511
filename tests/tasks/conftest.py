"""A corpus of short texts for every task, and what a run makes of it."""

import dataclasses
import functools

import numpy as np
import pytest

from experiments.sources.scenes import draw_all
from jformer.data.corpus import open_corpus
from jformer.data.data_config import DataConfig
from jformer.data.pipeline import make_batches
from jformer.data.sources.split import Pair, Split
from jformer.data.vocabularies import learn_tokenizers
from jformer.tasks.build import TASKS

RNG = np.random.default_rng(0)
TEXTS = ["".join(RNG.choice(list("abcdef "), n)).strip() or "a" for n in RNG.integers(1, 45, 61)]
PICTURES = draw_all([f"large red circle {i % 32} {i // 32}" for i in range(len(TEXTS))])
PAIRS = {
    "translate": [Pair(text, text[::-1]) for text in TEXTS],
    "prefix_lm": [Pair(text, text[:10][::-1]) for text in TEXTS],  # which together fit a packed row
    "caption": [Pair(f"{PICTURES}#{i}", text) for i, text in enumerate(TEXTS)],
    "embed": [Pair(text, text[::-1]) for text in TEXTS],
    "classify": [Pair(f"{text}\t{text[:3]}", f"label {i % 3}") for i, text in enumerate(TEXTS)],
    "tag": [Pair(text, " ".join("O" if word < "c" else f"B-{word[0]}" for word in text.split())) for text in TEXTS],
    "qa": [Pair(f"{text[::-1]}\t{text}", text.split()[0], start=0) for text in TEXTS],
}
SIZES = {"tokens_per_update": 256, "row_multiple": 2, "packed_length": 60, "num_buckets": 2, "vocab_size": 30}


def make_task(name, /, crf=False, **data):
    """Return a task and the options it was made with."""
    source = {"tag": "conll", "qa": "squad", "caption": "captions"}.get(name, "generated")
    sizes = {**SIZES, "tokens_per_update": 8 * 32 * 32} if name == "caption" else SIZES  # a pixel counts as a token
    config = DataConfig(**{"tokenizer": "char", "source": source, **sizes, **data})
    return TASKS[name](config, label_smoothing=0.0, scores=("bleu",), tokenize="13a", lowercase=False, crf=crf), config


@dataclasses.dataclass
class Made:
    """What a run has before its model."""

    task: object
    config: DataConfig
    tokenizers: tuple
    corpus: object
    batches: object


@pytest.fixture
def make(tmp_path):
    """Return a function: task, pairs, options → everything up to the batches."""

    @functools.cache
    def build(name, /, pairs=None, evaluating=False, **data):
        task, config = make_task(name, cache_dir=str(tmp_path / "cache"), **data)
        pairs = pairs or PAIRS.get(name, [Pair("", text) for text in TEXTS])
        split = Split("train", repr(pairs), lambda counts: iter(pairs))
        tokenizers = learn_tokenizers(tmp_path / "tokenizer", config, [split], task.vocabularies)
        corpus = open_corpus(split, task.encoder(*tokenizers, evaluating=evaluating), config.cache_dir)
        batches = make_batches([corpus], [1.0], config, 0, task.features(*tokenizers))
        return Made(task, config, tokenizers, corpus, batches)

    return build
