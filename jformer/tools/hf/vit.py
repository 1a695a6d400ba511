"""The Vision Transformer (Dosovitskiy et al. 2021) as a classifier."""

import math
import re
from typing import Any

import numpy as np

from jformer.data.tokenizers import ImageTokenizer
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tools.hf.families import Fields, HfFamily
from jformer.tools.hf.name_tables import Entry, Table, below, modules

LAYER = {
    "self_attn/q": "attention.attention.query", "self_attn/k": "attention.attention.key",
    "self_attn/v": "attention.attention.value", "self_attn/o": "attention.output.dense",
    "self_attn_norm": "layernorm_before", "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense", "feed_forward_norm": "layernorm_after",
}  # fmt: skip


def _table(model: ModelConfig) -> Table:
    size, channels = model.vision.patch_size, model.vision.channels

    def read_patches(kernel: np.ndarray) -> np.ndarray:  # [d c h w] → [h*w*c d], the order of a patch's pixels
        return kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))

    def write_patches(kernel: np.ndarray) -> np.ndarray:  # [h*w*c d] → [d c h w]
        return kernel.reshape(size, size, channels, -1).transpose(3, 2, 0, 1)

    inputs = "vit.embeddings"
    return {
        "class_token": Entry(f"{inputs}.cls_token"),
        "input/positions/embedding": Entry(
            f"{inputs}.position_embeddings", lambda table: table[0], lambda table: table[None]
        ),
        "patches/kernel": Entry(f"{inputs}.patch_embeddings.projection.weight", read_patches, write_patches),
        "patches/bias": Entry(f"{inputs}.patch_embeddings.projection.bias"),
        **modules({"encoder/final_norm": "vit.layernorm", "classifier": "classifier"}),
        **below("encoder/block", "vit.encoder.layer.{}", modules(LAYER)),
    }


PIXEL_SCALE = "_pixel_scale"  # not a field of config.json: mean and deviation, of preprocessor_config.json
FACTOR = 1 / 255  # of pixels, unless it is given
ELSEWHERE = ("crop_pct", "do_pad", "do_flip_channel_order")  # what other processors do
SHORTEST = re.compile("(CLIP|Bit|ConvNext)")  # processors for which a single number is the shorter side


def pixel_scale(fields: Fields) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of a preprocessor_config.json, for pixels from 0 to 1."""
    factor = (fields.get("rescale_factor", FACTOR) if fields.get("do_rescale", True) else 1) / FACTOR
    factor = 1.0 if math.isclose(factor, 1) else factor

    def each(key: str, off: float) -> tuple[float, ...]:
        given = fields.get(key, 0.5) if fields.get("do_normalize", True) else off
        values = [number / factor for number in (given if isinstance(given, list) else [given])]
        return tuple(values if len({*values}) > 1 else values[:1])

    return each("image_mean", 0.0), each("image_std", 1.0)


def image_steps(fields: Fields, size: int) -> dict[str, Any]:
    """Return how images of any size are brought to the model's, for `data.image_files.prepare`; {} if they are not.

    Raises UserError for what is not implemented, and for images of another size than the model's.
    """
    for key in ELSEWHERE:
        if fields.get(key):
            raise UserError(f"preprocessor_config.json: {key}={fields[key]!r} is not implemented")
    crop = _sides(fields, "crop_size") if fields.get("do_center_crop") else []
    sides = _sides(fields, "size") if fields.get("do_resize", bool(fields)) else []
    if (sides or crop) and (crop or sides) != [size, size]:
        key = "crop_size" if crop else "size"
        raise UserError(f"preprocessor_config.json: {key}={fields.get(key)} gives other images than config.json's "
                        f"image_size={size}")  # fmt: skip
    return {"sides": sides, "filter": int(fields.get("resample", 2))} if sides or crop else {}


def _sides(fields: Fields, key: str) -> list[int]:
    """Return [height, width], or [shorter side]."""
    given = fields.get(key, 224)
    if type(given) is int:
        kind = str(fields.get("image_processor_type", fields.get("feature_extractor_type")))
        return [given] if key == "size" and SHORTEST.match(kind) else [given, given]
    for names in (("height", "width"), ("shortest_edge",)):
        if {*given} == {*names} and all(type(given[name]) is int and given[name] > 0 for name in names):
            return [given[name] for name in names]
    raise UserError(f"preprocessor_config.json: {key}={given} is not implemented: height and width, or shortest_edge")


def pixel_fields(model: ModelConfig, images: ImageTokenizer) -> dict[str, Any]:
    """Return the preprocessor_config.json that prepares images as ours does."""
    size = model.vision.image_size
    sides = images.steps["sides"] if images.steps else [size] if images.resize else []
    names = ("shortest_edge",) if len(sides) == 1 else ("height", "width")
    scale = {"image_mean": model.vision.mean, "image_std": model.vision.deviation}
    return {
        **{key: [*values] * (model.vision.channels if len(values) == 1 else 1) for key, values in scale.items()},
        "image_processor_type": "BitImageProcessor" if len(sides) == 1 else "ViTImageProcessor",
        "do_resize": bool(sides),
        "size": dict(zip(names, sides or [size, size], strict=True)),
        "resample": images.steps.get("filter", 2),
        "do_center_crop": len(sides) == 1 or bool(sides and sides != [size, size]),
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": FACTOR,
        "do_normalize": True,
        "do_convert_rgb": model.vision.channels == 3,
    }


VIT = HfFamily(
    model_type="vit",
    classes={"ViTForImageClassification": "classify"},
    options={"hidden_size": ("d_model", 768), "num_hidden_layers": ("num_layers", 12),
     "num_attention_heads": ("num_heads", 12), "intermediate_size": ("d_ff", 3072),
     "layer_norm_eps": ("norm_epsilon", 1e-12), "hidden_dropout_prob": ("dropout", 0.0),
     "attention_probs_dropout_prob": ("attention_dropout", 0.0), "image_size": ("vision.image_size", 224),
     "patch_size": ("vision.patch_size", 16), "num_channels": ("vision.channels", 3),
     "hidden_act": ("activation", "gelu")},
    defaults={PIXEL_SCALE: ((0.5,), (0.5,))},
    ours={"family": "vit", "norm": "pre", "positions": "learned", "embedding_scale": "none", "init": "vit"},
    theirs={"qkv_bias": True},
    table=_table,
    read=lambda fields: dict(zip(("vision.mean", "vision.deviation"), fields[PIXEL_SCALE], strict=True)),
    write=lambda model: {PIXEL_SCALE: (model.vision.mean, model.vision.deviation)},
    unread=(r"vit\.pooler\..*",),
)  # fmt: skip
