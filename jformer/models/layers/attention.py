"""Multi-head attention. Keys and values are explicit: `project_kv` makes them, `__call__` attends.

The computation between the projections is in `dot_product`.

Axes: b rows, t query positions, s key positions, d d_model, h query heads, g heads of keys and values, r = h / g query
heads of a group, k size of a query and key, u size of a value. In a cache: m sentences, n = b / m beams of each,
e entries, q = n·t·r queries that attend to the keys of one sentence and group.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PyTree

from jformer.models.cache import KeyValue
from jformer.models.layers.dot_product import attend, attend_few_queries, attend_in_chunks, attend_in_slices
from jformer.models.layers.dropout import DropoutKey, Site, dropout, place_words
from jformer.models.layers.initializers import kernel_init
from jformer.models.layers.kernels import ROWS, Call, attend_cudnn, attend_splash, choose_kernel, known_length
from jformer.models.layers.linear import Dense
from jformer.models.layers.matmul import matmul
from jformer.models.layers.positions import apply_rotary
from jformer.models.layers.row_kernel import SAVED, attend_rows
from jformer.models.layers.transformer_xl import Distances
from jformer.models.layers.visibility import Visibility
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import (
    COLUMN,
    ROW,
    heads_to_positions,
    manual_parts,
    own_heads,
    parts,
    positions_to_heads,
)
from jformer.parallel.backend import target
from jformer.parallel.mesh import FSDP, SEQUENCE, TENSOR


class Attention(nn.Module):
    """Multi-head attention with separate key and value sizes (Vaswani et al. 2017, section 3.2.2)."""

    config: ModelConfig
    site: Site  # of the dropout of weights
    layers: int = 1  # of the stack, and DeepNorm's beta: for initial kernels
    beta: float = 1.0

    def setup(self) -> None:
        """Make the four projections; each kernel is 2-D, its heads side by side."""
        c = self.config
        self.q = self.projection(c.num_heads * c.key_size, "query", COLUMN)
        self.k = self.projection(c.kv_heads * c.key_size, "key", COLUMN)
        self.v = self.projection(c.kv_heads * c.value_size, "value", COLUMN)
        self.o = self.projection(c.d_model, "output", ROW)
        if c.positions == "transformer_xl" and self.site == Site.SELF_WEIGHTS:
            self.distance = Distances(c, self.layers)

    def projection(self, size: int, role: str, split: str) -> Dense:
        """Build one projection; the devices of a mesh share its heads."""
        c = self.config
        return Dense(size, kernel_init(c, role, self.layers, self.beta), c.bias, split=split)

    def rotary(self, x: Float[Array, "b t g k"], positions: Int[Array, "b t"] | None) -> Float[Array, "b t g k"]:
        """Rotate queries or keys by their positions, where positions are rotary."""
        return x if positions is None or self.config.positions != "rotary" else apply_rotary(x, positions)

    def queries(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"] | None,
        product: Float[Array, "b t _"] | None = None,
    ) -> Float[Array, "b t h k"]:
        """Project queries; with positions, rotary ones are rotated. `product` is that of x, if known."""
        q = self.q(x, product).reshape(*x.shape[:-1], self.config.num_heads, -1)  # [b t h·k] → [b t h k]
        return self.rotary(q, positions)

    def project_kv(
        self,
        y: Float[Array, "b s d"],
        positions: Int[Array, "b s"] | None = None,
        products: Sequence[Float[Array, "b s _"] | None] = (None, None),
    ) -> KeyValue:
        """Project keys and values; with positions, rotary keys are rotated. `products` are those of y, if known."""
        heads = (*y.shape[:-1], self.config.kv_heads, -1)
        k = self.k(y, products[0]).reshape(heads)  # [b s g·k] → [b s g k]
        v = self.v(y, products[1]).reshape(heads)
        return {"k": self.rotary(k, positions), "v": v}

    def __call__(
        self,
        x: Float[Array, "b t d"],
        kv: KeyValue,
        visible: Visibility,
        positions: Int[Array, "b t"] | None = None,
        bias: Float[Array, "#b _ _ _"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "b t d"]:
        """Attend from x to keys and values. Where intermediates are collected, sow the weights and their mask.

        If `sequence` splits positions, a device holds part of x and kv, and attends over whole rows with some heads.

        Args:
            x: the hidden states that queries are projected from.
            kv: the keys and values that they attend to, from `project_kv`, or `project_self` with x's queries.
            visible: which keys of whole rows each query may attend to.
            positions: of x, if it attends to itself; for rotary positions.
            bias: of positions [#b h t s] of whole rows and this device's heads, added to the scores.
            dropout_key: the key of the dropout of weights; None = no dropout.
        """
        c = self.config
        heads = jnp.arange(c.num_heads)[own_heads(c.num_heads, c.kv_heads)]

        q, scale = kv["q"] if "q" in kv else self.queries(x, positions), c.query_scale
        if positions is not None and c.positions == "transformer_xl":
            q, bias = self.distance(q)  # a bias of its own: for other schemes, the stack makes it
        q = positions_to_heads(q, c.kv_heads)
        kv = {"k": positions_to_heads(kv["k"], c.kv_heads), "v": positions_to_heads(kv["v"], c.kv_heads)}
        keys = kv["k"].shape[1]
        drop_weights = Partial(functools.partial(_drop, c.attention_dropout, self.site, keys), dropout_key, heads)
        call = Call(
            q.dtype.name,
            known_length(q.shape[1]),
            known_length(keys),
            rule=visible.rule,
            biased=bias is not None,
            drops=dropout_key is not None and c.attention_dropout > 0,
            shows=self.is_mutable_collection("intermediates"),
            tensor=parts(TENSOR),
            arrays=known_length(q.shape[0]) * q.shape[2] // parts(FSDP, TENSOR) or 1,
        )
        choice = choose_kernel(c, target(), call)
        if choice.kernel == "splash":  # chosen only without bias and dropout
            return self._attend_on_tpu(functools.partial(attend_splash, scale=scale), q, kv, visible)
        if choice.kernel == ROWS:
            words = None
            if dropout_key is not None and call.drops:
                words = place_words(dropout_key, self.site, (heads, jnp.arange(q.shape[1])))
            attend_row = functools.partial(attend_rows, scale=scale, rate=c.attention_dropout)
            return self._attend_on_tpu(attend_row, q, kv, visible, bias, words)
        if choice.kernel == "cudnn":
            values = attend_cudnn(q, kv, visible, bias, scale)
        elif choice.kernel == "chunked":
            values = attend_in_chunks(q, kv, visible, bias, scale, drop_weights, choice.chunk)
        elif choice.kernel == "sliced":
            values = attend_in_slices(q, kv, visible, bias, scale, drop_weights, choice.chunk)
        else:
            mask = visible.mask()
            values, weights = attend(q, kv, mask, bias, scale, drop_weights)
            self.sow("intermediates", "weights", weights)
            self.sow("intermediates", "mask", mask)
        return self._project(values)

    def _project(self, values: Float[Array, "b t e u"]) -> Float[Array, "b p d"]:
        """Project the values that queries have attended to."""
        values = heads_to_positions(values, self.config.num_heads, self.config.kv_heads)
        if manual_parts(SEQUENCE) > 1:  # sent between devices, which `_attend_on_tpu` does not do twice
            values = checkpoint_name(values, SAVED)
        return self.o(values.reshape(*values.shape[:2], -1))  # [b p h u] → [b p h·u]

    def _attend_on_tpu(
        self, attend: Callable[..., Array], q: Float[Array, "b t h k"], kv: KeyValue, *others: PyTree
    ) -> Float[Array, "b p d"]:
        """Attend in a fused kernel of TPUs and project, saving no array twice for the backward pass.

        A kernel would save its arrays as [b h t k], whose last axis TPUs pad to 128, beside the projections
        [b t h·k]. Here only the projections are saved, in the order in which the kernel reads them. Of the kernel's
        output and the input of `o`, its transpose, only the first is saved.
        """
        arrays = q, kv["k"], kv["v"]

        def project(self: Attention, flat: Sequence[Array], *others: PyTree) -> Array:
            q, k, v = (x.reshape(like.shape) for x, like in zip(flat, arrays, strict=True))
            return self._project(attend(q, {"k": k, "v": v}, *others))

        flat = [x.reshape(*x.shape[:2], -1) for x in arrays]
        policy = jax.checkpoint_policies.save_only_these_names(SAVED)
        return nn.remat(project, policy=policy, prevent_cse=False)(self, flat, *others)

    def project_for_cache(
        self, y: Float[Array, "b t d"], m: int, positions: Int[Array, "b t"] | None = None
    ) -> KeyValue:
        """Project keys and values to the layout of a cache of m sentences: token by token, beams side by side."""
        kv = self.project_kv(y, positions)
        k = kv["k"].reshape(m, -1, *kv["k"].shape[1:])  # [b t g k] → [m n t g k]
        v = kv["v"].reshape(m, -1, *kv["v"].shape[1:])
        k = jnp.einsum("mntgk->mgktn", k)
        v = jnp.einsum("mntgu->mgtnu", v)
        k = k.reshape(*k.shape[:3], -1)  # → [m g k e]
        v = v.reshape(*v.shape[:2], -1, v.shape[-1])  # → [m g e u]
        return {"k": k, "v": v}

    def attend_cached(
        self,
        x: Float[Array, "b t d"],
        cached_kv: KeyValue,
        mask: Bool[Array, " m _ e"] | None,
        positions: Int[Array, "b t"] | None = None,
        bias: Float[Array, "b h t e"] | None = None,
        distance: Int[Array, "b t e"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t e"]]:
        """Attend from the beams of each sentence to its cache; also return the mean weights of the heads.

        Args:
            x: the hidden states of new tokens.
            cached_kv: keys [m g k e] and values [m g e u], including those of the new tokens.
            mask: one row for each of a sentence's n·t queries, beam by beam, or one for all; None = everything.
            positions, bias: those of `__call__`.
            distance: from queries to entries, for the positions of Transformer-XL.
        """
        b, t, _ = x.shape
        m, g = cached_kv["k"].shape[:2]
        n, r = b // m, self.config.num_heads // g
        q = self.queries(x, positions)  # [b t h k]
        q, bias = (q, bias) if distance is None else self.distance.of_entries(q, distance)
        q = q.reshape(m, n * t, g, r, -1).swapaxes(1, 2)  # → [m n·t g r k] → [m g n·t r k]
        q = q.reshape(m, g, n * t * r, -1)  # → [m g q k]
        if bias is not None:
            bias = bias.reshape(m, n, g, r, t, -1)  # [b h t e] → [m n g r t e]
            bias = bias.transpose(0, 2, 1, 4, 3, 5)  # → [m g n t r e]
            bias = bias.reshape(m, g, n * t * r, -1)  # → [m g q e]
        if mask is not None:  # [m n·t e] → [m q e] → [m 1 q e]
            mask = (jnp.repeat(mask, r, axis=1) if mask.shape[1] > 1 else mask)[:, None]
        values, weights = attend_few_queries(q, cached_kv, mask, bias, self.config.query_scale)
        values = values.reshape(m, g, n * t, r, -1)  # [m g q u] → [m g n·t r u]
        values = values.swapaxes(1, 2)  # → [m n·t g r u]
        values = values.reshape(b, t, -1)  # → [b t h·u]
        weights = weights.reshape(m, g, n * t, r, -1)  # [m g q e] → [m g n·t r e]
        weights = weights.mean((1, 3))  # → [m n·t e]
        return self.o(values), weights.reshape(b, t, -1)


def project_self(attention: Attention, x: Float[Array, "b t d"], positions: Int[Array, "b t"]) -> KeyValue:
    """Project what self-attention needs; on GPUs in one product, so that its gradient is one product, too.

    XLA joins the three forward, but not backward, where it writes and adds three gradients of x. A subclass may project
    differently, and shares of a kernel over `tensor` are not contiguous.
    """
    alone = target().platform != "gpu" or parts(TENSOR) > 1 or attention.is_initializing()
    if alone or type(attention) is not Attention:
        return attention.project_kv(x, positions)
    kernels: list[Array] = [each.get_variable("params", "kernel") for each in (attention.q, attention.k, attention.v)]
    ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels))
    q, *kv = jnp.split(matmul(x, jnp.concatenate(kernels, axis=1), COLUMN), ends[:-1], axis=-1)
    return {"q": attention.queries(x, positions, q), **attention.project_kv(x, positions, kv)}


def _drop(
    rate: float,
    site: Site,
    keys: int,
    key: DropoutKey | None,
    heads: Array,
    weights: Array,
    first: int | Int[Array, ""],
    first_key: int = 0,
) -> Array:
    return dropout(weights, rate, key, site, (heads, first + jnp.arange(weights.shape[2])), (first_key, keys))
