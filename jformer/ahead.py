"""The programs of a run compiled ahead of time, for devices that are not here, and what the compiler says of them."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jformer import costs, hlo
from jformer.collectives import Collective, collectives
from jformer.config import Config
from jformer.data.plan import Shape
from jformer.generation import make_answer
from jformer.memory import Memory, abstract_batch, update_memory
from jformer.models import ModelConfig, build_model
from jformer.platform import compiling_for
from jformer.restore import abstract_params
from jformer.run import abstract_update
from jformer.sharding import EVERY_ROW, fill_axes, fill_rows, replicated
from jformer.tasks import Task

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

    @property
    def memory(self) -> int:
        """The most bytes in use at once."""
        return self.arguments + self.outputs + self.temporaries + self.code

    @property
    def sent(self) -> float:
        """The bytes that each device sends to others."""
        return sum(each.sent for each in self.collectives)


def mesh_sizes(config: Config, devices: int) -> dict[str, int]:
    """Return the size of each axis of a config's mesh on so many devices."""
    return fill_axes(dataclasses.asdict(config.mesh), devices)


def estimate(config: Config, task: Task, model: ModelConfig, shape: Shape, devices: int, platform: str) -> Memory:
    """Return the memory that the update of a run takes of each of so many devices, none of which need be here."""
    sizes = mesh_sizes(config, devices)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), AUTO)
    with compiling_for(platform):
        step, arguments = _update(config, task, model, shape, mesh)
        return update_memory(step, *arguments)


def compile_update(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh) -> Figures:
    """Compile the update of a run for batches of a shape."""
    with compiling_for(_platform(mesh)):
        step, arguments = _update(config, task, model, shape, mesh)
        return figures(_compile(step.lower(*arguments)), mesh)


def compile_answer(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Mesh) -> Figures:
    """Compile the program that answers a batch of a shape (see `answer_shape`): the whole search, or the classes."""
    room = shape.target_length
    batch = answer_batch(model, task, shape, mesh)
    vocabulary = np.ones(model.target_vocab_size or model.vocab_size, bool)
    with compiling_for(_platform(mesh)):
        built = build_model(model)
        params = abstract_params(built, mesh)
        answer = make_answer([built], task.answer, config.decode, vocabulary, mesh)
        return figures(_compile(answer.lower((params,), batch, room)), mesh)


def answer_shape(config: Config, task: Task, mesh: Mesh) -> Shape:
    """Return rows, input length and most output tokens of a batch of inputs as long as the config allows."""
    decode = config.decode
    continues = task.answer == "continuation"
    length = config.data.max_target_length if continues else config.data.max_source_length
    room = decode.max_extra_length + (0 if continues else length)
    room = min(room, decode.max_length or room)
    if config.model.positions == "learned":
        length, room = min(length, config.model.max_length), min(room, config.model.max_length)
    return Shape(fill_rows(decode.batch_size, mesh), length, room)


def answer_batch(model: ModelConfig, task: Task, shape: Shape, mesh: Mesh) -> dict[str, Any]:
    """Return the shapes of the arrays that `requests.Inputs` makes of such inputs, placed."""
    rows, length, _ = shape
    continues = task.answer == "continuation"
    encoded = abstract_batch(model, Shape(rows, 0 if continues else length, 1), mesh)
    shapes = {name: (array.shape[1:], array.dtype) for name, array in encoded.items()}
    per_row = dict.fromkeys(("prompt_length", "limit", "line"), ((rows,), jnp.int32))
    shapes |= per_row | {"prompt": ((rows, length if continues else 1), jnp.int32), "spare": ((), jnp.int32)}
    split, whole = NamedSharding(mesh, EVERY_ROW), replicated(mesh)
    return {
        name: jax.ShapeDtypeStruct(sizes, dtype, sharding=split if sizes else whole)
        for name, (sizes, dtype) in shapes.items()
    }


def figures(compiled: Any, mesh: Mesh) -> Figures:
    """Read what a compiled program takes from what the compiler says, and from its HLO what that does not say."""
    memory, program = compiled.memory_analysis(), hlo.parse(compiled.as_text())
    return Figures(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        costs.flops(program),
        costs.traffic(program),
        collectives(program, dict(mesh.shape)),
    )


def _update(config: Config, task: Task, model: ModelConfig, shape: Shape, mesh: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return the update and the shapes of its state and batch, placed on a mesh."""
    step, state = abstract_update(config, task, build_model(model), mesh)
    return step, (state, abstract_batch(model, shape, mesh, config.train.accumulation))


def _compile(lowered: Any) -> Any:
    """Compile anew: JAX keeps programs for devices that are not here, but cannot read them again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return lowered.compile()


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
