"""Images of any size are brought to one; tests/data/sources/test_images.py has how they are read."""

import sys

import numpy as np
import pytest
from PIL import Image

from jformer.data.image_files import file_of, fit, read_images
from jformer.data.tokenizers import learn, load
from jformer.errors import UserError

NOISE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def learned(place, size):
    return learn("image", [str(place)], size, "identity", False)


def test_what_is_of_the_size_is_returned_as_it_is():
    image = NOISE[:, :6]
    assert fit(image, 6, 3, "x") is image


def test_of_the_longer_side_the_middle_is_kept():
    np.testing.assert_array_equal(fit(NOISE, 6, 3, "x"), NOISE[:, 1:7])
    np.testing.assert_array_equal(fit(NOISE.swapaxes(0, 1), 6, 3, "x"), NOISE.swapaxes(0, 1)[1:7])


def test_shrinking_averages_all_pixels_and_growing_goes_from_one_to_the_next():
    """Pillow's triangle filter over a chessboard: no pixel is passed over, so what comes out is gray."""
    board = (np.indices((64, 96)).sum(axis=0) % 2 * 255).astype(np.uint8)[..., None]
    small = fit(board, 8, 1, "x")
    assert small.shape == (8, 8, 1)
    assert 120 < small.min() <= small.max() < 135
    ramp = np.repeat(np.array([0, 200], np.uint8), 2).reshape(2, 2, 1).swapaxes(0, 1)
    grown = fit(ramp, 4, 1, "x")[0, :, 0].astype(int)
    np.testing.assert_array_equal(grown, [0, 50, 150, 200])


@pytest.mark.parametrize("size", [(3, 100), (100, 3), (7, 11), (1, 1)])
def test_any_size_fits(size):
    image = np.full((*size, 3), 7, np.uint8)
    np.testing.assert_array_equal(fit(image, 5, 3, "x"), np.full((5, 5, 3), 7))


def test_grays_and_colours_become_what_the_first_image_was():
    gray = NOISE[..., :1]
    np.testing.assert_array_equal(fit(gray, 6, 3, "x"), np.repeat(gray[:, 1:7], 3, axis=-1))
    expected = NOISE[:, 1:7] @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(fit(NOISE, 6, 1, "x")[..., 0], expected, atol=1)
    with pytest.raises(UserError, match=r"^x: an image with 2 channels; .*image_size resizes only images with 1 or 3$"):
        fit(NOISE[..., :2], 6, 3, "x")


def test_files_of_any_size_and_form_become_tokens_of_one(tmp_path):
    Image.fromarray(NOISE).save(tmp_path / "a.png")
    Image.fromarray(np.full((40, 30, 3), 90, np.uint8)).save(tmp_path / "b.jpg", quality=95)
    Image.fromarray(np.full((4, 4), 9, np.uint8)).save(tmp_path / "c.jpeg")
    np.save(tmp_path / "d.npy", NOISE[None])
    places = [f"{tmp_path}/{name}" for name in ("a.png", "b.jpg", "c.jpeg", "d.npy#0")]
    tokenizer = learned(places[0], 6)
    assert (tokenizer.shape, tokenizer.length) == ((6, 6, 3), 108)
    first, second, third, fourth = (values.reshape(6, 6, 3) for values in tokenizer.encode(places))
    np.testing.assert_array_equal(first, NOISE[:, 1:7])
    assert (abs(second.astype(int) - 90) <= 2).all()
    assert (abs(third.astype(int) - 9) <= 2).all()
    np.testing.assert_array_equal(fourth, first)
    tokenizer.save(tmp_path, "source")
    loaded = load(tmp_path, "source")
    assert loaded.fingerprint == tokenizer.fingerprint != learned(places[0], 0).fingerprint
    np.testing.assert_array_equal(loaded.encode(places[1:2]), tokenizer.encode(places[1:2]))


def test_without_a_size_another_one_is_refused_with_the_remedy(tmp_path):
    Image.fromarray(NOISE).save(tmp_path / "a.png")
    Image.fromarray(NOISE[:4]).save(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"b\.png is 4 by 9 by 3, not 6 by 9 by 3 .*; make all images one size, or set"):
        learned(tmp_path / "a.png", 0).encode([f"{tmp_path}/b.png"])


def test_a_photo_is_turned_as_the_camera_was_held(tmp_path):
    photo = Image.fromarray(np.repeat(NOISE[:1], 6, axis=0) // 255 * 255)
    exif = photo.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    photo.save(tmp_path / "photo.jpg", exif=exif)
    (image,) = read_images([f"{tmp_path}/photo.jpg"])
    assert image.shape == (9, 6, 3)


def test_files_that_are_cut_or_too_large_are_named(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:2000])
    with pytest.raises(UserError, match=r"cut\.jpg: not a readable PNG or JPEG \(image file is truncated"):
        list(read_images([f"{tmp_path}/cut.jpg"]))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(UserError, match=r"whole\.jpg: not a readable PNG or JPEG .*decompression bomb"):
        list(read_images([f"{tmp_path}/whole.jpg"]))


def test_resizing_without_pillow_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r'^x: resizing images needs Pillow; pip install -e "\.\[vision\]"$'):
        fit(NOISE, 6, 3, "x")


def test_the_file_of_a_place():
    assert [str(file_of(place)) for place in ("a/b.png", "a/b.npy#3", "a#1.png")] == ["a/b.png", "a/b.npy", "a#1.png"]
