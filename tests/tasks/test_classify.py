import math
from collections import Counter

import numpy as np
import pytest

from jformer.data.sources.split import Pair
from jformer.data.tokenizers import BOS, EOS
from jformer.errors import UserError
from jformer.tasks.sums import Sum
from tests.tasks.conftest import PAIRS, make_task

TOTALS = {"nll": Sum(4.0, 2.0), "correct": Sum(1.0, 2.0)}


def test_two_texts_and_their_class_come_back_from_the_batches(make):
    made, found = make("classify"), []
    for step in range(len(made.batches)):
        batch = made.batches[step]
        for row in np.flatnonzero(batch["weights"][:, 0]):
            real = batch["source_segments"][row] > 0
            tokens, types = batch["source"][row][real], batch["source_types"][row][real]
            assert (tokens[0], tokens[-1], (tokens == EOS).sum()) == (BOS, EOS, 2)
            parts = [made.tokenizers[0].decode(tokens[types == kind]) for kind in (0, 1)]
            label = made.tokenizers[1].decode([batch["target_out"][row, 0] + 4])
            found.append(Pair("\t".join(parts), label))
    assert sorted(found) == sorted(PAIRS["classify"])


def test_images_of_a_file_come_back_from_the_batches(make, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 6, 3), dtype=np.uint8)
    np.save(tmp_path / "train.npy", images)
    pairs = tuple(Pair(f"{tmp_path}/train.npy#{i}", f"{'even' if i % 2 == 0 else 'odd'}") for i in range(9))
    made = make("classify", pairs, tokenizer="image", source="images")
    assert made.corpus.source.values.dtype == np.uint8
    shape = made.batches.plan.shapes[0]
    assert (shape.rows, shape.source_length, shape.target_length) == (10, 24, 1)
    batch = made.batches[0]
    real = batch["weights"][:, 0] > 0
    found = {
        (image.tobytes(), int(label))
        for image, (label,) in zip(batch["image"][real], batch["target_out"][real], strict=True)
    }
    assert found == {(image.tobytes(), i % 2) for i, image in enumerate(images)}
    assert not batch["image"][~real].any()


def test_scores_of_labels_by_hand():
    """Right: 2 of a's 4 and 1 of b's 1, so F1 is 2/3 and 2/3; no answer, to an empty text, is not a label."""
    examples = [Pair("", label) for label in "aaaba"]
    scores = make_task("classify")[0].score([*"aabb", ""], examples, TOTALS)
    assert scores["accuracy"] == {"score": 0.6}
    assert scores["macro_f1"]["score"] == pytest.approx(2 / 3)
    assert scores["perplexity"]["score"] == pytest.approx(math.exp(2))


def test_accuracy_is_given_by_group_where_examples_have_groups():
    examples = [Pair("", "a", "short"), Pair("", "b", "long")]
    scores = make_task("classify")[0].score(["a", "a"], examples, TOTALS)
    assert scores["accuracy"] == {"score": 0.5, "by_group": {"long": 0.0, "short": 1.0}}


def test_a_label_that_training_did_not_hold_is_refused_by_name(make):
    made = make("classify")
    with pytest.raises(UserError, match=r"label 'new'"):
        made.task.encoder(*made.tokenizers).encode([Pair("a", "new")], Counter())


def test_a_corpus_of_texts_beside_images_is_refused():
    with pytest.raises(UserError, match=r"^data\.tokenizer='image' .*source='generated'"):
        make_task("classify", tokenizer="image", source="images", mixture=(make_task("classify")[1],))


def test_labels_are_compared_as_they_are_answered():
    examples = [Pair("good", "½ star"), Pair("bad", "ﬁne")]
    normalized = make_task("classify", normalization="nfkc")[0].score(["1⁄2 star", "fine"], examples, TOTALS)
    assert normalized["accuracy"]["score"] == normalized["macro_f1"]["score"] == 1
    assert make_task("classify", normalization="identity")[0].score(["1⁄2 star", "ﬁne"], examples, TOTALS)[
        "accuracy"
    ] == {"score": 0.5}
