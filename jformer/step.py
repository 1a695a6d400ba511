"""The compiled train and eval step: jit(shard_map(…)). The only collective by hand, a sum over `data`, is here."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jformer.losses import Sums
from jformer.placement import place
from jformer.sharding import DATA, ROWS, parameter_specs, replicated, state_shardings

LossFn = Callable[[Any, dict[str, jax.Array], jax.Array | None], Sums]
"""(parameters, batch of rows, dropout key or None) → sums; `loss` is what is differentiated."""


class TrainState(flax.struct.PyTreeNode):
    """All that a resumed run needs beside its config and data."""

    step: jax.Array  # updates tried, which is also the number of the next batch
    params: Any
    opt_state: Any
    ema: Any  # exponential moving average of the parameters, or None
    skipped: jax.Array  # updates not applied because they were not finite
    skipped_in_row: jax.Array


def create_state(params: Any, tx: optax.GradientTransformation, ema: bool) -> TrainState:
    """Return the state before the first update."""
    zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]  # three buffers: a step that reuses memory needs its own
    copy = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(
        step=zeros[0], params=params, opt_state=tx.init(params), ema=copy, skipped=zeros[1], skipped_in_row=zeros[2]
    )


def make_loss(model: Any, task: Any) -> LossFn:
    """Join a model and a task's loss; the task sees hidden states and the projection, never a model."""

    def loss(params: Any, batch: dict[str, jax.Array], key: jax.Array | None) -> Sums:
        rngs = {} if key is None else {"dropout": key}
        hidden = model.apply({"params": params}, batch, key is not None, rngs=rngs, method="hidden")
        return task.loss(hidden, lambda h: model.apply({"params": params}, h, method="logits"), batch)

    return loss


def make_gradient(loss: LossFn, mesh: Mesh) -> Callable:
    """Return (parameters, batch [a b …], key) → (sums, gradient of the global mean loss).

    The body differentiates the sum over the rows of its part of the `data` axis. Gradients and sums then meet in one
    psum and are divided by the global count: never a mean of means, so devices and microbatches with uneven padding
    count as they should. Within a part, over `fsdp` and `tensor`, the compiler exchanges what the model's placements
    ask for; every gradient is laid where its parameter lies, so that only shards of them cross the `data` axis.
    """

    def local(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Sums]:
        def objective(params: Any, rows: dict[str, jax.Array]) -> tuple[jax.Array, Sums]:
            sums = loss(params, rows, key)
            return sums["loss"][0], sums

        def differentiate(rows: dict[str, jax.Array]) -> tuple[Any, Sums]:
            gradient, sums = jax.grad(objective, has_aux=True)(params, rows)
            return jax.tree.map(lambda g, spec: place(g, *spec), gradient, parameter_specs(params)), sums

        def accumulate(total: Any, rows: dict[str, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, differentiate(rows)), None

        first, rest = jax.tree.map(lambda x: x[0], batch), jax.tree.map(lambda x: x[1:], batch)
        total = differentiate(first)
        if jax.tree.leaves(rest)[0].shape[0]:
            total, _ = jax.lax.scan(accumulate, total, rest)
        return _sum_over_data(total, mesh)

    # With check_vma=True the gradients of replicated parameters would arrive summed already, and psum again.
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), ROWS, P()), out_specs=P(), axis_names={DATA}, check_vma=False
    )

    def gradient(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> tuple[Sums, Any]:
        total, sums = sharded(params, batch, key)
        count = jnp.maximum(sums["loss"][1], 1.0)
        return sums, jax.tree.map(lambda g: g / count, total)

    return gradient


def _sum_over_data(tree: Any, mesh: Mesh) -> Any:
    """Add up what the parts of the `data` axis have; XLA knows no such sum where there is one part and other axes."""
    return jax.lax.psum(tree, DATA) if mesh.shape[DATA] > 1 else tree


def moving_average(average: Any, params: Any, decay: float, updates: jax.Array) -> Any:
    """Return the average one update later; a young one forgets faster, so it starts unbiased."""
    rate = jnp.maximum(1 - decay, 9.0 / (10.0 + updates))
    return jax.tree.map(lambda old, new: old + rate * (new - old), average, params)


def make_train_step(
    loss: LossFn, tx: optax.GradientTransformation, mesh: Mesh, seed: int, ema_decay: float = 0.0
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, Any]]]:
    """Return the compiled update (state, batch [a b …]) → (state, metrics); the state's memory is reused.

    An update whose loss or gradient is not finite changes nothing but the counters.
    """
    gradient = make_gradient(loss, mesh)

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        sums, grads = gradient(state.params, batch, key)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"][0])
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = None if state.ema is None else moving_average(state.ema, params, ema_decay, state.step - state.skipped)
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            {"params": params, "opt_state": opt_state, "ema": ema},
            {"params": state.params, "opt_state": state.opt_state, "ema": state.ema},
        )
        skipped = state.skipped + ~finite
        in_row = jnp.where(finite, 0, state.skipped_in_row + 1)
        metrics = {"sums": sums, "grad_norm": norm, "skipped": skipped, "skipped_in_row": in_row}
        state = state.replace(step=state.step + 1, **kept, skipped=skipped, skipped_in_row=in_row)
        places = state_shardings(mesh, state), jax.tree.map(lambda _: replicated(mesh), metrics)
        return jax.lax.with_sharding_constraint((state, metrics), places)

    return jax.jit(step, donate_argnums=0)


def make_eval_step(loss: LossFn, mesh: Mesh) -> Callable[[Any, dict[str, jax.Array]], Sums]:
    """Return the compiled (parameters, batch [1 b …]) → sums over all rows, without dropout."""

    def local(params: Any, batch: dict[str, jax.Array]) -> Sums:
        return _sum_over_data(loss(params, jax.tree.map(lambda x: x[0], batch), None), mesh)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), ROWS), out_specs=P(), axis_names={DATA}, check_vma=False)
    return jax.jit(sharded)
