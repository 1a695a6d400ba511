"""Learning-rate schedules and the optimizer. `step` applies them."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jformer import plugins
from jformer.config.options import OPEN_SCHEDULES, OptimConfig
from jformer.errors import UserError
from jformer.models import param_shapes
from jformer.models.flops import Frozen, frozen_parts
from jformer.models.model import Model
from jformer.models.parts import in_stacks
from jformer.parallel.sharding import named_leaves, parameter_names
from jformer.tasks.sums import Scalar

Count = int | Array  # updates applied so far
Schedule = Callable[[Count], Scalar]
"""Updates applied so far → learning rate of the next one."""

# The highest usual peak of Adam times sqrt(d_model). Transformers in configs/ are below it (Multi30k's has 0.057, that
# of 2017 has 0.016); a run at 0.1 collapsed to a model that outputs a single word.
USUAL_PEAK = 0.06

KEPT = 16  # optimizers, cached by key


class ScheduleParams(NamedTuple):
    """The parameters of a learning-rate schedule."""

    warmup: int  # updates
    num_steps: int
    d_model: int
    decay: int = 0  # updates at the end of a warmup_stable_decay
    final_rate: float = 0.0  # just after the last update, as a share of the peak


def _noam(step: Count, params: ScheduleParams) -> Array:
    """Vaswani et al. 2017, equation 3."""
    slope = max(params.warmup, 1) ** -1.5
    return params.d_model**-0.5 * jnp.minimum((step + 1.0) ** -0.5, (step + 1.0) * slope)


def _inverse_square_root(step: Count, params: ScheduleParams) -> Array:
    """Noam's shape, with its peak at the learning rate."""
    return _warmup_factor(step, params) * _t5(step, params)


def _t5(step: Count, params: ScheduleParams) -> Array:
    """Raffel et al. 2020, section 3.1.2: the peak for `warmup` updates, then the inverse square root."""
    flat = max(params.warmup, 1)
    return jnp.sqrt(flat / jnp.maximum(step + 1.0, flat))


def _cosine(step: Count, params: ScheduleParams) -> Array:
    """Loshchilov and Hutter 2017, one period."""
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * _decay_progress(step, params, params.num_steps - params.warmup)))
    return _warmup_factor(step, params) * _interpolate_to_final(params.final_rate, cosine)


def _linear(step: Count, params: ScheduleParams) -> Array:
    line = 1 - _decay_progress(step, params, params.num_steps - params.warmup)
    return _warmup_factor(step, params) * _interpolate_to_final(params.final_rate, line)


def _warmup_stable_decay(step: Count, params: ScheduleParams) -> Array:
    """Hu et al. 2024, section 4.1, with a linear decay."""
    line = 1 - _decay_progress(step, params, params.decay)
    return _warmup_factor(step, params) * _interpolate_to_final(params.final_rate, line)


def _warmup_factor(step: Count, params: ScheduleParams) -> Array:
    """Rise from 1/warmup at the first update to 1 at number `warmup`."""
    return jnp.minimum((step + 1.0) / max(params.warmup, 1), 1.0)


def _decay_progress(step: Count, params: ScheduleParams, updates: int) -> Array:
    """Rise from 0 to 1, reached just after the last update, so that the rate changes at each of the last `updates`."""
    return jnp.clip((step + 1.0 - (params.num_steps - updates)) / (updates + 1), 0.0, 1.0)


def _interpolate_to_final(final_rate: float, factor: Array) -> Array:
    """Interpolate linearly between `final_rate` (factor 0) and 1 (factor 1)."""
    return final_rate + (1 - final_rate) * factor


SCHEDULES: dict[str, Callable[[Count, ScheduleParams], Array]] = {
    "noam": _noam,  # Vaswani et al. 2017, equation 3
    "inverse_square_root": _inverse_square_root,
    "t5": _t5,  # Raffel et al. 2020, section 3.1.2
    "constant": _warmup_factor,
    "cosine": _cosine,  # Loshchilov and Hutter 2017
    "linear": _linear,
    "warmup_stable_decay": _warmup_stable_decay,  # Hu et al. 2024, section 4.1
}
"""Name → (updates applied so far, parameters) → factor of the learning rate."""


def make_schedule(name: str, learning_rate: float, params: ScheduleParams) -> Schedule:
    """Return the named schedule; all of them but t5 warm up linearly."""
    factor = plugins.find("optim.schedule", name, SCHEDULES)
    return lambda step: learning_rate * factor(step, params)


