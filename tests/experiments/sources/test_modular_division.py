from experiments.sources import modular_division
from jformer.data.data_config import SourceConfig


def test_division_is_the_inverse_of_multiplication_and_each_equation_is_in_one_half():
    splits = modular_division.build()
    assert [len(pairs) for pairs in splits.values()] == [97 * 96 // 2] * 2
    read = [tuple(pair.source.split()) for pairs in splits.values() for pair in pairs]
    assert set(read) == {(str(a), "/", str(b), "=") for a in range(97) for b in range(1, 97)}
    for pair in [*splits["train"], *splits["valid"]]:
        a, _, b, _ = pair.source.split()
        assert int(pair.target) * int(b) % 97 == int(a)
        assert 0 <= int(pair.target) < 97


def test_the_equations_are_the_same_wherever_and_whenever():
    config = SourceConfig(source="experiments.sources.modular_division:open_split")
    found = modular_division.open_split(config, "valid").fingerprint
    assert found == "9ece68fc9deb525f0b6e78c8828289f1190d7510f96517c4e17cc463252c1482"
