"""Images as tokens: the values of their pixels, in the order of rows, columns and channels (h, w, c)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jformer.data.image_files import fit, prepare, read_images
from jformer.data.tokenizers.symbols import OneFile, Symbols, to_json
from jformer.errors import UserError


class ImageTokenizer(OneFile):
    """Pixel values as ids, for images of one shape (h, w, c), or resized to it. No symbols."""

    vocab_size = 256
    tokens = [str(value) for value in range(256)]  # noqa: RUF012
    symbols = Symbols(unk=-1)

    def __init__(
        self, shape: Sequence[int], resize: bool = False, steps: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Take the shape (h, w, c) of all images; others are resized as `fit` does, or by the steps of `prepare`."""
        more = ({"resize": True} if resize else {}) | ({"steps": dict(steps)} if steps else {})
        super().__init__(".json", to_json(kind="image", shape=list(shape), **more))
        height, width, channels = shape
        self.shape = (int(height), int(width), int(channels))
        self.resize, self.steps = bool(resize), steps

    @property
    def length(self) -> int:
        """The values of an image."""
        return math.prod(self.shape)

    def encode(self, lines: Sequence[str]) -> list[Any]:
        """Return the u8 [h·w·c] of the images at the given places, row by row and channels last."""
        return [self._values(place, image) for place, image in zip(lines, read_images(lines), strict=True)]

    def _values(self, place: str, image: np.ndarray) -> np.ndarray:
        if self.steps:
            image = prepare(image, self.steps, self.shape, place)
        elif self.resize:
            image = fit(image, self.shape[0], self.shape[2], place)
        if image.shape != self.shape:
            found, wanted = (" by ".join(map(str, shape)) for shape in (image.shape, self.shape))
            raise UserError(
                f"{place} is {found}, not {wanted} like the first training image; make all images one size, or set "
                "data.image_size"
            )
        return np.array(image).reshape(-1)

    def decode(self, ids: Sequence[int]) -> str:
        """Raise NotImplementedError: pixels are not text."""
        raise NotImplementedError("an image has no text to decode")


def learn_images(places: Iterable[str], size: int) -> ImageTokenizer:
    """Take the channels of the first image, and its sides too where no `size` is given."""
    height, width, channels = next(read_images(places)).shape
    return ImageTokenizer((size, size, channels), resize=True) if size else ImageTokenizer((height, width, channels))