def schedule_line(options: OptimConfig, last: int, d_model: int) -> str:
    """Describe the schedule of a run of `last` updates: learning rate at its peak and end, and warnings.

    `d_model` is `ModelConfig.scale_width`.
    """
    schedule, warmup = build_schedule(options, last, d_model), options.warmup_steps(last)
    highest = min(max(warmup, 1), last)
    peak, end = (float(schedule(step - 1)) for step in (highest, last))
    line = f"learning rate: {options.schedule}, {peak:.3g} at update {highest:,}, {end:.3g} at update {last:,}"
    if warmup > last:
        line += f"; the warm-up of {warmup:,} updates does not end within the run"
    if options.optimizer in ("adam", "adamw") and peak * d_model**0.5 > USUAL_PEAK:
        usual = USUAL_PEAK * d_model**-0.5
        line += f"; that peak is high: up to {usual:.2g} is usual for {options.optimizer} at this width"
    return line


class Optimizer(NamedTuple):
    """The optimizer of one model, and what it leaves frozen."""

    schedule: Schedule
    transform: optax.GradientTransformation
    frozen: PyTree  # a tree of booleans, True for parameters that are not trained; None if all are
    base: tuple[str, ...]  # names of the parameters that adapters leave to train.init_from: not in checkpoints
    frozen_parts: Mapping[str, Frozen]  # gradients that `frozen` saves, for `update_flops`
    keeps_finite: bool  # no gradient of finite norm makes a parameter non-finite


def build_optimizer(model: Model, options: OptimConfig, num_steps: int, freeze: Sequence[str] = ()) -> Optimizer:
    """Return the optimizer of a run of num_steps updates; it is cached, so that equal arguments share programs."""
    params = schedule_params(options, num_steps, model.config.scale_width)
    return _build_optimizer(model, options, params, tuple(freeze))


@plugins.cached(KEPT)
def _build_optimizer(model: Model, options: OptimConfig, params: ScheduleParams, freeze: Sequence[str]) -> Optimizer:
    schedule = make_schedule(options.schedule, options.learning_rate, params)
    shapes = param_shapes(model)
    sizes = {name: leaf.size for name, leaf in named_leaves(shapes).items()}
    _refuse_unmatched("model.lora.also", model.config.lora.also, [*sizes])
    base = tuple(name for name in sizes if not model.config.lora.trains(name))
    frozen = frozen_parameters(shapes, freeze, base)
    marked = {name for name, mark in named_leaves(frozen).items() if mark}
    transform = make_optimizer(options, schedule, frozen, model.config.mup_width_ratio)
    parts = frozen_parts(model.config, sizes, marked)
    return Optimizer(
        schedule=schedule,
        transform=transform,
        frozen=frozen,
        base=base,
        frozen_parts=parts,
        keeps_finite=keeps_finite(options),
    )


def keeps_finite(options: OptimConfig) -> bool:
    """Return whether parameters stay finite after all gradients of a finite norm.

    Such gradients are below 1.9e19 everywhere, and so is Adam's mean of them. Even without further ones, whose squares
    would divide it, Adam moves a parameter by less than its rate * 1.9e19 / epsilon / (1 - b1) in all. With these
    bounds, and a width of 1e-6 of mup's base, that is 1.9e38; float32 ends at 3.4e38.
    """
    own = options.optimizer in ("adam", "adamw") and options.schedule in SCHEDULES
    shrinks = options.learning_rate * options.weight_decay <= 1
    return own and shrinks and options.learning_rate <= 10 and options.epsilon >= 1e-10 and options.b1 <= 0.99


def build_schedule(options: OptimConfig, num_steps: int, d_model: int) -> Schedule:
    """Return the learning-rate schedule of a run of num_steps updates; `d_model` is `ModelConfig.scale_width`."""
    return make_schedule(options.schedule, options.learning_rate, schedule_params(options, num_steps, d_model))


def schedule_params(options: OptimConfig, num_steps: int, d_model: int) -> ScheduleParams:
    """Return the parameters of a run's schedule; the run's length matters only if the schedule has an end."""
    ends = options.schedule not in OPEN_SCHEDULES
    return ScheduleParams(
        warmup=options.warmup_steps(num_steps),
        num_steps=num_steps if ends else 0,
        d_model=d_model,
        decay=options.decay_steps(num_steps) if ends else 0,
        final_rate=options.final_rate,
    )


def frozen_parameters(params: PyTree, patterns: Sequence[str], base: Sequence[str] = ()) -> PyTree:
    """Mark the parameters (arrays or shapes) in `base`, or whose names a regular expression matches; None if none is.

    Raise UserError for a pattern that matches no parameter, or patterns that leave none to train.
    """
    if not patterns and not base:
        return None
    names = parameter_names(params)
    _refuse_unmatched("train.freeze", patterns, jax.tree.leaves(names))
    frozen = jax.tree.map(lambda path: path in base or any(re.search(pattern, path) for pattern in patterns), names)
    if all(jax.tree.leaves(frozen)):
        raise UserError(f"train.freeze={tuple(patterns)} freezes every parameter; leave something to train")
    return frozen


