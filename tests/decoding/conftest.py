"""A model for searches: next-token logits are the sum of what every earlier token of the sentence says about them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.rules import Rules
from jformer.decoding.search import SearchLoop, Start

PAD, BOS, EOS, VOCABULARY, LENGTH = 0, 1, 2, 5, 6


@dataclasses.dataclass(frozen=True)
class Toy:
    """`table[sentence, position, token]` are the logits that a token at a position adds from then on."""

    table: np.ndarray

    def log_probs(self, sentence: int, prefix: tuple[int, ...]) -> np.ndarray:
        """Return the log-probabilities of the token after `prefix`, in float64."""
        logits = sum(self.table[sentence, i, token].astype(np.float64) for i, token in enumerate((BOS, *prefix)))
        return logits - np.logaddexp.reduce(logits)

    def score(self, sentence: int, tokens: tuple[int, ...]) -> float:
        """Return the summed log-probability of a hypothesis."""
        return sum(self.log_probs(sentence, tokens[:i])[token] for i, token in enumerate(tokens))

    def search(
        self, function: Callable, max_lengths: list[int], rules: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Run a search over this model, compiled once for the same options that are not arrays."""
        (rule_arrays, rules), (arrays, options) = split(rules or {}), split(options)
        run = compiled(function, tuple(sorted(options.items())), tuple(sorted(rules.items())))
        return jax.tree.map(np.asarray, run(self.table, jnp.asarray(max_lengths), arrays, rule_arrays))

    def steps(self, function: Callable, max_lengths: list[int], **options: Any) -> int:
        """Count the steps of a search."""
        calls = []

        def counted(step, cache, *arguments):
            def spy(cache, last):
                jax.debug.callback(lambda: calls.append(1))
                return step(cache, last)

            return function(spy, cache, *arguments)

        self.search(counted, max_lengths, **options)
        jax.effects_barrier()
        return len(calls)


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part the arrays from the rest."""
    arrays = {key: value for key, value in options.items() if hasattr(value, "shape")}
    return arrays, {key: value for key, value in options.items() if key not in arrays}


def search_arguments(options: dict[str, Any]) -> list[Any]:
    """Return what a search takes beside a start and rules: options, and keys of samples; nothing for greedy search."""
    if "size" in options:
        others = [options.pop("constraints", None), options.pop("coverage", None)]
        names = {"size": "beam_size", "groups": "beam_groups"}
        plain = {"length_penalty": 0.0, "diversity": 0.0, **{names.get(key, key): options[key] for key in options}}
        return [DecodeConfig(**plain), *others]
    if "keys" in options:
        keys = options.pop("keys")
        return [DecodeConfig(**options), keys]
    return []


@functools.cache
def compiled(function: Callable, options: tuple, rules: tuple) -> Callable:
    """Return jit of a search over the toy model."""

    def step(cache, last):
        position, history, table = cache["position"], cache["self"]["history"], cache["memory"]["table"]
        rows = jnp.arange(position.shape[0])
        history = history.at[rows, position].set(last)
        said = table[(rows // (len(rows) // len(table)))[:, None], jnp.arange(LENGTH), history]
        past = jnp.arange(LENGTH) <= position[:, None]
        logits = jnp.where(past[..., None], said, 0).sum(1)
        return logits, {**cache, "position": position + 1, "self": {"history": history}}

    def run(table, limits, arrays, rule_arrays):
        rows = len(arrays["keys"]) if "keys" in arrays else len(table) * dict(options).get("size", 1)
        history = jnp.zeros((rows, LENGTH), jnp.int32)
        cache = {"position": jnp.zeros(rows, jnp.int32), "self": {"history": history}}
        cache["memory"] = {"table": table}
        fixed = {key: np.array(value) if key == "allowed" else value for key, value in rules}
        own = {**dict(options), **arrays}
        start = Start(jnp.full(len(table), BOS), limits, LENGTH, own.pop("max_unfinished", 0))
        found = function(step, cache, start, Rules(EOS, PAD, **fixed, **rule_arrays), *search_arguments(own))
        return found.run() if isinstance(found, SearchLoop) else found

    return jax.jit(run)


@pytest.fixture
def toy() -> Callable[..., Toy]:
    """Draw a model: toy(seed, sentences, scale)."""

    def draw(seed: int, sentences: int, scale: float = 1.0) -> Toy:
        shape = sentences, LENGTH, VOCABULARY, VOCABULARY
        return Toy(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32))

    return draw
