"""The encoder-decoder of Vaswani et al. 2017 and its relatives, as three small steps: encode, start a cache, extend."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.models.batch import Batch, causal, same_segment
from jformer.models.cache import Cache, Memory, advance, empty_cache
from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, make_noise
from jformer.models.embeddings import InputEmbedding, token_table
from jformer.models.heads import TokenHead
from jformer.models.linear import Embedding
from jformer.models.transformer import Layout, Stack


class EncoderDecoder(nn.Module):
    """Two stacks over one or two vocabularies. `config.vocab_size` must be set."""

    config: ModelConfig

    def setup(self) -> None:
        """Make the tables, the stacks and the head."""
        c = self.config
        target_vocab_size = c.target_vocab_size or c.vocab_size
        self.source_embedding = token_table(c, c.vocab_size)
        if not c.shared_embedding:
            self.target_embedding = token_table(c, target_vocab_size)
        self.source_input = InputEmbedding(c, c.max_length)
        self.target_input = InputEmbedding(c, c.max_length)
        self.encoder = Stack(c, c.num_layers, cross=False, causal=False)
        self.decoder = Stack(c, c.decoder_layers, cross=True, causal=True)
        self.head = TokenHead(c, target_vocab_size)

    @property
    def target_table(self) -> Embedding:
        """The table that target tokens are read from, and tied logits made with."""
        return self.source_embedding if self.config.shared_embedding else self.target_embedding

    def __call__(self, batch: Batch, train: bool = False) -> Float[Array, "b t v"]:
        """Return the logits of every target position; training needs `rngs={'dropout': key}`."""
        return self.logits(self.hidden(batch, train))

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return the decoder's output at every target position, before the projection to the vocabulary."""
        memory = self.encode(batch, train)
        tokens, positions, segments = (batch[f"target_{name}"] for name in ("in", "positions", "segments"))
        noise = self.noise(batch, train)
        x = self.target_input(self.target_table(tokens), positions, tokens.shape[1], noise)
        layout = Layout(positions, causal(segments), same_segment(segments, memory["segments"]))
        return self.decoder(x, memory["hidden"], layout, noise)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Project to the target vocabulary."""
        return self.head(hidden, self.target_table)

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Encode the source side of a batch."""
        tokens, positions, segments = (batch[name] for name in ("source", "source_positions", "source_segments"))
        noise = self.noise(batch, train)
        x = self.source_input(self.source_embedding(tokens), positions, tokens.shape[1], noise)
        hidden = self.encoder(x, None, Layout(positions, same_segment(segments, segments)), noise)
        return {"hidden": hidden, "segments": segments}

    def noise(self, batch: Batch, train: bool) -> Noise | None:
        """Draw a stack's dropout seed; every call draws another."""
        return make_noise(self.make_rng("dropout"), batch["row"]) if train else None

    def start(self, memory: Memory, batch_size: int, length: int) -> Cache:
        """Return an empty cache for the `batch_size` sentences of the memory, with room for `length` entries each."""
        kept = {"layers": self.decoder.memory_kv(memory["hidden"]), "mask": memory["segments"] > 0}
        return empty_cache(self.config, self.decoder.blocks(), kept, batch_size, length)

    def extend(
        self, cache: Cache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Append each row's valid tokens to its cache and return their hidden states; the rest is meaningless.

        Where the cache keeps what a row has looked at ('coverage' [b s] in its 'self'), that is added up.
        """
        to, after = advance(cache, valid)
        x = self.target_input(self.target_table(tokens), to.positions, to.keys.shape[1], None)
        layout = Layout(to.positions, to.mask, cache["memory"]["mask"][:, None])
        hidden, after["entries"]["layers"], weights = self.decoder.extend(x, cache, layout, to.keys, to.at)
        if "coverage" in cache["self"]:
            after["self"]["coverage"] += jnp.where(valid[..., None], weights, 0).sum(1)
        return hidden, after
