"""Random augmentation of training images on the host. NumPy only.

The draws for a row depend only on (seed, step, row number), not on devices, microbatches or restarts. Evaluation images
are not augmented.

Axes: b rows, h and w pixels, c channels.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import UInt8

from jformer.data.image_files import Image
from jformer.data.rand_augment import LUMINANCE, rand_augment

Alter = Callable[[Image, np.random.Generator], Image]
Augment = Callable[[UInt8[np.ndarray, "b h w c"], np.ndarray, tuple[int, int]], UInt8[np.ndarray, "b h w c"]]
"""(images, their row numbers, (seed, step)) → augmented images."""

BORDER = 1 / 8  # padding of "crop" relative to a side: 4 of 32 pixels in He et al. 2016, section 4.2
JITTER = 0.4  # the largest change of brightness and contrast by "color" (Krizhevsky 2014's factors)


def make_augment(names: Sequence[str]) -> Augment | None:
    """Return the function that applies the named AUGMENTS in order, or None without names."""
    return functools.partial(_augment, [AUGMENTS[name] for name in names]) if names else None


def _augment(alters: Sequence[Alter], images: np.ndarray, rows: np.ndarray, seed: tuple[int, int]) -> np.ndarray:
    altered = np.empty_like(images)
    for i, (image, row) in enumerate(zip(images, rows, strict=True)):
        rng = np.random.default_rng([*seed, int(row)])
        for alter in alters:
            image = alter(image, rng)
        altered[i] = image
    return altered


def flip(image: Image, rng: np.random.Generator) -> Image:
    """Mirror an image with probability 1/2; unsuitable where labels or captions depend on left and right."""
    return image[:, ::-1] if rng.random() < 1 / 2 else image


def crop(image: Image, rng: np.random.Generator) -> Image:
    """Pad an image with black and cut a random window of the original size (He et al. 2016, section 4.2)."""
    h, w, _ = image.shape
    border = [round(side * BORDER) for side in (h, w)]
    top, left = (int(rng.integers(2 * each + 1)) for each in border)
    padded = np.pad(image, [(each, each) for each in border] + [(0, 0)])
    return padded[top : top + h, left : left + w]


def color(image: Image, rng: np.random.Generator) -> Image:
    """Scale brightness, then contrast, each by a factor of 1 - JITTER to 1 + JITTER; hues are unchanged."""
    brightness, contrast = rng.uniform(1 - JITTER, 1 + JITTER, 2)
    pixels = image * brightness
    gray = (pixels @ LUMINANCE if image.shape[-1] == 3 else pixels).mean()
    return np.clip(np.rint(gray + contrast * (pixels - gray)), 0, 255).astype(np.uint8)


AUGMENTS: dict[str, Alter] = {"flip": flip, "crop": crop, "color": color, "randaugment": rand_augment}
