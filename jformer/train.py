"""The training loop: what happens to a built run, update after update, until it ends."""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils.epath import Path
from jax.sharding import Mesh

from jformer import hosts
from jformer.config import Config
from jformer.data.pipeline import Batches, prefetch
from jformer.errors import UserError
from jformer.evaluate import split_totals
from jformer.flops import Work, batch_work, update_flops
from jformer.memory import abstract_batch, update_memory
from jformer.metrics import summarize
from jformer.peak import Peak, find_peak
from jformer.profile import Profile
from jformer.report import Cost, Report
from jformer.run import Run, as_items, build
from jformer.sharding import local_rows, put_batch
from jformer.storage import lock_of


def train(config: Config, workdir: Path) -> bool:
    """Train, or go on where an earlier call stopped; return False if a signal asked to stop before the end."""
    with sole_trainer(workdir) if hosts.first() else contextlib.nullcontext():
        hosts.refuse_unshared(workdir)
        run = build(config, workdir)
        devices = sorted(run.mesh.devices.flat, key=lambda device: device.process_index != hosts.index())
        peak = find_peak(devices, config.model.dtype, config.train.peak_flops)
        cost = Cost(functools.partial(update_flops, run.sampler.model.config), peak.flops)
        profiled = config.train.profiled() if hosts.first() else range(0)
        with (
            Report(workdir, config, run.progress.step, run.schedule, cost) as report,
            Profile(workdir / "profile", profiled, report.say) as profile,
            stop_signals() as stop,
        ):
            introduce(run, report, peak)
            if not run.finished:
                loop(run, report, profile, stop)
        hosts.reach("the last save")
        run.checkpoints.close()
        return run.finished


def loop(run: Run, report: Report, profile: Profile, stop: threading.Event) -> None:
    """Update until the last step, the end of patience or a signal.

    The order of one turn is a contract: update, report, validate, save. So a row or a checkpoint of step s holds all
    of update s and nothing of the next, no window of rows spans a checkpoint, and a resumed run writes the same rows.
    The devices are waited for only when something is reported, or a trace begins or ends; until then updates are
    dispatched a little ahead.
    """
    train, progress = run.config.train, run.progress
    began = time.monotonic() - progress.seconds
    for batch, work in report.waiting(prefetch(feed(run.data.batches, progress.step, train.accumulation, run.mesh))):
        hosts.reach(f"update {progress.step + 1}", like=tuple(array.shape for array in batch.values()))
        with profile.update(progress.step + 1, lambda: run.state):
            run.state, metrics = run.train_step(run.state, batch)
            report.collect(metrics, work)
        progress.step += 1
        last, stopping = progress.step >= train.num_steps, hosts.stopping(progress.step, stop.is_set())
        saving = last or stopping or progress.step % train.checkpoint_every == 0
        validating = bool(train.eval_every) and (last or progress.step % train.eval_every == 0)
        if saving or progress.step % train.log_every == 0:  # what validates also saves
            hosts.reach(f"the row of update {progress.step}", like="row")
            report.flush(progress.step)
        loss = validate(run, report) if validating else None
        if saving:
            progress.seconds = time.monotonic() - began
            report.keep()
            save(run, loss)
            report.restart_clock()
        if run.finished or stopping:
            return


def feed(
    batches: Batches, start: int, accumulation: int, mesh: Mesh
) -> Iterator[tuple[dict[str, jax.Array], tuple[Work, Work]]]:
    """Yield the device arrays [a b …] of every update from `start` on, and the work of its texts and of its rows.

    Of several processes each makes, and counts, its own rows alone.
    """
    for step in itertools.count(start):
        rows = batches.plan.batch(step).shape.rows // accumulation
        mine = local_rows(mesh, rows)
        arrays = batches.rows(step, np.add.outer(rows * np.arange(accumulation), mine).ravel())
        split = {name: x.reshape(accumulation, -1, *x.shape[1:]) for name, x in arrays.items()}
        counted = np.tile(first_holder(mesh, rows)[mine] == jax.process_index(), accumulation)
        yield put_batch(mesh, split, rows), batch_work({name: x[counted] for name, x in arrays.items()})


