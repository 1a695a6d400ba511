"""The Vision Transformer (Dosovitskiy et al. 2021) as a classifier."""

from typing import Any

import numpy as np

from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tools.hf.families import Fields, HfFamily
from jformer.tools.hf.name_tables import Entry, Table, below, linear, norm


def _table(model: ModelConfig) -> Table:
    size, channels = model.vision.patch_size, model.vision.channels

    def read_patches(kernel: np.ndarray) -> np.ndarray:  # [d c h w] → [h*w*c d], the order of a patch's pixels
        return kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))

    def write_patches(kernel: np.ndarray) -> np.ndarray:  # [h*w*c d] → [d c h w]
        return kernel.reshape(size, size, channels, -1).transpose(3, 2, 0, 1)

    inputs = "vit.embeddings"
    layer = "attention.attention"
    return {
        "class_token": Entry(f"{inputs}.cls_token"),
        "input/positions/embedding": Entry(
            f"{inputs}.position_embeddings", lambda table: table[0], lambda table: table[None]
        ),
        "patches/kernel": Entry(f"{inputs}.patch_embeddings.projection.weight", read_patches, write_patches),
        "patches/bias": Entry(f"{inputs}.patch_embeddings.projection.bias"),
        **norm("encoder/final_norm", "vit.layernorm"),
        **linear("classifier", "classifier"),
        **below(
            "encoder/block",
            "vit.encoder.layer.{}",
            *(linear(f"self_attn/{name[0]}", f"{layer}.{name}") for name in ("query", "key", "value")),
            linear("self_attn/o", "attention.output.dense"),
            norm("self_attn_norm", "layernorm_before"),
            linear("feed_forward/up", "intermediate.dense"),
            linear("feed_forward/down", "output.dense"),
            norm("feed_forward_norm", "layernorm_after"),
        ),
    }


PIXELS = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": 0.5, "image_std": 0.5}


def check_pixels(fields: Fields) -> None:
    """Raise UserError unless pixels are scaled to -1 to 1, as ours are."""
    for key, value in PIXELS.items():
        found = fields.get(key, value)
        if {*found} != {value} if isinstance(found, list) else found != value:
            raise UserError(f"preprocessor_config.json: {key}={found} is not implemented: only {value}")


def pixel_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the preprocessor_config.json that scales pixels as ours does."""
    size = {"height": model.vision.image_size, "width": model.vision.image_size}
    pixels = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {**pixels, "size": size, "do_resize": True, "do_normalize": True}


VIT = HfFamily(
    model_type="vit",
    classes={"ViTForImageClassification": "classify"},
    sizes={"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
     "intermediate_size": "d_ff", "layer_norm_eps": "norm_epsilon", "hidden_dropout_prob": "dropout",
     "attention_probs_dropout_prob": "attention_dropout", "image_size": "vision.image_size",
     "patch_size": "vision.patch_size", "num_channels": "vision.channels"},
    defaults={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
     "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu",
     "image_size": 224, "patch_size": 16, "num_channels": 3},
    ours={"family": "vit", "norm": "pre", "positions": "learned", "embedding_scale": "none", "init": "vit"},
    theirs={"qkv_bias": True},
    table=_table, activation="hidden_act",
    unread=(r"vit\.pooler\..*",),
)  # fmt: skip
