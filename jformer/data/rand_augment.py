"""RandAugment (Cubuk et al. 2020): apply random operations out of fourteen, all at one strength. NumPy only.

Strengths range from -1 to 1; operations without a direction ignore the sign.

Axes: h and w pixels, c channels.
"""

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from jformer.data.image_files import Image

Operation = Callable[[Image, float], Image]

OPERATIONS_DRAWN, STRENGTH = 2, 9 / 30  # N = 2 and M = 9 of 30: those of ResNet-50 on ImageNet
LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)
MOST_DEGREES, MOST_SHEAR, MOST_MOVED, MOST_ENHANCED = 30, 0.3, 150 / 331, 0.9  # at strength 1; MOST_MOVED of a side
SMOOTHING = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13


def rand_augment(image: Image, rng: np.random.Generator) -> Image:
    """Apply operations drawn with replacement."""
    for number in rng.integers(len(OPERATIONS), size=OPERATIONS_DRAWN):
        sign = 1 if rng.random() < 1 / 2 else -1
        image = list(OPERATIONS.values())[number](image, sign * STRENGTH)
    return image


def _autocontrast(image: Image, strength: float) -> Image:
    """Stretch each channel from black to white."""
    low, high = image.min(axis=(0, 1)).astype(float), image.max(axis=(0, 1)).astype(float)
    scale = np.where(high > low, 255 / np.maximum(high - low, 1), 1)
    return _as_pixels(np.where(high > low, (image - low) * scale, image))


def _equalize(image: Image, strength: float) -> Image:
    """Equalize the histogram of each channel."""
    equal = image.copy()
    for channel in range(image.shape[-1]):
        counts = np.bincount(image[..., channel].ravel(), minlength=256)
        step = (counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        if step:
            below = np.concatenate([[0], counts.cumsum()[:-1]])
            equal[..., channel] = np.minimum((step // 2 + below) // step, 255)[image[..., channel]]
    return equal


def _solarize(image: Image, strength: float) -> Image:
    """Invert bright values."""
    return np.where(image >= 255 * (1 - abs(strength)), 255 - image, image).astype(np.uint8)


def _posterize(image: Image, strength: float) -> Image:
    """Keep 4 to 8 bits of every value."""
    dropped = round(4 * abs(strength))
    return image >> dropped << dropped


def _enhance(base: Callable[[Image], Float[np.ndarray, "..."]], image: Image, strength: float) -> Image:
    """Move the image away from a degenerate version of it, such as gray, or towards it."""
    lacking = base(image)
    return _as_pixels(lacking + (1 + MOST_ENHANCED * strength) * (image - lacking))


def _gray(image: Image) -> Float[np.ndarray, "h w 1"]:
    return (image @ LUMINANCE)[..., None] if image.shape[-1] == 3 else image.astype(float)


def _smooth(image: Image) -> Float[np.ndarray, "h w c"]:
    """Mix each pixel with its neighbours; those at the border stay."""
    h, w, _ = image.shape
    smooth = image.astype(float)
    if min(h, w) > 2:
        parts = [SMOOTHING[y, x] * image[y : h - 2 + y, x : w - 2 + x] for y in range(3) for x in range(3)]
        smooth[1:-1, 1:-1] = sum(parts)
    return smooth


def _rotate(image: Image, strength: float) -> Image:
    angle = np.deg2rad(MOST_DEGREES * strength)
    return _warp(image, [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def _move(image: Image, strength: float, side: int) -> Image:
    moved = MOST_MOVED * strength * image.shape[side]
    return _warp(image, np.eye(2), [0.0, moved] if side else [moved, 0.0])


def _warp(image: Image, matrix: object, moved: object = (0.0, 0.0)) -> Image:
    """Take each pixel from `matrix` times its offset (y, x) from the center plus `moved`: the nearest, or black."""
    size = np.array(image.shape[:2])
    places = np.stack(np.meshgrid(*(np.arange(side) + 0.5 for side in size), indexing="ij"), axis=-1) - size / 2
    taken = np.floor(places @ np.asarray(matrix).T + moved + size / 2).astype(int)
    inside = ((taken >= 0) & (taken < size)).all(axis=-1)
    rows, columns = np.where(inside[..., None], taken, 0).transpose(2, 0, 1)
    return np.where(inside[..., None], image[rows, columns], 0).astype(np.uint8)


def _as_pixels(values: Float[np.ndarray, "h w c"]) -> Image:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, strength: image,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": _solarize,
    "color": functools.partial(_enhance, _gray),
    "posterize": _posterize,
    "contrast": functools.partial(_enhance, lambda image: np.rint(_gray(image).mean())),
    "brightness": functools.partial(_enhance, np.zeros_like),
    "sharpness": functools.partial(_enhance, _smooth),
    "shear_x": lambda image, strength: _warp(image, [[1, 0], [MOST_SHEAR * strength, 1]]),
    "shear_y": lambda image, strength: _warp(image, [[1, MOST_SHEAR * strength], [0, 1]]),
    "translate_x": functools.partial(_move, side=1),
    "translate_y": functools.partial(_move, side=0),
}
