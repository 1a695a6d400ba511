"""The encoder-only model: BERT and its relatives (Devlin et al. 2019), predicting tokens or a class."""

import flax.linen as nn
from jaxtyping import Array, Float

from jformer.models.batch import Batch, same_segment
from jformer.models.cache import Memory
from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, make_noise
from jformer.models.embeddings import InputEmbedding, token_table
from jformer.models.heads import Pooler, TokenHead, class_head
from jformer.models.transformer import Layout, Stack


class Encoder(nn.Module):
    """One stack that sees the whole source side. `config.vocab_size` must be set.

    With `head.num_classes` it classifies: `hidden` is one pooled vector for each row, `logits` its classes. Without,
    `hidden` has every position and `logits` the vocabulary.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Make the table, the stack and one of the two heads."""
        c = self.config
        self.embedding = token_table(c, c.vocab_size)
        self.input = InputEmbedding(c, c.max_length)
        self.encoder = Stack(c, c.num_layers, cross=False, causal=False)
        if c.head.num_classes:
            self.pooler = Pooler(c)
            self.classifier = class_head(c)
        else:
            self.head = TokenHead(c, c.vocab_size)

    def __call__(self, batch: Batch, train: bool = False) -> Float[Array, "b t v"]:
        """Return the logits; training needs `rngs={'dropout': key}`."""
        return self.logits(self.hidden(batch, train))

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return what the head reads: every position, or one pooled vector (t = 1)."""
        noise = make_noise(self.make_rng("dropout"), batch["row"]) if train else None
        hidden = self.states(batch, noise)
        return self.pooler(hidden, batch["source_segments"] > 0, noise) if self.config.head.num_classes else hidden

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Project to the vocabulary, or to the classes."""
        return self.classifier(hidden) if self.config.head.num_classes else self.head(hidden, self.embedding)

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Return every position's output, for who wants vectors of a text."""
        return {"hidden": self.states(batch, None), "segments": batch["source_segments"]}

    def states(self, batch: Batch, noise: Noise | None) -> Float[Array, "b s d"]:
        """Run the stack."""
        tokens, positions, segments = (batch[name] for name in ("source", "source_positions", "source_segments"))
        x = self.input(self.embedding(tokens), positions, tokens.shape[1], noise, batch.get("source_types", 0 * tokens))
        return self.encoder(x, None, Layout(positions, same_segment(segments, segments)), noise)
