"""Multi-head attention. Keys and values are data: `kv` projects them once, `__call__` attends, nothing is hidden."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.models.linear import Dense

KeyValue = dict[str, Any]
"""{'k': [b s h k], 'v': [b s h u]}: the keys and values of s positions."""


def attend(
    q: Float[Array, "b t h k"], kv: KeyValue, mask: Bool[Array, "b #1 #t s"]
) -> tuple[Float[Array, "b t h u"], Float[Array, "b h t s"]]:
    """Scaled dot-product attention: softmax(q·k / sqrt(k))·v, and its weights (Vaswani et al. 2017, equation 1).

    The softmax is float32. A row that may look at nothing gets finite, meaningless weights.
    """
    scores = jnp.einsum("bthk,bshk->bhts", q * q.shape[-1] ** -0.5, kv["k"]).astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    return jnp.einsum("bhts,bshu->bthu", weights.astype(q.dtype), kv["v"]), weights


def write(buffer: KeyValue, new: KeyValue, at: Int[Array, "b t"]) -> KeyValue:
    """Return the buffer [b s h ·] with new entries [b t h ·] at their positions; those past its end are dropped."""
    rows = jnp.arange(at.shape[0])[:, None]
    return {name: old.at[rows, at].set(new[name], mode="drop") for name, old in buffer.items()}


class Attention(nn.Module):
    """Multi-head attention with separate key and value sizes (Vaswani et al. 2017, section 3.2.2)."""

    d_model: int
    num_heads: int
    key_size: int
    value_size: int

    def setup(self) -> None:
        """Make the four projections; each kernel is 2-D, its heads side by side."""
        self.q = Dense(self.num_heads * self.key_size)
        self.k = Dense(self.num_heads * self.key_size)
        self.v = Dense(self.num_heads * self.value_size)
        self.o = Dense(self.d_model)

    def kv(self, y: Float[Array, "b s d"]) -> KeyValue:
        """Project keys and values."""
        heads = (*y.shape[:-1], self.num_heads, -1)
        return {"k": self.k(y).reshape(heads), "v": self.v(y).reshape(heads)}

    def __call__(self, x: Float[Array, "b t d"], kv: KeyValue, mask: Bool[Array, "m 1 #t s"]) -> Float[Array, "b t d"]:
        """Attend from x to keys and values; True in the mask = may look.

        Keys and values may have fewer rows (m) than x has (b): then each serves b / m consecutive rows of x, as
        one encoded sentence serves its beams, and the mask must be the same for all of a row's positions.
        """
        q = self.q(x).reshape(kv["k"].shape[0], -1, self.num_heads, self.key_size)
        y, weights = attend(q, kv, mask)
        self.sow("intermediates", "weights", weights)
        return self.o(y.reshape(*x.shape[:-1], -1))
