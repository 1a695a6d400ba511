"""GPT-2 (Radford et al. 2019), and other models of its architecture."""

import numpy as np

from jformer.models import ModelConfig
from jformer.tools.hf.families import HfFamily
from jformer.tools.hf.name_tables import Entry, Table, below, embedding, norm


def _conv1d(ours: str, theirs: str) -> Table:
    """Map a projection whose kernel is [in out], as ours is."""
    return {f"{ours}/kernel": Entry(f"{theirs}.weight"), f"{ours}/bias": Entry(f"{theirs}.bias")}


def _third(ours: str, theirs: str, part: int) -> Table:
    """Map one of queries, keys and values, which are concatenated."""

    def read(array: np.ndarray) -> np.ndarray:
        return np.split(array, 3, axis=-1)[part]

    return {path: entry._replace(read=read, part=part, parts=3) for path, entry in _conv1d(ours, theirs).items()}


def _table(model: ModelConfig) -> Table:
    return {
        **embedding("embedding", "transformer.wte"),
        **embedding("input/positions", "transformer.wpe"),
        **norm("decoder/final_norm", "transformer.ln_f"),
        **below(
            "decoder/block",
            "transformer.h.{}",
            *(_third(f"self_attn/{name}", "attn.c_attn", part) for part, name in enumerate("qkv")),
            _conv1d("self_attn/o", "attn.c_proj"),
            norm("self_attn_norm", "ln_1"),
            _conv1d("feed_forward/up", "mlp.c_fc"),
            _conv1d("feed_forward/down", "mlp.c_proj"),
            norm("feed_forward_norm", "ln_2"),
        ),
    }


GPT2 = HfFamily(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": "lm", "GPT2Model": "lm"},
    options={"vocab_size": ("vocab_size", 50_257), "n_embd": ("d_model", 768), "n_layer": ("num_layers", 12),
     "n_head": ("num_heads", 12), "n_positions": ("max_length", 1024), "layer_norm_epsilon": ("norm_epsilon", 1e-5),
     "resid_pdrop": ("dropout", 0.1), "attn_pdrop": ("attention_dropout", 0.1),
     "activation_function": ("activation", "gelu_new")},
    ours={"family": "decoder", "norm": "pre", "positions": "learned", "embedding_scale": "none", "init": "gpt2"},
    theirs={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
     "add_cross_attention": False, "tie_word_embeddings": True},
    table=_table,
    read=lambda fields: {"d_ff": fields.get("n_inner") or 4 * fields["n_embd"]},
    write=lambda model: {"n_inner": model.d_ff, "embd_pdrop": model.dropout},
    copies={"lm_head.weight": "transformer.wte.weight"},
    unread=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    prefix="transformer.",
)  # fmt: skip
