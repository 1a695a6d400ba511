import pytest

from jformer.data.sources import scan

SIZES = {  # Lake and Baroni 2018, Experiments 1 to 3: training and test pairs
    "simple": (16_728, 4_182),
    "length": (16_990, 3_920),
    "jump": (14_670, 7_706),
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


@pytest.mark.parametrize("name", SIZES)
def test_splits_are_disjoint_and_as_large_as_in_the_paper(splits, name):
    training, test = splits[f"{name}_train"], splits[f"{name}_test"]
    assert (len(training), len(test)) == SIZES[name]
    assert not {pair.source for pair in training} & {pair.source for pair in test}
    assert {pair.source for pair in training + test} == {words for words, _ in scan.commands()}


def test_each_split_holds_out_what_it_says(splits):
    assert {len(pair.target.split()) <= 22 for pair in splits["length_train"]} == {True}
    assert {len(pair.target.split()) >= 24 for pair in splits["length_test"]} == {True}
    assert {pair.source for pair in splits["jump_train"] if "jump" in pair.source} == {"jump"}
    assert all("jump" in pair.source for pair in splits["jump_test"])
    assert {len(pair.target.split()) > 22 for pair in splits["simple_test"]} == {False, True}
