"""Our encoder-decoder as a specification of CTranslate2's Transformer, which runs it on CPU and GPU without JAX.

CTranslate2 has linear weights [out in]: queries, keys and values of self-attention in one, keys and values of
cross-attention in another. Positions are tables. Tokens that our search never writes, such as PAD and BOS, get a logit
bias that no model outweighs; rows past the tokenizer's vocabulary are left out.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from jformer.checkpoints.untie_layers import own_layers
from jformer.data.tokenizers.symbols import BOS, PAD, Symbols
from jformer.errors import UserError, refuse_unknown
from jformer.models.layers.positions import sinusoids
from jformer.models.model_config import ModelConfig

if TYPE_CHECKING:
    from ctranslate2.specs.transformer_spec import TransformerSpec

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
GATES = {"glu": "Sigmoid", "reglu": "RELU", "geglu": "GELU", "geglu_tanh": "GELUTanh", "swiglu": "SWISH"}
KNOWN = (  # model options that `check` compares, that the specification has, or that only training reads
    *("family", "norm", "residual", "parametrization", "positions", "embedding_scale", "d_v"),
    *("vocab_size", "target_vocab_size", "num_layers", "num_decoder_layers", "shared_layers", "d_model", "d_ff"),
    *("num_heads", "num_kv_heads", "d_k", "norm_type", "norm_epsilon", "attention_scale", "max_length", "activation"),
    *("bias", "embedding_norm", "shared_embedding", "tied_output", "relative", "head"),
    *("dropout", "attention_dropout", "activation_dropout", "embedding_dropout", "output_dropout", "init"),
    *("dtype", "precision", "execution"),
)
NEVER = -1e4  # added to the logits of tokens that are never written

Layer = Mapping[str, PyTree]  # the parameters of one block


def check(config: ModelConfig) -> None:
    """Raise UserError for the first option that CTranslate2's Transformer cannot express."""
    if config.recurrent.cell:
        raise UserError(f"model.recurrent.cell={config.recurrent.cell!r}: CTranslate2 has Transformers only")
    needed = {
        "family": ("encdec",),
        "norm": ("post", "pre"),
        "residual": (True,),
        "parametrization": ("standard",),
        "positions": ("sinusoidal", "learned", "relative", "rotary", "none"),
        "embedding_scale": ("input", "output", "none"),
        "d_v": (config.d_v,) if config.value_size == config.key_size else (config.key_size,),
        "activation": (*ACTIVATIONS, *GATES),
        "norm_type": ("layernorm", "rmsnorm"),
    }
    for key, values in needed.items():
        value = getattr(config, key)
        if value not in values:
            wanted = " or ".join(map(repr, dict.fromkeys(values)))
            raise UserError(f"model.{key}={value!r}: CTranslate2's Transformer has only {wanted} there")
    refuse_unknown("model", config, KNOWN, "CTranslate2's Transformer")


def build_spec(
    config: ModelConfig,
    params: Mapping[str, PyTree],
    vocabularies: tuple[Sequence[str], Sequence[str]],
    longest: int,
    symbols: Symbols = Symbols(),  # noqa: B008  # an immutable tuple
    never: Sequence[int] = (PAD, BOS),
) -> "TransformerSpec":
    """Return the TransformerSpec of a model, ready to be saved.

    Args:
        config: one that `check` accepts.
        params: the parameters of that model, the layers of a stack on the first axis.
        vocabularies: the tokens of the source and target ids. Rows of a table past them are left out.
        longest: the most positions of either side, if no table of the model limits them.
        symbols: those of the target. Unless they are the default ones, sources must bring their own special tokens.
        never: the ids that are not written.

    Raises:
        UserError: for an option that CTranslate2's Transformer lacks, or a symbol that it needs and the target lacks.
    """
    from ctranslate2.specs import transformer_spec

    check(config)
    config, params = own_layers(config, params)
    source, target = vocabularies
    encoder = transformer_spec.TransformerEncoderSpec(config.num_layers, **_options(config))
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, **_options(config))
    _fill_side(config, params, encoder, "source", encoder.embeddings[0], len(source), longest)
    _fill_side(config, params, decoder, "target", decoder.embeddings, len(target), longest)
    _fill_logits(config, params, decoder, len(target), never)
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    if min(symbols.unk, symbols.bos, symbols.eos) < 0:
        raise UserError("CTranslate2 needs an unknown token, a beginning and an end: use stablehlo")
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = (
        target[i] for i in (symbols.unk, symbols.bos, symbols.eos)
    )
    spec.config.decoder_start_token, spec.config.add_source_eos = target[symbols.bos], symbols == Symbols()
    spec.register_source_vocabulary([*source])
    spec.register_target_vocabulary([*target])
    spec.validate()
    spec.optimize()
    return spec


