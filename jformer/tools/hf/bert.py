"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and DistilBERT (Sanh et al. 2019)."""

from typing import Any

from jformer.models import ModelConfig
from jformer.models.head_config import HeadConfig
from jformer.tools.hf.families import HfFamily
from jformer.tools.hf.name_tables import Entry, Table, below, embedding, linear, norm

SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads", "intermediate_size": "d_ff", "layer_norm_eps": "norm_epsilon",
    "hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attention_dropout",
    "max_position_embeddings": "max_length", "type_vocab_size": "head.num_segments",
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "family": "encoder", "norm": "post", "positions": "learned", "embedding_scale": "none", "embedding_norm": True,
    "init": "bert", "head": HeadConfig(pooler=True, transform=True),
}  # fmt: skip
FIRST = 2  # unused first rows of RoBERTa's positions
REFUSED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
           "tie_word_embeddings": True}  # fmt: skip


def _stack(theirs: str) -> Table:
    attention = [linear(f"self_attn/{name[0]}", f"attention.self.{name}") for name in ("query", "key", "value")]
    return below(
        "encoder/block",
        f"{theirs}.encoder.layer.{{}}",
        *attention,
        linear("self_attn/o", "attention.output.dense"),
        norm("self_attn_norm", "attention.output.LayerNorm"),
        linear("feed_forward/up", "intermediate.dense"),
        linear("feed_forward/down", "output.dense"),
        norm("feed_forward_norm", "output.LayerNorm"),
    )


def _inputs(theirs: str, segments: int, first: int = 0) -> Table:
    table = embedding("embedding", f"{theirs}.embeddings.word_embeddings")
    table |= embedding("input/positions", f"{theirs}.embeddings.position_embeddings", first)
    table |= embedding("input/segments", f"{theirs}.embeddings.token_type_embeddings") if segments else {}
    return table | norm("input/norm", f"{theirs}.embeddings.LayerNorm")


def _classifier(model: ModelConfig, pooler: str, output: str) -> Table:
    """Map the head of a classifier; a tagger's has no pooler, and the same name in all three families."""
    if model.head.pooling == "none":
        return linear("classifier", "classifier")
    return linear("pooler/dense", pooler) | linear("classifier", output)


def _bert(model: ModelConfig) -> Table:
    table = _inputs("bert", model.head.num_segments) | _stack("bert")
    if model.head.num_classes:
        return table | _classifier(model, "bert.pooler.dense", "classifier")
    predictions = "cls.predictions"
    if not model.head.transform:
        return table
    table |= linear("head/transform", f"{predictions}.transform.dense")
    return table | norm("head/norm", f"{predictions}.transform.LayerNorm") | {"head/bias": Entry(f"{predictions}.bias")}


def _roberta(model: ModelConfig) -> Table:
    table = _inputs("roberta", model.head.num_segments, FIRST) | _stack("roberta")
    if model.head.num_classes:
        return table | _classifier(model, "classifier.dense", "classifier.out_proj")
    if not model.head.transform:
        return table
    table |= linear("head/transform", "lm_head.dense") | norm("head/norm", "lm_head.layer_norm")
    return table | {"head/bias": Entry("lm_head.bias")}


def _distilbert(model: ModelConfig) -> Table:
    table = _inputs("distilbert", 0)
    table |= below(
        "encoder/block",
        "distilbert.transformer.layer.{}",
        *(linear(f"self_attn/{name}", f"attention.{name}_lin") for name in "qkv"),
        linear("self_attn/o", "attention.out_lin"),
        norm("self_attn_norm", "sa_layer_norm"),
        linear("feed_forward/up", "ffn.lin1"),
        linear("feed_forward/down", "ffn.lin2"),
        norm("feed_forward_norm", "output_layer_norm"),
    )
    if model.head.num_classes:
        return table | _classifier(model, "pre_classifier", "classifier")
    if not model.head.transform:
        return table
    table |= linear("head/transform", "vocab_transform") | norm("head/norm", "vocab_layer_norm")
    return table | {"head/bias": Entry("vocab_projector.bias")}


BERT = HfFamily(
    model_type="bert",
    classes={"BertForMaskedLM": "mlm", "BertForPreTraining": "mlm", "BertForSequenceClassification": "classify",
     "BertForTokenClassification": "tag", "BertForQuestionAnswering": "qa", "BertForNextSentencePrediction": "mlm",
     "BertModel": "mlm"},
    sizes=SIZES, defaults=DEFAULTS, ours=ENCODER, theirs=REFUSED, table=_bert, activation="hidden_act",
    copies={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias"},
    unread=(r"bert\.embeddings\.position_ids", r"bert\.pooler\..*"), prefix="bert.",
)  # fmt: skip
ROBERTA = HfFamily(
    model_type="roberta",
    classes={"RobertaForMaskedLM": "mlm", "RobertaForSequenceClassification": "classify",
     "RobertaForTokenClassification": "tag", "RobertaForQuestionAnswering": "qa", "RobertaModel": "mlm"},
    sizes=SIZES, defaults={**DEFAULTS, "vocab_size": 50_265, "pad_token_id": 1}, ours=ENCODER,
    theirs={**REFUSED, "pad_token_id": 1, "hidden_act": "gelu"},  # the head has gelu regardless of the field
    table=_roberta, activation="hidden_act",
    read=lambda fields: {"max_length": fields["max_position_embeddings"] - FIRST},
    write=lambda model: {"max_position_embeddings": model.max_length + FIRST},
    copies={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias"},
    unread=(r"roberta\.embeddings\.position_ids", r"roberta\.pooler\..*"), prefix="roberta.",
)  # fmt: skip
DISTILBERT = HfFamily(
    model_type="distilbert",
    classes={"DistilBertForMaskedLM": "mlm", "DistilBertForSequenceClassification": "classify",
     "DistilBertForTokenClassification": "tag", "DistilBertForQuestionAnswering": "qa",
     "DistilBertModel": "mlm"},
    sizes={"vocab_size": "vocab_size", "dim": "d_model", "n_layers": "num_layers", "n_heads": "num_heads",
     "hidden_dim": "d_ff", "max_position_embeddings": "max_length", "dropout": "dropout",
     "attention_dropout": "attention_dropout"},
    defaults={"vocab_size": 30_522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
     "max_position_embeddings": 512, "dropout": 0.1, "attention_dropout": 0.1},
    ours={**ENCODER, "norm_epsilon": 1e-12,
     "head": HeadConfig(pooler=True, pooler_activation="relu", transform=True)},
    theirs={"tie_word_embeddings": True},
    table=_distilbert, activation="activation",
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    unread=(r"distilbert\.embeddings\.position_ids",), prefix="distilbert.",
)  # fmt: skip
