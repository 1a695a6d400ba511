"""Learning-rate schedules and the optimizer. What an update does with them is said in `step`."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jformer.config.options import Config, OptimConfig
from jformer.errors import UserError
from jformer.models import init_params
from jformer.parallel.sharding import parameter_names

Schedule = Callable[[Any], Any]
"""Updates applied so far → learning rate of the next one."""

# Of Adam's peak times sqrt(d_model). The recipes in configs/ lie below (Multi30k's is 0.057, that of 2017 is 0.016); a
# run at 0.1 ended in a model that says one word.
USUAL_PEAK = 0.06


class Course(NamedTuple):
    """What the course of a learning rate depends on."""

    warmup: int  # updates
    num_steps: int
    d_model: int
    decay: int = 0  # updates at the end of a warmup_stable_decay
    final_rate: float = 0.0  # just after the last update, as a share of the peak


def _noam(s: Any, course: Course) -> Any:
    """Vaswani et al. 2017, equation 3."""
    slope = max(course.warmup, 1) ** -1.5
    return course.d_model**-0.5 * jnp.minimum((s + 1.0) ** -0.5, (s + 1.0) * slope)


def _inverse_square_root(s: Any, course: Course) -> Any:
    """Noam's shape, with its peak at the learning rate."""
    return _ramp(s, course) * _t5(s, course)


def _t5(s: Any, course: Course) -> Any:
    """Raffel et al. 2020, section 3.1.2: the peak for `warmup` updates, then the inverse square root."""
    flat = max(course.warmup, 1)
    return jnp.sqrt(flat / jnp.maximum(s + 1.0, flat))


def _constant(s: Any, course: Course) -> Any:
    return _ramp(s, course)


def _cosine(s: Any, course: Course) -> Any:
    """Loshchilov and Hutter 2017, one period."""
    progress = _progress(s, course, course.num_steps - course.warmup)
    return _ramp(s, course) * _towards(course.final_rate, 0.5 * (1 + jnp.cos(jnp.pi * progress)))


def _linear(s: Any, course: Course) -> Any:
    return _ramp(s, course) * _towards(course.final_rate, 1 - _progress(s, course, course.num_steps - course.warmup))


def _warmup_stable_decay(s: Any, course: Course) -> Any:
    """Hu et al. 2024, section 4.1, with a linear decay."""
    return _ramp(s, course) * _towards(course.final_rate, 1 - _progress(s, course, course.decay))


def _ramp(s: Any, course: Course) -> Any:
    """Rise from 1/warmup at the first update to 1 at number `warmup`."""
    return jnp.minimum((s + 1.0) / max(course.warmup, 1), 1.0)


def _progress(s: Any, course: Course, updates: int) -> Any:
    """Go from 0 to 1, which is just after the last update, so that every one of the last `updates` moves."""
    return jnp.clip((s + 1.0 - (course.num_steps - updates)) / (updates + 1), 0.0, 1.0)


def _towards(final: float, factor: Any) -> Any:
    """Return what goes from 1 to `final` as a factor goes from 1 to 0."""
    return final + (1 - final) * factor


SCHEDULES: dict[str, Callable[[Any, Course], Any]] = {
    "noam": _noam,
    "inverse_square_root": _inverse_square_root,
    "t5": _t5,
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "warmup_stable_decay": _warmup_stable_decay,
}
"""Name → (updates applied so far, course) → factor of the learning rate."""


def make_schedule(name: str, learning_rate: float, course: Course) -> Schedule:
    """Return the named schedule; all of them but t5 warm up linearly."""
    return lambda s: learning_rate * SCHEDULES[name](s, course)


def schedule_line(config: Config, schedule: Schedule) -> str:
    """Say in one line how the learning rate of a run goes, what its peak is, and whether that is out of the usual."""
    options, last, warmup = config.optim, config.train.num_steps, config.warmup_steps()
    highest = min(max(warmup, 1), last)
    peak, end = (float(schedule(step - 1)) for step in (highest, last))
    line = f"learning rate: {options.schedule}, {peak:.3g} at update {highest:,}, {end:.3g} at update {last:,}"
    if warmup > last:
        line += f"; the warm-up of {warmup:,} updates does not end before the run"
    if options.optimizer in ("adam", "adamw") and peak * config.model.scale_width**0.5 > USUAL_PEAK:
        usual = USUAL_PEAK * config.model.scale_width**-0.5
        line += f"; that peak is high: up to {usual:.2g} is usual for {options.optimizer} at this width"
    return line


