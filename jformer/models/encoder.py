"""The encoder-only model: BERT and its relatives (Devlin et al. 2019), predicting tokens or a class.

Axes: b rows, s source positions, t of what the head reads: s, or 1; d d_model, v vocabulary or classes.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jformer.models.batch import Batch
from jformer.models.cache import Memory
from jformer.models.layers.dropout import DropoutKey
from jformer.models.layers.embeddings import InputEmbedding, token_table
from jformer.models.layers.heads import Pooler, TokenHead, class_head
from jformer.models.layers.precision import Network
from jformer.models.layers.transformer import Stack
from jformer.models.layers.visibility import TokenPlaces


class SourceModel(Network):
    """The parts of an encoder besides its stack. `config.vocab_size` must be set.

    With `head.num_classes` it classifies: `hidden` is one pooled vector for each row (or every position, where nothing
    is pooled) and `logits` its classes. Without, `hidden` has every position and `logits` the vocabulary.
    """

    def setup(self) -> None:
        """Make the table and one of the two heads."""
        c = self.config
        self.embedding = token_table(c, c.vocab_size)
        if c.head.num_classes:
            self.pooler = Pooler(c)
            self.classifier = class_head(c)
            if c.head.crf:  # scores of a class (column) after another (row); the last of both is outside a sentence
                self.transitions = self.param("transitions", nn.initializers.zeros, (c.head.num_classes + 1,) * 2)
        else:
            self.head = TokenHead(c, c.vocab_size)

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return the input of the head: every position, or one pooled vector (t = 1)."""
        dropout_key = self.dropout_key(batch, train)
        hidden, pools = self.states(batch, dropout_key), self.config.head.num_classes
        return self.pooler(hidden, batch["source_segments"] > 0, dropout_key) if pools else hidden

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t *v"]:
        """Project to the vocabulary or classes, or with a CRF to pairs [b t v+1 v+1]: a class after the one before."""
        logits = self.classifier(hidden) if self.config.head.num_classes else self.head(hidden, self.embedding)
        outside = [(0, 0), (0, 0), (0, 1)]
        return jnp.pad(logits, outside)[:, :, None] + self.transitions if self.config.head.crf else logits

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Return the output of every position: vectors of a text."""
        return {"hidden": self.states(batch, self.dropout_key(batch, train)), "segments": batch["source_segments"]}

    def states(self, batch: Batch, dropout_key: DropoutKey | None) -> Float[Array, "b s d"]:
        """Run the stack."""
        raise NotImplementedError


class Encoder(SourceModel):
    """One stack of Transformer blocks over the whole source side."""

    def setup(self) -> None:
        """Add the stack."""
        super().setup()
        c = self.config
        self.input = InputEmbedding(c, c.max_length)
        self.encoder = Stack(c, c.num_layers, cross=False, causal=False)

    def states(self, batch: Batch, dropout_key: DropoutKey | None) -> Float[Array, "b s d"]:
        """Run the stack."""
        tokens, positions, segments = batch["source"], batch["source_positions"], batch["source_segments"]
        types = batch.get("source_types", 0 * tokens)
        x = self.input(self.embedding(tokens), positions, tokens.shape[1], dropout_key, types)
        return self.encoder(x, TokenPlaces(segments, positions), dropout_key=dropout_key)
