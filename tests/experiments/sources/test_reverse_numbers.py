from collections import Counter

import pytest

from experiments.sources.reverse_numbers import open_split
from jformer.data.data_config import SourceConfig


def opened(split, num_pairs=2_000):
    config = SourceConfig(source="experiments.sources.reverse_numbers:open_split", num_pairs=num_pairs)
    return open_split(config, split)


def test_numbers_are_reversed_as_the_tutorial_of_joeynmt_says():
    """0 to 49, 1 to 25 of them in training and 1 to 30 in the 1,000 pairs of valid and of test."""
    read = {split: opened(split).read(Counter()) for split in ("train", "valid", "test")}
    splits = {
        split: [(pair.source.split(" "), pair.target.split(" ")) for pair in each] for split, each in read.items()
    }
    assert [len(pairs) for pairs in splits.values()] == [2_000, 1_000, 1_000]
    for split, pairs in splits.items():
        assert all(target == source[::-1] for source, target in pairs)
        assert {len(source) for source, _ in pairs} == set(range(1, 26 if split == "train" else 31))
        assert {number for source, _ in pairs for number in source} == {str(i) for i in range(50)}
    long = [{tuple(source) for source, _ in pairs if len(source) > 3} for pairs in splits.values()]
    assert sum(map(len, long)) == len(set.union(*long))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_pairs_do_not_depend_on_the_training_size(split):
    assert opened(split, 100).fingerprint == opened(split, 5_000).fingerprint
    assert opened("train", 100).fingerprint != opened("train", 5_000).fingerprint


def test_the_numbers_are_the_same_wherever_and_whenever():
    assert opened("valid").fingerprint == "6cc1966ed444af27bdf9965b24687deb87161b75670219b57eb43575d4436a52"
