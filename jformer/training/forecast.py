"""A forecast of the memory of a run, logged before anything is compiled; on a CPU, runs that cannot fit are refused.

`memory` estimates the update, `machine` measures what is available. On a CPU the forecast covers the whole process:
the program and its libraries, the text, the state, and what compiling and saving need in addition.
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
COMPILING = 60 * MIB  # growth per layer of the compiled program, measured; see docs/performance.md
UNFORESEEN = 0.25  # share of the sum: the largest excess measured, see the lab book
# Multiple of a machine's memory: a margin, because forecasts of the update may be too high. For accelerators they may
# be twice the truth (docs/performance.md), since only the compiler knows what it fuses: nothing is refused there.
CLEARLY = 1.2


class Forecast(NamedTuple):
    """Bytes of a device, or of the whole process on a CPU."""

    held: int  # in use already: program, text, state
    updating: int  # the longest update or validation batch, in addition to the state
    # The largest growth of the heap, whose free parts the others can reuse: a copy of the state during a save, the
    # compiler's memory, or a second copy of an update's temporaries. (Freed temporaries stay in the heap, see `malloc`;
    # small allocations fragment them, so that the next update needs new space.)
    beside: int
    unforeseen: int = 0  # a margin for what the sum omits

    def __str__(self) -> str:
        parts = (f"{size / MIB:,.0f} {name}" for name, size in self._asdict().items() if size)
        return f"up to {sum(self) / MIB:,.0f} MiB ({', '.join(parts)})"


def memory_lines(
    config: Config, model: ModelConfig, mesh: Mesh, update: UpdateMemory, evaluation: int
) -> Iterator[str]:
    """Yield lines about the memory of the longest update and validation batch, of the run, and of the device.

    A warning follows if the run needs more than is free now. Raises UserError if a CPU run clearly exceeds the total.

    Args:
        config: of the run, whose options the remedies name.
        model: whose layers are compiled.
        mesh: its devices.
        update: bytes of the longest update.
        evaluation: bytes of the longest validation batch on each device; 0 = no validation.
    """
    yield f"memory of the longest update: {update}"
    if evaluation:
        yield f"memory of the longest validation batch: {evaluation / MIB:,.1f} MiB a device beside the state"
    give_back_freed_memory()  # used while opening the run
    there = available(mesh.local_devices[0])
    if there:
        found = forecast(update, evaluation, there, mesh, compiled_layers(model))
        yield f"memory of the run: {found}; {there.total / MIB:,.0f} in total, {there.free / MIB:,.0f} free"
        if warning := check(found, there, config, binding=mesh.local_devices[0].platform == "cpu"):
            yield f"warning: {warning}"


def forecast(update: UpdateMemory, evaluation: int, there: Available, mesh: Mesh, layers: int) -> Forecast:
    """Return the memory of a device or, on a CPU, whose devices share their memory, of the whole process.

    Args:
        update: bytes of the longest update on each device.
        evaluation: bytes of the longest validation batch on each device, in addition to the state; 0 = no validation.
        there: the memory available, and that already in use.
        mesh: whose devices of this process are counted.
        layers: of the compiled program, which determine how much memory compiling takes.
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
    """Return how many layers a program for a CPU has: stacks are unrolled fully unless execution.unroll is set."""
    stacks = [model.num_layers, *([model.decoder_layers] if model.family == "encdec" and model.decodes else [])]
    return sum(min(layers, model.execution.unroll or layers) for layers in stacks)


def check(found: Forecast, there: Available, config: Config, binding: bool) -> str:
    """Return a warning if more is needed than is free, otherwise "".

    A `binding` forecast raises UserError if it clearly exceeds the total.
    """
    data, train = config.data, config.train
    ways = [f"raise train.accumulation={train.accumulation}", f"lower data.tokens_per_update={data.tokens_per_update}"]
    if config.model.execution.remat != "full" and not config.model.recurrent.cell:
        ways.append("set model.execution.remat='full'")
    remedy = f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 2 else " or ".join(ways)
    if 2 * found.held > there.total:
        remedy = "use a smaller model, or shard it over devices (mesh.fsdp)"
    if binding and found.held + found.updating > CLEARLY * there.total:
        raise UserError(f"this run needs {found}, more than the {there.total / MIB:,.0f} MiB of memory: {remedy}")
    if sum(found) - found.held > there.free:
        return f"that may exceed the free memory: {remedy}"
    return ""
