"""Multi-head attention. Keys and values are data: `kv` projects them once, `__call__` attends, nothing is hidden."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, Site, drop
from jformer.models.initializers import kernel_init
from jformer.models.linear import Dense
from jformer.models.positions import rotate
from jformer.placement import NARROW, WIDE
from jformer.platform import target

KeyValue = dict[str, Any]
"""{'k': [b s g k], 'v': [b s g u]}: the keys and values of s positions; in a cache [m g k e] and [m g e u]."""

FEW = 16  # queries of a head and sentence, up to which a sum is quicker than a matrix product on CPU


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


def look(
    q: Float[Array, "m g x k"],
    kv: KeyValue,
    mask: Bool[Array, "m #g #x e"],
    bias: Float[Array, "m g x e"] | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, "m g x u"], Float[Array, "m g x e"]]:
    """Attend from few queries to the entries of a cache; see `attend`.

    So few rows are slow as a matrix product on CPU, and quick as a sum, which XLA fuses.
    """
    few = q.shape[2] <= FEW and target() == "cpu"
    scores = (q[..., None] * kv["k"][:, :, None]).sum(3) if few else jnp.einsum("mgxk,mgke->mgxe", q, kv["k"])
    scores = scores.astype(jnp.float32) * scale + (0.0 if bias is None else bias)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    kept = weights.astype(q.dtype)
    values = (kept[..., None] * kv["v"][:, :, None]).sum(3) if few else jnp.einsum("mgxe,mgeu->mgxu", kept, kv["v"])
    return values, weights


def write(buffer: KeyValue, new: KeyValue, at: Int[Array, ""]) -> KeyValue:
    """Return the entries of a cache with new ones from place `at` on."""
    put = lax.dynamic_update_slice_in_dim
    return {name: put(buffer[name], new[name], at, axis) for name, axis in (("k", 3), ("v", 2))}


class Attention(nn.Module):
    """Multi-head attention with separate key and value sizes (Vaswani et al. 2017, section 3.2.2)."""

    config: ModelConfig
    site: Site  # of the mask that drops weights
    layers: int = 1  # of the stack, and DeepNorm's beta: for the initial kernels
    beta: float = 1.0

    def setup(self) -> None:
        """Make the four projections; each kernel is 2-D, its heads side by side."""
        c = self.config
        self.q = self.projection(c.num_heads * c.key_size, "query", WIDE)
        self.k = self.projection(c.kv_heads * c.key_size, "key", WIDE)
        self.v = self.projection(c.kv_heads * c.value_size, "value", WIDE)
        self.o = self.projection(c.d_model, "output", NARROW)

    def projection(self, size: int, role: str, split: str) -> Dense:
        """Build one projection; the devices of a mesh share its heads."""
        c = self.config
        return Dense(size, kernel_init(c, role, self.layers, self.beta), c.bias, split=split)

    def kv(self, y: Float[Array, "b s d"], positions: Int[Array, "b s"] | None = None) -> KeyValue:
        """Project keys and values; with positions, rotary keys are turned by them."""
        heads = (*y.shape[:-1], self.config.kv_heads, -1)
        k, v = self.k(y).reshape(heads), self.v(y).reshape(heads)
        return {"k": self.turn(k, positions), "v": v}

    def entries(self, y: Float[Array, "b t d"], sentences: int, positions: Any = None) -> KeyValue:
        """Project keys and values as the cache of `sentences` keeps them: the beams of a token side by side."""
        k, v = (x.reshape(sentences, -1, *x.shape[1:]) for x in self.kv(y, positions).values())  # [m n t g ·]
        k, v = jnp.einsum("mntgk->mgktn", k), jnp.einsum("mntgu->mgtnu", v)
        return {"k": k.reshape(*k.shape[:3], -1), "v": v.reshape(*v.shape[:2], -1, v.shape[-1])}

    @property
    def scale(self) -> float:
        """Scale of q·k."""
        return self.config.key_size**-0.5 if self.config.attention_scale == "sqrt" else 1.0

    def queries(self, x: Float[Array, "b t d"], positions: Int[Array, "b t"] | None) -> Float[Array, "b t h k"]:
        """Project queries; rotary ones are turned by their positions."""
        return self.turn(self.q(x).reshape(*x.shape[:-1], self.config.num_heads, -1), positions)

    def turn(self, x: Float[Array, "b t g k"], positions: Int[Array, "b t"] | None) -> Float[Array, "b t g k"]:
        """Turn queries or keys by their positions, where positions are rotary."""
        return x if positions is None or self.config.positions != "rotary" else rotate(x, positions)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        kv: KeyValue,
        mask: Bool[Array, "b 1 #t s"],
        positions: Int[Array, "b t"] | None = None,
        bias: Float[Array, "#b h t s"] | None = None,
        noise: Noise | None = None,
    ) -> Float[Array, "b t d"]:
        """Attend from x to keys and values; True in the mask = may look."""
        c = self.config
        q = self.queries(x, positions)
        if choose_kernel(c, target()) == "jax":
            y = jax.nn.dot_product_attention(q, kv["k"], kv["v"], bias, mask, scale=self.scale)
        else:
            y, weights = attend(q, kv, mask, bias, self.scale, lambda w: drop(w, c.attention_dropout, noise, self.site))
            self.sow("intermediates", "weights", weights)
        return self.o(y.reshape(*x.shape[:-1], -1))

    def look(
        self,
        x: Float[Array, "b t d"],
        entries: KeyValue,
        mask: Bool[Array, "m #n e"],
        positions: Int[Array, "b t"] | None = None,
        bias: Float[Array, "b h t e"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t e"]]:
        """Attend from the b / m beams of each sentence to its entries; also return the mean weights of the heads.

        The mask has n = b / m · t rows a sentence, a beam's tokens side by side.
        """
        q, m = self.queries(x, positions), entries["k"].shape[0]
        (b, t, h, k), g = q.shape, entries["k"].shape[1]
        q = q.reshape(m, b // m * t, g, h // g, k).transpose(0, 2, 1, 3, 4).reshape(m, g, -1, k)
        if bias is not None:
            bias = bias.reshape(m, b // m, g, h // g, t, -1).transpose(0, 2, 1, 4, 3, 5).reshape(*q.shape[:3], -1)
        mask = jnp.repeat(mask, h // g, axis=1) if mask.shape[1] > 1 else mask
        y, weights = look(q, entries, mask[:, None], bias, self.scale)
        y = y.reshape(m, g, b // m * t, h // g, -1).swapaxes(1, 2)
        weights = weights.reshape(m, g, b // m * t, h // g, -1).mean((1, 3))
        return self.o(y.reshape(b, t, -1)), weights.reshape(b, t, -1)
