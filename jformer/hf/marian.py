"""Marian's Transformer, the architecture of OPUS-MT (Tiedemann and Thottingal 2020), as MarianMTModel has it.

It is the model of Vaswani et al. 2017 with all sines of a position before its cosines, where ours alternate. A feature
of the residual stream is but a name, so the features are renamed in all that reads or writes the stream, which is
exact and changes no output. Two things their config cannot say: the epsilon of their norms, which is torch's 1e-5
unless the modules are told otherwise, and that ours never writes PAD, BOS or an id past the tokenizer's vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jformer.errors import UserError
from jformer.models.config import ModelConfig

State = dict[str, np.ndarray]

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "swish"}
LEAVES = {"kernel": "weight", "bias": "bias", "scale": "weight", "embedding": "weight"}


def _layers(side: str, attentions: Mapping[str, str]) -> dict[str, str]:
    """Name the modules of a stack's layers."""
    letters = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    rows = {"feed_forward/up": "fc1", "feed_forward/down": "fc2", "feed_forward_norm": "final_layer_norm"}
    for ours, theirs in attentions.items():
        rows |= {f"{ours}/{a}": f"{theirs}.{b}" for a, b in letters.items()} | {f"{ours}_norm": f"{theirs}_layer_norm"}
    return {f"{side}/block/{ours}": f"model.{side}.layers.{{}}.{theirs}" for ours, theirs in rows.items()}


# Our module → theirs; {} is the number of a layer, which ours stacks.
NAMES = {
    "source_embedding": "model.shared",
    **_layers("encoder", {"self_attn": "self_attn"}),
    **_layers("decoder", {"self_attn": "self_attn", "cross_attn": "encoder_attn"}),
}
ALIASES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")  # of the table
COMPUTED = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def check(config: ModelConfig) -> None:
    """Raise UserError for the first option that Marian's architecture cannot express."""
    needed = {
        "family": ("encdec",),
        "norm": ("post",),
        "norm_type": ("layernorm",),
        "residual": (True,),
        "attention_scale": ("sqrt",),
        "positions": ("sinusoidal",),
        "activation": tuple(ACTIVATIONS),
        "bias": (True,),
        "embedding_scale": ("input", "none"),
        "embedding_norm": (False,),
        "shared_embedding": (True,),
        "tied_output": (True,),
        "num_kv_heads": (0, config.num_heads),
        "d_k": (0, config.d_model // config.num_heads),
        "d_v": (0, config.d_model // config.num_heads),
    }
    for key, values in needed.items():
        value = getattr(config, key)
        if value not in values:
            wanted = " or ".join(map(repr, dict.fromkeys(values)))
            raise UserError(f"model.{key}={value!r}: Marian's architecture has only {wanted} there")


def options(config: ModelConfig, pad: int, bos: int, eos: int) -> dict[str, Any]:
    """Return the arguments of a MarianConfig. Raise UserError for what that cannot express."""
    check(config)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_layers,
        "decoder_layers": config.decoder_layers,
        **{f"{side}_ffn_dim": config.d_ff for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": config.num_heads for side in ("encoder", "decoder")},
        "activation_function": ACTIVATIONS[config.activation],
        "scale_embedding": config.embedding_scale == "input",
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "pad_token_id": pad,
        "decoder_start_token_id": bos,
        "eos_token_id": eos,
        "forced_eos_token_id": None,
    }


def to_state(config: ModelConfig, params: Mapping[str, Any]) -> State:
    """Return our parameters as a state that a MarianMTModel of `options` loads, its sinusoids apart.

    Raises UserError for a model that Marian's architecture cannot express.
    """
    check(config)
    state: State = {"final_logits_bias": np.zeros((1, config.vocab_size), np.float32)}
    for module, leaf, array in _leaves(_rename(params, _halves(config.d_model))):
        for i, part in enumerate(array if "{}" in NAMES[module] else [array]):
            part = part.T if leaf == "kernel" else part
            state[f"{NAMES[module].format(i)}.{LEAVES[leaf]}"] = np.ascontiguousarray(part)
    return state | dict.fromkeys(ALIASES, state["model.shared.weight"])


def from_state(config: ModelConfig, state: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return our parameters from the state of a MarianMTModel. `config` gives the sizes; `vocab_size` must be set.

    Raises UserError for a model that Marian's architecture cannot express, a bias of the logits, which ours has not,
    and a state whose names are not those of `config`.
    """
    check(config)
    if np.any(state.get("final_logits_bias", 0)):
        raise UserError("final_logits_bias is not zero: ours has no bias of the logits")
    params: dict[str, Any] = {}
    read = {*ALIASES, *COMPUTED, "final_logits_bias"}
    for module, theirs in NAMES.items():
        depth = config.num_layers if module.startswith("encoder/") else config.decoder_layers
        names = [theirs.format(i) for i in range(depth)] if "{}" in theirs else [theirs]
        inner = params
        for name in module.split("/"):
            inner = inner.setdefault(name, {})
        for leaf in _leaf_names(module):
            keys = [f"{name}.{LEAVES[leaf]}" for name in names]
            if missing := [key for key in keys if key not in state]:
                raise UserError(f"{missing[0]} is missing: not the state of a MarianMTModel with {depth} layers")
            parts = [state[key].T if leaf == "kernel" else state[key] for key in keys]
            inner[leaf] = np.stack(parts) if "{}" in theirs else parts[0]
            read |= {*keys}
    if unread := sorted(state.keys() - read):
        raise UserError(f"{unread[0]} has no place in ours: not the state of a MarianMTModel of this size")
    return _rename(params, _alternating(config.d_model))


def _leaf_names(module: str) -> tuple[str, ...]:
    if module == "source_embedding":
        return ("embedding",)
    return ("scale", "bias") if module.endswith("_norm") else ("kernel", "bias")


def _leaves(params: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (module, leaf, array) of a tree."""
    for name, below in params.items():
        if isinstance(below, Mapping):
            yield from _leaves(below, f"{path}/{name}".removeprefix("/"))
        else:
            yield path, name, np.asarray(below)


def _rename(params: Mapping[str, Any], order: np.ndarray) -> dict[str, Any]:
    """Take the features of the residual stream in another order, in all parameters that read or write it."""

    def take(module: str, leaf: str, array: np.ndarray) -> np.ndarray:
        if module.rpartition("/")[2] in ("q", "k", "v", "up"):  # read the stream and write another space
            return array[..., order, :] if leaf == "kernel" else array
        return array[..., order]

    renamed: dict[str, Any] = {}
    for module, leaf, array in _leaves(params):
        inner = renamed
        for name in module.split("/"):
            inner = inner.setdefault(name, {})
        inner[leaf] = take(module, leaf, array)
    return renamed


def _alternating(d_model: int) -> np.ndarray:
    """Return where ours finds its features among theirs: of first half and second half by turns."""
    return np.arange(d_model).reshape(2, -1).T.ravel()


def _halves(d_model: int) -> np.ndarray:
    """Return where theirs finds its features among ours: the even ones, then the odd ones."""
    return np.arange(d_model).reshape(-1, 2).T.ravel()
