"""Multi-head attention. Keys and values are data: `kv` projects them once, `__call__` attends, nothing is hidden."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, Site, drop
from jformer.models.initializers import kernel_init
from jformer.models.linear import Dense
from jformer.models.positions import rotate

KeyValue = dict[str, Any]
"""{'k': [b s g k], 'v': [b s g u]}: the keys and values of s positions."""


def choose_kernel(config: ModelConfig, platform: str) -> str:
    """Return which code attends: 'own', or 'jax' for jax.nn.dot_product_attention.

    Only our own drops weights, shows them, and has values of another size than keys. On CPU both are as quick.
    """
    ours = config.attention_dropout > 0 or config.key_size != config.value_size
    return "own" if ours or platform == "cpu" else "jax"


def attend(
    q: Float[Array, "b t h k"],
    kv: KeyValue,
    mask: Bool[Array, "b #1 #t s"],
    bias: Float[Array, "#b h t s"] | None = None,
    scale: float = 1.0,
    drop_weights: Callable[[Array], Array] = lambda weights: weights,
) -> tuple[Float[Array, "b t h u"], Float[Array, "b h t s"]]:
    """Attention: softmax(scale · q·k + bias)·v, and its weights before dropout (Vaswani et al. 2017, equation 1).

    Each of the g heads of keys and values serves h / g neighbouring heads of queries (Ainslie et al. 2023). The
    softmax is float32. A row that may look at nothing gets finite, meaningless weights.
    """
    b, t, h, _ = q.shape
    s, g = kv["k"].shape[1:3]
    grouped = (q * scale).reshape(b, t, g, h // g, -1)
    scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, kv["k"]).astype(jnp.float32).reshape(b, h, t, s)
    scores = scores if bias is None else scores + bias
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    kept = drop_weights(weights).astype(q.dtype).reshape(b, g, h // g, t, s)
    return jnp.einsum("bgrts,bsgu->btgru", kept, kv["v"]).reshape(b, t, h, -1), weights


def write(buffer: KeyValue, new: KeyValue, at: Int[Array, "b t"]) -> KeyValue:
    """Return the buffer [b s g ·] with new entries [b t g ·] at their positions; those past its end are dropped."""
    rows = jnp.arange(at.shape[0])[:, None]
    return {name: old.at[rows, at].set(new[name], mode="drop") for name, old in buffer.items()}


class Attention(nn.Module):
    """Multi-head attention with separate key and value sizes (Vaswani et al. 2017, section 3.2.2)."""

    config: ModelConfig
    site: Site  # of the mask that drops weights
    layers: int = 1  # of the stack, and DeepNorm's beta: for the initial kernels
    beta: float = 1.0

    def setup(self) -> None:
        """Make the four projections; each kernel is 2-D, its heads side by side."""
        c = self.config
        sizes = {
            "query": c.num_heads * c.key_size,
            "key": c.kv_heads * c.key_size,
            "value": c.kv_heads * c.value_size,
            "output": c.d_model,
        }
        self.q, self.k, self.v, self.o = (
            Dense(size, kernel_init(c, role, self.layers, self.beta), c.bias) for role, size in sizes.items()
        )

    def kv(self, y: Float[Array, "b s d"], positions: Int[Array, "b s"] | None = None) -> KeyValue:
        """Project keys and values; with positions, rotary keys are turned by them."""
        heads = (*y.shape[:-1], self.config.kv_heads, -1)
        k, v = self.k(y).reshape(heads), self.v(y).reshape(heads)
        return {"k": self.turn(k, positions), "v": v}

    def turn(self, x: Float[Array, "b t g k"], positions: Int[Array, "b t"] | None) -> Float[Array, "b t g k"]:
        """Turn queries or keys by their positions, where positions are rotary."""
        return x if positions is None or self.config.positions != "rotary" else rotate(x, positions)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        kv: KeyValue,
        mask: Bool[Array, "m 1 #t s"],
        positions: Int[Array, "b t"] | None = None,
        bias: Float[Array, "#b h t s"] | None = None,
        noise: Noise | None = None,
    ) -> Float[Array, "b t d"]:
        """Attend from x to keys and values; True in the mask = may look.

        Keys and values may have fewer rows (m) than x has (b): then each serves b / m consecutive rows of x, as
        one encoded sentence serves its beams, and the mask must be the same for all of a row's positions.
        """
        c = self.config
        q = self.turn(self.q(x).reshape(*x.shape[:-1], c.num_heads, -1), positions)
        q = q.reshape(kv["k"].shape[0], -1, *q.shape[2:])
        scale = c.key_size**-0.5 if c.attention_scale == "sqrt" else 1.0
        if choose_kernel(c, jax.default_backend()) == "jax":
            y = jax.nn.dot_product_attention(q, kv["k"], kv["v"], bias, mask, scale=scale)
        else:
            y, weights = attend(q, kv, mask, bias, scale, lambda w: drop(w, c.attention_dropout, noise, self.site))
            self.sow("intermediates", "weights", weights)
        return self.o(y.reshape(*x.shape[:-1], -1))
