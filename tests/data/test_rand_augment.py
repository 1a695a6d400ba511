"""The operations of RandAugment are those of Pillow, and each is drawn as often as the others."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from jformer.data import rand_augment
from jformer.data.rand_augment import OPERATIONS, STRENGTH

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (30, 40, 3), np.uint8)
SMOOTH = np.stack(np.meshgrid(np.linspace(20, 180, 30), np.linspace(60, 250, 40), indexing="ij"), axis=-1).mean(-1)
DULL = np.stack([SMOOTH, SMOOTH / 2, np.full_like(SMOOTH, 77)], axis=-1).astype(np.uint8)


def affine(a, b, c, d, e, f):
    """Return Pillow's map from a place (right, down) of the result to one of the image, about the middle."""

    def apply(image):
        x, y = image.width / 2, image.height / 2
        moved = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
        return image.transform(image.size, Image.Transform.AFFINE, moved)

    return apply


EXPECTED = {
    "identity": lambda image: image,
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "rotate": lambda image: image.rotate(9),
    "solarize": lambda image: ImageOps.solarize(image, 179),
    "color": lambda image: ImageEnhance.Color(image).enhance(1.27),
    "posterize": lambda image: ImageOps.posterize(image, 7),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.27),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.27),
    "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.27),
    "shear_x": affine(1, 0.09, 0, 0, 1, 0),
    "shear_y": affine(1, 0, 0, 0.09, 1, 0),
    "translate_x": affine(1, 0, 0.3 * 40 * 150 / 331, 0, 1, 0),
    "translate_y": affine(1, 0, 0, 0, 1, 0.3 * 30 * 150 / 331),
}


@pytest.mark.parametrize("image", [NOISE, DULL, NOISE[..., :1], DULL[..., 2:]], ids=["noise", "dull", "gray", "flat"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_pillow(name, image):
    found = OPERATIONS[name](image, STRENGTH)
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    expected = np.asarray(EXPECTED[name](picture)).reshape(image.shape)
    assert (found.shape, found.dtype) == (image.shape, np.uint8)
    difference = abs(found.astype(int) - expected)
    if name in ("rotate", "shear_x", "shear_y"):  # a place in the middle of two pixels may be taken for either
        assert (difference.max(axis=-1) > 0).mean() < 0.02
    elif name not in ("autocontrast", "color", "contrast", "brightness", "sharpness"):
        assert difference.max() == 0
    else:
        assert difference.max() <= 2  # Pillow cuts fractions off, and has luminances in whole numbers


@pytest.mark.parametrize("name", ["rotate", "shear_x", "translate_y", "color", "contrast", "brightness", "sharpness"])
def test_the_sign_says_which_way(name):
    one, other = OPERATIONS[name](NOISE, STRENGTH), OPERATIONS[name](NOISE, -STRENGTH)
    assert (one != other).any()
    assert np.array_equal(OPERATIONS[name](NOISE, 0.0), NOISE)


def test_each_image_gets_two_operations_and_all_come_as_often(monkeypatch):
    met = Counter()

    def counting(name):
        def count(image, strength):
            met[name, strength] += 1
            return image

        return count

    monkeypatch.setattr(rand_augment, "OPERATIONS", {name: counting(name) for name in OPERATIONS})
    rng = np.random.default_rng(1)
    for _ in range(1_400):
        rand_augment.rand_augment(NOISE, rng)
    assert sum(met.values()) == 2_800
    assert {strength for _, strength in met} == {STRENGTH, -STRENGTH}
    assert all(60 < met[name, sign * STRENGTH] < 140 for name in OPERATIONS for sign in (1, -1))


def test_tiny_images_survive_every_operation():
    for name, operation in OPERATIONS.items():
        assert operation(NOISE[:1, :2], STRENGTH).shape == (1, 2, 3), name
