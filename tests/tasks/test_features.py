import numpy as np
import pytest

from jformer.data.corpus import Tokens
from jformer.data.pipeline import Rows
from jformer.data.plan import Shape
from jformer.data.tokenizers import BOS, EOS
from jformer.errors import UserError
from jformer.tasks.batch_arrays import refuse_foreign_ids
from jformer.tasks.classify import labelled_images, labelled_texts, one_label
from jformer.tasks.denoise import corrupted_spans, infilled
from jformer.tasks.features import sequence_to_sequence
from jformer.tasks.lm import next_token
from jformer.tasks.mlm import masked
from jformer.tasks.prefix_lm import prefixed

V = 50
MAKERS = {
    "pairs": sequence_to_sequence(),
    "lm": next_token(),
    "mlm": masked(0.3, V),
    "t5": corrupted_spans(0.3, 2.0, V),
    "bart": infilled(0.3, 2.0, V),
}
SEED = (7, 11)


def tokens(*sequences):
    values = np.array([token for sequence in sequences for token in sequence], np.uint8)
    return Tokens(values, np.cumsum([0, *map(len, sequences)]))


# The same text on both sides. Examples 0 and 2 share row 0, 3 is alone in row 2; row 1 is empty and 1 is not drawn.
TEXTS = tokens([5, 6, 7, EOS], [8, 9, EOS], [10, 11, 12, 13, 14, EOS], [15, EOS])
PACKED = Rows(np.array([0, 2, 3]), np.array([0, 0, 2]), np.array([1, 2, 1]), np.array([0, 0, 2]))
SHAPE = Shape(3, 13, 14)


def arrays(name, seed=SEED, rows=PACKED, texts=TEXTS):
    return MAKERS[name].arrays(rows, texts, texts, SHAPE, seed)


@pytest.mark.parametrize("name", MAKERS)
def test_rows_that_hold_nothing_weigh_nothing(name):
    batch = arrays(name)
    for key, array in batch.items():
        assert len(array) == 3, key
        assert (array[1] == (BOS if key == "target_in" else 0)).all(), key
    assert batch["weights"][0].any()
    assert batch["weights"][2].any()


def test_examples_that_share_a_row_follow_each_other_in_rows_of_any_order():
    rows = Rows(np.array([3, 0, 2]), np.array([2, 0, 0]), np.array([1, 1, 2]), np.array([2, 0, 0]))
    for key, array in arrays("pairs", rows=rows).items():
        np.testing.assert_array_equal(array, arrays("pairs")[key])


def test_a_row_that_cannot_hold_its_examples_is_refused():
    with pytest.raises(ValueError, match="10 tokens share a row of 9"):
        MAKERS["pairs"].arrays(PACKED, TEXTS, TEXTS, Shape(3, 13, 9), SEED)


@pytest.mark.parametrize("name", MAKERS)
def test_segments_tell_the_examples_of_a_row_apart_and_positions_start_anew(name):
    batch = arrays(name)
    for side in {key.removesuffix("_segments") for key in batch if key.endswith("_segments")}:
        segments, positions = batch[f"{side}_segments"], batch[f"{side}_positions"]
        assert set(segments[0]) == {0, 1, 2}
        assert set(segments[2]) == {0, 1}
        for segment in (1, 2):
            here = positions[0][segments[0] == segment]
            assert here.tolist() == list(range(len(here)))


def test_a_language_model_gets_the_target_alone():
    batch = arrays("lm")
    assert {key.partition("_")[0] for key in batch} == {"target", "weights"}
    assert batch["target_out"][0].tolist() == [5, 6, 7, EOS, 10, 11, 12, 13, 14, EOS, 0, 0, 0, 0]
    assert batch["target_in"][0].tolist()[:10] == [BOS, 5, 6, 7, BOS, 10, 11, 12, 13, 14]
    assert batch["weights"].sum() == 12