def _options(config: ModelConfig) -> dict[str, Any]:
    from ctranslate2.specs import common_spec

    return {
        "num_heads": config.num_heads,
        "pre_norm": config.norm == "pre",
        "activation": getattr(common_spec.Activation, (ACTIVATIONS | GATES)[config.activation]),
        "ffn_glu": config.activation in GATES,
        "rms_norm": config.norm_type == "rmsnorm",
        "layernorm_embedding": config.embedding_norm,
        "relative_attention_bias": config.positions == "relative",
        "rotary_dim": config.key_size if config.positions == "rotary" else None,
        "rotary_interleave": False,
        "num_heads_kv": config.kv_heads if config.kv_heads != config.num_heads else None,
        "head_dim": config.key_size if config.d_k else None,
    }


def _fill_side(
    config: ModelConfig, params: Mapping[str, PyTree], spec: Any, side: str, embeddings: Any, rows: int, longest: int
) -> None:
    """Fill the encoder (side "source") or the decoder ("target"), except for the logits."""
    table = "source" if config.shared_embedding else side
    embeddings.weight = _array(params[f"{table}_embedding"]["embedding"])[:rows]
    spec.scale_embeddings = config.embedding_scale == "input"
    inputs = params.get(f"{side}_input", {})
    if config.embedding_norm:
        _fill_norm(spec.layernorm_embedding, inputs["norm"])
    if config.positions == "learned":
        spec.position_encodings.encodings = _array(inputs["positions"]["embedding"])
    elif config.positions == "sinusoidal":
        spec.position_encodings.encodings = sinusoids(longest, config.d_model)
    elif config.positions == "none":
        spec.position_encodings.encodings = np.zeros((longest, config.d_model), np.float32)
    stack = params["encoder" if side == "source" else "decoder"]
    if config.norm == "pre":
        _fill_norm(spec.layer_norm, stack["final_norm"])
    for i, layer in enumerate(spec.layer):
        _fill_block(config, layer, jax.tree.map(operator.itemgetter(i), stack["block"]))
        if config.positions == "relative":
            layer.self_attention.relative_attention_bias = _array(stack["position_bias"]["embedding"])
            layer.self_attention.relative_attention_max_distance = np.int32(config.relative.max_distance)


def _fill_block(config: ModelConfig, spec: Any, block: Layer) -> None:
    """Fill one layer of a stack."""
    for theirs, ours in (("self_attention", "self_attn"), ("attention", "cross_attn")):
        if ours not in block:
            continue
        attention, sublayer = getattr(spec, theirs), block[ours]
        groups = ("qkv", "o") if ours == "self_attn" else ("q", "kv", "o")
        for linear, names in zip(attention.linear, groups, strict=True):
            _fill_linear(linear, *(sublayer[name] for name in names))
        _fill_norm(attention.layer_norm, block[f"{ours}_norm"])
        if config.attention_scale != "sqrt":
            attention.queries_scale = np.float32(1)
    feed_forward = block["feed_forward"]
    _fill_linear(spec.ffn.linear_0, feed_forward.get("gate", feed_forward["up"]))
    if "gate" in feed_forward:
        _fill_linear(spec.ffn.linear_0_noact, feed_forward["up"])
    _fill_linear(spec.ffn.linear_1, feed_forward["down"])
    _fill_norm(spec.ffn.layer_norm, block["feed_forward_norm"])


def _fill_logits(
    config: ModelConfig, params: Mapping[str, PyTree], decoder: Any, rows: int, never: Sequence[int]
) -> None:
    """Fill the projection to the vocabulary."""
    if config.tied_output:
        decoder.projection.weight = decoder.embeddings.weight
    else:
        decoder.projection.weight = _array(params["head"]["output"]["kernel"]).T[:rows].copy()
    if config.embedding_scale == "output":
        decoder.scale_outputs = np.float32(config.d_model**-0.5)
    bias = _array(params["head"]["bias"])[:rows].copy() if config.head.bias else np.zeros(rows, np.float32)
    bias[[*never]] = NEVER
    decoder.projection.bias = bias


def _fill_linear(spec: Any, *projections: Layer) -> None:
    """Put one or more projections of the same input side by side."""
    spec.weight = np.concatenate([_array(each["kernel"]).T for each in projections])
    if "bias" in projections[0]:
        spec.bias = np.concatenate([_array(each["bias"]) for each in projections])


def _fill_norm(spec: Any, norm: Layer) -> None:
    spec.gamma = _array(norm["scale"])
    if hasattr(spec, "beta"):
        spec.beta = _array(norm.get("bias", np.zeros_like(spec.gamma)))


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float32)
