"""What a run will hold of the memory, said before anything is compiled, and refused where it cannot be had.

What an update takes by itself is in `memory`, what there is in `machine`. Where the CPU computes, the whole process
counts: the program and its libraries, the text, the state, and what compiling and saving need beside them.
"""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jformer.config.options import Config
from jformer.data.pipeline import Batches
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tasks.batch_arrays import abstract_batch
from jformer.training.log import TrainingLog
from jformer.training.machine import Available, available
from jformer.training.malloc import give_back_freed_memory
from jformer.training.memory import Memory, evaluation_memory, update_memory
from jformer.training.run import Run

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


def say_memory(run: Run, log: TrainingLog) -> None:
    """Say what the longest update, the longest validation batch and the whole run will take, and what there is.

    Raises UserError if that is clearly more than all there is; what is more than is free just now is a warning.
    """
    batch = longest_batch(run, run.data.batches)
    update = update_memory(run.train_step, run.state, batch)
    log.say(f"memory of the longest update: {update}")
    evaluation = 0
    if run.data.valid:
        evaluation = evaluation_memory(run.eval_step, run.state.params, longest_batch(run, run.data.valid))
        log.say(f"memory of the longest validation batch: {evaluation / MIB:,.1f} MiB a device beside the state")
    give_back_freed_memory()  # of what the run was opened with
    there = available(run.mesh.local_devices[0])
    if there:
        found = forecast(update, evaluation, there, run.mesh, compiled_layers(run.sampler.model.config))
        log.say(f"memory of the run: {found}; there are {there.total / MIB:,.0f}, {there.free / MIB:,.0f} of them free")
        warning = check(found, there, run.config)
        if warning:
            log.say(f"warning: {warning}")


def longest_batch(run: Run, batches: Batches) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the longest batch, placed."""
    model = run.sampler.model.config
    answer = run.sampler.task.answer
    return abstract_batch(model, answer, batches.plan.shapes[-1], run.mesh, run.config.train.accumulation)


def forecast(update: Memory, evaluation: int, there: Available, mesh: Mesh, layers: int) -> Forecast:
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
