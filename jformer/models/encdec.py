"""The encoder-decoder of Vaswani et al. 2017, as three small steps: encode, start a cache, extend it."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, drop, make_noise
from jformer.models.linear import Dense, Embedding
from jformer.models.positions import sinusoids
from jformer.models.transformer import Masks, Stack

Batch = Mapping[str, Any]
"""i32 [b s]: source, source_segments, source_positions; i32 [b t]: target_in, target_segments, target_positions;
i32 [b]: row, the row's number in the whole update (training only). Segment 0 is padding; sentences that share a row
have segments 1, 2, … on both sides."""

Memory = dict[str, Any]
"""{'hidden': [b s d], 'segments': i32 [b s]}: the encoded source."""

Cache = dict[str, Any]
"""{'position': i32 [b], 'self': {'k', 'v'} [b l t h ·], 'memory': {'k', 'v'} [m l s h ·] and 'mask' [m s]}; the m
rows of the memory each serve b / m consecutive rows."""


def example_batch() -> Batch:
    """Return the smallest batch: one token on each side, to initialise parameters with."""
    one = jnp.ones((1, 1), jnp.int32)
    sides = ("source", "target_in"), ("source_segments", "target_segments"), ("source_positions", "target_positions")
    return {name: one * value for names, value in zip(sides, (1, 1, 0), strict=True) for name in names}


class InputEmbedding(nn.Module):
    """Tokens and positions to the vectors that enter a stack (Vaswani et al. 2017, sections 3.4 and 3.5)."""

    config: ModelConfig

    def setup(self) -> None:
        """Make the table of learned positions, where they are learned."""
        if self.config.positions == "learned":
            self.positions = Embedding(self.config.max_length, self.config.d_model)

    def __call__(
        self, tokens: Float[Array, "b t d"], positions: Int[Array, "b t"], length: int, noise: Noise | None
    ) -> Float[Array, "b t d"]:
        """Scale the embedded tokens, add their positions (all below `length`) and drop."""
        c = self.config
        if c.embedding_scale:
            tokens = tokens * c.d_model**0.5
        learned = c.positions == "learned"
        x = tokens + (self.positions(positions) if learned else jnp.asarray(sinusoids(length, c.d_model))[positions])
        return drop(x.astype(c.dtype), c.dropout, noise, 3)


class EncoderDecoder(nn.Module):
    """Two stacks over one or two vocabularies. `config.vocab_size` must be set."""

    config: ModelConfig

    def setup(self) -> None:
        """Make the tables, the stacks and, where it is not tied, the projection to logits."""
        c = self.config
        target_vocab_size = c.target_vocab_size or c.vocab_size
        self.source_embedding = Embedding(c.vocab_size, c.d_model)
        if not c.shared_embedding:
            self.target_embedding = Embedding(target_vocab_size, c.d_model)
        self.source_input = InputEmbedding(c)
        self.target_input = InputEmbedding(c)
        self.encoder = Stack(c, c.num_layers, cross=False)
        self.decoder = Stack(c, c.decoder_layers, cross=True)
        if not c.tied_output:
            self.output = Dense(target_vocab_size, use_bias=False)

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
        tokens, segments = batch["target_in"], batch["target_segments"]
        noise = self.noise(batch, train)
        x = self.target_input(self.target_table(tokens), batch["target_positions"], tokens.shape[1], noise)
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        masks = Masks(same_segment(segments, segments) & causal, same_segment(segments, memory["segments"]))
        return self.decoder(x, memory["hidden"], masks, noise)

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Project to the target vocabulary."""
        return self.target_table.attend(hidden) if self.config.tied_output else self.output(hidden)

    def encode(self, batch: Batch, train: bool = False) -> Memory:
        """Encode the source side of a batch."""
        tokens, segments = batch["source"], batch["source_segments"]
        noise = self.noise(batch, train)
        x = self.source_input(self.source_embedding(tokens), batch["source_positions"], tokens.shape[1], noise)
        hidden = self.encoder(x, None, Masks(same_segment(segments, segments)), noise)
        return {"hidden": hidden, "segments": segments}

    def noise(self, batch: Batch, train: bool) -> Noise | None:
        """Draw a stack's dropout seed; every call draws another."""
        return make_noise(self.make_rng("dropout"), batch["row"]) if train else None

    def start(self, memory: Memory, batch_size: int, length: int) -> Cache:
        """Return an empty cache for `batch_size` rows (a multiple of the memory's) of up to `length` tokens."""
        c = self.config
        shape = (batch_size, c.decoder_layers, length, c.num_heads)
        return {
            "position": jnp.zeros((batch_size,), jnp.int32),
            "self": {
                "k": jnp.zeros((*shape, c.key_size), c.dtype),
                "v": jnp.zeros((*shape, c.value_size), c.dtype),
            },
            "memory": {**self.decoder.memory_kv(memory["hidden"]), "mask": memory["segments"] > 0},
        }

    def extend(
        self, cache: Cache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Append each row's valid tokens to its cache and return their hidden states; the rest is meaningless."""
        length = cache["self"]["k"].shape[2]
        positions = cache["position"][:, None] + jnp.cumsum(valid, axis=1) - 1
        at = jnp.where(valid, positions, length)
        x = self.target_input(self.target_table(tokens), jnp.clip(positions, 0, length - 1), length, None)
        seen = jnp.arange(length) <= positions[..., None]
        memory = dict(cache["memory"])
        masks = Masks(seen[:, None], memory.pop("mask")[:, None, None])
        hidden, buffer = self.decoder.extend(x, cache["self"], memory, masks, at)
        position = cache["position"] + valid.sum(axis=1, dtype=jnp.int32)
        return hidden, {"position": position, "self": buffer, "memory": cache["memory"]}


def same_segment(query: Int[Array, "b t"], key: Int[Array, "b s"]) -> Bool[Array, "b 1 t s"]:
    """Let positions look at their own sentence only; padding looks at nothing and is seen by nothing."""
    return ((query[:, :, None] == key[:, None, :]) & (key[:, None, :] > 0))[:, None]
