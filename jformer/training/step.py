"""The update of a run, compiled: gradients over devices and microbatches, the optimizer, and the guard against NaN.

`optim` has the optimizer, `state` the state. The hand-written sum over devices is in parallel/sharding.

Letters in shapes: a microbatches of an update, b rows, · any further axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key, PyTree

from jformer.errors import UserError
from jformer.models.batch import Batch
from jformer.models.parts import in_stacks, join, split
from jformer.parallel.activations import constrain_sharding
from jformer.parallel.backend import Target, target, xla_options
from jformer.parallel.sharding import parameter_specs, replicated, state_shardings, sum_over_parts
from jformer.plugins import cached
from jformer.tasks.sums import LossFn, Scalar, Sums, sum_over_microbatches
from jformer.training.state import TrainState

AD: Any = jax.ad  # whose types lack `GradValue`
KEPT = 8  # compiled updates
# Compiler options, by platform. cuBLAS adds biases and sums of gradients within its products; Triton's cannot.
XLA_OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}


class Metrics(NamedTuple):
    """The metrics of an update, still on the devices."""

    sums: Sums
    grad_norm: Scalar  # of all parameters that are trained, before clipping
    skipped: Array  # updates so far that were not applied because they were not finite
    skipped_in_row: Array  # the most recent consecutive ones; 0 after an applied update


GradientFn = Callable[[PyTree, Batch, Key[Array, ""]], tuple[PyTree, Sums]]
"""(parameters, batch, dropout key) → the gradient of a loss by the parameters that are trained, and the sums."""

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
"""(state, batch [a b …]) → state and metrics. It is compiled, and the state is donated: do not use it afterwards."""


def trained_gradient(loss: LossFn, frozen: PyTree = None) -> Callable[..., tuple[PyTree, Sums]]:
    """Return the function that differentiates the sum of `loss` over rows [b …] with respect to the trained parameters.

    It is a `GradientFn` with an optional fourth argument, a tree like the parameters: if a leaf is a reference to an
    array, the gradient is added to that array; if it is None, the gradient is returned. Parameters that are marked in
    `frozen`, a tree of booleans, are None in the gradient; without marks all are trained.
    """

    def gradient(params: PyTree, rows: Batch, key: Key[Array, ""], added: PyTree = None) -> tuple[PyTree, Sums]:
        trained, fixed = split(params, frozen)

        def total_loss(trained: PyTree) -> tuple[Scalar, Sums]:
            sums = loss(join(trained, fixed), rows, key)
            return sums["loss"].total, sums

        pull_back: Any  # `with_refs` is not in JAX's types
        total, pull_back, sums = jax.vjp(total_loss, trained, has_aux=True)
        values = jax.tree.map(lambda _: AD.GradValue(), trained)
        places = values if added is None else join(added, values)
        (found,) = pull_back.with_refs(places)(jnp.ones_like(total))
        return jax.tree.map(lambda place, g: g if isinstance(place, AD.GradValue) else None, places, found), sums

    return gradient


def make_gradient(loss: LossFn, mesh: Mesh, frozen: PyTree = None) -> GradientFn:
    """Return the function that differentiates the mean of `loss` over a batch, as `trained_gradient` does the sum.

    Each part of the axes `data` and `sequence` differentiates the sum over its own rows and positions, a microbatch at
    a time. Gradients and sums are added over the axes in one psum and divided by the global count: never a mean of
    means, so that devices and microbatches with uneven padding are weighted correctly. They are float32, as parameters
    are. Within a part, over `fsdp` and `tensor`, the compiler inserts the collectives that the model's shardings need.

    Positions are padded to a multiple of `sequence`, which changes what attention dropout draws: a run refuses that
    (`kernel_line` of `introduction`), this function does not.

    On accelerators, each layer adds its gradients to those of earlier microbatches in place, while JAX by itself stacks
    the gradients of all layers and adds the stack in a separate pass. Tables are added whole, because XLA moves more
    bytes to scatter into a sum. So is everything on CPUs, where unrolled layers move fewer bytes that way.
    """
    differentiate = trained_gradient(loss, frozen)

    def add_up_part(params: PyTree, batch: Batch, key: Key[Array, ""]) -> tuple[PyTree, Sums]:
        """Return the gradient of the total loss of this part's rows, and the sums."""
        trained, _ = split(params, frozen)
        in_place = target().platform != "cpu" and len(jax.tree.leaves(batch)[0]) > 1
        marks = in_stacks(trained) if in_place else None
        zeros = jax.tree.map(jnp.zeros_like, split(trained, marks)[1])
        added = jax.tree.map(jax.new_ref, _shard_as_parameters(zeros))

        # All microbatches and parts share one key: random draws for a row also depend on its number in the whole update
        # (batch["row"]), so they are the same however the rows are split.
        def add(rows: Batch) -> tuple[PyTree, Sums]:
            gradient, sums = differentiate(params, rows, key, added)
            return _shard_as_parameters(gradient), sums

        gradient, sums = sum_over_microbatches(add, batch)
        return join(gradient, jax.tree.map(jax.freeze, added)), sums

    add_up = sum_over_parts(add_up_part, mesh)

    def mean_gradient(params: PyTree, batch: Batch, key: Key[Array, ""]) -> tuple[PyTree, Sums]:
        total, sums = add_up(params, batch, key)
        return mean_of(total, sums["loss"].count), sums

    return mean_gradient


def mean_of(total: PyTree, count: Float[Array, ""]) -> PyTree:
    """Return sums divided by the weights that were added up; 0 if there are none."""
    count = jnp.where(count == 0, 1.0, count)
    return jax.tree.map(lambda g: g / count, total)


