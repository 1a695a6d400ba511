"""Who may attend to whom: the places of queries and keys, and the rule between them.

Code that needs a dense mask makes it from a `Visibility`, for as many queries as it processes at a time. A new kind of
attention is a field of `Rule` and a line of `may_attend`; kernels that do not support a rule are not chosen.

Axes: b rows, t query positions, s key positions.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jformer.models.model_config import ModelConfig


class TokenPlaces(NamedTuple):
    """The place of each token of a row."""

    segments: Int[Array, "b t"]  # its text: 1, 2, … for texts that share a row; 0 is padding, which no query sees
    positions: Int[Array, "#b t"]  # its order within its text
    prefix: Bool[Array, "b t"] | None = None  # optional: whether it is in the prefix, which its whole text sees


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which keys of its own text a query sees. Programs and kernels are chosen by it, so it is hashable."""

    causal: bool = False  # none that come later
    window: int = 0  # none at this distance or beyond; 0 = at any
    prefix: bool = False  # but all of the prefix of its text


def self_attention_rule(config: ModelConfig, causal: bool) -> Rule:
    """Return the rule of a stack's self-attention. Cross-attention sees the whole source: `Rule()`."""
    return Rule(causal, config.window)


def shown_at(distance: Int[Array, "*a"], rule: Rule) -> Bool[Array, "*a"] | bool:
    """Return whether a rule shows a key at a distance after the query, regardless of prefixes."""
    shown: Any = distance <= 0 if rule.causal else True
    return shown & (abs(distance) < rule.window) if rule.window else shown


def may_attend(query: TokenPlaces, key: TokenPlaces, rule: Rule) -> Bool[Array, "b t s"]:
    """Return which keys each query may attend to: those of its own text, without padding, that the rule shows."""
    segments = key.segments[:, None]  # [b 1 s]
    visible = (query.segments[..., None] == segments) & (segments > 0)  # → [b t s]
    shown = shown_at(key.positions[:, None] - query.positions[..., None], rule)  # [#b t s]
    if rule.prefix and key.prefix is not None:
        shown |= key.prefix[:, None]
    return visible & shown


@functools.partial(jax.tree_util.register_dataclass, data_fields=["query", "key"], meta_fields=["rule", "one_text"])
@dataclasses.dataclass(frozen=True)
class Visibility:
    """Queries, keys and the rule between them, from which code that needs a dense mask makes one."""

    query: TokenPlaces
    key: TokenPlaces
    rule: Rule = Rule()
    one_text: bool = False  # whether every row is known to hold one text, from its first position

    def lengths(self) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
        """Return each row's number of positions that are not padding, of queries and of keys; 1 if empty."""
        query, key = ((place.segments > 0).sum(1, dtype=jnp.int32) for place in (self.query, self.key))
        return jnp.maximum(query, 1), jnp.maximum(key, 1)

    def mask(self) -> Bool[Array, "b 1 t s"]:
        """Return the dense mask, the same for every head; True = may attend."""
        return may_attend(self.query, self.key, self.rule)[:, None]
