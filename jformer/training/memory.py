"""Estimate the memory of an update on a device, by class, before anything is compiled.

The estimate follows from shapes alone. Activations are the values alive at the same time in the traced forward and
backward program, each from its definition to its last use; the real update is traced, so dropout, remat and the chunks
of the loss are included. The compiler fuses some values away, and keeps copies of weights and random words that the
program does not show; docs/performance.md has the ratio to what XLA reports.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import partial_eval
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.config.options import Config
from jformer.models import init_params
from jformer.models.model import Model
from jformer.models.parts import split
from jformer.parallel.backend import target
from jformer.parallel.mesh import FSDP
from jformer.parallel.sharding import abstract_like, device_bytes, state_shardings
from jformer.tasks.split_loss import EvalStep
from jformer.tasks.task import Task, make_loss
from jformer.training.optim import build_optimizer
from jformer.training.state import TrainState, create_state
from jformer.training.step import TrainStep, make_train_step

LOOPS = ("scan", "while")
STORED = {  # primitives whose results are not fused into later ones
    *LOOPS, "argmax", "concatenate", "cond", "conv_general_dilated", "cumsum", "dot_general", "gather",
    "optimization_barrier", "random_bits", "reduce_max", "reduce_sum", "scatter-add", "sort",
}  # fmt: skip


class UpdateMemory(NamedTuple):
    """Bytes on each device."""

    parameters: int
    optimizer: int
    average: int  # the moving average of parameters
    gradients: int
    activations: int
    batch: int

    def __str__(self) -> str:
        parts = (f"{name} {size / 2**20:,.1f}" for name, size in self._asdict().items() if size)
        return f"{sum(self) / 2**20:,.1f} MiB a device: " + ", ".join(parts)


def abstract_update(config: Config, task: Task, model: Model, mesh: Mesh) -> tuple[TrainStep, TrainState, PyTree]:
    """Return the compiled update of a run, its state as shapes with shardings, and which parameters are frozen.

    Nothing is allocated.
    """
    optimizer = build_optimizer(model, config.optim, config.train.num_steps, config.train.freeze)
    ema_decay = config.train.ema_decay
    create = functools.partial(create_state, tx=optimizer.transform, ema=bool(ema_decay), base=optimizer.base)
    state = jax.eval_shape(lambda key: create(init_params(model, key)), jax.random.key(0))
    state = abstract_like(state, state_shardings(mesh, state))
    loss = make_loss(model, task.loss, config.optim.r_drop)
    tx, frozen, keeps_finite = optimizer.transform, optimizer.frozen, optimizer.keeps_finite
    return make_train_step(loss, tx, mesh, config.seed, ema_decay, frozen, keeps_finite), state, frozen


def update_memory(train_step: TrainStep, state: TrainState, frozen: PyTree, batch: PyTree) -> UpdateMemory:
    """Return the memory of the compiled update of `make_train_step`; state and batch may be shapes with shardings.

    `frozen` marks parameters without a gradient, as in `make_train_step`.

    Tracing is shared with the first update of these shapes and shardings, so that a run pays for it only once. The
    activation memory that the mesh axis `tensor` saves is not subtracted.
    """
    (passes,) = _equations(_traced(train_step, state, batch), "shard_map")
    parameters, optimizer, average, rows = map(device_bytes, (state.params, state.opt_state, state.ema, batch))
    fsdp = batch["row"].sharding.mesh.shape[FSDP]  # these devices share the rows of the traced program
    activations = max(peak_bytes(_needed(program)) for program in _programs(passes)) // fsdp
    return UpdateMemory(
        parameters=parameters,
        optimizer=optimizer,
        average=average,
        gradients=device_bytes(split(state.params, frozen)[0]),
        activations=activations,
        batch=rows,
    )


def evaluation_memory(eval_step: EvalStep, params: PyTree, batch: PyTree) -> int:
    """Return the bytes on each device of a batch of `make_eval_step`, in addition to the parameters."""
    (passes,) = _equations(_traced(eval_step, params, batch), "shard_map")
    fsdp = batch["row"].sharding.mesh.shape[FSDP]
    return max(map(peak_bytes, _programs(passes))) // fsdp + device_bytes(batch)


def peak_bytes(program: Jaxpr) -> int:
    """Return the peak bytes of the values made by a jaxpr, without its inputs.

    An elementwise value that is read once is fused into its reader: it takes no memory, but its operands stay alive
    until then. A called program's values are alive beside the caller's; a loop's results grow while its body runs.
    """
    origins = _fused(program)
    reads = [_origins(equation.invars, origins) for equation in program.eqns]
    last = {var: at for at, read in enumerate([*reads, _origins(program.outvars, origins)]) for var in read}
    alive: dict[Any, int] = {}
    total = peak = 0
    for at, (equation, read) in enumerate(zip(program.eqns, reads, strict=True)):
        made = {var: _size(var.aval, _unrolled(equation)) for var in equation.outvars if var not in origins}
        results, inside = sum(made.values()), max(map(peak_bytes, _programs(equation)), default=0)
        peak = max(peak, total + max(results, inside + int(_kept(equation) * results)))
        alive.update(made)
        total += results
        for var in (read | made.keys()) & alive.keys():
            if last.get(var, at) == at:
                total -= alive.pop(var)
    return peak


def _needed(program: Any) -> Jaxpr:
    """Return a program without dead code, such as the gradients of frozen kernels."""
    return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0]


def _traced(step: Callable[..., object], *arguments: PyTree) -> Jaxpr:
    """Return the program of a compiled step."""
    return cast(jax.stages.Wrapped, step).trace(*arguments).jaxpr.jaxpr


def _kept(equation: Any) -> float:
    """Return the share of an equation's results that is alive while its body runs: results of earlier iterations."""
    if equation.primitive.name not in LOOPS:
        return 0.0
    return 1 - 1 / equation.params["length"] if _unrolled(equation) else 1.0


