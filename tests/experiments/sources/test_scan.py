import pytest

from experiments.sources import scan
from jformer.data.data_config import SourceConfig

PARTS = ("train", "test")
SIZES = {  # Lake and Baroni 2018, Experiments 1 to 3: training and test pairs
    "simple": (16_728, 4_182),
    "length": (16_990, 3_920),
    "jump": (14_670, 7_706),
    "length26": (18_286, 2_624),
}
DIGESTS = {
    "simple": ("6da431aad05a97c5", "8865f92b94fc16d9"),
    "length": ("471e1d866df3d2d0", "d7bb1c453e9e1958"),
    "length24": ("93695f324a875448", "9827997f0869027f"),
    "length25": ("6d5812d9fdd76aab", "c44af8aa9eb7e8b3"),
    "length26": ("518f8945f64bfa71", "f660cf93073ee323"),
    "length27": ("c7e9065a7d508f75", "fcdb4d9815599fd8"),
    "length28": ("3151a8e0a5236ffd", "4bf8accce458a7e1"),
    "length30": ("34bcd4984804154a", "a34bf4f5e8c1adb2"),
    "length32": ("47a30b04a88beb1e", "e406facbfe526957"),
    "length33": ("f76a791d60d4a564", "0367c3c006f48e3f"),
    "length36": ("bf97e7839e3947c1", "dcf217bbde85caa4"),
    "length40": ("2e4cdd52430df941", "ef51e2ddd70ca914"),
    "jump": ("255dc4f75b9730a8", "5a91f9545a8070b4"),
}
EXAMPLES = {  # their Figure 1 and the rules of their appendix
    "jump": "I_JUMP",
    "jump left": "I_TURN_LEFT I_JUMP",
    "jump around right": "I_TURN_RIGHT I_JUMP " * 4,
    "turn left twice": "I_TURN_LEFT I_TURN_LEFT",
    "jump thrice": "I_JUMP I_JUMP I_JUMP",
    "jump opposite left and walk thrice": "I_TURN_LEFT I_TURN_LEFT I_JUMP I_WALK I_WALK I_WALK",
    "jump opposite left after walk around left": "I_TURN_LEFT I_WALK " * 4 + "I_TURN_LEFT I_TURN_LEFT I_JUMP",
    "turn opposite right": "I_TURN_RIGHT I_TURN_RIGHT",
    "turn around left": "I_TURN_LEFT " * 4,
}


@pytest.fixture(scope="module")
def splits():
    return scan.build()


def test_commands_ask_for_the_actions_of_the_paper():
    meaning = dict(scan.commands())
    assert len(meaning) == len(scan.commands()) == 20_910
    assert {words: " ".join(meaning[words]) for words in EXAMPLES} == {k: v.strip() for k, v in EXAMPLES.items()}
    assert max(map(len, meaning.values())) == 48
    assert max(len(words.split()) for words in meaning) == 9


@pytest.mark.slow
def test_every_split_is_the_same_for_ever(splits):
    """SHA-256 of its pairs."""
    config = SourceConfig(source="experiments.sources.scan:open_split")
    found = {split: scan.open_split(config, split).fingerprint[:16] for split in splits}
    assert found == {f"{name}_{part}": digest[part == "test"] for name, digest in DIGESTS.items() for part in PARTS}


@pytest.mark.parametrize("name", SIZES)
def test_splits_are_disjoint_and_as_large_as_in_the_paper(splits, name):
    training, test = splits[f"{name}_train"], splits[f"{name}_test"]
    assert (len(training), len(test)) == SIZES[name]
    assert not {pair.source for pair in training} & {pair.source for pair in test}
    assert {pair.source for pair in training + test} == {words for words, _ in scan.commands()}


def test_each_split_holds_out_what_it_says(splits):
    assert {len(pair.target.split()) <= 22 for pair in splits["length_train"]} == {True}
    assert {len(pair.target.split()) >= 24 for pair in splits["length_test"]} == {True}
    assert {len(pair.target.split()) <= 26 for pair in splits["length26_train"]} == {True}
    assert {len(pair.target.split()) >= 27 for pair in splits["length26_test"]} == {True}
    assert {pair.source for pair in splits["jump_train"] if "jump" in pair.source} == {"jump"}
    assert all("jump" in pair.source for pair in splits["jump_test"])
    assert {len(pair.target.split()) > 22 for pair in splits["simple_test"]} == {False, True}
