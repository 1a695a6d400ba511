"""The one Block of the whole family and the Stack that repeats it. Encoders and decoders are both a Stack."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jformer.models.attention import Attention, KeyValue, write
from jformer.models.config import ModelConfig
from jformer.models.dropout import Noise, Site, drop
from jformer.models.initializers import bias_init, deepnorm, kernel_init
from jformer.models.linear import Dense
from jformer.models.positions import PositionBias
from jformer.placement import NARROW, WIDE
from jformer.platform import target

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),  # Hendrycks and Gimpel 2016
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),  # the same paper's approximation, as GPT-2 has it
    "silu": nn.silu,  # Elfwing et al. 2018; Ramachandran et al. 2017 call it swish
}
GATES: dict[str, Callable[[Array], Array]] = {  # Shazeer 2020
    "glu": nn.sigmoid,  # Dauphin et al. 2017
    "reglu": nn.relu,
    "geglu": ACTIVATIONS["gelu"],
    "geglu_tanh": ACTIVATIONS["gelu_tanh"],
    "swiglu": nn.silu,
}
REMAT: dict[str, Any] = {  # what a block keeps for the backward pass, where not all of it
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the projections, but no attention
    "full": jax.checkpoint_policies.nothing_saveable,  # its input
}


class Layout(NamedTuple):
    """Who may look at whom and where everybody stands, the same for all blocks."""

    positions: Int[Array, "b t"]
    self_mask: Any  # bool [b 1 #t s]; of a cache's entries [m n e]
    cross_mask: Any = None  # bool [b 1 #t s], where there is a memory; in a cache [m 1 s]
    bias: Any = None  # float32 [#b h t s], added to the scores of self-attention; the stack fills it in


def make_norm(config: ModelConfig) -> nn.Module:
    """Build a norm with float32 statistics and an output in the compute dtype."""
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": jnp.dtype(config.dtype)}
    if config.norm_type == "rmsnorm":
        return nn.RMSNorm(**options)
    return nn.LayerNorm(**options, use_bias=config.bias, use_fast_variance=False)


class FeedForward(nn.Module):
    """Two projections with a nonlinearity between them (Vaswani et al. 2017, equation 2), gated or not."""

    config: ModelConfig
    layers: int = 1  # of the stack, and DeepNorm's beta: for the initial kernels
    beta: float = 1.0

    def setup(self) -> None:
        """Make d → f → d, and the gate's d → f."""
        c = self.config
        self.up = self.projection(c.d_ff, "up", WIDE)
        if c.activation in GATES:
            self.gate = self.projection(c.d_ff, "gate", WIDE)
        self.down = self.projection(c.d_model, "down", NARROW)

    def projection(self, size: int, role: str, split: str) -> Dense:
        """Build one projection."""
        c = self.config
        return Dense(size, kernel_init(c, role, self.layers, self.beta), c.bias, bias_init(c, role), split)

    def __call__(self, x: Float[Array, "b t d"], noise: Noise | None = None) -> Float[Array, "b t d"]:
        """Map every position alike."""
        name = self.config.activation
        y = GATES[name](self.gate(x)) * self.up(x) if name in GATES else ACTIVATIONS[name](self.up(x))
        return self.down(drop(y, self.config.activation_dropout, noise, Site.ACTIVATION))


class Block(nn.Module):
    """Self-attention, optional cross-attention, feed-forward, each inside one residual."""

    config: ModelConfig
    layers: int
    cross: bool

    def setup(self) -> None:
        """Make the sublayers, and for each its norm, or two."""
        c = self.config
        _, beta = deepnorm(c, self.cross)
        self.self_attn = Attention(c, Site.SELF_WEIGHTS, self.layers, beta)
        if self.cross:
            self.cross_attn = Attention(c, Site.CROSS_WEIGHTS, self.layers, beta)
        self.feed_forward = FeedForward(c, self.layers, beta)
        for name in ("self_attn", "cross_attn", "feed_forward") if self.cross else ("self_attn", "feed_forward"):
            if c.norm != "none":
                setattr(self, f"{name}_norm", make_norm(c))
            if c.norm == "sandwich":
                setattr(self, f"{name}_out_norm", make_norm(c))

    def residual(self, x: Array, name: str, f: Callable, noise: Noise | None, site: Site) -> Array:
        """Wrap a sublayer: the only place where Post-LN, Pre-LN and their relatives differ.

        post      norm(x + f(x))              Vaswani et al. 2017
        pre       x + f(norm(x))              Xiong et al. 2020; the stack ends with one norm
        sandwich  x + norm'(f(norm(x)))       Ding et al. 2021 (CogView); the stack ends with one norm
        deepnorm  norm(alpha · x + f(x))      Wang et al. 2022
        none      x + f(x)
        """
        c = self.config
        norm: Any = getattr(self, f"{name}_norm", None)
        y = drop(f(norm(x) if c.norm in ("pre", "sandwich") else x), c.dropout, noise, site)
        y = getattr(self, f"{name}_out_norm")(y) if c.norm == "sandwich" else y
        y = x * deepnorm(c, self.cross)[0] + y if c.residual else y
        return norm(y) if c.norm in ("post", "deepnorm") else y

    def sublayers(self, x: Array, self_attn: Callable, cross_attn: Callable, noise: Noise | None) -> Array:
        """Run the residuals; whoever calls decides where keys and values come from."""
        x = self.residual(x, "self_attn", self_attn, noise, Site.SELF_ATTN)
        if self.cross:
            x = self.residual(x, "cross_attn", cross_attn, noise, Site.CROSS_ATTN)
        return self.residual(x, "feed_forward", lambda y: self.feed_forward(y, noise), noise, Site.FEED_FORWARD)

    def __call__(
        self, x: Array, layer: Int[Array, ""], memory: Any, layout: Layout, noise: Noise | None
    ) -> tuple[Float[Array, "b t d"], None]:
        """Run the block on whole sequences."""
        noise = noise.at_layer(layer) if noise else None

        def self_attn(y: Array) -> Array:
            kv = self.self_attn.kv(y, layout.positions)
            return self.self_attn(y, kv, layout.self_mask, layout.positions, layout.bias, noise)

        def cross_attn(y: Array) -> Array:
            return self.cross_attn(y, self.cross_attn.kv(memory), layout.cross_mask, noise=noise)

        x = self.sublayers(x, self_attn, cross_attn, noise)
        self.sow("intermediates", "output", x)
        return x, None

    def memory_kv(self, memory: Float[Array, "m s d"]) -> KeyValue:
        """Project the memory's keys and values, once for a whole decode."""
        return self.cross_attn.entries(memory, memory.shape[0])

    def extend(
        self, x: Array, entries: KeyValue, cross_kv: Any, layout: Layout, at: Int[Array, ""]
    ) -> tuple[Float[Array, "b t d"], KeyValue, Any]:
        """Run the block on new positions only, whose entries are written from `at` on; also return what they looked at.

        That is the mean weights of cross-attention [b t s], if there is one.
        """
        written, weights = dict(entries), None

        def self_attn(y: Array) -> Array:
            new = self.self_attn.entries(y, entries["k"].shape[0], layout.positions)
            written.update(write(entries, new, at))
            return self.self_attn.look(y, written, layout.self_mask, layout.positions, layout.bias)[0]

        def cross_attn(y: Array) -> Array:
            nonlocal weights
            y, weights = self.cross_attn.look(y, cross_kv, layout.cross_mask)
            return y

        return self.sublayers(x, self_attn, cross_attn, None), written, weights