def test_a_prefix_is_what_is_read_before_the_last_token_of_a_source_and_targets_alone_weigh():
    source = tokens([5, 6, EOS], [9, EOS], [7, EOS], [8, EOS])
    target = tokens([15, EOS], [19, EOS], [16, 17, EOS], [EOS])
    made = prefixed()
    batch = made.arrays(PACKED, source, target, Shape(3, 0, 12), SEED)
    assert {key.partition("_")[0] for key in batch} == {"target", "weights"}
    assert batch["target_in"][0].tolist() == [BOS, 5, 6, EOS, 15, BOS, 7, EOS, 16, 17, BOS, BOS]
    assert batch["target_out"][0].tolist() == [5, 6, EOS, 15, EOS, 7, EOS, 16, 17, EOS, 0, 0]
    assert batch["target_prefix"][0].tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert batch["weights"][0].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]
    assert batch["target_segments"][0].tolist() == [1] * 5 + [2] * 5 + [0] * 2
    assert (batch["weights"].sum(), batch["target_prefix"].sum()) == (6, 7)
    planned = made.lengths(source.lengths, target.lengths)
    assert [side.tolist() for side in planned] == [[0] * 4, [5, 4, 5, 3]]


PIECES = tokens([5, 6], [7, 8], [9, EOS], [10, EOS], [11, 12], [13, 14], [EOS])  # of three texts
INPUTS = ([BOS, 5], [6, 7], [8, 9], [BOS, 10], [BOS, 11], [12, 13], [14])  # of their pieces, read after what precedes


@pytest.mark.parametrize("examples", [range(7), [6, 1, 4, 2, 5, 3, 0]])
def test_a_piece_is_read_after_the_previous_token_of_its_text(examples):
    """Side by side in rows or alone; a text begins with BOS, and what is predicted stays."""
    made, order = next_token(previous=True), np.array(examples)
    alone = made.arrays(Rows(order, np.arange(7), np.ones(7, int), order), TEXTS, PIECES, Shape(7, 1, 2), SEED)
    assert [row[row > 0].tolist() for row in alone["target_out"]] == [
        PIECES.values[PIECES.offsets[i] : PIECES.offsets[i + 1]].tolist() for i in examples
    ]
    lengths = PIECES.lengths[order]
    assert [row[:n].tolist() for row, n in zip(alone["target_in"], lengths, strict=True)] == [
        INPUTS[i] for i in examples
    ]
    packed = Rows(order, np.repeat([0, 2], [4, 3]), np.array([1, 2, 3, 4, 1, 2, 3]), np.repeat([0, 2], [4, 3]))
    row, empty, other = made.arrays(packed, TEXTS, PIECES, Shape(3, 1, 9), SEED)["target_in"].tolist()
    assert row[: sum(lengths[:4])] == [token for i in examples[:4] for token in INPUTS[i]]
    assert other[: sum(lengths[4:])] == [token for i in examples[4:] for token in INPUTS[i]]
    assert set(empty) == {BOS}


def test_masked_positions_are_those_that_weigh_and_tell_the_text():
    batch = arrays("mlm")
    clean = MAKERS["pairs"].arrays(PACKED, TEXTS, TEXTS, SHAPE, SEED)["source"]
    np.testing.assert_array_equal(batch["target_out"], clean)
    weighs = batch["weights"] > 0
    np.testing.assert_array_equal(batch["source"][~weighs], clean[~weighs])
    by_segment = [int(weighs[0][batch["source_segments"][0] == segment].sum()) for segment in (1, 2)]
    assert by_segment == [1, 2]  # 0.3 of 3 and of 5 tokens, rounded
    drawn = [arrays("mlm", (0, step))["source"] for step in range(30)]
    assert sum((source == V).sum() for source in drawn) > 60
    assert batch["source"].shape == batch["weights"].shape == (3, 13)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_denoising_lays_both_sides_as_long_as_planned(name):
    bare = tokens([5, 6, 7, 8, 9], [20], [10, 11, 12, 13, 14, 15], [16, 17, 18])
    batch = arrays(name, texts=bare)
    lengths = np.stack(MAKERS[name].lengths(np.zeros(4, np.int64), bare.lengths))[:, PACKED.examples]
    for side, planned in zip(("source", "target"), lengths, strict=True):
        cells = [(batch[f"{side}_segments"][row] == segment).sum() for row, segment in zip(*PACKED[1:3], strict=True)]
        assert all(cell <= most for cell, most in zip(cells, planned, strict=True))
        assert cells == planned.tolist() or (name, side) == ("bart", "source")
    assert (batch["source"] >= V).any(axis=1).tolist() == [True, False, True]
    assert (batch["target_out"] >= V).any() == (name == "t5")
    assert (batch["target_out"] == EOS).sum() == (batch["source"] == EOS).sum() == 3


