"""The memory that a run will hold, logged before anything is compiled, and refused where there is not enough.

`memory` has what an update takes, `machine` what there is. Where the CPU computes, the whole process counts: the
program and its libraries, the text, the state, and what compiling and saving need beside them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.training.machine import Available, available
from jformer.training.malloc import give_back_freed_memory
from jformer.training.memory import UpdateMemory

MIB = 2**20
COMPILING = 60 * MIB  # for each layer of the compiled program: what processes grew by, see docs/performance.md
UNFORESEEN = 0.25  # of all that is added up: so much more was held at most, see the lab book
CLEARLY = 1.2  # times all there is: so much too high the forecast of an update may be, and was not


class Forecast(NamedTuple):
    """Bytes of a device, or of the whole process where the CPU computes."""

    held: int  # already: program, text, state
    updating: int  # the longest update or validation batch, beside the state
    # The largest of what the heap grows by, into whose free parts the others fit: a copy of the state while it is
    # saved, what compiling takes, or the temporaries of an update once more. Freed ones are kept (see `malloc`), but
    # small things come to lie in them, so that the next update needs another place.
    beside: int
    unforeseen: int = 0  # what the sum may be too low by

    def __str__(self) -> str:
        parts = (f"{size / MIB:,.0f} {name}" for name, size in self._asdict().items() if size)
        return f"up to {sum(self) / MIB:,.0f} MiB ({', '.join(parts)})"


def memory_lines(
    config: Config, model: ModelConfig, mesh: Mesh, update: UpdateMemory, evaluation: int
) -> Iterator[str]:
    """Yield what the longest update, the longest validation batch and the whole run will take, and what there is.

    A warning follows if that is more than is free now. Raises UserError if it is clearly more than all there is.

    Args:
        config: of the run, whose options a remedy names.
        model: whose layers are compiled.
        mesh: its devices.
        update: bytes of the longest update.
        evaluation: bytes of the longest validation batch on each device; 0 = there is none.
    """
    yield f"memory of the longest update: {update}"
    if evaluation:
        yield f"memory of the longest validation batch: {evaluation / MIB:,.1f} MiB a device beside the state"
    give_back_freed_memory()  # of what the run was opened with
    there = available(mesh.local_devices[0])
    if there:
        found = forecast(update, evaluation, there, mesh, compiled_layers(model))
        yield f"memory of the run: {found}; there are {there.total / MIB:,.0f}, {there.free / MIB:,.0f} of them free"
        if warning := check(found, there, config):
            yield f"warning: {warning}"


def forecast(update: UpdateMemory, evaluation: int, there: Available, mesh: Mesh, layers: int) -> Forecast:
    """Return what a device will hold or, of devices of a CPU, which share one memory, the whole process.

    Args:
        update: bytes of the longest update on each device.
        evaluation: bytes of the longest validation batch on each device, beside the state; 0 = there is none.
        there: what is held already.
        mesh: its devices of this process count.
        layers: of the compiled program, which say how much compiling takes.
    """
    count = len(mesh.local_devices)
    updating = max(update.gradients + update.activations + update.batch, evaluation)
    if mesh.local_devices[0].platform != "cpu":
        return Forecast(there.held, updating, 0)
    state, temporaries = update.parameters + update.optimizer + update.average, max(update.activations, evaluation)
    beside = max(count * state, count * temporaries, COMPILING * layers)
    parts = (there.held, count * updating, beside)
    return Forecast(*parts, unforeseen=round(UNFORESEEN * sum(parts)))


def compiled_layers(model: ModelConfig) -> int:
    """Return how many layers a program for a CPU has: those of a stack are unrolled unless the config says less."""
    stacks = [model.num_layers, *([model.decoder_layers] if model.family == "encdec" else [])]
    return sum(min(layers, model.execution.unroll or layers) for layers in stacks)


def check(found: Forecast, there: Available, config: Config) -> str:
    """Return a warning where more is needed than is free, or nothing; raise UserError where there never is so much."""
    data, train = config.data, config.train
    remedy = (
        f"raise train.accumulation={train.accumulation}, lower data.tokens_per_update={data.tokens_per_update}, or set "
        "model.execution.remat='full'"
    )
    if 2 * found.held > there.total:
        remedy = "take a smaller model, or share it among devices (mesh.fsdp)"
    if found.held + found.updating > CLEARLY * there.total:
        raise UserError(f"this run will hold {found}, more than the {there.total / MIB:,.0f} MiB there are: {remedy}")
    if sum(found) - found.held > there.free:
        return f"that may be more than is free: {remedy}"
    return ""
