"""T5 and T5 1.1 (Raffel et al. 2020), Flan-T5 (Chung et al. 2022) and mT5 (Xue et al. 2021).

T5 ties the projection to the vocabulary to the table, and scales hidden states before it; T5 1.1 has a projection of
its own and no scale. The newer field `scale_decoder_outputs` means the same as `tie_word_embeddings`.
"""

import dataclasses
from typing import Any

from jformer.models import ModelConfig
from jformer.models.layers.feed_forward import GATES
from jformer.tools.hf.families import Fields, HfFamily
from jformer.tools.hf.name_tables import Table, below, embedding, linear, modules, norm

FEED_FORWARDS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu",
    "gated-gelu": "geglu_tanh", "gated-relu": "reglu", "gated-silu": "swiglu",
}  # fmt: skip
GATED = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
PLAIN = {"up": "wi", "down": "wo"}


def _stack(side: str, projections: dict[str, str]) -> Table:
    attentions = {"self_attn": "SelfAttention"} | ({"cross_attn": "EncDecAttention"} if side == "decoder" else {})
    last, names = len(attentions), dict[str, str]()
    for i, (ours, theirs) in enumerate(attentions.items()):
        names |= {f"{ours}/{x}": f"layer.{i}.{theirs}.{x}" for x in "qkvo"} | {f"{ours}_norm": f"layer.{i}.layer_norm"}
    names |= {f"feed_forward/{ours}": f"layer.{last}.DenseReluDense.{x}" for ours, x in projections.items()}
    names |= {"feed_forward_norm": f"layer.{last}.layer_norm"}
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return {
        **below(f"{side}/block", f"{side}.block.{{}}", modules(names, bias=False)),
        **embedding(f"{side}/position_bias", bias),
        **norm(f"{side}/final_norm", f"{side}.final_layer_norm", False),
    }


def _table(model: ModelConfig) -> Table:
    projections = GATED if model.activation in GATES else PLAIN
    table = embedding("source_embedding", "shared") | _stack("encoder", projections) | _stack("decoder", projections)
    if model.tied_output:
        return table
    head = linear("head/output", "lm_head", bias=False)
    return table | {path: entry._replace(otherwise="shared.weight") for path, entry in head.items()}


def _read(fields: Fields) -> dict[str, Any]:
    scaled = fields.get("scale_decoder_outputs", fields["tie_word_embeddings"])
    return {
        "num_decoder_layers": fields.get("num_decoder_layers") or fields["num_layers"],
        "d_v": fields["d_kv"],
        "attention_dropout": float(fields["dropout_rate"]),
        "activation_dropout": float(fields["dropout_rate"]),
        "embedding_scale": "output" if scaled else "none",
        "tied_output": scaled,
    }


T5 = HfFamily(
    model_type="t5",
    classes={"T5ForConditionalGeneration": "translate", "T5Model": "translate"},
    options={"vocab_size": ("vocab_size", 32_128), "d_model": ("d_model", 512), "d_kv": ("d_k", 64),
     "d_ff": ("d_ff", 2048), "num_layers": ("num_layers", 6), "num_heads": ("num_heads", 8),
     "dropout_rate": ("dropout", 0.1), "layer_norm_epsilon": ("norm_epsilon", 1e-6),
     "relative_attention_num_buckets": ("relative.num_buckets", 32),
     "relative_attention_max_distance": ("relative.max_distance", 128), "tie_word_embeddings": ("tied_output", True),
     "feed_forward_proj": ("activation", "relu")},
    ours={"norm": "pre", "norm_type": "rmsnorm", "attention_scale": "one", "positions": "relative", "bias": False,
     "output_dropout": True, "init": "t5"},
    theirs={},
    table=_table, activations=FEED_FORWARDS, read=_read,
    write=lambda model: {"num_decoder_layers": model.decoder_layers},
    copies={**dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"),
            "lm_head.weight": "shared.weight"},
    unread=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)  # fmt: skip
MT5 = dataclasses.replace(
    T5,
    model_type="mt5",
    read=lambda fields: {**_read(fields), "embedding_scale": "none", "tied_output": False},  # regardless of the fields
    classes={"MT5ForConditionalGeneration": "translate", "MT5Model": "translate"},
    options={**T5.options, "vocab_size": ("vocab_size", 250_112), "d_ff": ("d_ff", 1024),
             "num_layers": ("num_layers", 8), "num_heads": ("num_heads", 6),
             "feed_forward_proj": ("activation", "gated-gelu")},
)  # fmt: skip