@pytest.mark.parametrize("name", ["mlm", "t5", "bart"])
def test_noise_depends_on_seed_step_row_and_segment_alone(name):
    long = tokens(*(range(4, 44) for _ in range(4)))
    shape = Shape(3, 100, 100)

    def noised(seed, rows=PACKED):
        return MAKERS[name].arrays(rows, long, long, shape, seed)["source"]

    first = noised(SEED)
    np.testing.assert_array_equal(first, noised(SEED))
    for seed in ((7, 12), (8, 11)):
        assert (first != noised(seed)).any()
    np.testing.assert_array_equal(first[2], noised(SEED, Rows(*(part[2:] for part in PACKED)))[2])  # without row 0
    size = (first[0] > 0).sum() // 2
    assert (first[0][:size] != first[0][size : 2 * size]).any()  # two segments of the same text
    assert (first[0][:40] != first[2][:40]).any()  # two rows of it


@pytest.mark.parametrize("name", ["t5", "bart", "pairs"])
def test_a_given_source_and_target_are_not_noised(name):
    given = MAKERS[name].given(PACKED, TEXTS, TEXTS, SHAPE)
    for key, array in arrays("pairs").items():
        np.testing.assert_array_equal(given[key], array)


def test_given_masks_are_not_noised_and_weigh_where_a_token_is_given_for_them():
    given = MAKERS["mlm"].given(PACKED, TEXTS, tokens(*[[7, 0], *[[]] * (len(TEXTS.lengths) - 1)]), SHAPE)
    np.testing.assert_array_equal(given["source"], arrays("pairs")["source"])
    assert given["weights"].sum() == 1
    assert (given["weights"] == (given["target_out"] == 7)).all()


def test_the_second_text_is_of_type_one_and_its_class_counts_from_zero():
    sources = tokens([BOS, 7, EOS, 8, 9, EOS], [BOS, 5, 6, EOS])
    labels = tokens([5], [4])
    rows = Rows(np.array([1, 0]), np.array([0, 1]), np.array([1, 1]), np.array([0, 1]))
    batch = labelled_texts(one_label()).arrays(rows, sources, labels, Shape(3, 8, 1), SEED)
    assert batch["source_types"].tolist() == [[0] * 8, [0, 0, 0, 1, 1, 1, 0, 0], [0] * 8]
    assert batch["source"][1].tolist() == [BOS, 7, EOS, 8, 9, EOS, 0, 0]
    assert batch["target_out"].tolist() == [[0], [1], [0]]
    assert batch["weights"].tolist() == [[1], [1], [0]]


def test_images_come_in_their_shape_and_a_pixel_is_a_position():
    images = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 4), dtype=np.uint8)
    made = labelled_images(2, 3, 4, one_label())
    sources, labels = Tokens(images.ravel(), np.arange(6) * 24), tokens([4], [5], [6], [5], [4])
    lengths = made.lengths(sources.lengths, labels.lengths)
    assert [side.tolist() for side in lengths] == [[6] * 5, [1] * 5]
    rows = Rows(np.array([4, 2]), np.array([0, 2]), np.array([1, 1]), np.array([0, 2]))
    batch = made.arrays(rows, sources, labels, Shape(4, 6, 1), SEED)
    for row, image in enumerate([images[4], 0, images[2], 0]):
        assert (batch["image"][row] == image).all()
    assert batch["image"].shape == (4, 2, 3, 4)
    assert batch["image"].dtype == np.uint8
    assert batch["target_out"].tolist() == [[0], [0], [2], [0]]
    assert batch["weights"].ravel().tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("bad", [50, 49, -1])
def test_a_token_that_the_model_has_not_is_refused_on_the_host(bad):
    arrays = {"source": np.array([[4, 5], [49, 0]]), "target_in": np.array([[4, bad], [5, 0]])}
    sizes = {"source": 50, "target_in": 49}
    with pytest.raises(UserError, match=f"update 3: target_in holds the token id {bad}, .* the ids 0 to 48: delete"):
        refuse_foreign_ids(arrays, sizes, "update 3")
    refuse_foreign_ids(arrays, {"source": 50}, "update 3")
