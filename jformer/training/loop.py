"""The training loop: update after update, until the run ends. jformer/trainer.py assembles what it needs."""

import dataclasses
from collections.abc import Callable, Iterator

import jax

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config.options import TrainConfig
from jformer.errors import BrokenRunError
from jformer.models.batch import Batch
from jformer.parallel import processes
from jformer.training.clock import Clock, has_ended
from jformer.training.heartbeat import UPDATING
from jformer.training.log import TrainingLog, Works
from jformer.training.malloc import give_back_freed_memory
from jformer.training.state import Progress, TrainState, as_items
from jformer.training.step import TrainStep


def loop(
    train: TrainConfig,
    state: TrainState,
    progress: Progress,
    batches: Iterator[tuple[Batch, Works]],
    update: TrainStep,
    validate: Callable[[TrainState], float],
    checkpoints: Checkpoints,
    log: TrainingLog,
) -> TrainState:
    """Update until the last step, the patience or time limit, or a signal; return the last state.

    The order of one turn is a contract: update, row, validation, checkpoint. So a row or a checkpoint of step s holds
    all of update s and nothing of the next, no window of rows spans a checkpoint, and a resumed run writes the same
    rows, except for one that a stop splits in two. The loop waits for the devices only when a row is due or a trace
    begins or ends; otherwise it dispatches updates slightly ahead.

    Skipped updates leave the parameters unchanged. Unchanged parameters are not validated or saved again: that would
    delete older checkpoints. If a validation raises BrokenRunError, the update is saved before it is raised again.

    Args:
        train: how long to train, and when to log, validate and save.
        state: the first one; it is donated.
        progress: of the run so far; advanced here.
        batches: device arrays [a b …] of the next update and of all later ones, with their work.
        update: the compiled update.
        validate: validates the parameters of a state; returns their selection cost.
        checkpoints: where states are saved.
        log: where rows and lines go.
    """
    clock, saved_step = Clock(train, progress.seconds), progress.step
    if has_ended(train, progress):
        return state
    for batch, work in log.waiting(batches):
        step = progress.step + 1
        shapes = tuple(array.shape for array in jax.tree.leaves(batch))
        # Starting and writing a trace makes an update slower.
        processes.enter_phase(f"update {step}", kind=None if step in train.profiled() else shapes)
        with log.profile.update(step, lambda: state):  # noqa: B023 (it is called within this turn)
            with log.timing(step, shapes) as first:
                if first:
                    processes.compile_together(update, state, batch)
                state, metrics = update(state, batch)
            log.collect(step, state, metrics, work)
        progress.step = step
        checkpoints.check_save()
        processes.defer_stop()  # from the first update on there is something to save
        stopping = processes.should_stop(step, processes.stop_requested() or clock.is_over())
        last = step >= train.num_steps or (stopping and clock.ends_run())
        saving = step % train.checkpoint_every == 0
        if last or stopping or saving or step % train.log_every == 0:
            processes.enter_phase(f"the row of update {step}", kind="row")
            log.flush(step)
            saving = saving or clock.is_save_due()
        saving &= log.skipped_in_row < step - saved_step
        validating = train.eval_every and (last or (saving and step % train.eval_every == 0))
        selection_cost, failure = None, None
        if validating:
            try:
                selection_cost = validate(state)
            except BrokenRunError as error:  # of all processes: a score that fails must not cost the updates before it
                failure = error
        if last or stopping or saving:
            progress.seconds, progress.rows = clock.note_save(), log.rows
            log.heartbeat.enter(f"saving update {step}")
            log.keep()
            processes.enter_phase(f"saving update {step}")
            checkpoints.save(step, as_items(state), dataclasses.asdict(progress), selection_cost)
            saved_step = step
            give_back_freed_memory()  # copies fragment the heap, so that updates would need more
            log.heartbeat.enter(UPDATING)
            log.restart_clock()
        if failure:
            raise failure
        if stopping or has_ended(train, progress):
            break
    return state
