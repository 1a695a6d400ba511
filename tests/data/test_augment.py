import dataclasses

import numpy as np
import pytest

from jformer.config import resolve
from jformer.data.augment import AUGMENTS, color, crop, flip, make_augment
from jformer.data.corpus import open_corpus
from jformer.data.data_config import AUGMENTS as NAMES
from jformer.data.pipeline import make_batches
from jformer.data.sources import open_split
from jformer.data.vocabularies import learn_tokenizers
from jformer.tasks.build import build_task
from jformer.tasks.split_loss import evaluation_batches

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 16, 24, 3), np.uint8)
ROWS = np.arange(40)


def test_the_names_are_those_that_the_config_allows():
    assert tuple(AUGMENTS) == NAMES
    assert make_augment(()) is None


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES])
def test_a_row_is_altered_as_its_seed_step_and_number_say_and_nothing_else(names):
    augment = make_augment(names)
    whole = augment(IMAGES, ROWS, (3, 7))
    assert (whole.shape, whole.dtype) == (IMAGES.shape, np.uint8)
    chosen = np.array([5, 30, 2])
    np.testing.assert_array_equal(augment(IMAGES[chosen], chosen, (3, 7)), whole[chosen])
    assert (whole != IMAGES).any(axis=(1, 2, 3)).sum() > 10
    for seed in ((3, 8), (4, 7)):
        assert (augment(IMAGES, ROWS, seed) != whole).any()


def test_half_of_the_images_are_mirrored():
    flipped = make_augment(("flip",))(IMAGES, ROWS, (0, 0))
    mirrored = [np.array_equal(image, before[:, ::-1]) for image, before in zip(flipped, IMAGES, strict=True)]
    same = [np.array_equal(image, before) for image, before in zip(flipped, IMAGES, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 10 < sum(mirrored) < 30
    assert np.array_equal(flip(IMAGES[0], np.random.default_rng(1)), IMAGES[0][:, ::-1]) == (
        np.random.default_rng(1).random() < 0.5
    )


def test_a_crop_is_the_image_moved_by_an_eighth_at_most():
    offsets = set()
    for seed in range(400):
        moved = crop(IMAGES[0], np.random.default_rng(seed))
        padded = np.pad(IMAGES[0], [(2, 2), (3, 3), (0, 0)])
        found = [(y, x) for y in range(5) for x in range(7) if np.array_equal(moved, padded[y : y + 16, x : x + 24])]
        assert len(found) == 1
        offsets.update(found)
    assert len(offsets) == 35  # all there are


def test_brightness_and_contrast_keep_order_and_hue():
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    for seed in range(20):
        assert (np.diff(color(gray, np.random.default_rng(seed)).ravel().astype(int)) >= 0).all()
    flat = np.full((4, 4, 3), 100, np.uint8)
    values = np.array([color(flat, np.random.default_rng(seed))[0, 0] for seed in range(200)])
    assert (values == values[:, :1]).all()
    assert 59 < values.min() < 70
    assert 130 < values.max() < 141


def test_images_are_augmented_in_training_and_never_in_evaluation(tmp_path):
    values = {"source": "experiments.sources.scenes:open_split", "num_pairs": 40, "tokenizer": "word", "augment": NAMES}
    values |= {"tokens_per_update": 8 * 1024, "cache_dir": str(tmp_path / "cache"), "num_buckets": 1}
    vision = {"image_size": 32, "patch_size": 8}
    config = resolve({"task": "caption", "data": values, "model": {"vision": vision}})
    task, split = build_task(config), open_split(config.data, "train")
    tokenizers = learn_tokenizers(tmp_path / "tokenizer", config.data, [split], task.vocabularies)
    corpus = open_corpus(split, task.encoder(*tokenizers), config.data.cache_dir)
    originals = {image.tobytes() for image in corpus.source.values.reshape(-1, 32, 32, 3)}

    def unaltered(batches):
        images = [image for step in range(len(batches)) for image in batches[step]["image"] if image.any()]
        return np.mean([image.tobytes() in originals for image in images])

    features = task.features(*tokenizers)
    assert unaltered(make_batches([corpus], [1.0], config.data, 0, features)) < 0.2
    assert unaltered(evaluation_batches(config.data, task, tokenizers, split)[0]) == 1
    plain = dataclasses.replace(config.data, augment=())
    assert unaltered(make_batches([corpus], [1.0], plain, 0, features)) == 1
