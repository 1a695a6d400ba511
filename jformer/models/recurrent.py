"""Recurrent encoder-decoders, language models and encoders, behind the same protocol as Transformers.

The cache of a recurrent model is its state, which follows a beam. The source belongs to a sentence.

Letters: b rows (in a search the beams of m sentences side by side), t target and s source positions, d features of the
state (d_model), e of an embedded token, r of what is projected to the vocabulary, l layers, n arrays of a state.
"""

from typing import TypedDict

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer.models.batch import Batch
from jformer.models.cache import Memory
from jformer.models.decoder import LanguageModel
from jformer.models.encdec import SequenceToSequence
from jformer.models.encoder import SourceModel
from jformer.models.layers.dropout import DropoutKey
from jformer.models.layers.linear import Dense
from jformer.models.layers.recurrent_stack import AttentiveDecoder, RecurrentStack, Source, States, reverse, tokens_in


class RecurrentMemory(Memory, total=False):
    """The encoded source, and the decoder's initial state."""

    state: Float[Array, "m l n d"]


class RecurrentCache(TypedDict):
    """The state of b rows, and the source as their steps read it."""

    position: Int[Array, " b"]  # of each row's next token
    self: States
    memory: Source


class RecurrentEncoderDecoder(SequenceToSequence):
    """Sequence to sequence, as Sutskever et al. 2014 without attention, as Bahdanau or Luong et al. 2015 with it."""

    def setup(self) -> None:
        """Add the stacks and the bridge between them."""
        super().setup()
        c = self.config
        self.encoder = RecurrentStack(c, c.num_layers, c.recurrent.bidirectional)
        attends = c.recurrent.attention != "none"
        self.decoder = AttentiveDecoder(c) if attends else RecurrentStack(c, c.decoder_layers, False)
        if c.recurrent.bridge == "dense":
            init = nn.initializers.xavier_uniform()
            self.bridge = [Dense(c.d_model, init) for _ in range(c.decoder_layers)]

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t r"]:
        """Return the decoder's output at every target position, before the projection to the vocabulary."""
        cache = self.start(self.encode(batch, train), batch["target_in"].shape[0], 0)
        dropout_key = self.dropout_key(batch, train)
        x = tokens_in(self.config, self.target_table, batch["target_in"], dropout_key)
        hidden, _, weights = self.decoder(x, batch["target_segments"] > 0, cache["self"], cache["memory"], dropout_key)
        if weights is not None:
            self.sow("intermediates", "cross_weights", weights)
        return hidden

    def encode(self, batch: Batch, train: bool = False) -> RecurrentMemory:
        """Encode the source side of a batch: its outputs at every position, and the decoder's initial state."""
        c = self.config
        segments = batch["source_segments"]
        dropout_key = self.dropout_key(batch, train)
        real = segments > 0
        tokens = reverse(batch["source"], real) if c.recurrent.reverse_source else batch["source"]
        x = tokens_in(c, self.source_embedding, tokens, dropout_key)
        hidden, last, _ = self.encoder(x, real, self.encoder.blank(x.shape[0]), {}, dropout_key)
        hidden = reverse(hidden, real) if c.recurrent.reverse_source else hidden
        return {"hidden": hidden, "segments": segments, "state": self.bridged(last["layers"])}

    def bridged(self, last: Float[Array, "b l n d"]) -> Float[Array, "b l n d"]:
        """Return the decoder's initial state: the encoder's last, zeros, or tanh of a projection for every layer.

        The projected vector is the last layer's output after the whole source; with two directions, of the backward
        one (Bahdanau et al. 2015, appendix A.2.2).
        """
        c = self.config
        if c.recurrent.bridge == "copy":
            return last
        blank = jnp.zeros((last.shape[0], c.decoder_layers, *last.shape[2:]))
        if c.recurrent.bridge == "zeros":
            return blank
        top = last[:, -1, 0].astype(c.dtype)
        outputs = [jnp.tanh(layer(top)) for layer in self.bridge]
        return blank.at[:, :, 0].set(jnp.stack(outputs, axis=1).astype(blank.dtype))

    def start(self, memory: RecurrentMemory, batch_size: int, length: int) -> RecurrentCache:
        """Return the cache of the `batch_size` sentences of the memory; a state needs no room for `length` entries."""
        return {
            "position": jnp.zeros(batch_size, jnp.int32),
            "self": self.decoder.begin(memory["state"]),
            "memory": {**self.decoder.read(memory["hidden"]), "mask": memory["segments"] > 0},
        }

    def extend(
        self, cache: RecurrentCache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t r"], RecurrentCache]:
        """Advance each row's state by its valid tokens and return the hidden states, undefined at invalid tokens.

        If the cache has 'coverage' [b s] in its 'self', the attention weights are added to it.
        """
        x = tokens_in(self.config, self.target_table, tokens, None)
        before = {name: x for name, x in cache["self"].items() if name != "coverage"}
        hidden, after, weights = self.decoder(x, valid, before, cache["memory"], None)
        if "coverage" in cache["self"]:
            seen = 0 if weights is None else jnp.where(valid[..., None], weights, 0).sum(1)
            after["coverage"] = cache["self"]["coverage"] + seen
        return hidden, {**cache, "position": cache["position"] + valid.sum(1, dtype=jnp.int32), "self": after}

    @staticmethod
    def cross_weights(intermediates: PyTree) -> Float[Array, "b t s"]:
        """Return the attention weights of each target position, from the intermediates of `hidden`."""
        (weights,) = intermediates["cross_weights"]
        return weights


class RecurrentLanguageModel(LanguageModel):
    """One recurrent stack over the target side (Mikolov et al. 2010, Zaremba et al. 2014)."""

    def setup(self) -> None:
        """Add the stack."""
        super().setup()
        c = self.config
        self.decoder = RecurrentStack(c, c.num_layers, False)

    def hidden(self, batch: Batch, train: bool = False) -> Float[Array, "b t d"]:
        """Return the stack's output at every position, before the projection to the vocabulary."""
        dropout_key = self.dropout_key(batch, train)
        x = tokens_in(self.config, self.embedding, batch["target_in"], dropout_key)
        return self.decoder(x, batch["target_segments"] > 0, self.decoder.blank(x.shape[0]), {}, dropout_key)[0]

    def start(self, memory: Memory, batch_size: int, length: int) -> RecurrentCache:
        """Return the cache of `batch_size` texts; a state needs no room for `length` entries."""
        return {
            "position": jnp.zeros(batch_size, jnp.int32),
            "self": self.decoder.blank(batch_size),
            "memory": {},
        }

    def extend(
        self, cache: RecurrentCache, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], RecurrentCache]:
        """Advance each row's state by its valid tokens and return the hidden states, undefined at invalid tokens."""
        x = tokens_in(self.config, self.embedding, tokens, None)
        hidden, after, _ = self.decoder(x, valid, cache["self"], {}, None)
        return hidden, {**cache, "position": cache["position"] + valid.sum(1, dtype=jnp.int32), "self": after}


class RecurrentEncoder(SourceModel):
    """One recurrent stack over the whole source side, predicting tokens or, many to one, a class."""

    def setup(self) -> None:
        """Add the stack."""
        super().setup()
        c = self.config
        self.encoder = RecurrentStack(c, c.num_layers, c.recurrent.bidirectional)

    def states(self, batch: Batch, dropout_key: DropoutKey | None) -> Float[Array, "b s d"]:
        """Run the stack."""
        x = tokens_in(self.config, self.embedding, batch["source"], dropout_key)
        return self.encoder(x, batch["source_segments"] > 0, self.encoder.blank(x.shape[0]), {}, dropout_key)[0]
