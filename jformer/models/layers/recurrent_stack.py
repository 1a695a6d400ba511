"""Recurrent layers on top of each other: a stack that reads, and a decoder that attends at every step.

Both are called with (embedded tokens, which of them are real, states, source, dropout key) and return
(outputs, states, attention weights or None). States are a dict, so that a search can let them follow a beam:
`layers` float32 [b l n d], and `fed` [b r] if a step reads the output of the previous one.

Letters: b rows, m sentences, t target and s source positions, e features of an embedded token, d of a state, z of
all gates side by side, r of the output, a of a key that alignment compares, l layers, n arrays of a state.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.models.layers.alignment import RecurrentAttention
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.linear import Dense, Embedding
from jformer.models.layers.recurrent_cells import GATES, STATES, RecurrentLayer, positions_in_turn
from jformer.models.model_config import ModelConfig

States = dict[str, Array]
Source = dict[str, Array]
"""{'keys': [m s a], 'values': [m s e], 'mask': bool [m s]}, or less where nothing attends."""


class Token(NamedTuple):
    """One token of every row, or with a further axis of t all of them."""

    gates: Float[Array, "b *t z"]  # its part of the first layer's
    x: Float[Array, "b *t e"]
    real: Bool[Array, " b *t"]
    kept: tuple[Array, ...]  # dropout factors of the inputs of all layers but the first


def make_layer(config: ModelConfig) -> RecurrentLayer:
    """Build one direction of one layer."""
    return RecurrentLayer(config.recurrent.cell, config.d_model, config.recurrent.update_bias)


def tokens_in(
    config: ModelConfig, table: Embedding, tokens: Int[Array, "b t"], dropout_key: DropoutKey | None
) -> Float[Array, "b t e"]:
    """Embed tokens in the compute dtype, with dropout."""
    return dropout(table(tokens).astype(config.dtype), config.dropout, dropout_key, Site.INPUT)


def reverse(x: Array, real: Bool[Array, "b s"]) -> Array:
    """Return x [b s ·] with the real positions of every row, which are contiguous, in reverse order."""
    positions = jnp.arange(x.shape[1])
    ends = 2 * real.argmax(axis=1, keepdims=True) + real.sum(axis=1, keepdims=True) - 1  # first + last of them
    order = jnp.where(real, ends - positions, positions)
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


class RecurrentStack(nn.Module):
    """N layers, each running over all positions before the next one; of one or of two directions."""

    config: ModelConfig
    num_layers: int
    bidirectional: bool

    def setup(self) -> None:
        """Make the layers."""
        self.forward = [make_layer(self.config) for _ in range(self.num_layers)]
        if self.bidirectional:
            self.backward = [make_layer(self.config) for _ in range(self.num_layers)]

    def blank(self, rows: int) -> States:
        """Return the initial states."""
        c = self.config
        return {"layers": jnp.zeros((rows, self.num_layers, STATES[c.recurrent.cell], c.d_model))}

    def begin(self, state: Float[Array, "b l n d"]) -> States:
        """Return the states that start from those of another stack."""
        return {"layers": state}

    def read(self, memory: Float[Array, "m s e"]) -> Source:
        """Return what the layers read from the source: nothing, since only the initial state depends on it."""
        return {}

    def __call__(
        self,
        x: Float[Array, "b t e"],
        real: Bool[Array, "b t"],
        states: States,
        source: Source,
        dropout_key: DropoutKey | None,
    ) -> tuple[Float[Array, "b t r"], States, None]:
        """Run every layer; dropout is between layers, never between positions (Zaremba et al. 2014).

        With two directions, the states are those of the backward one: at the first token, it has read all of them.
        """
        rate = self.config.dropout
        last = []
        for i, layer in enumerate(self.forward):
            x = dropout(x, rate if i else 0.0, dropout_key and dropout_key.at_layer(jnp.int32(i)), Site.LAYER)
            y, state = layer(x, real, states["layers"][:, i])
            if self.bidirectional:
                back, state = self.backward[i](x, real, states["layers"][:, i], reverse=True)
                y = jnp.concatenate([y, back], axis=-1)
            last.append(state)
            x = y
        return dropout(x, rate, dropout_key, Site.READOUT), {"layers": jnp.stack(last, axis=1)}, None


class AttentiveDecoder(nn.Module):
    """N layers that step together and attend to the source once per step.

    With additive scores (Bahdanau et al. 2015, appendix A.2.2) a step attends with the previous state, the layers read
    the context, and the output is a maxout of the previous state, the token and the context. With the others (Luong et
    al. 2015, sections 3.1 and 3.3) it attends with the new state; the output is tanh of a projection of context and
    state, and with input feeding the next step reads it.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Build the layers, the attention and the readout."""
        c = self.config
        init = nn.initializers.xavier_uniform()
        self.layers = [make_layer(c) for _ in range(c.decoder_layers)]
        self.alignment = RecurrentAttention(c.recurrent.attention, c.d_model)
        if self.additive or c.recurrent.input_feeding:
            self.feed = Dense(GATES[c.recurrent.cell] * c.d_model, init, use_bias=False)
        self.readout = Dense(c.readout_size * (2 if self.additive else 1), init, use_bias=self.additive)

    @property
    def additive(self) -> bool:
        """Whether it attends before a step rather than after it."""
        return self.config.recurrent.attention == "additive"

    def begin(self, state: Float[Array, "b l n d"]) -> States:
        """Return the first states; input feeding starts from zero."""
        c = self.config
        fed = {"fed": jnp.zeros((state.shape[0], c.readout_size), c.dtype)} if c.recurrent.input_feeding else {}
        return {"layers": state, **fed}

    def read(self, memory: Float[Array, "m s e"]) -> Source:
        """Return what attention needs of the source."""
        return {"keys": self.alignment.keys(memory), "values": memory}

    def __call__(
        self,
        x: Float[Array, "b t e"],
        real: Bool[Array, "b t"],
        states: States,
        source: Source,
        dropout_key: DropoutKey | None,
    ) -> tuple[Float[Array, "b t r"], States, Float[Array, "b t s"]]:
        """Take a step for every position."""
        tokens = Token(self.layers[0].input(x), x, real, self._kept(x, dropout_key))

        def step(decoder: "AttentiveDecoder", states: States, token: Token) -> tuple[States, tuple[Array, Array]]:
            return (decoder._attend_first if decoder.additive else decoder._attend_last)(source, states, token)

        over_positions = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
            unroll=positions_in_turn(self.config.d_model, x.shape[1]),
        )
        states, (outputs, weights) = over_positions(self, states, tokens)
        return dropout(outputs, self.config.dropout, dropout_key, Site.READOUT), states, weights

    def _attend_first(self, source: Source, states: States, token: Token) -> tuple[States, tuple[Array, Array]]:
        """Attend with the state before the step; the layers read the context."""
        top = states["layers"][:, -1, 0].astype(token.x.dtype)
        context, weights = self.alignment(top, **source)
        output = self.maxout(jnp.concatenate([top, token.x, context], axis=-1))
        after = self._run_layers(token._replace(gates=token.gates + self.feed(context)), states["layers"])
        return {"layers": after}, (output, weights)

    def _attend_last(self, source: Source, states: States, token: Token) -> tuple[States, tuple[Array, Array]]:
        """Attend with the state after the step; with input feeding, the next step reads the output."""
        feeding = self.config.recurrent.input_feeding
        gates = token.gates + self.feed(states["fed"]) if feeding else token.gates
        after = self._run_layers(token._replace(gates=gates), states["layers"])
        top = after[:, -1, 0].astype(gates.dtype)
        context, weights = self.alignment(top, **source)
        output = jnp.tanh(self.readout(jnp.concatenate([context, top], axis=-1)))
        fed = {"fed": jnp.where(token.real[:, None], output, states["fed"])} if feeding else {}
        return {"layers": after, **fed}, (output, weights)

    def _run_layers(self, token: Token, before: Float[Array, "b l n d"]) -> Float[Array, "b l n d"]:
        """Return the state of every layer after one token."""
        after: list[Array] = []
        gates = token.gates
        for i, layer in enumerate(self.layers):
            if i:
                top = after[-1][:, 0].astype(gates.dtype)
                gates = layer.input(top * token.kept[i - 1] if token.kept else top)
            after.append(layer.step(gates, before[:, i], token.real))
        return jnp.stack(after, axis=1)

    def _kept(self, x: Float[Array, "b t e"], dropout_key: DropoutKey | None) -> tuple[Float[Array, "b t d"], ...]:
        """Return the dropout factors of the inputs of all layers but the first, by position; none without dropout."""
        rate = self.config.dropout
        if not dropout_key or not rate:
            return ()
        ones = jnp.ones((*x.shape[:2], self.config.d_model), x.dtype)
        keys = (dropout_key.at_layer(jnp.int32(i)) for i in range(1, len(self.layers)))
        return tuple(dropout(ones, rate, key, Site.LAYER) for key in keys)

    def maxout(self, x: Float[Array, "b f"]) -> Float[Array, "b r"]:
        """Project to pairs and take the larger of each (Goodfellow et al. 2013)."""
        pairs = self.readout(x)
        return pairs.reshape(*pairs.shape[:-1], -1, 2).max(axis=-1)
