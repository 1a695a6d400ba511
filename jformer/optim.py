"""Learning-rate schedules with warmup, the optimizer chain, and averages of parameters."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jformer.errors import UserError

Schedule = Callable[[Any], Any]
"""Updates applied so far → learning rate of the next one."""


def _noam(rate: float, warmup: int, num_steps: int, d_model: int) -> Schedule:
    return lambda s: rate * d_model**-0.5 * jnp.minimum((s + 1.0) ** -0.5, (s + 1.0) * max(warmup, 1) ** -1.5)


def _inverse_square_root(rate: float, warmup: int, num_steps: int, d_model: int) -> Schedule:
    return lambda s: _ramp(s, warmup) * rate * jnp.sqrt(max(warmup, 1) / jnp.maximum(s + 1.0, max(warmup, 1)))


def _cosine(rate: float, warmup: int, num_steps: int, d_model: int) -> Schedule:
    return lambda s: _ramp(s, warmup) * rate * 0.5 * (1 + jnp.cos(jnp.pi * _progress(s, warmup, num_steps)))


def _linear(rate: float, warmup: int, num_steps: int, d_model: int) -> Schedule:
    return lambda s: _ramp(s, warmup) * rate * (1 - _progress(s, warmup, num_steps))


def _constant(rate: float, warmup: int, num_steps: int, d_model: int) -> Schedule:
    return lambda s: _ramp(s, warmup) * rate


def _ramp(s: Any, warmup: int) -> Any:
    """Rise from 1/warmup at the first update to 1 at number `warmup`."""
    return jnp.minimum((s + 1.0) / max(warmup, 1), 1.0)


def _progress(s: Any, warmup: int, num_steps: int) -> Any:
    """Go from 0 at the end of the warmup to 1 just after the last update, so that every update moves."""
    return jnp.clip((s + 1.0 - warmup) / (num_steps - warmup + 1), 0.0, 1.0)


SCHEDULES: dict[str, Callable[[float, int, int, int], Schedule]] = {
    "noam": _noam,  # Vaswani et al. 2017, equation 3, times learning_rate
    "inverse_square_root": _inverse_square_root,  # noam's shape with its peak at learning_rate
    "cosine": _cosine,  # Loshchilov and Hutter 2017, one period, to 0 just after num_steps
    "linear": _linear,  # to 0 just after num_steps
    "constant": _constant,
}


def make_schedule(name: str, learning_rate: float, warmup_steps: int, num_steps: int, d_model: int) -> Schedule:
    """Return the named schedule; all of them warm up linearly over `warmup_steps` updates."""
    return SCHEDULES[name](learning_rate, warmup_steps, num_steps, d_model)


def _adam(schedule: Schedule, b1: float, b2: float, epsilon: float, weight_decay: float) -> Any:
    return optax.adam(schedule, b1=b1, b2=b2, eps=epsilon)


def _adamw(schedule: Schedule, b1: float, b2: float, epsilon: float, weight_decay: float) -> Any:
    return optax.adamw(schedule, b1=b1, b2=b2, eps=epsilon, weight_decay=weight_decay, mask=decayed)


def _adafactor(schedule: Schedule, b1: float, b2: float, epsilon: float, weight_decay: float) -> Any:
    return per_layer(optax.adafactor(schedule))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": _adam,  # Kingma and Ba 2015
    "adamw": _adamw,  # Loshchilov and Hutter 2019
    "adafactor": _adafactor,  # Shazeer and Stern 2018; reads only the learning rate
}


def make_optimizer(
    name: str,
    schedule: Schedule,
    params: Any,
    *,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    clip_norm: float,
    freeze: Sequence[str] = (),
) -> optax.GradientTransformation:
    """Chain clipping by global norm (0 = off) and the named optimizer; parameters matching `freeze` stay as they are.

    `params` gives the names only (arrays or shapes). Frozen gradients do not count in the norm. Raise UserError for
    a pattern of `freeze` that matches no parameter, or patterns that leave none to train.
    """
    core = OPTIMIZERS[name](schedule, b1, b2, epsilon, weight_decay)
    chain = optax.chain(optax.clip_by_global_norm(clip_norm), core) if clip_norm else core
    if not freeze:
        return chain
    names = parameter_names(params)
    for pattern in freeze:
        if not any(re.search(pattern, path) for path in jax.tree.leaves(names)):
            first = ", ".join(sorted(jax.tree.leaves(names))[:3])
            raise UserError(f"train.freeze={pattern!r} matches no parameter; their names are like {first}")
    labels = jax.tree.map(lambda path: "frozen" if any(re.search(p, path) for p in freeze) else "trained", names)
    if "trained" not in jax.tree.leaves(labels):
        raise UserError(f"train.freeze={tuple(freeze)} freezes every parameter; leave something to train")
    return optax.multi_transform({"trained": chain, "frozen": optax.set_to_zero()}, labels)


def parameter_names(params: Any) -> Any:
    """Return the tree with every leaf replaced by its path, such as 'encoder/block/self_attn/q/kernel'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )


def decayed(params: Any) -> Any:
    """Mark what weight decay pulls on: matrices, not biases and norm scales."""
    return jax.tree.map(lambda path: path.endswith(("kernel", "embedding")), parameter_names(params))


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let a transform that looks at whole parameters see one layer at a time of those stacked under 'block'.

    Factored moments, update clipping and parameter scale of Adafactor are statistics of a matrix; taken over a
    stack of layers they would mix all of them.
    """

    def apply(function: Callable, path: str, *leaves: Any) -> Any:
        return jax.vmap(function)(*leaves) if "/block/" in path else function(*leaves)

    def init(params: Any) -> Any:
        return jax.tree.map(lambda path, p: apply(tx.init, path, p), parameter_names(params), params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        names = parameter_names(updates)
        treedef: Any = jax.tree.structure(names)
        columns = [treedef.flatten_up_to(tree) for tree in (names, updates, state, params)]
        results = [apply(tx.update, *leaves) for leaves in zip(*columns, strict=True)]
        return treedef.unflatten([u for u, _ in results]), treedef.unflatten([s for _, s in results])

    return optax.GradientTransformation(init, update)


def average(trees: Iterable[Any]) -> Any:
    """Return the mean of several parameter trees, summed in float32 where they lie, one held at a time."""
    total, count = None, 0
    for tree in trees:
        total = tree if total is None else jax.tree.map(jnp.add, total, tree)
        count += 1
    return jax.tree.map(lambda x: x / jnp.float32(count), total)
