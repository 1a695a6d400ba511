"""The decoder-only language model: GPT-2, GPT-3 and their relatives (Radford et al. 2019)."""

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from jformer.models.batch import Batch, causal
from jformer.models.cache import Cache, Memory, advance, empty_cache
from jformer.models.config import ModelConfig
from jformer.models.dropout import make_noise
from jformer.models.embeddings import InputEmbedding, token_table
from jformer.models.heads import TokenHead
from jformer.models.transformer import Layout, Stack


class Decoder(nn.Module):
    """One causal stack over the target side. `config.vocab_size` must be set."""

    config: ModelConfig

    def setup(self) -> None:
        """Make the table, the stack and the head."""
        c = self.config
        self.embedding = token_table(c, c.vocab_size)
        self.input = InputEmbedding(c, c.max_length)
        self.decoder = Stack(c, c.num_layers, cross=False, causal=True)
        self.head = TokenHead(c, c.vocab_size)

    def __call__(self, batch: Batch, train: bool = False) -> Float[Array, "b t v"]:
        """Return the logits of every position; training needs `rngs={'dropout': key}`."""
        return self.logits(self.hidden(batch, train))

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return the stack's output at every position, before the projection to the vocabulary."""
        tokens, positions, segments = (batch[f"target_{name}"] for name in ("in", "positions", "segments"))
        noise = make_noise(self.make_rng("dropout"), batch["row"]) if train else None
        x = self.input(self.embedding(tokens), positions, tokens.shape[1], noise)
        return self.decoder(x, None, Layout(positions, causal(segments)), noise)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Project to the vocabulary."""
        return self.head(hidden, self.embedding)

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Return the memory of a model that has no source: nothing."""
        return {}

    def start(self, memory: Memory, batch_size: int, length: int) -> Cache:
        """Return an empty cache for `batch_size` texts, with room for `length` entries each."""
        return empty_cache(self.config, self.decoder.blocks(), memory, batch_size, length)

    def extend(
        self, cache: Cache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Append each row's valid tokens to its cache and return their hidden states; the rest is meaningless."""
        to, after = advance(cache, valid)
        x = self.input(self.embedding(tokens), to.positions, to.keys.shape[1], None)
        layout = Layout(to.positions, to.mask)
        hidden, after["entries"]["layers"], _ = self.decoder.extend(x, cache, layout, to.keys, to.at)
        return hidden, after