def _shard_as_parameters(gradient: PyTree) -> PyTree:
    """Shard each gradient like its parameter, so that only shards of gradients are summed."""
    return jax.tree.map(lambda g, spec: constrain_sharding(g, *spec), gradient, parameter_specs(gradient))


def apply_gradient(
    tx: optax.GradientTransformation, gradient: PyTree, state: TrainState, frozen: PyTree = None
) -> tuple[PyTree, optax.OptState]:
    """Return the parameters and the optimizer's state after a gradient of `trained_gradient`.

    Frozen parameters stay as they are, even under weight decay, which needs no gradient.
    """
    gradient = join(gradient, jax.tree.map(jnp.zeros_like, split(state.params, frozen)[1]))
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    trained, _ = split(optax.apply_updates(state.params, updates), frozen)
    return join(trained, state.params), opt_state


def moving_average(average: PyTree, params: PyTree, decay: float, updates: jax.Array) -> PyTree:
    """Return the average one update later.

    At first the decay is lower, at most (1 + n) / (10 + n) after n updates, so that the average soon forgets the
    initial parameters.
    """
    rate = jnp.maximum(1 - decay, 9.0 / (10.0 + updates))

    def moved(old: jax.Array | None, new: jax.Array) -> jax.Array | None:
        return None if old is None else old + rate * (new - old)  # untrained parameters are not averaged

    return jax.tree.map(moved, average, params, is_leaf=lambda leaf: leaf is None)


def make_train_step(
    loss: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    ema_decay: float = 0.0,
    frozen: PyTree = None,
    keeps_finite: bool = False,
) -> TrainStep:
    """Return the compiled update.

    An update whose loss, gradient, new parameters or their average are not finite changes nothing but the counters.
    Programs are cached by these arguments.

    Args:
        loss: of a task joined with a model, from `make_loss`.
        tx: the optimizer, whose state the train state holds.
        mesh: over which rows are split, and parameters with mesh.fsdp.
        seed: with the number of the update, determines the masks of dropout.
        ema_decay: of the moving average, above 0 and below 1; 0.0 for a state without one.
        frozen: a tree of booleans: marked parameters have no gradient and do not count in the norm.
            None = all are trained.
        keeps_finite: that of the optimizer; True saves a pass over the new parameters that looks for NaN.
    """
    marks, tree = jax.tree.flatten(frozen)
    return _make_train_step(loss, tx, mesh, seed, ema_decay, (tuple(marks), tree), keeps_finite, target())


@cached(KEPT)
def _make_train_step(
    loss: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    ema_decay: float,
    frozen_leaves: tuple[tuple[bool, ...], jax.tree_util.PyTreeDef],
    keeps_finite: bool,
    traced_for: Target,
) -> TrainStep:
    marks, tree = frozen_leaves
    frozen = jax.tree.unflatten(tree, marks)
    mean_gradient = make_gradient(loss, mesh, frozen)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if any(array.ndim < 2 for array in jax.tree.leaves(batch)):
            raise UserError("a batch without the axis of microbatches: give array[None] for each, one microbatch")
        if state.ema is not None and not ema_decay:
            raise UserError("the state has a moving average: give make_train_step its ema_decay, such as 0.999")
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        gradient, sums = mean_gradient(state.params, batch, key)
        norm = optax.tree.norm(gradient)

        def updated(old: TrainState) -> dict[str, PyTree]:
            params, opt_state = apply_gradient(tx, gradient, old, frozen)
            ema = None if old.ema is None else moving_average(old.ema, params, ema_decay, state.step - state.skipped)
            return {"params": params, "opt_state": opt_state, "ema": ema}

        new = updated(state)
        # A finite gradient can still lead to NaN, if epsilon or the learning rate does not fit float32.
        finite = all_finite((norm, sums["loss"].total, () if keeps_finite else (new["params"], new["ema"])))
        if not keeps_finite and _computed_again(state.opt_state, split(state.params, frozen)[0]):
            new = updated(jax.lax.optimization_barrier((finite, state))[1])
        old = {"params": state.params, "opt_state": state.opt_state, "ema": state.ema}
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        skipped = state.skipped + ~finite
        in_row = jnp.where(finite, 0, state.skipped_in_row + 1)
        metrics = Metrics(sums=sums, grad_norm=norm, skipped=skipped, skipped_in_row=in_row)
        state = state.replace(step=state.step + 1, **kept, skipped=skipped, skipped_in_row=in_row)
        shardings = state_shardings(mesh, state), jax.tree.map(lambda _: replicated(mesh), metrics)
        return jax.lax.with_sharding_constraint((state, metrics), shardings)

    return jax.jit(step, donate_argnums=0, compiler_options=xla_options(XLA_OPTIONS))


def _computed_again(opt_state: optax.OptState, trained: PyTree) -> bool:
    """Return whether recomputing a new state is quicker than writing one that may not be kept.

    It is not on CPUs, nor with factored moments, which take sums over whole gradients: XLA keeps those sums, and
    repeats the rest by itself.
    """
    return target().platform != "cpu" and optax.tree.size(opt_state) >= optax.tree.size(trained)


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether no array of a tree holds a NaN or an infinity.

    The barrier makes the result one number. Without it, XLA fuses the reduction over all arrays into the kernel of each
    dependent array, so the program grows with the square of their number. XLA:CPU of JAX 0.10 ignores barriers.
    """
    return jax.lax.optimization_barrier(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all())
