import numpy as np
import pytest

from jformer.data.corpus import Tokens
from jformer.data.pipeline import Rows
from jformer.data.plan import Shape
from jformer.data.tokenizers import LabelTokenizer, NumberTokenizer, learn, load
from jformer.errors import UserError
from jformer.tasks.classify import balanced, one_label, one_number, several_labels

ROWS = Rows(np.array([2, 0]), np.array([0, 2]), np.array([1, 1]), np.array([0, 2]))  # example 2, nothing, example 0
SHAPE = Shape(3, 8, 1)


def tokens(sequences, dtype=np.uint8):
    return Tokens(np.concatenate(sequences).astype(dtype), np.cumsum([0, *map(len, sequences)]))


def labels_of(kind, lines):
    return learn(kind, lines, 100, "identity", False)


def test_balanced_labels_weigh_alike_and_one_on_average():
    tokenizer = labels_of("label", ["a"] * 6 + ["b"] * 2)
    weights = balanced(tokenizer)
    np.testing.assert_allclose(weights, [8 / 12, 8 / 4])
    made = one_label(weights)(ROWS, tokens(tokenizer.encode(["b", "a", "a"])), SHAPE)
    assert made["target_out"].tolist() == [[0], [0], [1]]
    np.testing.assert_allclose(made["weights"], [[8 / 12], [0], [2]])


def test_several_labels_are_marked_and_an_example_without_any_still_counts():
    tokenizer = labels_of("labels", ["glad, calm", "", "sad,glad"])
    assert tokenizer.tokens[4:] == ["calm", "glad", "sad"]
    made = several_labels(3)(ROWS, tokens(tokenizer.encode(["sad,calm", "glad", ""])), SHAPE)
    assert made["target_out"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 1]]
    assert made["weights"].tolist() == [[1] * 3, [0] * 3, [1] * 3]


def test_an_unknown_one_of_several_labels_is_named():
    with pytest.raises(
        UserError, match=r"^label 'angry' does not occur in the training data, which has 'calm', 'glad'"
    ):
        labels_of("labels", ["glad,calm"]).encode(["calm", "calm, angry"])


def test_labels_of_commas_alone_are_refused():
    with pytest.raises(UserError, match=r"^the training split holds no label"):
        labels_of("labels", [",", "", " , "])


def test_labels_that_differ_in_white_space_alone_are_refused():
    with pytest.raises(UserError, match=r"^labels 'pos' and 'pos ' differ only in white space: spell both the same"):
        labels_of("label", ["pos", "neg", "pos "])


def test_numbers_come_back_from_the_batch_and_from_disk(tmp_path):
    tokenizer = labels_of("number", ["1", "2.5", "-4e1"])
    made = one_number(ROWS, tokens(tokenizer.encode(["7", "1", "-40"]), np.uint32), SHAPE)
    assert made["target_out"].dtype == np.int32
    assert made["weights"].tolist() == [[1], [0], [1]]
    back = [tokenizer.decode(ids) for ids in made["target_out"].view(np.uint32)[[0, 2]]]
    assert [float(text) for text in back] == pytest.approx([-40, 7], rel=1e-5)
    tokenizer.save(tmp_path, "target")
    saved = load(tmp_path, "target")
    assert isinstance(saved, NumberTokenizer)
    assert saved.fingerprint == tokenizer.fingerprint


def test_numbers_that_differ_little_for_their_size_are_told_apart():
    given = ["1700000000", "1700000100.5", "1699999999.25"]
    tokenizer = labels_of("number", given)
    assert [float(tokenizer.decode(ids)) for ids in tokenizer.encode(given)] == pytest.approx(
        [*map(float, given)], abs=0.01
    )


def test_numbers_that_are_all_one_have_a_unit():
    tokenizer = labels_of("number", ["3", "3"])
    assert tokenizer.decode(tokenizer.encode(["5"])[0]) == "5"


@pytest.mark.parametrize("text", ["much", "nan", "inf", ""])
def test_what_is_no_finite_number_is_refused(text):
    with pytest.raises(UserError, match=r"^label .*: data\.labels='number' needs a finite number"):
        labels_of("number", ["1"]).encode([text])


def test_labels_of_an_earlier_run_keep_their_identity(tmp_path):
    """A list of labels without counts, as a model from elsewhere has, is written as it was read."""
    written = LabelTokenizer("label", "identity", ["a", "b"])
    written.save(tmp_path, "target")
    assert "counts" not in (tmp_path / "target.json").read_text()
    assert load(tmp_path, "target").fingerprint == written.fingerprint != labels_of("label", ["a", "b"]).fingerprint
