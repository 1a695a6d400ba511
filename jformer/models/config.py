"""The one ModelConfig whose rows are the families. Plain dataclasses: importing this room's options needs no jax."""

import dataclasses

from jformer.errors import UserError

CHOICES = {
    "norm": ("post", "pre"),
    "positions": ("sinusoidal", "learned"),
    "activation": ("relu", "gelu"),
    "dtype": ("float32", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and choices of a Transformer; the defaults are the base model of Vaswani et al. 2017, Table 3."""

    vocab_size: int = 0  # rows of the source embedding; 0 = the tokenizer's; more pads it, for even shards
    target_vocab_size: int = 0  # the same for the target side; with a shared embedding both are one
    num_layers: int = 6  # N, of the encoder
    num_decoder_layers: int = 0  # N of the decoder; 0 = num_layers
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int = 0  # query and key size of one head; 0 = d_model / num_heads
    d_v: int = 0  # value size of one head; 0 = d_model / num_heads
    norm: str = "post"  # post: norm(x + f(x)), the paper; pre: x + f(norm(x)) and one norm at the end of a stack
    activation: str = "relu"  # relu, the paper; gelu: the exact one (Hendrycks and Gimpel 2016)
    dropout: float = 0.1  # on every sublayer's output and on the embedded input (section 5.4)
    positions: str = "sinusoidal"  # sinusoidal: section 3.5; learned: a table of max_length rows
    max_length: int = 512  # learned positions only: the longest sequence the table can place
    embedding_scale: bool = True  # embeddings times sqrt(d_model) (section 3.4)
    shared_embedding: bool = True  # source and target read one table; needs one shared vocabulary
    tied_output: bool = True  # the projection to logits is the target table, transposed
    dtype: str = "float32"  # of activations; parameters and sums of the loss are always float32
    unroll: int = 0  # blocks unrolled per scan step, execution only; 0 = all of them on CPU, 1 elsewhere

    @property
    def decoder_layers(self) -> int:
        """N of the decoder."""
        return self.num_decoder_layers or self.num_layers

    @property
    def key_size(self) -> int:
        """k: query and key size of one head."""
        return self.d_k or self.d_model // self.num_heads

    @property
    def value_size(self) -> int:
        """u: value size of one head."""
        return self.d_v or self.d_model // self.num_heads

    def with_vocabulary(self, source: int, target: int) -> "ModelConfig":
        """Return the config with the sizes of the vocabularies filled in, or UserError where it sets too few rows."""
        for key, needed in (("vocab_size", source), ("target_vocab_size", target)):
            if 0 < getattr(self, key) < needed:
                raise UserError(
                    f"model.{key}={getattr(self, key)} is less than the tokenizer's {needed}: use 0 for its size"
                )
        rows = self.vocab_size or source
        target_rows = rows if self.shared_embedding else self.target_vocab_size or target
        return dataclasses.replace(self, vocab_size=rows, target_vocab_size=target_rows)

    def check(self) -> None:
        """Raise UserError for the first field that no model can be built from."""
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                raise UserError(f"model.{key}={getattr(self, key)!r}; choose one of: {', '.join(choices)}")
        for key in ("num_layers", "d_model", "d_ff", "num_heads", "max_length"):
            if getattr(self, key) < 1:
                raise UserError(f"model.{key}={getattr(self, key)} must be at least 1")
        for key in ("vocab_size", "target_vocab_size", "num_decoder_layers", "d_k", "d_v", "unroll"):
            if getattr(self, key) < 0:
                raise UserError(f"model.{key}={getattr(self, key)} must be 0 (the default rule) or more")
        if not (self.d_k and self.d_v) and self.d_model % self.num_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} must divide model.d_model={self.d_model}, or set d_k and d_v"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"model.d_model={self.d_model} must be even: sinusoidal positions pair their features")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout} must be at least 0 and below 1")
        if self.shared_embedding and self.target_vocab_size not in (0, self.vocab_size):
            raise UserError(
                f"model.target_vocab_size={self.target_vocab_size} differs from model.vocab_size={self.vocab_size}: "
                "set model.shared_embedding=False or leave it 0"
            )
