"""Recurrent layers: one cell run over time, forwards or backwards, with the products of all inputs computed at once.

    rnn   h' = tanh(x W + h U)                                        Elman 1990
    lstm  input, forget and output gates around a memory cell         Hochreiter and Schmidhuber 1997, Gers et al. 2000
    gru   reset and update gates; the reset acts on h U, as in cuDNN  Cho et al. 2014

Flax has these cells but multiplies each position's input separately. Here one product serves all positions, as in
cuDNN, and the gradient of U is one product, too.

Letters: b rows, t positions, e features of an input, d features of the state, z features of all gates side by side
(d for each gate), n arrays of a state: its output first, then the memory cell of an LSTM.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jformer.models.layers.linear import Dense
from jformer.models.layers.matmul import gradient_by_hand, materialized
from jformer.parallel.backend import target

State = Float[Array, "b n d"]
Parts = tuple[Float[Array, "b d"], ...]  # of a state: stacked in a loop, XLA:CPU computes one number at a time


def _rnn(inputs: Float[Array, "b z"], recurrent: Float[Array, "b z"], state: Parts) -> Parts:
    return (jnp.tanh(inputs + recurrent),)


def _lstm(inputs: Float[Array, "b z"], recurrent: Float[Array, "b z"], state: Parts) -> Parts:
    factors = np.repeat(np.array([1, 1, 2, 1], np.float32), state[0].shape[-1])  # tanh(x) is 2 sigmoid(2x) - 1
    gates = materialized(nn.sigmoid((inputs + recurrent) * factors))  # in one pass, once for both results
    input_gate, forget, candidate, output = jnp.split(gates, 4, axis=-1)
    cell = forget * state[1] + input_gate * (2 * candidate - 1)
    return output * jnp.tanh(cell), cell


def _gru(inputs: Float[Array, "b z"], recurrent: Float[Array, "b z"], state: Parts) -> Parts:
    reset_x, update_x, candidate_x = jnp.split(inputs, 3, axis=-1)
    reset_h, update_h, candidate_h = jnp.split(recurrent, 3, axis=-1)
    update = nn.sigmoid(update_x + update_h)
    candidate = jnp.tanh(candidate_x + nn.sigmoid(reset_x + reset_h) * candidate_h)
    return ((1 - update) * candidate + update * state[0],)


CELLS: dict[str, Callable[..., Parts]] = {"rnn": _rnn, "lstm": _lstm, "gru": _gru}
"""cell → (gates of the input, gates of the state, state) → the next state; all in float32."""
GATES = {"rnn": 1, "lstm": 4, "gru": 3}
STATES = {"rnn": 1, "lstm": 2, "gru": 1}  # n


def _next_state(cell: str, inputs: Array, recurrent: Array, state: Parts, real: Bool[Array, " b"]) -> Parts:
    """Return the next state of every row; rows without a real token keep theirs."""
    after = CELLS[cell](inputs.astype(jnp.float32), recurrent, state)
    return tuple(jnp.where(real[:, None], new, old) for new, old in zip(after, state, strict=True))


def _multiply(x: Float[Array, "b d"], kernel: Float[Array, "d z"], dtype: jnp.dtype) -> Float[Array, "b z"]:
    """Multiply in the compute dtype, into float32."""
    return (x.astype(dtype) @ kernel.astype(dtype)).astype(jnp.float32)


def _scan(
    cell: str, unroll: int, inputs: Array, kernel: Array, bias: Array, state: State, real: Array
) -> tuple[Array, Array]:
    def step(state: Parts, now: tuple[Array, Array]) -> tuple[Parts, tuple[Parts, Array]]:
        recurrent = _multiply(state[0], kernel, inputs.dtype) + bias
        state = _next_state(cell, now[0], recurrent, state, now[1])
        return state, (state, recurrent)

    states, recurrent = jax.lax.scan(step, jnp.unstack(state, axis=1), (inputs, real), unroll=unroll)[1]
    return jnp.stack(states, axis=2), recurrent


def _run_forward(cell: str, unroll: int, *arguments: Array) -> tuple[Array, tuple[Array, ...]]:
    states, recurrent = _scan(cell, unroll, *arguments)
    return states, (*arguments, states, recurrent)


def _run_backward(cell: str, unroll: int, saved: tuple[Array, ...], gradient: Array) -> tuple[Any, ...]:
    inputs, kernel, _, state, real, states, recurrent = saved
    before = jnp.concatenate([state[None], states[:-1]])
    transposed = materialized(kernel.T)

    def step(later: Parts, now: tuple[Any, ...]) -> tuple[Parts, tuple[Array, Array]]:
        gradient, inputs, recurrent, state, real = now
        _, pull = jax.vjp(functools.partial(_next_state, cell, real=real), inputs, recurrent, state)
        d_inputs, d_recurrent, (d_output, *others) = pull(tuple(map(jnp.add, gradient, later)))
        d_output += _multiply(d_recurrent, transposed, inputs.dtype)
        return (d_output, *others), (d_inputs, d_recurrent)

    now = (jnp.unstack(gradient, axis=2), inputs, recurrent, jnp.unstack(before, axis=2), real)
    blank = jnp.unstack(jnp.zeros_like(state), axis=1)
    d_state, (d_inputs, d_recurrent) = jax.lax.scan(step, blank, now, reverse=True, unroll=unroll)
    outputs, d_gates = before[:, :, 0].astype(inputs.dtype), d_recurrent.astype(inputs.dtype)
    d_kernel = jnp.tensordot(outputs, d_gates, axes=((0, 1), (0, 1))).astype(kernel.dtype)
    return d_inputs, d_kernel, d_recurrent.sum((0, 1)), jnp.stack(d_state, axis=1), None


@gradient_by_hand(_run_forward, _run_backward, static=(0, 1))
def run_cell(
    cell: str,
    unroll: int,
    inputs: Float[Array, "t b z"],
    kernel: Float[Array, "d z"],
    bias: Float[Array, " z"],
    state: State,
    real: Bool[Array, "t b"],
) -> Float[Array, "t b n d"]:
    """Return the state of every row after every position; only real tokens change it.

    The gradients are written by hand: only what depends on time runs back through time, and the gradient of the kernel
    is one product over all positions, where autodiff would add up one for each.

    Args:
        cell: a key of CELLS.
        unroll: positions unrolled in each iteration of the loop.
        inputs: the inputs' part of the gates, in the compute dtype.
        kernel: float32, from a state's output to its part of the gates.
        bias: float32, added to that part.
        state: float32, before the first position.
        real: False where a row has no token, or no more.
    """
    return _scan(cell, unroll, inputs, kernel, bias, state, real)[0]


def positions_in_turn(features: int, length: object) -> int:
    """Return how many positions an iteration of the loop takes; 1 in a program exported for every length.

    On CPU, 4 is faster for small products and slower for large ones (measured: 160 and 650 features). Other devices
    were not measured.
    """
    return 4 if target().platform == "cpu" and features < 512 and isinstance(length, int) else 1


class RecurrentLayer(nn.Module):
    """One direction of one layer."""

    cell: str
    features: int  # d
    update_bias: float = 0.0  # of a GRU

    def setup(self) -> None:
        """Build the two projections; kernels of states start orthogonal (Saxe et al. 2014)."""
        gates = GATES[self.cell] * self.features
        self.input = Dense(gates, nn.initializers.xavier_uniform(), bias_init=self.input_bias)
        self.state_kernel = self.param("state_kernel", self.orthogonal, (self.features, gates))
        # Only with the GRU's reset does a bias of the state differ from one of the input.
        has_bias = self.cell == "gru"
        self.state_bias = self.param("state_bias", nn.initializers.zeros_init(), (gates,)) if has_bias else None

    def input_bias(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        """Return zeros, but ones for an LSTM's forget gate, so that it starts open (Jozefowicz et al. 2015).

        A GRU's update gate, which has the same role, starts at `update_bias`.
        """
        kept = {"lstm": 1.0, "gru": self.update_bias}.get(self.cell, 0.0)
        return (
            jnp.zeros(shape, dtype).at[self.features : 2 * self.features].set(kept) if kept else jnp.zeros(shape, dtype)
        )

    def orthogonal(self, key: Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32) -> Array:
        """Draw an orthogonal matrix for each gate."""
        draw, square = nn.initializers.orthogonal(), (shape[0], shape[0])
        return jnp.concatenate([draw(k, square, dtype) for k in jax.random.split(key, GATES[self.cell])], axis=1)

    @property
    def bias(self) -> Float[Array, " z"]:
        """The bias of the state's part of the gates."""
        return jnp.zeros(self.state_kernel.shape[1]) if self.state_bias is None else self.state_bias

    def __call__(
        self, x: Float[Array, "b t e"], real: Bool[Array, "b t"], state: State | None = None, reverse: bool = False
    ) -> tuple[Float[Array, "b t d"], State]:
        """Run over all positions; return the outputs, and the state of every row after its last real token."""
        state = jnp.zeros((x.shape[0], STATES[self.cell], self.features)) if state is None else state
        inputs, real = self.input(x).swapaxes(0, 1), real.T  # [b t z] → [t b z]
        if reverse:
            inputs, real = inputs[::-1], real[::-1]
        unroll = positions_in_turn(self.features, x.shape[1])
        states = run_cell(self.cell, unroll, inputs, self.state_kernel, self.bias, state, real)
        outputs = states[::-1, :, 0] if reverse else states[:, :, 0]
        return outputs.swapaxes(0, 1).astype(x.dtype), states[-1]

    def step(self, inputs: Float[Array, "b z"], state: State, real: Bool[Array, " b"]) -> State:
        """Return the next state, given the inputs' part of the gates."""
        recurrent = _multiply(state[:, 0], self.state_kernel, inputs.dtype) + self.bias
        return jnp.stack(_next_state(self.cell, inputs, recurrent, jnp.unstack(state, axis=1), real), axis=1)
