"""Llama (Touvron et al. 2023), with the published rotary positions: other bases and scalings are refused."""

from typing import Any

from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tools.hf.families import Fields, HfFamily
from jformer.tools.hf.name_tables import Table, below, embedding, linear, modules, norm

GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu", "sigmoid": "glu",
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
LAYER = {
    "self_attn/q": "self_attn.q_proj", "self_attn/k": "self_attn.k_proj", "self_attn/v": "self_attn.v_proj",
    "self_attn/o": "self_attn.o_proj", "feed_forward/gate": "mlp.gate_proj", "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj",
}  # fmt: skip
NORMS = {"self_attn_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}


def _table(model: ModelConfig) -> Table:
    return {
        **embedding("embedding", "model.embed_tokens"),
        **({} if model.tied_output else linear("head/output", "lm_head", bias=False)),
        **norm("decoder/final_norm", "model.norm", bias=False),
        **below("decoder/block", "model.layers.{}", modules(LAYER, model.bias), modules(NORMS, bias=False)),
    }


# Fields of architectures whose tensors are named as Llama's, but which scale activations.
SCALES = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",  # Granite
          "scale_emb", "scale_depth", "dim_model_base")  # MiniCPM  # fmt: skip


def _read(fields: Fields) -> dict[str, Any]:
    if scales := [key for key in SCALES if key in fields]:
        raise UserError(f"config.json: {scales[0]}={fields[scales[0]]!r} is not implemented for llama")
    if str(name := fields.get("model_type", "")).startswith("gemma"):
        raise UserError(
            f"config.json: model_type={name!r} is not implemented: its norms and embeddings are not llama's"
        )
    rotary = {"rope_theta": fields.get("rope_theta", 10_000.0), **(fields.get("rope_scaling") or {})}
    rotary = {**ROTARY, **rotary, **(fields.get("rope_parameters") or {})}
    if rotary != ROTARY:
        raise UserError(f"config.json: rotary positions {rotary} are not implemented: only {ROTARY}")
    if fields["attention_bias"] != fields["mlp_bias"]:
        raise UserError("config.json: attention_bias and mlp_bias differ; only both or neither is implemented")
    size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "max_length": fields["max_position_embeddings"],
        "num_kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "d_k": size,
        "d_v": size,
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.key_size,
        "max_position_embeddings": model.max_length,
        "attention_bias": model.bias,
        "rope_parameters": ROTARY,
    }


LLAMA = HfFamily(
    model_type="llama",
    classes={"LlamaForCausalLM": "lm", "LlamaModel": "lm"},
    options={"vocab_size": ("vocab_size", 32_000), "hidden_size": ("d_model", 4096),
     "num_hidden_layers": ("num_layers", 32), "num_attention_heads": ("num_heads", 32),
     "intermediate_size": ("d_ff", 11_008), "rms_norm_eps": ("norm_epsilon", 1e-6),
     "attention_dropout": ("attention_dropout", 0.0), "mlp_bias": ("bias", False),
     "tie_word_embeddings": ("tied_output", False), "hidden_act": ("activation", "silu")},
    defaults={"attention_bias": False, "max_position_embeddings": 2048},
    ours={"family": "decoder", "norm": "pre", "norm_type": "rmsnorm", "positions": "rotary", "dropout": 0.0,
     "embedding_scale": "none", "init": "gpt2"},
    theirs={"sliding_window": None},  # of its relatives, such as Mistral
    table=_table, activations=GATES, read=_read, write=_write,
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    unread=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",), prefix="model.",
)  # fmt: skip
