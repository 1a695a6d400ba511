"""Llama (Touvron et al. 2023), with the published rotary positions: other bases and scalings are refused."""

from typing import Any

from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tools.hf.families import Fields, HfFamily
from jformer.tools.hf.name_tables import Table, below, embedding, linear, norm

GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu", "sigmoid": "glu",
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}


def _table(model: ModelConfig) -> Table:
    head = {} if model.tied_output else linear("head/output", "lm_head", bias=False)
    projections = {"self_attn": {name: f"{name}_proj" for name in "qkvo"}}
    projections["feed_forward"] = {name: f"{name}_proj" for name in ("gate", "up", "down")}
    modules = {"self_attn": "self_attn", "feed_forward": "mlp"}
    return {
        **embedding("embedding", "model.embed_tokens"),
        **head,
        **norm("decoder/final_norm", "model.norm", bias=False),
        **below(
            "decoder/block",
            "model.layers.{}",
            *(
                linear(f"{ours}/{name}", f"{modules[ours]}.{theirs}", model.bias)
                for ours, rows in projections.items()
                for name, theirs in rows.items()
            ),
            norm("self_attn_norm", "input_layernorm", bias=False),
            norm("feed_forward_norm", "post_attention_layernorm", bias=False),
        ),
    }


def _read(fields: Fields) -> dict[str, Any]:
    rotary = {"rope_theta": fields.get("rope_theta", 10_000.0), **(fields.get("rope_scaling") or {})}
    rotary = {**ROTARY, **rotary, **(fields.get("rope_parameters") or {})}
    if rotary != ROTARY:
        raise UserError(f"config.json: rotary positions {rotary} are not implemented: only {ROTARY}")
    if fields["attention_bias"] != fields["mlp_bias"]:
        raise UserError("config.json: attention_bias and mlp_bias differ; only both or neither is implemented")
    size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "num_kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "d_k": size,
        "d_v": size,
        "bias": fields["mlp_bias"],
        "tied_output": fields["tie_word_embeddings"],
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.key_size,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "tie_word_embeddings": model.tied_output,
        "rope_parameters": ROTARY,
    }


LLAMA = HfFamily(
    model_type="llama",
    classes={"LlamaForCausalLM": "lm", "LlamaModel": "lm"},
    sizes={"vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "num_layers",
     "num_attention_heads": "num_heads", "intermediate_size": "d_ff", "rms_norm_eps": "norm_epsilon",
     "attention_dropout": "attention_dropout"},
    defaults={"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
     "intermediate_size": 11_008, "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "hidden_act": "silu",
     "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    ours={"family": "decoder", "norm": "pre", "norm_type": "rmsnorm", "positions": "rotary", "dropout": 0.0,
     "embedding_scale": "none", "init": "gpt2"},
    theirs={},
    table=_table, activation="hidden_act", activations=GATES, read=_read, write=_write,
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    unread=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",), prefix="model.",
)  # fmt: skip