def first_holder(mesh: Mesh, rows: int) -> np.ndarray:
    """Return the process of the first device that holds each row of a batch; others may hold it too."""
    holders = [device.process_index for device in mesh.devices[..., 0].flat]
    return np.repeat(holders, rows // len(holders))


def validate(run: Run, report: Report) -> float:
    """Report the validation loss and the answers to samples; return the loss, and note whether patience is over."""
    assert run.data.valid is not None
    hosts.reach(f"the validation after update {run.progress.step}")
    means = summarize(split_totals(run.eval_step, run.state.params, run.data.valid, run.mesh))
    progress, loss = run.progress, means["loss"]
    report.write({"step": progress.step, "split": "valid", **means})
    if progress.best_loss is None or loss < progress.best_loss:
        progress.best_loss, progress.best_step, progress.since_best = loss, progress.step, 0
    else:
        progress.since_best += 1
    if run.data.samples:
        hosts.reach(f"the samples after update {progress.step}")
        run.sampler.params = run.state.params
        outputs = run.sampler.predict([pair.source for pair in run.data.samples])
        report.show_samples(run.data.samples, outputs)
    if 0 < run.config.train.patience <= progress.since_best:
        report.say(f"no better validation loss than {progress.best_loss:.4f} of update {progress.best_step}: stopping")
    return loss


def save(run: Run, valid_loss: float | None) -> None:
    """Start writing a checkpoint of the whole state."""
    hosts.reach(f"saving update {run.progress.step}")
    items = as_items(run.state)
    run.checkpoints.save(run.progress.step, items, dataclasses.asdict(run.progress), valid_loss)


@contextlib.contextmanager
def sole_trainer(workdir: Path) -> Iterator[None]:
    """Hold the run against a second trainer; the operating system lets go when this process ends, however it ends.

    Held before anything of the run is opened: opening removes what a killed run left half-written, which may be what
    a living one is writing. A directory that was made for the lock alone goes with it.
    """
    made = not workdir.exists()
    lock = lock_of(workdir)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{workdir}: another process is training here; wait for it or use another --workdir"
            ) from error
        try:
            yield
        finally:
            if made and list(lock.parent.iterdir()) == [lock]:
                lock.unlink()
                lock.parent.rmdir()


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turn SIGTERM and the first SIGINT into a request to save and stop; a second SIGINT ends at once."""
    stop = threading.Event()

    def request(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def introduce(run: Run, report: Report, peak: Peak) -> None:
    """Say what is about to be trained, on what."""
    data, plan = run.data, run.data.batches.plan
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    report.show_config()
    for text, corpus in data.texts.items():
        report.say(f"{text}: " + ", ".join(f"{count:,} {reason}" for reason, count in corpus.counts.items()))
    for note in run.notes:
        report.say(note)
    source, target = (f"{tokenizer.vocab_size:,}" for tokenizer in data.tokenizers)
    shared = data.tokenizers[0] is data.tokenizers[1]
    vocabulary = source if shared else f"{source} source, {target} target"
    report.say(f"vocabulary: {vocabulary}; parameters: {parameters:,}")
    shapes = ", ".join(f"{s.rows} x ({s.source_length} + {s.target_length})" for s in plan.shapes)
    report.say(f"batches: {len(data.batches):,} an epoch, of rows x (source + target) = {shapes}")
    kind = run.mesh.devices.flat[0].device_kind
    report.say(f"devices: {run.mesh.size} x {kind}, at most {peak.flops / 1e12:.3g} TFLOP/s ({peak.origin})")
    if run.finished:
        report.say(f"already trained to update {run.progress.step}: nothing left to do")
        return
    batch = abstract_batch(run.sampler.model.config, plan.shapes[-1], run.mesh, run.config.train.accumulation)
    report.say(f"memory of the longest update: {update_memory(run.train_step, run.state, batch)}")
    profiled = run.config.train.profiled()
    if profiled and profiled[-1] <= run.progress.step:
        report.say(f"train.profile_steps={run.config.train.profile_steps!r} are updates of the past: none is traced")
    if run.progress.step:
        report.say(f"resuming at update {run.progress.step} of {run.config.train.num_steps}")
