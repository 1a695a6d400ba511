"""The decoder-only language model: GPT-2, GPT-3 and their relatives (Radford et al. 2019).

Axes: b rows, t positions, d d_model, v vocabulary.
"""

from jaxtyping import Array, Bool, Float, Int

from jformer.models.batch import Batch
from jformer.models.cache import Cache, Memory, advance, empty_cache
from jformer.models.layers.embeddings import InputEmbedding, token_table
from jformer.models.layers.heads import TokenHead
from jformer.models.layers.precision import Network
from jformer.models.layers.transformer import Stack
from jformer.models.layers.visibility import TokenPlaces


class LanguageModel(Network):
    """The parts of a language model besides its stack: embedding table and head.

    `config.vocab_size` must be set.
    """

    def setup(self) -> None:
        """Make the table and the head."""
        c = self.config
        self.embedding = token_table(c, c.vocab_size)
        self.head = TokenHead(c, c.vocab_size)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Project to the vocabulary."""
        return self.head(hidden, self.embedding)

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Return the empty memory of a model without a source."""
        return {}


class Decoder(LanguageModel):
    """One causal stack of Transformer blocks over the target side."""

    def setup(self) -> None:
        """Add the stack."""
        super().setup()
        c = self.config
        self.input = InputEmbedding(c, c.max_length)
        self.decoder = Stack(c, c.num_layers, cross=False, causal=True)

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return the stack's output at every position, before the projection to the vocabulary."""
        tokens, positions, segments = batch["target_in"], batch["target_positions"], batch["target_segments"]
        dropout_key = self.dropout_key(batch, train)
        x = self.input(self.embedding(tokens), positions, tokens.shape[1], dropout_key)
        places = TokenPlaces(segments, positions, batch.get("target_prefix"))
        return self.decoder(x, places, dropout_key=dropout_key)

    def start(self, memory: Memory, batch_size: int, length: int) -> Cache:
        """Return an empty cache for `batch_size` texts, with room for `length` entries each."""
        return empty_cache(self.config, self.decoder.blocks(), {}, batch_size, length)

    def extend(
        self, cache: Cache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Append each row's valid tokens to its cache and return the hidden states, undefined at invalid tokens."""
        new, after = advance(cache, valid, self.decoder.rule)
        x = self.input(self.embedding(tokens), new.positions, new.entry_positions.shape[1], None)
        hidden, layers, _ = self.decoder.extend(x, cache, new)
        after["entries"]["layers"] = layers
        return hidden, after
