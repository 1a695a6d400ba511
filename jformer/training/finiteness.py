"""Find the first non-finite part of an update; used only after an update was skipped.

Recomputes the update while inspecting the output of every module; the training state is not changed.

Letters in shapes: a microbatches, l layers of a stack, · any further axes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from jformer.models.batch import Batch
from jformer.models.layers.layer_scan import FINITE
from jformer.models.model import Model
from jformer.models.parts import STACKED, in_stack, split
from jformer.parallel import processes
from jformer.parallel.sharding import sum_over_parts
from jformer.tasks.sums import LossFn
from jformer.training.machine import available, in_one_memory
from jformer.training.state import TrainState
from jformer.training.step import apply_gradient, mean_of, trained_gradient

FLAG = "is_finite"  # of a module's output

Module = tuple[str, ...]
"""The path of a module, such as ('encoder', 'block', 'self_attn', 'q')."""


class Broken(NamedTuple):
    """The non-finite parts of an update, as booleans by path: one each, or one for each layer of a stack [l]."""

    parameters: PyTree
    activations: PyTree  # [a ·] outputs of modules
    loss: Array  # [a]
    gradients: PyTree  # [a ·] of each microbatch
    norm: Array  # of the whole gradient
    updated: PyTree  # the parameters after it


class Examination:
    """The search for the first non-finite part of an update, compiled on first use."""

    def __init__(
        self,
        model: Model,
        loss: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        seed: int,
        passes: int = 1,
        frozen: PyTree = None,
    ) -> None:
        """Store the parts of an update.

        Args:
            model: whose modules are inspected.
            loss, tx, mesh, seed, frozen: those of `make_train_step`.
            passes: how many the model makes over each row, each with its own dropout; two with R-Drop.
        """
        self._model, self._gradient, self._tx, self._mesh = model, trained_gradient(loss, frozen), tx, mesh
        self._seed, self._passes, self._frozen = seed, passes, frozen
        self._calls: list[Module] = []  # modules in the order in which they finish while tracing
        self.program = jax.jit(self._examine)

    def __call__(self, state: TrainState, batch: Batch, step: int) -> str:
        """Name the first non-finite part of the update of this state with this batch [a b …].

        `step`, from 0, is the number of the update, for the same dropout. All processes call it.
        """
        processes.enter_phase(f"looking for non-finite values in update {step + 1}")
        program = self._compiled(state, batch, step)
        if not processes.agree(program is not None, all):
            return "the first non-finite value is not known: finding it needs more memory than is free"
        assert program
        broken = jax.device_get(program(state, batch, step))
        return f"the first non-finite value is {self._first(broken)}"

    def _compiled(self, *arguments: object) -> jax.stages.Compiled | None:
        """Return the compiled program, or None if it does not fit in memory: it holds more than an update does."""
        try:
            program = self.program.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # as the TPU compiler says
                return None
            raise
        there, needed = available(self._mesh.local_devices[0]), program.memory_analysis()
        if there and needed and in_one_memory(needed.temp_size_in_bytes, self._mesh) > there.free:
            return None
        return program

    def _examine(self, state: TrainState, batch: Batch, step: Array) -> Broken:
        key = jax.random.fold_in(jax.random.key(self._seed), step)
        add_up = sum_over_parts(self._microbatches, self._mesh)
        total, count, (activations, loss, gradients) = add_up(state.params, batch, key)
        gradient = mean_of(total, count)
        updated, _ = apply_gradient(self._tx, gradient, state, self._frozen)
        return Broken(
            parameters=by_layer(state.params),
            activations=jax.tree.map(lambda parts: parts > 0, activations),
            loss=loss > 0,
            gradients=jax.tree.map(lambda parts: parts > 0, gradients),
            norm=~jnp.isfinite(optax.tree.norm(gradient)),
            updated=by_layer(updated),
        )

    def _microbatches(self, params: PyTree, batch: Batch, key: Key[Array, ""]) -> tuple[PyTree, Array, PyTree]:
        """Return the gradient of the summed loss, its divisor, and which parts are not finite (0 or 1) [a ·]."""

        def add(sum_so_far: PyTree, rows: Batch) -> tuple[PyTree, PyTree]:
            gradient, sums = self._gradient(params, rows, key)
            added = jax.tree.map(jnp.add, sum_so_far, (gradient, sums["loss"].count))
            flags = self._outputs(params, rows, key), ~jnp.isfinite(sums["loss"].total), by_layer(gradient)
            return added, jax.tree.map(lambda flag: flag.astype(jnp.int32), flags)

        begin = jax.tree.map(jnp.zeros_like, split(params, self._frozen)[0]), jnp.zeros(())
        (gradient, count), flags = jax.lax.scan(add, begin, batch)
        return gradient, count, flags

    def _outputs(self, params: PyTree, rows: Batch, key: Key[Array, ""]) -> PyTree:
        """Return which outputs of the modules before the head are not finite."""

        def note(call: Callable[..., Any], arguments: Any, named: Any, context: nn.module.InterceptorContext) -> Any:
            output, module = call(*arguments, **named), cast(Any, context.module)
            arrays = [x for x in jax.tree.leaves(output) if isinstance(x, jax.Array)]
            floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
            if context.method_name == "__call__" and floats:
                flag = jnp.stack([~jnp.isfinite(x).all() for x in floats]).any()
                if module.sow(FINITE, FLAG, flag, init_fn=lambda: False, reduce_fn=jnp.logical_or):
                    self._calls.append(module.path)
            return output

        keys = [key] if self._passes == 1 else jax.random.split(key, self._passes)
        with nn.intercept_methods(note):
            found = [
                self._model.apply(
                    {"params": params}, rows, True, rngs={"dropout": each}, method="hidden", mutable=[FINITE]
                )[1]
                for each in keys
            ]
        return functools.reduce(functools.partial(jax.tree.map, jnp.logical_or), found)[FINITE]

    def _first(self, broken: Broken) -> str:
        """Name the first broken part in the order of computation: parameters, outputs, then gradients backwards."""
        if named := self._named(broken.parameters):
            return f"the parameter {named[0]}"
        count = len(broken.loss)
        for number in range(count):
            where = f", in microbatch {number + 1} of {count}" if count > 1 else ""
            activations, gradients = (
                jax.tree.map(lambda flags, number=number: flags[number], tree)
                for tree in (broken.activations, broken.gradients)
            )
            if named := self._named(activations):
                return f"the output of {named[0]}{where}"
            if broken.loss[number]:
                return f"the loss, or its logits{where}"
            if named := self._named(gradients):
                return f"the gradient of {named[-1]}{where}"
        if broken.norm:
            return "the norm of the whole gradient"
        if named := self._named(broken.updated):
            return f"the new value of {named[0]}"
        return "not reproducible: parameters have changed since"

    def _named(self, tree: PyTree) -> list[str]:
        """Return the names of the true leaves of a tree, in the order of the module calls, layer after layer."""
        found = []
        for path, flags in jax.tree_util.tree_leaves_with_path(tree):
            name = tuple(key.key for key in path if key.key != FLAG)
            module = name if len(name) < len(path) else name[:-1]
            for layer in np.flatnonzero(flags):
                in_stack = f" in layer {layer + 1}" if np.size(flags) > 1 else ""
                found.append((self._place(module, int(layer)), "/".join(name) + in_stack))
        return [name for _, name in sorted(found)]

    def _place(self, module: Module, layer: int) -> tuple[int, int, int]:
        """Return a sort key: when a module's stack first finishes, the layer, when the module itself finishes.

        For a module that was never called, the innermost called one around it counts; if there is none, it comes last.
        """
        around = (module[:end] for end in range(len(module), 0, -1))
        own = next((self._calls.index(each) for each in around if each in self._calls), len(self._calls))
        if STACKED not in module:
            return own, layer, own
        stack = module[: module.index(STACKED) + 1]
        return next(i for i, call in enumerate(self._calls) if call[: len(stack)] == stack), layer, own


def by_layer(tree: PyTree) -> PyTree:
    """Return which leaves of a tree are not finite: a boolean each, or one for each layer of a stack [l]."""

    def broken(path: Any, leaf: Array) -> Array:
        return ~jnp.isfinite(leaf).all(axis=tuple(range(1 if in_stack(path) else 0, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(broken, tree)
