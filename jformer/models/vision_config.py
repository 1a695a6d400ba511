"""The options of models that read images, and checks of the options that they do not read."""

import dataclasses
from typing import Any

from jformer.errors import UserError, check_least


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """How an image becomes a sequence of patches (Dosovitskiy et al. 2021), for models that read images."""

    image_size: int = 224  # pixels of either side
    patch_size: int = 16  # pixels of either side of a patch, one position (section 3.1); must divide image_size
    channels: int = 3  # values of a pixel: 3 of colours, 1 of grey
    # Subtracted from a pixel's values, from 0 to 1: one number for all channels, or one for each.
    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)  # which then divides them: one for all channels, or one each
    source: bool = False  # encdec: its source is an image, not a text; task='caption' sets it

    @property
    def patch_names(self) -> tuple[str, ...]:
        """The names of the patches, in their order: "1,1" for the first row and column, "1,2" and so on."""
        side = range(1, self.image_size // self.patch_size + 1)
        return tuple(f"{row},{column}" for row in side for column in side)

    def check(self, model: Any) -> None:
        """Raise UserError for the first option that no model of images can be built from, or that none would read."""
        check_least("model.vision", self, ("image_size", "patch_size", "channels"), 1)
        if self.source and model.family != "encdec":
            raise UserError(f"model.vision.source=True is read by family='encdec' only, not by {model.family!r}")
        if self.source and not model.shared_embedding:
            raise UserError("model.shared_embedding=False: an image as the source has no table to share, use True")
        for key, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) not in (1, self.channels) or (key == "deviation" and min(values) <= 0):
                positive = " above 0" if key == "deviation" else ""
                raise UserError(f"model.vision.{key}={values} must be one number{positive}, or one for each channel")
        if model.family == "vit":
            _check_classifier(model)
        if not model.reads_images:
            return
        size, patch = self.image_size, self.patch_size
        if size % patch:
            raise UserError(f"model.vision.patch_size={patch} must divide model.vision.image_size={size}")


def _check_classifier(model: Any) -> None:
    if model.embedding_scale == "output" or not model.tied_output or model.head.transform:
        raise UserError(
            "model.embedding_scale='output', tied_output=False and head.transform=True are about vocabularies: "
            "family='vit' has none"
        )
    if model.head.pooling == "none":
        raise UserError(
            "model.head.pooling='none' classifies each patch, but an image has one label: choose another pooling"
        )
    if model.head.num_segments:
        raise UserError(f"model.head.num_segments={model.head.num_segments}: an image has no second text, use 0")
