"""The one Block of the whole family and the Stack that repeats it. Encoders and decoders are both a Stack."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jformer.models.attention import Attention, KeyValue, write
from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, drop
from jformer.models.linear import Dense

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
}
NORM_EPSILON = 1e-6


class Masks(NamedTuple):
    """Boolean, True = may look; made once for a whole stack."""

    self_attn: Bool[Array, "b 1 #t s"]
    cross_attn: Any = None  # bool [m 1 #t s], where there is a memory


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Build a layer norm (Ba et al. 2016) with float32 statistics and an output in the compute dtype."""
    return nn.LayerNorm(epsilon=NORM_EPSILON, dtype=jnp.dtype(config.dtype), use_fast_variance=False)


class FeedForward(nn.Module):
    """Two projections with a nonlinearity between them (Vaswani et al. 2017, equation 2)."""

    config: ModelConfig

    def setup(self) -> None:
        """Make d → f → d."""
        self.up = Dense(self.config.d_ff)
        self.down = Dense(self.config.d_model)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Map every position alike."""
        return self.down(ACTIVATIONS[self.config.activation](self.up(x)))


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward, each inside one residual."""

    config: ModelConfig
    cross: bool

    def setup(self) -> None:
        """Make the sublayers and one norm for each."""
        c = self.config
        self.self_attn = Attention(c.d_model, c.num_heads, c.key_size, c.value_size)
        self.self_attn_norm = layer_norm(c)
        if self.cross:
            self.cross_attn = Attention(c.d_model, c.num_heads, c.key_size, c.value_size)
            self.cross_attn_norm = layer_norm(c)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = layer_norm(c)

    def residual(self, x: Array, norm: nn.Module, f: Callable, noise: Noise | None, site: int) -> Array:
        """norm(x + f(x)) or x + f(norm(x)): the only place where Post-LN and Pre-LN differ (Xiong et al. 2020)."""
        pre = self.config.norm == "pre"
        x = x + drop(f(norm(x) if pre else x), self.config.dropout, noise, site)
        return x if pre else norm(x)

    def sublayers(
        self,
        x: Array,
        self_kv: Callable[[Array], KeyValue],
        cross_kv: Any,
        masks: Masks,
        noise: Noise | None,
    ) -> Array:
        """Run the residuals; whoever calls decides where keys and values come from."""

        def self_attn(y: Array) -> Array:
            return self.self_attn(y, self_kv(y), masks.self_attn)

        def cross_attn(y: Array) -> Array:
            return self.cross_attn(y, cross_kv, masks.cross_attn)

        x = self.residual(x, self.self_attn_norm, self_attn, noise, 0)
        if self.cross:
            x = self.residual(x, self.cross_attn_norm, cross_attn, noise, 1)
        return self.residual(x, self.feed_forward_norm, self.feed_forward, noise, 2)

    def __call__(
        self, x: Array, layer: Int[Array, ""], memory: Any, masks: Masks, noise: Noise | None
    ) -> tuple[Float[Array, "b t d"], None]:
        """Run the block on whole sequences."""
        cross_kv = self.cross_attn.kv(memory) if self.cross else None
        noise = noise.at_layer(layer) if noise else None
        return self.sublayers(x, self.self_attn.kv, cross_kv, masks, noise), None

    def memory_kv(self, carry: None, memory: Float[Array, "b s d"]) -> tuple[None, KeyValue]:
        """Project the memory's keys and values, once for a whole decode."""
        return carry, self.cross_attn.kv(memory)

    def extend(
        self, x: Array, buffer: KeyValue, cross_kv: Any, masks: Masks, at: Int[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], KeyValue]:
        """Run the block on new positions only, their keys and values written into the buffer at `at`."""
        written: list[KeyValue] = []

        def self_kv(y: Array) -> KeyValue:
            written.append(write(buffer, self.self_attn.kv(y), at))
            return written[-1]

        return self.sublayers(x, self_kv, cross_kv, masks, None), written[0]


class Stack(nn.Module):
    """N blocks with their parameters stacked on a leading layer axis, and the final norm that Pre-LN needs."""

    config: ModelConfig
    num_layers: int
    cross: bool

    def setup(self) -> None:
        """Lift the block's three methods over the layer axis: parameters on 0, cached leaves on 1 (batch first)."""
        on_cpu = jax.default_backend() == "cpu"
        scan = {
            "variable_axes": {"params": 0, "intermediates": 0},
            "split_rngs": {"params": True},
            "length": self.num_layers,
            "unroll": min(self.config.unroll or (self.num_layers if on_cpu else 1), self.num_layers),
        }
        shared = nn.broadcast
        methods = {
            "__call__": {**scan, "in_axes": (0, shared, shared, shared)},
            "memory_kv": {**scan, "in_axes": shared, "out_axes": 1},
            "extend": {**scan, "in_axes": (1, 1, shared, shared), "out_axes": 1},
        }
        self.block = nn.scan(Block, methods=methods)(self.config, self.cross)
        if self.config.norm == "pre":
            self.final_norm = layer_norm(self.config)

    def finish(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Normalise the output once where the blocks leave it unnormalised."""
        return self.final_norm(x) if self.config.norm == "pre" else x

    def __call__(
        self,
        x: Float[Array, "b t d"],
        memory: Any,
        masks: Masks,
        noise: Noise | None,
    ) -> Float[Array, "b t d"]:
        """Run every block on whole sequences."""
        return self.finish(self.block(x, jnp.arange(self.num_layers), memory, masks, noise)[0])

    def memory_kv(self, memory: Float[Array, "b s d"]) -> KeyValue:
        """Project the memory for every layer: leaves [b l s h ·]."""
        return self.block.memory_kv(None, memory)[1]

    def extend(
        self,
        x: Float[Array, "b t d"],
        buffer: KeyValue,
        cross_kv: Any,
        masks: Masks,
        at: Int[Array, "b t"],
    ) -> tuple[Float[Array, "b t d"], KeyValue]:
        """Run every block on new positions; buffer and cross_kv have leaves [· l s h ·]."""
        x, buffer = self.block.extend(x, buffer, cross_kv, masks, at)
        return self.finish(x), buffer
