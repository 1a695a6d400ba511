"""The programs of a run compiled ahead of time, for devices that are not here, and what the compiler says of them."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jformer.checkpoints.weights import abstract_params
from jformer.config.options import Config
from jformer.data.plan import Shape
from jformer.data.tokenizers import Symbols
from jformer.inference.generation import make_answer, make_setup
from jformer.models import ModelConfig, build_model
from jformer.parallel.backend import compiling_for
from jformer.parallel.sharding import EVERY_ROW, replicated
from jformer.tasks.batch_arrays import abstract_batch
from jformer.tasks.task import Task
from jformer.tools.forecast import cost_analysis, hlo
from jformer.tools.forecast.collectives import Collective, collectives
from jformer.tools.forecast.program_quality import Overlap, gathered_twice, ideal_traffic, overlap
from jformer.tools.forecast.shapes import mesh_sizes
from jformer.training.memory import UpdateMemory, abstract_update, update_memory

AUTO = (AxisType.Auto,) * 3


class Figures(NamedTuple):
    """What one run of a compiled program takes of each device; bytes, but for the FLOPs."""

    arguments: int
    outputs: int  # beside those that reuse the memory of arguments
    temporaries: int
    code: int
    flops: float
    traffic: float  # between HBM and the cores
    collectives: list[Collective]
    ideal: float = 0.0  # of traffic: see `judged`
    overlap: Overlap = Overlap(0, 0, 0)
    gathered_twice: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """The most bytes in use at once."""
        return self.arguments + self.outputs + self.temporaries + self.code

    @property
    def sent(self) -> float:
        """The bytes that each device sends to others."""
        return sum(each.sent for each in self.collectives)


def estimate(config: Config, task: Task, model: ModelConfig, shape: Shape, devices: int, platform: str) -> UpdateMemory:
    """Return the memory that the update of a run takes of each of so many devices, none of which need be here.

    Args:
        config: which optimizer there is, what is recomputed, and how many microbatches an update has.
        task: what is learned: the loss is traced with the model.
        model: the options of the model with the sizes of its vocabularies or classes.
        shape: rows of the whole update and positions of a row.
        devices: how many the mesh of the config is laid out over.
        platform: whose programs are traced: "cpu", "gpu" or "tpu".

    Raises:
        UserError: the devices, the rows or the parameters do not divide as the config wants it.
    """
    sizes = mesh_sizes(config, devices)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), AUTO)
    with compiling_for(platform):
        step, arguments = _update(config, task, model, shape, mesh)
        return update_memory(step, *arguments)


def compile_update(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh) -> Figures:
    """Compile the update of a run for batches of a shape.

    Args:
        config, task, model, shape: those of `estimate`.
        mesh: of the devices that are compiled for; a topology describes those that are not here.
    """
    with compiling_for(_platform(mesh)):
        step, arguments = _update(config, task, model, shape, mesh)
        return figures(_compile(step.lower(*arguments)), mesh)


def compile_answer(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh) -> Figures:
    """Compile the program that answers a batch: the whole search, or the classes.

    Args:
        config, task, model, mesh: those of `compile_update`.
        shape: from `answer_shape`: rows of a batch, positions of a source, and the most tokens of an output.
    """
    room = shape.target_length
    batch = _answer_batch(model, task, shape, mesh)
    vocabulary = np.ones(model.target_vocab_size or model.vocab_size, bool)
    with compiling_for(_platform(mesh)):
        built = build_model(model)
        params = abstract_params(built, mesh)
        answer = make_answer(make_setup([built], config.decode, vocabulary, Symbols(), mesh), task.answer)
        return figures(_compile(answer.lower((params,), batch, room)), mesh)


def _answer_batch(model: ModelConfig, task: Task, shape: Shape, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of the arrays that `inference.inputs.Inputs.arrays` makes of such inputs."""
    rows, length, _ = shape
    continues = task.answer == "continuation"
    encoded = abstract_batch(model, task.answer, Shape(rows, 0 if continues else length, 1), mesh)
    shapes = {name: (array.shape[1:], array.dtype) for name, array in encoded.items()}
    per_row = dict.fromkeys(("prompt_length", "limit", "line"), ((rows,), jnp.int32))
    shapes |= per_row | {"prompt": ((rows, length if continues else 1), jnp.int32), "max_unfinished": ((), jnp.int32)}
    split, whole = NamedSharding(mesh, EVERY_ROW), replicated(mesh)
    return {
        name: jax.ShapeDtypeStruct(sizes, dtype, sharding=split if sizes else whole)
        for name, (sizes, dtype) in shapes.items()
    }


def figures(compiled: jax.stages.Compiled, mesh: Mesh) -> Figures:
    """Read what a compiled program takes from what the compiler says, and from its HLO what that does not say."""
    memory, text, axes = compiled.memory_analysis(), compiled.as_text(), dict(mesh.shape)
    assert memory is not None
    assert text is not None
    program = hlo.parse(text)
    return Figures(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=cost_analysis.flops(program),
        traffic=cost_analysis.traffic(program),
        collectives=collectives(program, axes),
        ideal=ideal_traffic(program, memory.argument_size_in_bytes),
        overlap=overlap(program),
        gathered_twice=tuple(gathered_twice(program, axes)),
    )


def _update(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return the update and the shapes of its state and batch, placed on a mesh."""
    step, state = abstract_update(config, task, build_model(model), mesh)
    return step, (state, abstract_batch(model, task.answer, shape, mesh, config.train.accumulation))


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile anew: JAX keeps programs for devices that are not here, but cannot read them again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return lowered.compile()


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