def _refuse_unmatched(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for the first pattern that matches no name of a parameter."""
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            examples = ", ".join(sorted(names)[:3])
            raise UserError(f"{key}={pattern!r} matches no parameter; their names are like {examples}")


def make_optimizer(
    options: OptimConfig, schedule: Schedule, frozen: PyTree = None, mup_width_ratio: float = 1.0
) -> optax.GradientTransformation:
    """Chain clipping by global norm (0 = off) and the named optimizer; frozen parameters are not changed.

    Gradients of frozen parameters do not count in the norm. `mup_width_ratio` is `ModelConfig.mup_width_ratio`.
    """
    core = plugins.find("optim.optimizer", options.optimizer, OPTIMIZERS)(schedule, options, mup_width_ratio)
    chain = optax.chain(optax.clip_by_global_norm(options.clip_norm), core) if options.clip_norm else core
    if frozen is None:
        return chain
    labels = jax.tree.map(lambda fixed: "frozen" if fixed else "trained", frozen)
    return optax.multi_transform({"trained": chain, "frozen": optax.set_to_zero()}, labels)


def _adam(schedule: Schedule, options: OptimConfig, mup_width_ratio: float) -> optax.GradientTransformation:
    return optax.chain(_direction(options, mup_width_ratio), optax.scale_by_learning_rate(schedule))


def _adamw(schedule: Schedule, options: OptimConfig, mup_width_ratio: float) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(options.weight_decay, weight_decay_mask)
    return optax.chain(_direction(options, mup_width_ratio), decay, optax.scale_by_learning_rate(schedule))


def _direction(options: OptimConfig, mup_width_ratio: float) -> optax.GradientTransformation:
    """Return Adam's updates before the learning rate; with mup those of kernels are divided by the ratio of widths."""
    adam = optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.epsilon)
    if mup_width_ratio == 1:
        return adam
    return optax.chain(adam, optax.stateless(lambda updates, _: divide_kernels(updates, mup_width_ratio)))


def divide_kernels(updates: PyTree, mup_width_ratio: float) -> PyTree:
    """Divide the updates of parameters whose two axes grow with the width (Yang et al. 2022, Table 3): all kernels."""
    names = parameter_names(updates)
    return jax.tree.map(lambda name, u: u / mup_width_ratio if _is_kernel(name) else u, names, updates)


def _adafactor(schedule: Schedule, options: OptimConfig, mup_width_ratio: float) -> optax.GradientTransformation:
    """Return Adafactor; it supports neither mup's rates nor weight decay, which `config.checks` refuses with it."""
    return per_layer(optax.adafactor(schedule))


OPTIMIZERS: dict[str, Callable[[Schedule, OptimConfig, float], optax.GradientTransformation]] = {
    "adam": _adam,  # Kingma and Ba 2015
    "adamw": _adamw,  # Loshchilov and Hutter 2019
    "adafactor": _adafactor,  # Shazeer and Stern 2018; reads only the rate
}


def weight_decay_mask(params: PyTree) -> PyTree:
    """Return a tree of booleans, True for parameters with weight decay: matrices, not biases and norm scales."""
    return jax.tree.map(lambda name: _is_kernel(name) or name.endswith("embedding"), parameter_names(params))


def _is_kernel(name: str) -> bool:
    return name.endswith("kernel")


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transform to each parameter on its own, and to each layer of those stacked under 'block'.

    Parameters of a stack are one array, layers first. Transforms that take statistics of a matrix (Adafactor, LAMB)
    would mix the layers, and one that looks for matrices (Muon) would take stacked biases for one. Anything that needs
    all parameters at once, such as clipping by the global norm or a mask by names, belongs outside.
    """

    def apply(function: Callable[..., Any], stacked: bool, *leaves: Any) -> Any:
        return jax.vmap(function)(*leaves) if stacked else function(*leaves)

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda stacked, p: apply(tx.init, stacked, p), in_stacks(params), params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        marks, trees = in_stacks(updates), (updates, state) if params is None else (updates, state, params)
        results = jax.tree.map(functools.partial(apply, tx.update), marks, *trees)
        first, second = (jax.tree.map(lambda _, both, i=i: both[i], marks, results) for i in (0, 1))
        return first, second

    return optax.GradientTransformation(init, update)
