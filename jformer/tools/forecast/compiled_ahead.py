"""Compile the programs of a run ahead of time, for devices that need not be present, and return their figures."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jformer.checkpoints.weights import abstract_params
from jformer.config.options import Config
from jformer.data.plan import Shape
from jformer.data.tokenizers import Symbols
from jformer.errors import UserError
from jformer.inference.forced_pass import make_scorer
from jformer.inference.generation import make_answer, make_setup
from jformer.models import ModelConfig, build_model
from jformer.parallel.backend import Target, compiling_for, target_of
from jformer.parallel.mesh import slices_of
from jformer.parallel.sharding import EVERY_ROW, replicated
from jformer.plugins import is_own
from jformer.tasks.batch_arrays import abstract_batch, source_is_prefix
from jformer.tasks.build import check_heads
from jformer.tasks.task import VECTOR, Task
from jformer.tools.forecast import cost_analysis, hlo
from jformer.tools.forecast.collectives import Collective, collectives
from jformer.tools.forecast.shapes import mesh_sizes
from jformer.tools.forecast.topology import compiler_options
from jformer.training.memory import UpdateMemory, abstract_update, update_memory


class Figures(NamedTuple):
    """What one run of a compiled program needs on each device; in bytes, except for the FLOPs."""

    arguments: int
    outputs: int  # except those that reuse the memory of arguments
    temporaries: int
    code: int
    flops: float
    traffic: float  # between HBM and the cores
    collectives: list[Collective]
    program: hlo.Program  # what all of this was read from
    flops_once: float = 0.0  # as the model counts: without recomputation, over all pairs of positions

    @property
    def memory(self) -> int:
        """Bytes in use at most."""
        return self.arguments + self.outputs + self.temporaries + self.code


def estimate(
    config: Config, task: Task, model: ModelConfig, shape: Shape, devices: int, target: Target
) -> UpdateMemory:
    """Return the memory that the update of a run needs on each device, none of which need be present.

    Args:
        config: of the run.
        task: of the run; its loss is traced with the model.
        model: the options of the model with the sizes of its vocabularies or classes.
        shape: rows of the whole update and positions of a row.
        devices: the number of devices for the mesh of the config.
        target: the kind of device.

    Raises:
        UserError: devices, rows, heads or parameters are not divisible by the mesh.
    """
    sizes = mesh_sizes(config, devices)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    check_heads(model, mesh)
    with compiling_for(target), _reading_known_arrays(config):
        step, state, frozen, batch = _update(config, task, model, shape, mesh)
        return update_memory(step, state, frozen, batch)


def compile_update(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh) -> Figures:
    """Compile the update of a run for batches of a shape.

    Args:
        config, task, model, shape: as for `estimate`.
        mesh: of the target devices, which may come from a topology.
    """
    with compiling_for(target_of(mesh.devices.flat[0])), _reading_known_arrays(config):
        step, state, _, batch = _update(config, task, model, shape, mesh)
        return figures(_compile(step.lower(state, batch), mesh), mesh)


def compile_answer(
    config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh, ensemble: int = 1
) -> Figures:
    """Compile the program that answers a batch: the whole search, or the classes.

    Args:
        config, task, model, mesh: as for `compile_update`.
        shape: from `answer_shape`: rows of a batch, positions of a source, and tokens of an output.
        ensemble: the number of models in the ensemble.
    """
    room = shape.target_length
    batch = _answer_batch(model, task, shape, mesh)
    vocabulary = np.ones(model.target_vocab_size or model.vocab_size, bool)
    with compiling_for(target_of(mesh.devices.flat[0])):
        built = build_model(model.merged)
        params = abstract_params(built, mesh)
        answer = make_answer(make_setup([built] * ensemble, config.decode, vocabulary, Symbols(), mesh), task.answer)
        return figures(_compile(answer.lower((params,) * ensemble, batch, room), mesh), mesh)


def compile_score(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh) -> Figures:
    """Compile the program that scores given targets.

    Args:
        config, task, model, shape, mesh: as for `compile_update`.
    """
    with compiling_for(target_of(mesh.devices.flat[0])):
        built = build_model(model.merged)
        score: Any = make_scorer([built], config.decode.ensemble_average, mesh)
        split = NamedSharding(mesh, EVERY_ROW)
        batch = {
            name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=split)
            for name, array in abstract_batch(model, task.answer, shape, mesh).items()  # of one step of accumulation
        }
        return figures(_compile(score.lower((abstract_params(built, mesh),), batch), mesh), mesh)


def _answer_batch(model: ModelConfig, task: Task, shape: Shape, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of the arrays that `inference.inputs.Inputs.arrays` makes from inputs."""
    rows, length, _ = shape
    continues, prefix = task.answer == "continuation", source_is_prefix(model, task.answer)
    prompt = length if continues else 1 + length * prefix
    target = length if prefix or task.answer == VECTOR else 1
    encoded = abstract_batch(model, task.answer, Shape(rows, 0 if continues else length, target), mesh)
    shapes = {name: (array.shape[1:], array.dtype) for name, array in encoded.items()}
    per_row = dict.fromkeys(("prompt_length", "limit", "line"), ((rows,), jnp.int32))
    shapes |= per_row | {"prompt": ((rows, prompt), jnp.int32), "max_unfinished": ((), jnp.int32)}
    split, whole = NamedSharding(mesh, EVERY_ROW), replicated(mesh)
    return {
        name: jax.ShapeDtypeStruct(sizes, dtype, sharding=split if sizes else whole)
        for name, (sizes, dtype) in shapes.items()
    }


def figures(compiled: jax.stages.Compiled, mesh: Mesh) -> Figures:
    """Return the figures of a compiled program, from the compiler's analysis and from its HLO."""
    memory, text, axes = compiled.memory_analysis(), compiled.as_text(), dict(mesh.shape)
    assert memory is not None
    assert text is not None
    program = hlo.parse(text)
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu":  # whose compiler may count half again as much as its buffers take
        temporaries = min(temporaries, memory.peak_memory_in_bytes - memory.argument_size_in_bytes - outputs)
    return Figures(
        arguments=memory.argument_size_in_bytes,
        outputs=outputs,
        temporaries=temporaries,
        code=memory.generated_code_size_in_bytes,
        flops=cost_analysis.flops(program),
        traffic=cost_analysis.traffic(program),
        collectives=collectives(program, axes, np.array(slices_of(mesh.devices.flat))),
        program=program,
        flops_once=cost_analysis.flops(program, once=True),
    )


@contextlib.contextmanager
def _reading_known_arrays(config: Config) -> Iterator[None]:
    """Raise UserError for a task whose loss reads an array that only its data provides."""
    try:
        yield
    except KeyError as error:
        if not is_own(config.task):
            raise
        raise UserError(f"task={config.task!r} reads an array {error} of its own, which no forecast knows") from error


def _update(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Any) -> tuple[Any, Any, Any, Any]:
    """Return what `abstract_update` returns, and the shapes of the batch, sharded over a mesh."""
    batch = abstract_batch(model, task.answer, shape, mesh, config.train.accumulation)
    return *abstract_update(config, task, build_model(model), mesh), batch


def _compile(lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Compile without warnings: JAX caches programs for absent devices but cannot load them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return lowered.compile(compiler_options(mesh.devices.flat[0].platform))
