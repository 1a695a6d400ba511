"""The one Block of the whole family and the Stack that repeats it. Encoders and decoders are both a Stack.

Axes: b rows, t query positions, s key positions, d d_model, h heads. In a cache: m sentences, n tokens of one over its
beams, e entries.
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer import plugins
from jformer.errors import UserError
from jformer.models.cache import Cache, KeyValue, NewTokens, write_entries
from jformer.models.layers.attention import Attention, project_self
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.feed_forward import FeedForward
from jformer.models.layers.initializers import deepnorm
from jformer.models.layers.layer_scan import over_layers
from jformer.models.layers.norms import make_norm
from jformer.models.layers.positions import PositionBias
from jformer.models.layers.visibility import Rule, TokenPlaces, Visibility, self_attention_rule
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import whole_rows

LATER_KEYS = (
    "model.positions='transformer_xl' has no scores for later keys in a cache, which target_prefix needs: use other "
    "positions"
)
SITES = {"self_attn": Site.SELF_ATTN, "cross_attn": Site.CROSS_ATTN, "feed_forward": Site.FEED_FORWARD}


class AttentionContext(NamedTuple):
    """Inputs that the blocks of a stack share on whole sequences."""

    positions: Int[Array, "b t"]
    own: Visibility  # of self-attention
    cross: Visibility | None = None  # where there is a memory
    bias: Float[Array, "#b h t s"] | None = None  # of positions, added to the scores of self-attention


class CacheContext(NamedTuple):
    """Inputs that the blocks of a stack share on new tokens of a cache. In masks True = may attend."""

    positions: Int[Array, "b t"]
    own: Bool[Array, "m n e"]
    cross: Bool[Array, "m 1 s"] | None
    bias: Float[Array, "b h t e"] | None
    distance: Int[Array, "b t e"] | None  # from queries to entries, for the positions of Transformer-XL


class Block(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each between its norms and a residual.

    post      norm(x + f(x))              Vaswani et al. 2017
    pre       x + f(norm(x))              Xiong et al. 2020; the stack ends with one norm
    sandwich  x + norm'(f(norm(x)))       Ding et al. 2021 (CogView); the stack ends with one norm
    deepnorm  norm(alpha · x + f(x))      Wang et al. 2022
    none      x + f(x)                    with `config.residual=False`, every variant replaces x instead of adding to it
    """

    config: ModelConfig
    layers: int
    cross: bool

    def setup(self) -> None:
        """Build the sublayers and their norms."""
        c = self.config
        _, beta = deepnorm(c, self.cross)
        attention = plugins.find("model.attention", c.attention, {"multi_head": Attention})
        feed_forward = plugins.find("model.feed_forward", c.feed_forward, {"projections": FeedForward})
        self.self_attn = attention(c, Site.SELF_WEIGHTS, self.layers, beta)
        if self.cross:
            self.cross_attn = attention(c, Site.CROSS_WEIGHTS, self.layers, beta)
        self.feed_forward = feed_forward(c, self.layers, beta)
        for name in ("self_attn", "cross_attn", "feed_forward") if self.cross else ("self_attn", "feed_forward"):
            if c.norm != "none":
                setattr(self, f"{name}_norm", make_norm(c))
            if c.norm == "sandwich":
                setattr(self, f"{name}_out_norm", make_norm(c))

    def before(self, name: str, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return the input of sublayer `name`: x, normalised if the norm comes first."""
        return getattr(self, f"{name}_norm")(x) if self.config.norm in ("pre", "sandwich") else x

    def after(
        self, name: str, x: Float[Array, "b t d"], y: Float[Array, "b t d"], dropout_key: DropoutKey | None
    ) -> Float[Array, "b t d"]:
        """Add the output y of sublayer `name` to its input x, followed by dropout and norms."""
        c = self.config
        y = dropout(y, c.dropout, dropout_key, SITES[name])
        if c.norm == "sandwich":
            y = getattr(self, f"{name}_out_norm")(y)
        alpha, _ = deepnorm(c, self.cross)
        y = x * alpha + y if c.residual else y
        return getattr(self, f"{name}_norm")(y) if c.norm in ("post", "deepnorm") else y

    def __call__(
        self,
        x: Float[Array, "b t d"],
        layer: Int[Array, ""],
        memory: Float[Array, "b s d"] | None,
        context: AttentionContext,
        dropout_key: DropoutKey | None,
    ) -> tuple[Float[Array, "b t d"], None]:
        """Run the block on whole sequences; `nn.scan` needs the second value."""
        key = dropout_key.at_layer(layer) if dropout_key else None

        y = self.before("self_attn", x)
        kv = project_self(self.self_attn, y, context.positions)
        y = self.self_attn(y, kv, context.own, context.positions, context.bias, key)
        x = self.after("self_attn", x, y, key)
        if memory is not None and context.cross is not None:
            y = self.before("cross_attn", x)
            kv = self.cross_attn.project_kv(memory)
            y = self.cross_attn(y, kv, context.cross, dropout_key=key)
            x = self.after("cross_attn", x, y, key)
        y = self.before("feed_forward", x)
        y = self.feed_forward(y, key)
        x = self.after("feed_forward", x, y, key)

        self.sow("intermediates", "output", x)
        return x, None

    def memory_kv(self, memory: Float[Array, "m s d"]) -> KeyValue:
        """Project the memory's keys and values, once for a whole decode."""
        return self.cross_attn.project_for_cache(memory, memory.shape[0])

    def extend(
        self,
        x: Float[Array, "b t d"],
        cached_kv: KeyValue,
        memory_kv: KeyValue | None,
        context: CacheContext,
        first: Int[Array, ""],
    ) -> tuple[Float[Array, "b t d"], KeyValue, Float[Array, "b t s"] | None]:
        """Run the block on new positions; return its output, entries, and mean weights of cross-attention or None.

        Args:
            x: the hidden states of the new tokens.
            cached_kv: the entries [m g k e] and [m g e u] of this layer.
            memory_kv: from `memory_kv`; None without cross-attention.
            context: of the entries.
            first: the index of the first new entry.
        """
        y = self.before("self_attn", x)
        new_kv = self.self_attn.project_for_cache(y, cached_kv["k"].shape[0], context.positions)
        cached_kv = write_entries(cached_kv, new_kv, first)
        y, _ = self.self_attn.attend_cached(
            y, cached_kv, context.own, positions=context.positions, bias=context.bias, distance=context.distance
        )
        x = self.after("self_attn", x, y, None)
        weights = None
        if memory_kv is not None:
            y = self.before("cross_attn", x)
            y, weights = self.cross_attn.attend_cached(y, memory_kv, context.cross)
            x = self.after("cross_attn", x, y, None)
        y = self.before("feed_forward", x)
        y = self.feed_forward(y)
        return self.after("feed_forward", x, y, None), cached_kv, weights


class Stack(nn.Module):
    """N blocks with their parameters stacked on a leading layer axis (see `layer_scan`), and Pre-LN's final norm.

    A stack with cross-attention is the decoder of an encoder-decoder. In a causal one, no query sees later tokens.
    """

    config: ModelConfig
    num_layers: int
    cross: bool
    causal: bool

    def setup(self) -> None:
        """Build the repeated block, the final norm and the position bias."""
        c = self.config
        repeated = over_layers(Block, c, self.num_layers, self.is_initializing())
        self.block = repeated(c, self.num_layers, self.cross)
        if c.norm in ("pre", "sandwich"):
            self.final_norm = make_norm(c)
        if c.positions in ("relative", "alibi"):
            self.position_bias = PositionBias(c, self.causal)

    def finish(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Normalise the output if the blocks do not."""
        return self.final_norm(x) if self.config.norm in ("pre", "sandwich") else x

    @property
    def rule(self) -> Rule:
        """The rule of self-attention."""
        return self_attention_rule(self.config, self.causal)

    def bias(self, query: Int[Array, "b t"], key: Int[Array, "b s"]) -> Float[Array, "b h t s"] | None:
        """Return the bias of positions, made once for all layers, or None."""
        return self.position_bias(query, key) if self.config.positions in ("relative", "alibi") else None

    def __call__(
        self,
        x: Float[Array, "b t d"],
        tokens: TokenPlaces,
        memory: Float[Array, "b s d"] | None = None,
        memory_segments: Int[Array, "b s"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "b t d"]:
        """Run every block on whole sequences.

        Args:
            x: the embedded tokens.
            tokens: their segments, and their positions within their texts.
            memory: the encoded source; needed with cross-attention, refused without.
            memory_segments: the text of each of its positions; 0 is padding.
            dropout_key: determines the masks of dropout; None drops nothing.
        """
        has_memory = memory is not None and memory_segments is not None
        assert has_memory == self.cross, "a memory is for stacks with cross-attention, and they need one"
        # Within a text, indices differ as positions do: one bias serves all rows, even those that several texts share.
        placed = jax.tree.map(whole_rows, tokens)
        indices = jnp.arange(placed.segments.shape[1])[None]  # [1 t]
        placed = placed._replace(positions=indices)
        rule = dataclasses.replace(self.rule, prefix=tokens.prefix is not None)
        if rule.prefix and self.config.positions == "transformer_xl":
            raise UserError(LATER_KEYS)
        one_text = self.config.execution.rows == "one_text"
        own = Visibility(placed, placed, rule, one_text)
        context = AttentionContext(tokens.positions, own, bias=self.bias(indices, indices))
        if memory_segments is not None:
            memory_segments = whole_rows(memory_segments)
            source = TokenPlaces(memory_segments, jnp.arange(memory_segments.shape[1])[None])
            context = context._replace(cross=Visibility(placed, source, one_text=one_text))
        x, _ = self.block(x, jnp.arange(self.num_layers), memory, context, dropout_key)
        rate = self.config.dropout if self.config.output_dropout else 0.0
        return dropout(self.finish(x), rate, dropout_key, Site.OUTPUT)

    def blocks(self) -> tuple[PyTree, ...]:
        """Return the parameters of each block separately.

        A decoding step is a small program that runs often. Its layers are unrolled, so that each writes its entries in
        place. Parameters are split before the first step, because XLA would otherwise split them in every step.
        """
        stacked = self.block.variables["params"]
        places = [0] * self.num_layers if self.config.shared_layers else range(self.num_layers)
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in places)

    def apply_block(self, params: PyTree, *args: PyTree, method: str) -> PyTree:
        """Run a block with its own parameters."""
        block = Block(self.config, self.num_layers, self.cross, parent=None)
        return block.apply({"params": params}, *args, method=method)

    def memory_kv(self, memory: Float[Array, "m s d"]) -> tuple[KeyValue, ...]:
        """Project the memory for every layer."""
        return tuple(self.apply_block(params, memory, method="memory_kv") for params in self.blocks())

    def extend(
        self, x: Float[Array, "b t d"], cache: Cache, new: NewTokens
    ) -> tuple[Float[Array, "b t d"], tuple[KeyValue, ...], Float[Array, "b t s"] | None]:
        """Run every block on new tokens, for which `advance` made room.

        Return the hidden states, the entries of all layers, and the last layer's mean weights of cross-attention.
        """
        cross_mask = cache["memory"]["mask"][:, None] if self.cross else None  # [m s] → [m 1 s]
        distances = new.entry_positions[:, None] - new.positions[..., None]  # [b t e]
        context = CacheContext(
            positions=new.positions,
            own=new.mask,
            cross=cross_mask,
            bias=self.bias(new.positions, new.entry_positions),
            distance=distances if self.config.positions == "transformer_xl" else None,
        )
        entries = list(cache["entries"]["layers"])
        memory_kv = cache["memory"].get("layers", (None,) * self.num_layers)
        weights = None
        for i, params in enumerate(cache["blocks"]):
            args = x, entries[i], memory_kv[i], context, new.first
            x, entries[i], weights = self.apply_block(params, *args, method="extend")
        return self.finish(x), tuple(entries), weights
