"""The encoder-decoder of Vaswani et al. 2017 and its relatives, as three small steps: encode, start a cache, extend.

Axes: b rows, t target positions, s source positions (of an image its patches), d d_model, r of what is projected (d, or
a readout), v vocabulary.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer.models.batch import Batch
from jformer.models.cache import Cache, Memory, MemoryKeyValue, advance, empty_cache
from jformer.models.layers.embeddings import InputEmbedding, token_table
from jformer.models.layers.heads import TokenHead
from jformer.models.layers.linear import Embedding
from jformer.models.layers.patches import patch_projection, to_patches
from jformer.models.layers.precision import Network
from jformer.models.layers.transformer import Stack
from jformer.models.layers.visibility import TokenPlaces


class SequenceToSequence(Network):
    """The parts of an encoder-decoder besides its stacks: embedding tables and head.

    `config.vocab_size` must be set.
    """

    def setup(self) -> None:
        """Make the tables and the head."""
        c = self.config
        target_vocab_size = c.target_vocab_size or c.vocab_size
        if not c.vision.source:
            self.source_embedding = token_table(c, c.vocab_size)
        if not self.reads_source_table:
            self.target_embedding = token_table(c, target_vocab_size)
        self.head = TokenHead(c, target_vocab_size)

    @property
    def reads_source_table(self) -> bool:
        """Whether source and target tokens share one table; an image as the source has none."""
        return self.config.shared_embedding and not self.config.vision.source

    @property
    def target_table(self) -> Embedding:
        """The table of target tokens, also that of tied logits."""
        return self.source_embedding if self.reads_source_table else self.target_embedding

    def logits(self, hidden: Float[Array, "b t r"]) -> Float[Array, "b t v"]:
        """Project to the target vocabulary."""
        return self.head(hidden, self.target_table)


class EncoderDecoder(SequenceToSequence):
    """Two stacks of Transformer blocks over one or two vocabularies, or over images and one vocabulary."""

    def setup(self) -> None:
        """Add the stacks."""
        super().setup()
        c = self.config
        if c.vision.source:
            self.patches = patch_projection(c)
            # Scaling is for tables that also make logits; scaled patches would drown out their positions.
            self.source_input = InputEmbedding(dataclasses.replace(c, embedding_scale="none"), c.num_patches)
        else:
            self.source_input = InputEmbedding(c, c.max_length)
        self.target_input = InputEmbedding(c, c.max_length)
        self.encoder = Stack(c, c.num_layers, cross=False, causal=False)
        self.decoder = Stack(c, c.decoder_layers, cross=True, causal=True)

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return the decoder's output at every target position, before the projection to the vocabulary."""
        memory = self.encode(batch, train)
        tokens, positions, segments = batch["target_in"], batch["target_positions"], batch["target_segments"]
        dropout_key = self.dropout_key(batch, train)
        x = self.target_table(tokens)
        x = self.target_input(x, positions, tokens.shape[1], dropout_key)
        places = TokenPlaces(segments, positions, batch.get("target_prefix"))
        return self.decoder(x, places, memory["hidden"], memory["segments"], dropout_key)

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Encode the source side of a batch; segments of 0 in the memory are padding."""
        dropout_key = self.dropout_key(batch, train)
        if self.config.vision.source:
            x = self.patches(to_patches(batch["image"], self.config))
            segments = jnp.ones(x.shape[:2], jnp.int32)  # images are neither padded nor packed
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        else:
            x = self.source_embedding(batch["source"])
            positions, segments = batch["source_positions"], batch["source_segments"]
        x = self.source_input(x, positions, x.shape[1], dropout_key)
        hidden = self.encoder(x, TokenPlaces(segments, positions), dropout_key=dropout_key)
        return {"hidden": hidden, "segments": segments}

    def start(self, memory: Memory, batch_size: int, length: int) -> Cache:
        """Return an empty cache for the `batch_size` sentences of the memory, with room for `length` entries each."""
        read: MemoryKeyValue = {"layers": self.decoder.memory_kv(memory["hidden"]), "mask": memory["segments"] > 0}
        return empty_cache(self.config, self.decoder.blocks(), read, batch_size, length)

    def extend(
        self, cache: Cache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Append each row's valid tokens to its cache and return the hidden states, undefined at invalid tokens.

        If the cache has 'coverage' [b s] in its 'self', the attention that source positions received is added to it.
        """
        new, after = advance(cache, valid, self.decoder.rule)
        x = self.target_table(tokens)
        x = self.target_input(x, new.positions, new.entry_positions.shape[1], None)
        hidden, layers, weights = self.decoder.extend(x, cache, new)
        after["entries"]["layers"] = layers
        if weights is not None and "coverage" in cache["self"]:
            after["self"]["coverage"] += jnp.where(valid[..., None], weights, 0).sum(1)  # [b t s] → [b s]
        return hidden, after

    @staticmethod
    def cross_weights(intermediates: PyTree) -> Float[Array, "b t s"]:
        """Return how much each target position attends to each source position: the mean of the last layer's heads.

        Takes the intermediates of `hidden`, in which attention sows its weights: see `layers.attention`.
        """
        (weights,) = intermediates["decoder"]["block"]["cross_attn"]["weights"]  # [l b h t s]
        return weights[-1].mean(axis=1)