class Optimizer(NamedTuple):
    """What turns gradients into updates of the parameters of one model."""

    schedule: Schedule
    transform: optax.GradientTransformation
    frozen: Any  # a tree of booleans, True for parameters that stay as they are; None if all are trained


def build_optimizer(config: Config, model: Any) -> Optimizer:
    """Return the optimizer of a run."""
    schedule = build_schedule(config)
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    frozen = frozen_parameters(shapes, config.train.freeze)
    return Optimizer(schedule, make_optimizer(config.optim, schedule, frozen, config.model.widening), frozen)


def build_schedule(config: Config) -> Schedule:
    """Return the learning-rate schedule of a run."""
    course = Course(
        warmup=config.warmup_steps(),
        num_steps=config.train.num_steps,
        d_model=config.model.scale_width,
        decay=config.decay_steps(),
        final_rate=config.optim.final_rate,
    )
    return make_schedule(config.optim.schedule, config.optim.learning_rate, course)


def frozen_parameters(params: Any, patterns: Sequence[str]) -> Any:
    """Mark the parameters (arrays or shapes) whose names one of the regular expressions matches; None without any.

    Raise UserError for a pattern that matches no parameter, or patterns that leave none to train.
    """
    if not patterns:
        return None
    names = parameter_names(params)
    for pattern in patterns:
        if not any(re.search(pattern, path) for path in jax.tree.leaves(names)):
            examples = ", ".join(sorted(jax.tree.leaves(names))[:3])
            raise UserError(f"train.freeze={pattern!r} matches no parameter; their names are like {examples}")
    frozen = jax.tree.map(lambda path: any(re.search(pattern, path) for pattern in patterns), names)
    if all(jax.tree.leaves(frozen)):
        raise UserError(f"train.freeze={tuple(patterns)} freezes every parameter; leave something to train")
    return frozen


def make_optimizer(
    options: OptimConfig, schedule: Schedule, frozen: Any = None, widening: float = 1.0
) -> optax.GradientTransformation:
    """Chain clipping by global norm (0 = off) and the named optimizer; frozen parameters stay as they are.

    Gradients of frozen parameters do not count in the norm. `widening` is that of maximal update parametrization.
    """
    core = OPTIMIZERS[options.optimizer](schedule, options, widening)
    chain = optax.chain(optax.clip_by_global_norm(options.clip_norm), core) if options.clip_norm else core
    if frozen is None:
        return chain
    labels = jax.tree.map(lambda fixed: "frozen" if fixed else "trained", frozen)
    return optax.multi_transform({"trained": chain, "frozen": optax.set_to_zero()}, labels)


def _adam(schedule: Schedule, options: OptimConfig, widening: float) -> optax.GradientTransformation:
    return optax.chain(_direction(options, widening), optax.scale_by_learning_rate(schedule))


def _adamw(schedule: Schedule, options: OptimConfig, widening: float) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(options.weight_decay, decayed)
    return optax.chain(_direction(options, widening), decay, optax.scale_by_learning_rate(schedule))


def _direction(options: OptimConfig, widening: float) -> optax.GradientTransformation:
    """Return Adam's updates before the learning rate; with mup those of kernels are divided by the widening."""
    adam = optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.epsilon)
    return adam if widening == 1 else optax.chain(adam, optax.stateless(lambda u, _: divide_kernels(u, widening)))


def divide_kernels(updates: Any, widening: float) -> Any:
    """Divide the updates of what grows with the width on both sides (Yang et al. 2022, Table 3): all kernels."""
    names = parameter_names(updates)
    return jax.tree.map(lambda path, u: u / widening if path.endswith("kernel") else u, names, updates)


def _adafactor(schedule: Schedule, options: OptimConfig, widening: float) -> optax.GradientTransformation:
    return per_layer(optax.adafactor(schedule))


OPTIMIZERS: dict[str, Callable[[Schedule, OptimConfig, float], optax.GradientTransformation]] = {
    "adam": _adam,  # Kingma and Ba 2015
    "adamw": _adamw,  # Loshchilov and Hutter 2019
    "adafactor": _adafactor,  # Shazeer and Stern 2018; reads only the learning rate
}


def decayed(params: Any) -> Any:
    """Mark what weight decay shrinks: matrices, not biases and norm scales."""
    return jax.tree.map(lambda path: path.endswith(("kernel", "embedding")), parameter_names(params))


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let a transform that looks at whole parameters see one layer at a time of those stacked under 'block'.

    Factored moments, update clipping and parameter scale of Adafactor are statistics of a matrix; taken over a
    stack of layers they would mix all of them.
    """

    def apply(function: Callable[..., Any], path: str, *leaves: Any) -> Any:
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
