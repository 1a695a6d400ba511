"""The options of recurrent models, and the Transformer options that they read."""

import dataclasses
from typing import Any

from jformer.errors import UserError, check_choices, check_least, refuse_unknown

CHOICES = {
    "cell": ("", "rnn", "lstm", "gru"),
    "attention": ("none", "additive", "dot", "general", "concat"),
    "bridge": ("zeros", "copy", "dense"),
}
READ = (  # model options that recurrent models read, or that are checked elsewhere or only matter with others
    *("family", "vocab_size", "target_vocab_size", "num_layers", "num_decoder_layers", "d_model", "dropout"),
    *("shared_embedding", "tied_output", "dtype", "precision", "head", "recurrent", "execution"),
    *("max_length", "relative", "vision", "parametrization", "mup"),
)


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Recurrent layers instead of Transformer blocks, for the families encdec, encoder and decoder; see recurrent."""

    cell: str = ""  # rnn | lstm | gru; "" = Transformer blocks, and nothing else here is read
    bidirectional: bool = False  # the encoder reads from both ends (Schuster and Paliwal 1997)
    attention: str = "none"  # encdec: none | additive (Bahdanau) | dot | general | concat (Luong): see alignment
    input_feeding: bool = False  # a step reads the output of the previous one (Luong et al. 2015, section 3.3)
    reverse_source: bool = False  # the encoder reads the source from its end (Sutskever et al. 2014, section 3.3)
    bridge: str = "zeros"  # the decoder's initial state: zeros | copy: the encoder's last | dense: tanh of a projection
    embedding_size: int = 0  # features of an embedded token; 0 = d_model
    readout_size: int = 0  # attention: features of the readout, projected to the vocabulary; 0 = d_model
    update_bias: float = 0.0  # gru: initial bias of the update gate; 3 keeps gradients over 100 tokens

    def check(self, model: Any) -> None:
        """Raise UserError for the first option that no recurrent model can be built from, or that none would read."""
        check_choices("model.recurrent", self, CHOICES)
        check_least("model.recurrent", self, ("embedding_size", "readout_size"), 0)
        if not self.cell:
            refuse_unknown("model.recurrent", self, (), "a Transformer (model.recurrent.cell='')")
            return
        if self.update_bias and self.cell != "gru":
            raise UserError(
                f"model.recurrent.update_bias={self.update_bias} is for cell='gru', not {self.cell!r}: use 0"
            )
        if model.family == "vit":
            raise UserError(f"model.recurrent.cell={self.cell!r} is for the families encdec, encoder and decoder")
        if model.vision.source:
            raise UserError(f"model.recurrent.cell={self.cell!r} reads tokens, and the source is an image: use ''")
        refuse_unknown("model", model, READ, "a recurrent model")
        for key in ("transform", "num_segments"):
            if value := getattr(model.head, key):
                raise UserError(f"model.head.{key}={value} is for BERT: a recurrent model has none")
        self._check_family(model)
        if model.tied_output and not model.head.num_classes and model.output_size != model.embedding_size:
            raise UserError(
                f"model.tied_output=True needs vectors of one size: the embedding has {model.embedding_size}, the "
                f"output {model.output_size}; use False, or set model.recurrent.embedding_size"
            )

    def _check_family(self, model: Any) -> None:
        own: dict[str, Any] = {"embedding_size": self.embedding_size, "update_bias": self.update_bias}
        shared = RecurrentConfig(self.cell, self.bidirectional, **own)
        if model.family != "encdec" and self != shared:
            raise UserError(
                "model.recurrent: attention, input_feeding, reverse_source, bridge and readout_size are for "
                f"family='encdec', not for {model.family!r}"
            )
        if model.family == "decoder" and self.bidirectional:
            raise UserError("model.recurrent.bidirectional=True: a language model reads from one end; use False")
        if self.input_feeding and self.attention in ("none", "additive"):
            raise UserError(
                f"model.recurrent.input_feeding=True needs attention after the step, not {self.attention!r}"
            )
        if self.attention == "none" and self.readout_size:
            raise UserError("model.recurrent.readout_size is for decoders with attention: use 0")
        if self.attention == "dot" and self.bidirectional:
            raise UserError(
                "model.recurrent.attention='dot' compares vectors of one size: use 'general', or bidirectional=False"
            )
        if self.bridge == "copy" and (self.bidirectional or model.decoder_layers != model.num_layers):
            raise UserError(
                "model.recurrent.bridge='copy' needs an encoder of one direction with as many layers as the decoder: "
                "use 'dense'"
            )
