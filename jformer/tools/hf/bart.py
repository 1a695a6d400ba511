"""BART (Lewis et al. 2020), mBART (Liu et al. 2020), and M2M-100 (Fan et al. 2021) with NLLB (2022).

Their parameters have the same names. BART is Post-LN, the others Pre-LN. BART and mBART learn positions and normalise
the input of the stacks; M2M-100 has sinusoids, which are a table here: freeze it in training.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tools.hf.families import LOGITS_BIAS, Fields, HfFamily
from jformer.tools.hf.name_tables import Entry, Table, below, embedding, linear, modules, norm

SIDES = {"source": "encoder", "target": "decoder"}
OFFSET = 2  # unused first rows of the position tables
OPTIONS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50_265), "d_model": ("d_model", 1024), "encoder_layers": ("num_layers", 12),
    "decoder_layers": ("num_decoder_layers", 12), "encoder_attention_heads": ("num_heads", 16),
    "encoder_ffn_dim": ("d_ff", 4096), "dropout": ("dropout", 0.1), "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0), "tie_word_embeddings": ("tied_output", True),
    "activation_function": ("activation", "gelu"),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {"decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "scale_embedding": False,
                            "max_position_embeddings": 1024}  # fmt: skip
TABLE = "model.shared.weight"
COPIES = dict.fromkeys(
    ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"), TABLE
)


def _stack(side: str) -> Table:
    """Map the layers of one stack."""
    attentions = {"self_attn": "self_attn"} | ({"cross_attn": "encoder_attn"} if side == "decoder" else {})
    letters = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    names = {"feed_forward/up": "fc1", "feed_forward/down": "fc2", "feed_forward_norm": "final_layer_norm"}
    for ours, theirs in attentions.items():
        names |= {f"{ours}/{a}": f"{theirs}.{b}" for a, b in letters.items()} | {f"{ours}_norm": f"{theirs}_layer_norm"}
    return below(f"{side}/block", f"model.{side}.layers.{{}}", modules(names))


def common(model: ModelConfig) -> Table:
    """Map what all of these families share: the token tables, both stacks, the bias of the logits."""
    table = _stack("encoder") | _stack("decoder")
    if model.shared_embedding:
        table |= embedding("source_embedding", "model.shared")
    else:
        tables = {ours: f"model.{side}.embed_tokens.weight" for ours, side in SIDES.items()}
        table |= {f"{ours}_embedding/embedding": Entry(name, otherwise=TABLE) for ours, name in tables.items()}
    if not model.tied_output:
        table |= linear("head/output", "lm_head", bias=False)
    if model.head.bias:
        table["head/bias"] = Entry("final_logits_bias", lambda bias: bias[0], lambda bias: bias[None])
    if model.norm == "pre":
        for side in SIDES.values():
            table |= norm(f"{side}/final_norm", f"model.{side}.layer_norm")
    return table


def _bart(model: ModelConfig) -> Table:
    table = common(model)
    for ours, side in SIDES.items():
        table |= norm(f"{ours}_input/norm", f"model.{side}.layernorm_embedding")
        table |= embedding(f"{ours}_input/positions", f"model.{side}.embed_positions", first=OFFSET)
    return table


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Return M2M-100's table of positions: sines, then cosines, with rates down to exactly 1 / 10000."""
    half = d_model // 2
    rates = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10_000) / (half - 1)))
    angles = np.arange(OFFSET, length + OFFSET, dtype=np.float32)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _m2m(model: ModelConfig) -> Table:
    positions = Entry("", value=sinusoids(model.max_length, model.d_model))
    return common(model) | {f"{ours}_input/positions/embedding": positions for ours in SIDES}


def read(fields: Fields) -> dict[str, Any]:
    """Return the options that are not plain sizes."""
    for key in ("attention_heads", "ffn_dim"):
        one, other = (fields[f"{side}_{key}"] for side in ("encoder", "decoder"))
        if one != other:
            raise UserError(f"config.json: encoder_{key}={one} and decoder_{key}={other}: ours has one number for both")
    return {
        "shared_embedding": fields["tie_word_embeddings"],
        "embedding_scale": "input" if fields["scale_embedding"] else "none",
        "max_length": fields["max_position_embeddings"],
        "head.bias": fields.get(LOGITS_BIAS, False),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return their fields that are not plain sizes."""
    return {
        "decoder_attention_heads": model.num_heads,
        "decoder_ffn_dim": model.d_ff,
        "scale_embedding": model.embedding_scale == "input",
        "max_position_embeddings": model.max_length,
        LOGITS_BIAS: model.head.bias,
    }


BART = HfFamily(
    model_type="bart",
    classes={"BartForConditionalGeneration": "translate", "BartModel": "translate"},
    options=OPTIONS, defaults=DEFAULTS,
    ours={"norm": "post", "norm_epsilon": 1e-5, "positions": "learned", "embedding_norm": True, "init": "bert"},
    theirs={"normalize_before": False, "add_final_layer_norm": False,
     "normalize_embedding": True, "static_position_embeddings": False, "extra_pos_embeddings": OFFSET},
    table=_bart, read=read, write=write,
    copies=COPIES,
    unread=("final_logits_bias", r"model\.shared\.weight"), prefix="model.", start=2,
)  # fmt: skip
MBART = dataclasses.replace(
    BART,
    model_type="mbart",
    classes={"MBartForConditionalGeneration": "translate", "MBartModel": "translate"},
    ours={**BART.ours, "norm": "pre"},
    theirs={},
)
M2M100 = dataclasses.replace(
    BART,
    model_type="m2m_100",
    classes={"M2M100ForConditionalGeneration": "translate", "M2M100Model": "translate"},
    options={**OPTIONS, "vocab_size": ("vocab_size", 128_112), "attention_dropout": ("attention_dropout", 0.1),
             "activation_function": ("activation", "relu")},
    defaults={**DEFAULTS, "scale_embedding": True},
    ours={**BART.ours, "norm": "pre", "embedding_norm": False},
    theirs={"pad_token_id": OFFSET - 1},  # after which its positions begin
    table=_m2m,
    unread=(*BART.unread, r"model\.(encoder|decoder)\.embed_positions\.weights?"),
)  # fmt: skip
