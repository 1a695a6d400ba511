"""Images as tokens: the values of their pixels, in the order of rows, columns and channels (h, w, c)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jformer.data.sources.images import read_images
from jformer.data.tokenizers.symbols import OneFile, Symbols, to_json
from jformer.errors import UserError


class ImageTokenizer(OneFile):
    """Pixel values as ids, for images of one shape (h, w, c). No symbols: what is read is what there is."""

    vocab_size = 256
    tokens = [str(value) for value in range(256)]  # noqa: RUF012
    symbols = Symbols(unk=-1)

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(".json", to_json(kind="image", shape=list(shape)))
        height, width, channels = shape
        self.shape = (int(height), int(width), int(channels))

    def encode(self, lines: Sequence[str]) -> list[Any]:
        """Return the u8 [h·w·c] of the images that stand at some places, row by row and channels last."""
        return [self._values(place, image) for place, image in zip(lines, read_images(lines), strict=True)]

    def _values(self, place: str, image: np.ndarray) -> np.ndarray:
        if image.shape != self.shape:
            found, wanted = (" by ".join(map(str, shape)) for shape in (image.shape, self.shape))
            raise UserError(f"{place} is {found}, not {wanted} like the first image of training; make all alike")
        return np.array(image).reshape(-1)

    def decode(self, ids: Sequence[int]) -> str:
        """Refuse: pixels are no text."""
        raise NotImplementedError("an image has no text to decode")


def learn_images(places: Iterable[str]) -> ImageTokenizer:
    """Take the shape of the first image."""
    return ImageTokenizer(next(read_images(places)).shape)
