"""The options of a model's head: logits over a vocabulary, or over classes."""

import dataclasses

from jformer.errors import UserError, check_choices, check_least

CHOICES = {"pooling": ("first", "last", "final", "mean", "none"), "pooler_activation": ("tanh", "relu")}


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """The head on top of the stacks.

    A model with a decoder reads only `bias`, `vectors` and, with `vectors`, `pooling`. The other options are for
    encoders and vision models.
    """

    num_classes: int = 0  # of a classifier; 0 = predict tokens. A task with labels sets it
    vectors: bool = False  # no head: the pooled vector of a text is the answer. Task embed sets it
    # Input of a classifier, or vector of a text: first (the class token) | last | mean (of all positions) | none:
    # classes of each position
    # final: the final state of a recurrent stack, or of each of its two directions, side by side
    pooling: str = "first"
    pooler: bool = False  # a projection and tanh of the pooled vector (Devlin et al. 2019)
    pooler_activation: str = "tanh"  # tanh | relu (DistilBERT)
    bias: bool = False  # added to the logits over a vocabulary (Marian; Bart); a transform always has it
    transform: bool = False  # projection, activation and norm before the vocabulary's, with a bias (Devlin et al. 2019)
    crf: bool = False  # tag: a sentence's tags are one chain, each scored after the one before (Lafferty et al. 2001)
    num_segments: int = 0  # rows of the table of segments, first or second text; 0 = no table (Devlin et al. 2019)

    def check(self, family: str) -> None:
        """Raise UserError for the first option that no head supports, or that none would read."""
        check_choices("model.head", self, CHOICES)
        check_least("model.head", self, ("num_classes", "num_segments"), 0)
        pooling = self.pooling if self.vectors else HeadConfig.pooling
        read = HeadConfig(bias=self.bias, vectors=self.vectors, pooling=pooling)
        if family not in ("encoder", "vit") and self != read:
            raise UserError(f"model.head, except its bias, is read by encoder and vit, not by family={family!r}")
        if self.vectors and (family == "vit" or self.num_classes or self.crf):
            raise UserError(
                "model.head.vectors=True gives one vector for each text: it needs another family than 'vit', "
                "num_classes=0 and crf=False"
            )
        if self.vectors and self.pooling == "none":
            raise UserError("model.head.pooling='none' gives no single vector: use 'mean', 'first' or 'last'")
        if self.crf and family == "vit":
            raise UserError("model.head.crf=True is for a class of every word, and family='vit' has one for an image")