class Stack(nn.Module):
    """N blocks with their parameters stacked on a leading layer axis, and the final norm that Pre-LN needs.

    A stack with cross-attention is the decoder of an encoder-decoder; `causal` says that later positions are hidden
    by the masks, which relative buckets make use of.
    """

    config: ModelConfig
    num_layers: int
    cross: bool
    causal: bool

    def setup(self) -> None:
        """Lift the block over the layer axis of its parameters."""
        c, on_cpu = self.config, target() == "cpu"
        shared, policy = nn.broadcast, REMAT[c.execution.remat]
        lift = nn.scan(
            nn.remat(Block, policy=policy) if policy else Block,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=self.num_layers,
            unroll=min(c.execution.unroll or (self.num_layers if on_cpu else 1), self.num_layers),
            in_axes=(0, shared, shared, shared),
        )
        self.block = lift(c, self.num_layers, self.cross)
        if c.norm in ("pre", "sandwich"):
            self.final_norm = make_norm(c)
        if c.positions in ("relative", "alibi"):
            self.position_bias = PositionBias(c, self.causal)

    def finish(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Normalise the output once where the blocks leave it unnormalised."""
        return self.final_norm(x) if self.config.norm in ("pre", "sandwich") else x

    def place(self, layout: Layout, query: Int[Array, "b t"], key: Int[Array, "b s"]) -> Layout:
        """Fill in the bias of positions, made once for all layers."""
        biased = self.config.positions in ("relative", "alibi")
        return layout._replace(bias=self.position_bias(query, key) if biased else None)

    def __call__(
        self, x: Float[Array, "b t d"], memory: Any, layout: Layout, noise: Noise | None
    ) -> Float[Array, "b t d"]:
        """Run every block on whole sequences."""
        # Within a row, places differ as positions do: one bias serves all rows, also those that several texts share.
        places = jnp.arange(x.shape[1])[None]
        layout = self.place(layout, places, places)
        return self.finish(self.block(x, jnp.arange(self.num_layers), memory, layout, noise)[0])

    def blocks(self) -> tuple[Any, ...]:
        """Return the parameters of every block by itself.

        A step of decoding is a small program that runs often. Its layers are spelled out, so that each writes to its
        own entries in place, and taken apart before the first step, for XLA would do it again in every one.
        """
        stacked = self.block.variables["params"]
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(self.num_layers))

    def apply_block(self, params: Any, *args: Any, method: str) -> Any:
        """Run a block with its own parameters."""
        return Block(self.config, self.num_layers, self.cross, parent=None).apply(
            {"params": params}, *args, method=method
        )

    def memory_kv(self, memory: Float[Array, "m s d"]) -> tuple[KeyValue, ...]:
        """Project the memory for every layer."""
        return tuple(self.apply_block(params, memory, method="memory_kv") for params in self.blocks())

    def extend(
        self, x: Float[Array, "b t d"], cache: Any, layout: Layout, keys: Int[Array, "b e"], at: Int[Array, ""]
    ) -> tuple[Float[Array, "b t d"], tuple[KeyValue, ...], Any]:
        """Run every block on new positions; return them, the entries of all layers, and what the last one looked at.

        `keys` are the positions of the entries.
        """
        layout, weights = self.place(layout, layout.positions, keys), None
        entries, memory = list(cache["entries"]["layers"]), cache["memory"].get("layers", [None] * self.num_layers)
        for i, params in enumerate(cache["blocks"]):
            args = x, entries[i], memory[i], layout, at
            x, entries[i], weights = self.apply_block(params, *args, method="extend")
        return self.finish(x), tuple(entries), weights