def _unrolled(equation: Any) -> bool:
    return equation.primitive.name == "scan" and equation.params["unroll"] >= equation.params["length"]


def _fused(program: Any) -> dict[Any, set[Any]]:
    """Return, for every value fused into its only reader, the stored values that are read instead."""
    readers = Counter(var for equation in program.eqns for var in _variables(equation.invars))
    readers.update(2 * [*_variables(program.outvars)])  # results are stored
    origins: dict[Any, set[Any]] = {}
    for equation in program.eqns:
        if _elementwise(equation) and all(readers[var] == 1 for var in equation.outvars):
            origins |= dict.fromkeys(equation.outvars, _origins(equation.invars, origins))
    return origins


def _origins(values: Any, origins: dict[Any, set[Any]]) -> set[Any]:
    return {origin for var in _variables(values) for origin in origins.get(var, {var})}


def _elementwise(equation: Any) -> bool:
    called = [inner for program in _programs(equation) for inner in program.eqns]
    return equation.primitive.name not in STORED and all(map(_elementwise, called))


def _variables(values: Any) -> Iterator[Any]:
    return (value for value in values if not isinstance(value, Literal))


def _programs(equation: Any) -> Iterator[Any]:
    """Yield the programs that an equation calls."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                yield program


def _equations(program: Any, name: str) -> Iterator[Any]:
    """Yield the equations of a primitive, called programs included."""
    for equation in program.eqns:
        if equation.primitive.name == name:
            yield equation
        else:
            for inner in _programs(equation):
                yield from _equations(inner, name)


def _size(aval: Any, unrolled: bool = False) -> int:
    """Return the bytes of an array; for a mask of an unrolled loop, XLA:CPU keeps the 32-bit words it was made from."""
    words = unrolled and aval.dtype == bool and target().platform == "cpu"
    return aval.size * (4 if words else aval.dtype.itemsize)
