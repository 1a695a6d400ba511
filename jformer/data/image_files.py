"""Read images as u8 [h w c] and resize them.

An image is named by its place: "PATH.png", "PATH.jpg", or "PATH.npy#17" for item 17 of an array u8 [n h w] or
[n h w c].

Axes: h and w pixels, c channels.
"""

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jformer.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg")
GRAYS = ("1", "L")  # Pillow's modes of one channel
COLOURS = ("P", "RGB")
BILINEAR = 2  # Pillow's number of this filter

Image = UInt8[np.ndarray, "h w c"]


def read_images(places: Iterable[str]) -> Iterator[Image]:
    """Yield the images at the given places. Raise UserError for a place without an image."""
    open_once = functools.cache(open_array)
    for place in places:
        path, _, number = place.rpartition("#")
        if path.endswith(".npy") and number.isdecimal():
            images = open_once(Path(path))
            if int(number) >= len(images):
                raise UserError(f"{place}: the array has {len(images)} images, numbered from 0")
            yield images[int(number)]
        elif place.endswith(".npy"):
            raise UserError(f"{place}: name one image of the array by its number, as in {place}#0")
        else:
            yield _read_file(Path(place))


def file_of(place: str) -> Path:
    """Return the file that holds the image of a place, alone or in an array."""
    path, _, number = place.rpartition("#")
    return Path(path if path.endswith(".npy") and number.isdecimal() else place)


def open_array(path: Path) -> np.ndarray:
    """Map an array of images into memory as u8 [n h w c]. Raise UserError for anything else."""
    images = load_array(path, "images", mmap=True)
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
        found = f"{images.dtype} {list(images.shape)}"
        raise UserError(f"{path} holds {found}, not images; save them as uint8 [n h w] or [n h w c], at least one")
    return images if images.ndim == 4 else images[..., None]


def load_array(path: Path, what: str, mmap: bool) -> np.ndarray:
    """Read an array, or map it into memory. Raise UserError naming `what` it should hold if it cannot be read."""
    try:
        return np.load(path, mmap_mode="r" if mmap else None)
    except Exception as error:  # NumPy parses the header as Python literals, which may raise anything
        why = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable array of {what} ({why}); write it with numpy.save") from error


def fit(image: Image, size: int, channels: int, place: str) -> Image:
    """Return a square image of `size` pixels a side, with 1 or 3 channels.

    The shorter side is resized to `size`, bilinearly with antialiasing, and the longer side is center-cropped. Gray
    images become colour images or the reverse (luminance) as needed. An image of the right shape is returned unchanged.
    Raises UserError for an image with another number of channels.
    """
    sides = [max(size, round(side * size / min(image.shape[:2]))) for side in image.shape[:2]]
    return _resized(image, sides, (size, size, channels), place)


def prepare(image: Image, steps: Mapping[str, Any], shape: Sequence[int], place: str) -> Image:
    """Bring an image to a shape (h, w, c) by the steps of a published model. Raises UserError as `fit` does.

    The steps: "sides", (h, w), or the shorter side alone, or empty for no resizing; "filter", Pillow's number of the
    resampling filter. A larger image is then center-cropped, a smaller one gets a black margin.
    """
    h, w = image.shape[:2]
    sides = steps["sides"]
    if len(sides) == 1:
        sides = [side * sides[0] // min(h, w) for side in (h, w)]
    return _resized(image, sides or (h, w), shape, place, steps["filter"])


def _resized(image: Image, sides: Sequence[int], shape: Sequence[int], place: str, resample: int = BILINEAR) -> Image:
    """Resize an image to `sides` (h, w) and return its center, of a shape (h, w, c)."""
    h, w, c = image.shape
    (height, width), channels = shape[:2], shape[2]
    if (h, w, c) == (*sides, channels) == tuple(shape):
        return image
    if c not in (1, 3) or channels not in (1, 3):
        raise UserError(f"{place}: an image with {c} channels; data.image_size resizes only images with 1 or 3")
    pillow = _pillow("PIL.Image", place, "resizing images")
    picture = pillow.fromarray(np.ascontiguousarray(image[..., 0] if c == 1 else image))
    if (h, w) != tuple(sides):
        picture = picture.resize((sides[1], sides[0]), resample)
    left, top = (sides[1] - width) // 2, (sides[0] - height) // 2
    picture = picture.crop((left, top, left + width, top + height)).convert("L" if channels == 1 else "RGB")
    return _with_channels(np.asarray(picture))


def _read_file(path: Path) -> Image:
    """Read 8-bit grayscale, or colours as RGB, rotated by the EXIF orientation."""
    pillow = _pillow("PIL.Image", path, "reading PNG and JPEG files")
    turn = _pillow("PIL.ImageOps", path, "").exif_transpose
    try:
        with pillow.open(path, formats=["PNG", "JPEG"]) as image:
            if image.mode not in (*GRAYS, *COLOURS) or image.has_transparency_data:
                raise UserError(f"{path}: an image of mode {image.mode}; save it as 8-bit grayscale or RGB, all opaque")
            return _with_channels(np.asarray(turn(image.convert("L" if image.mode in GRAYS else "RGB"))))
    except UserError:
        raise
    # Pillow raises SyntaxError or ValueError for a broken PNG, DecompressionBombError for far too many pixels.
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise UserError(f"{path}: not a readable PNG or JPEG ({error})") from error


def _pillow(module: str, place: object, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f'{place}: {what} needs Pillow; pip install -e ".[vision]"') from error


def _with_channels(pixels: np.ndarray) -> Image:
    return pixels if pixels.ndim == 3 else pixels[..., None]
