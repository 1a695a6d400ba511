from collections import Counter
from itertools import pairwise

from experiments.sources.facts import FAMILY_NAMES, FIRST_NAMES
from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split

SOURCE = "experiments.sources.facts:open_split"


def test_facts_stand_where_they_are_said_to_and_people_are_of_one_split():
    config = SourceConfig(source=SOURCE, num_pairs=300)
    pairs = {split: list(open_split(config, split).read(Counter())) for split in ("train", "valid", "test")}
    assert {split: len(each) for split, each in pairs.items()} == {"train": 300, "valid": 500, "test": 1000}
    names = []
    for each in pairs.values():
        for pair in each:
            question, context = pair.source.split("\t")
            assert (pair.start is None) == (pair.target == "") == (pair.group == "unanswerable")
            if pair.start is not None:
                assert context[pair.start :].startswith(pair.target)
                sentence = context[context[: pair.start].rfind(".") + 1 :].partition(".")[0]
                assert sum(name in sentence for name in _names(question)) == 1
        names.append({name for pair in each for name in _names(pair.source)})
    assert not names[0] & names[1] | names[0] & names[2] | names[1] & names[2]
    longer = open_split(SourceConfig(source=SOURCE, num_pairs=310), "train")
    assert list(longer.read(Counter()))[:300] == pairs["train"]


def _names(text):
    words = text.replace(".", " ").replace("?", " ").split()
    return {f"{a} {b}" for a, b in pairwise(words) if a in FIRST_NAMES and b in FAMILY_NAMES}
