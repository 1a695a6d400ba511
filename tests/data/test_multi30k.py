"""The real corpus, where a path to it is given: python -m pytest --multi30k=PATH/multi30k tests/data."""

import dataclasses
from collections import Counter

import pytest

from jformer.config import resolve
from jformer.config.config_files import run_config_file
from jformer.data.corpus import open_corpus
from jformer.data.pipeline import make_batches
from jformer.data.sources import open_split
from jformer.data.vocabularies import learn_tokenizers
from jformer.tasks.build import TASKS


@pytest.fixture
def config(request, tmp_path):
    path = request.config.getoption("--multi30k")
    if not path:
        pytest.skip("needs the Multi30k files: give --multi30k=PATH/multi30k")
    values = run_config_file(request.config.rootpath / "configs" / "multi30k_tiny.py")
    values.data.update(dir=path, cache_dir=str(tmp_path / "cache"))
    return resolve(values)


def test_every_pair_is_read_and_batched_with_little_padding(config, tmp_path):
    task = TASKS["translate"](config.data, label_smoothing=0.1, scores=("bleu",), tokenize="13a", lowercase=False)
    split = open_split(config.data, config.data.train)
    tokenizers = learn_tokenizers(tmp_path / "tokenizer", config.data, [split], task.vocabularies)
    assert tokenizers[0].vocab_size == 10_000
    encoder = task.encoder(*tokenizers)
    corpus = open_corpus(split, encoder, config.data.cache_dir)
    assert corpus.counts == {"examples used": 29_000, "examples read": 29_000, "empty examples dropped": 0}
    real = sum(len(side.values) for side in (corpus.source, corpus.target))
    for batching, shapes, least in (("buckets", 8, 0.86), ("packed", 1, 0.98)):
        data = dataclasses.replace(config.data, batching=batching, packed_length=128)
        batches = make_batches([corpus], [1.0], data, config.seed, task.features(*tokenizers))
        assert len(batches.plan.shapes) <= shapes
        computed = sum(shape.rows * (shape.source_length + shape.target_length) for shape, _ in batches.plan.epoch(0))
        assert real / computed > least
    valid = open_corpus(open_split(config.data, config.data.valid), encoder, config.data.cache_dir)
    assert valid.counts["examples used"] == 1_014


def test_reference_of_test_2016_has_the_tokens_of_the_papers_log(config):
    pairs = list(open_split(config.data, config.data.test_splits()["test"]).read(Counter()))
    assert len(pairs) == 1_000
    assert sum(len(pair.target.split()) for pair in pairs) == 12_103
