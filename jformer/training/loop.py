"""The training loop: what happens to a built run, update after update, until it ends.

What is said before the first update is in `introduction`, what a validation does in `validation`.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from etils.epath import Path
from jax.sharding import Mesh

from jformer.config import save_config
from jformer.config.options import Config
from jformer.data.pipeline import prefetch
from jformer.models.flops import Work, batch_work, update_flops
from jformer.parallel import processes
from jformer.parallel.devices import find_peak
from jformer.tasks.batch_arrays import Batch, place_batch
from jformer.training.clock import Clock
from jformer.training.heartbeat import UPDATING
from jformer.training.introduction import introduce
from jformer.training.lock import sole_trainer
from jformer.training.log import Cost, TrainingLog
from jformer.training.malloc import give_back_freed_memory
from jformer.training.profile import Profile
from jformer.training.run import Run, build
from jformer.training.state import as_items
from jformer.training.validation import validate


def train(config: Config, workdir: Path) -> bool:
    """Train, or go on where an earlier call stopped; return False if a signal asked to stop before the end.

    However it ends, saves that were begun are finished first.
    """
    with sole_trainer(workdir) if processes.is_main_process() else contextlib.nullcontext():
        processes.refuse_unshared(workdir)
        run = build(config, workdir)
        devices = sorted(run.mesh.devices.flat, key=lambda device: device.process_index != processes.process_index())
        peak = find_peak(devices, run.config.model.dtype, config.train.peak_flops)
        passes = run.config.optim.passes
        cost = Cost(lambda work: passes * update_flops(run.sampler.model.config, work), peak.flops)
        profiled = config.train.profiled() if processes.is_main_process() else range(0)
        with (
            run.checkpoints,
            processes.readers_may_leave(),
            TrainingLog(workdir, run.config, run.progress, run.schedule, cost, functools.partial(explain, run)) as log,
            Profile(workdir / "profile", profiled, log.say) as profile,
        ):
            introduce(run, log, peak)
            if processes.is_main_process():
                save_config(run.config, workdir / "config.json")  # not before: what is refused leaves no run behind
            if not run.finished:
                loop(run, log, profile)
            processes.enter_phase("the last save")
        return run.finished


def loop(run: Run, log: TrainingLog, profile: Profile) -> None:
    """Update until the last step, the end of patience or of the time, or a signal.

    The order of one turn is a contract: update, row, validation, checkpoint. So a row or a checkpoint of step s holds
    all of update s and nothing of the next, no window of rows spans a checkpoint, and a resumed run writes the same
    rows. The devices are waited for only when a row is due, or a trace begins or ends; until then updates are
    dispatched a little ahead.

    While updates are skipped, parameters stay as they are saved already: they are not validated and saved again, which
    would push older checkpoints out.
    """
    train, progress = run.config.train, run.progress
    clock = Clock(train, progress.seconds)
    for batch, work in log.waiting(prefetch(feed(run, progress.step))):
        step = progress.step + 1
        shapes = tuple(array.shape for array in jax.tree.leaves(batch))
        processes.enter_phase(f"update {step}", kind=shapes)
        with profile.update(step, lambda: run.state):
            with log.timing(step, shapes) as first:
                if first:
                    processes.compile_together(run.train_step, run.state, batch)
                run.state, metrics = run.train_step(run.state, batch)
            log.collect(step, metrics, work)
        progress.step = step
        run.checkpoints.check_save()
        processes.defer_stop()  # from the first update on there is something to save
        stopping = processes.should_stop(step, processes.stop_requested() or clock.is_over())
        last = step >= train.num_steps or (stopping and clock.ends_run())
        saving = step % train.checkpoint_every == 0
        if last or stopping or saving or step % train.log_every == 0:
            processes.enter_phase(f"the row of update {step}", kind="row")
            log.flush(step)
            saving = saving or clock.is_save_due()
        saving &= log.skipped_in_row < step - run.saved_step
        validating = train.eval_every and (last or (saving and step % train.eval_every == 0))
        selection_cost = validate(run, log) if validating else None
        if last or stopping or saving:
            progress.seconds, progress.rows = clock.note_save(), log.rows
            log.heartbeat.enter(f"saving update {step}")
            log.keep()
            save(run, selection_cost)
            give_back_freed_memory()  # what was copied lay among the temporaries of updates, which then need more room
            log.heartbeat.enter(UPDATING)
            log.restart_clock()
        if run.finished or stopping:
            return


def feed(run: Run, start: int) -> Iterator[tuple[Batch, tuple[Work, Work]]]:
    """Yield the device arrays [a b …] of every update from `start` on, and the work of its texts and of its rows."""
    yield from (put_update(run, step) for step in itertools.count(start))


def put_update(run: Run, step: int) -> tuple[Batch, tuple[Work, Work]]:
    """Return the device arrays [a b …] of batch number `step`, and the work of its texts and of its rows.

    Of several processes each makes, and counts, its own rows alone. Raises UserError for ids that the model has not.
    """
    batches, accumulation, mesh = run.data.batches, run.config.train.accumulation, run.mesh
    model, name = run.sampler.model.config, f"update {step + 1}"
    batch, arrays, mine = place_batch(batches, step, model, mesh, accumulation, name)
    rows = batches.plan.batch(step).shape.rows // accumulation
    counted = np.tile(first_holder(mesh, rows)[mine] == jax.process_index(), accumulation)
    return batch, batch_work({name: x[counted] for name, x in arrays.items()})


def explain(run: Run, update: int) -> str:
    """Return what of an update that was skipped was not finite, by the parameters of now."""
    processes.enter_phase(f"looking for what was not finite in update {update}")
    batch, _ = put_update(run, update - 1)
    processes.compile_together(run.examination.program, run.state, batch, update - 1)
    return run.examination(run.state, batch, update - 1)


def first_holder(mesh: Mesh, rows: int) -> np.ndarray:
    """Return the process of the first device that holds each row of a batch; others may hold it too."""
    holders = [device.process_index for device in mesh.devices[..., 0].flat]
    return np.repeat(holders, rows // len(holders))


def save(run: Run, selection_cost: float | None) -> None:
    """Start writing a checkpoint of the whole state; it has a selection cost if it was validated."""
    step = run.progress.step
    processes.enter_phase(f"saving update {step}")
    run.checkpoints.save(step, as_items(run.state), dataclasses.asdict(run.progress), selection_cost)
    run.saved_step = step
