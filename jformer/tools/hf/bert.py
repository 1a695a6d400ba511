"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and DistilBERT (Sanh et al. 2019)."""

from collections.abc import Callable, Mapping
from typing import Any

from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.head_config import HeadConfig
from jformer.tools.hf.families import HfFamily
from jformer.tools.hf.name_tables import Entry, Table, below, embedding, linear, modules

OPTIONS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 30_522), "hidden_size": ("d_model", 768), "num_hidden_layers": ("num_layers", 12),
    "num_attention_heads": ("num_heads", 12), "intermediate_size": ("d_ff", 3072),
    "layer_norm_eps": ("norm_epsilon", 1e-12), "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1), "max_position_embeddings": ("max_length", 512),
    "type_vocab_size": ("head.num_segments", 2), "hidden_act": ("activation", "gelu"),
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "family": "encoder", "norm": "post", "positions": "learned", "embedding_scale": "none", "embedding_norm": True,
    "init": "bert", "head": HeadConfig(pooler=True, transform=True),
}  # fmt: skip
FIRST = 2  # unused first rows of RoBERTa's positions
REFUSED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
           "tie_word_embeddings": True}  # fmt: skip
LAYER = modules({
    "self_attn/q": "attention.self.query", "self_attn/k": "attention.self.key", "self_attn/v": "attention.self.value",
    "self_attn/o": "attention.output.dense", "self_attn_norm": "attention.output.LayerNorm",
    "feed_forward/up": "intermediate.dense", "feed_forward/down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
})  # fmt: skip


def _table(root: str, stack: Table, head: Mapping[str, str], first: int = 0) -> Callable[[ModelConfig], Table]:
    """Return the function from options to the table of a model whose names begin with `root`.

    `head` has the modules of both heads, `first` unused rows precede the positions. A tagger has no pooler, and the
    same name for its classifier in all families.
    """

    def table(model: ModelConfig) -> Table:
        inputs = f"{root}.embeddings"
        found = stack | modules({"input/norm": f"{inputs}.LayerNorm"})
        found |= embedding("embedding", f"{inputs}.word_embeddings")
        found |= embedding("input/positions", f"{inputs}.position_embeddings", first)
        if model.head.num_segments:
            found |= embedding("input/segments", f"{inputs}.token_type_embeddings")
        if model.head.num_classes and model.head.pooling == "none":
            return found | linear("classifier", "classifier")
        if model.head.num_classes:
            return found | modules({name: head[name] for name in ("pooler/dense", "classifier")})
        if model.head.transform:
            found |= modules({name: head[name] for name in ("head/transform", "head/norm")})
            found["head/bias"] = Entry(head["head/bias"])
        return found

    return table


def _refuse_no_segments(model: ModelConfig) -> dict[str, Any]:
    """Return no fields; raise UserError for a model without segments, as theirs look up token type 0."""
    if not model.head.num_segments:
        raise UserError("model.head.num_segments=0: it looks up token type 0, so train with 1 or more")
    return {}


BERT = HfFamily(
    model_type="bert",
    classes={"BertForMaskedLM": "mlm", "BertForPreTraining": "mlm", "BertForSequenceClassification": "classify",
     "BertForTokenClassification": "tag", "BertForQuestionAnswering": "qa", "BertForNextSentencePrediction": "mlm",
     "BertModel": "mlm"},
    options=OPTIONS, ours=ENCODER, theirs=REFUSED,
    table=_table("bert", below("encoder/block", "bert.encoder.layer.{}", LAYER), {
        "pooler/dense": "bert.pooler.dense", "classifier": "classifier", "head/bias": "cls.predictions.bias",
        "head/transform": "cls.predictions.transform.dense", "head/norm": "cls.predictions.transform.LayerNorm",
    }),
    write=_refuse_no_segments,
    copies={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias"},
    unread=(r"bert\.embeddings\.position_ids", r"bert\.pooler\..*"), prefix="bert.",
)  # fmt: skip
ROBERTA = HfFamily(
    model_type="roberta",
    classes={"RobertaForMaskedLM": "mlm", "RobertaForSequenceClassification": "classify",
     "RobertaForTokenClassification": "tag", "RobertaForQuestionAnswering": "qa", "RobertaModel": "mlm"},
    options={**OPTIONS, "vocab_size": ("vocab_size", 50_265)}, ours=ENCODER,
    theirs={**REFUSED, "pad_token_id": 1, "hidden_act": "gelu"},  # the head has gelu regardless of the field
    table=_table("roberta", below("encoder/block", "roberta.encoder.layer.{}", LAYER), {
        "pooler/dense": "classifier.dense", "classifier": "classifier.out_proj", "head/bias": "lm_head.bias",
        "head/transform": "lm_head.dense", "head/norm": "lm_head.layer_norm",
    }, FIRST),
    read=lambda fields: {"max_length": fields["max_position_embeddings"] - FIRST},
    write=lambda model: _refuse_no_segments(model) | {"max_position_embeddings": model.max_length + FIRST},
    copies={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias"},
    unread=(r"roberta\.embeddings\.position_ids", r"roberta\.pooler\..*"), prefix="roberta.",
)  # fmt: skip
DISTILBERT = HfFamily(
    model_type="distilbert",
    classes={"DistilBertForMaskedLM": "mlm", "DistilBertForSequenceClassification": "classify",
     "DistilBertForTokenClassification": "tag", "DistilBertForQuestionAnswering": "qa",
     "DistilBertModel": "mlm"},
    options={"vocab_size": ("vocab_size", 30_522), "dim": ("d_model", 768), "n_layers": ("num_layers", 6),
     "n_heads": ("num_heads", 12), "hidden_dim": ("d_ff", 3072), "max_position_embeddings": ("max_length", 512),
     "dropout": ("dropout", 0.1), "attention_dropout": ("attention_dropout", 0.1),
     "activation": ("activation", "gelu")},
    ours={**ENCODER, "norm_epsilon": 1e-12,
     "head": HeadConfig(pooler=True, pooler_activation="relu", transform=True)},
    theirs={"tie_word_embeddings": True},
    table=_table("distilbert", below("encoder/block", "distilbert.transformer.layer.{}", modules({
        "self_attn/q": "attention.q_lin", "self_attn/k": "attention.k_lin", "self_attn/v": "attention.v_lin",
        "self_attn/o": "attention.out_lin", "self_attn_norm": "sa_layer_norm", "feed_forward/up": "ffn.lin1",
        "feed_forward/down": "ffn.lin2", "feed_forward_norm": "output_layer_norm",
    })), {
        "pooler/dense": "pre_classifier", "classifier": "classifier", "head/bias": "vocab_projector.bias",
        "head/transform": "vocab_transform", "head/norm": "vocab_layer_norm",
    }),
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    unread=(r"distilbert\.embeddings\.position_ids",), prefix="distilbert.",
)  # fmt: skip
