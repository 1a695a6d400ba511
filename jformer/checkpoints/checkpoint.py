"""A run's checkpoints: saved by Orbax in the background, verified by digests, and deleted when no longer needed.

A step is a folder named by its number. A half-written step has another name until it is complete; a damaged one is
renamed broken-STEP when training resumes from an older step (in a bucket it is deleted).
"""

import contextlib
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import orbax.checkpoint as ocp
from etils.epath import Path
from jaxtyping import PyTree

from jformer.checkpoints.folders import delete, quarantine, remove_failed, remove_unfinished, saved_steps
from jformer.checkpoints.manifest import DamagedError, Manifest, entries, refuse_damage, refuse_mismatch
from jformer.checkpoints.quiet_orbax_logging import log_failures_once
from jformer.checkpoints.reading import explain, first_line, on_host, prove, read_together
from jformer.errors import UnavailableError, UserError
from jformer.integrity import parse_object
from jformer.parallel import processes
from jformer.storage import in_bucket, is_outage

MANIFEST = "manifest"
SAVE_SECONDS = 24 * 3_600  # Orbax gives up after 20 minutes, too short for a large state on a slow disk
log_failures_once()  # here: every use of Orbax imports this module


class Restored(NamedTuple):
    """The content of the newest intact step."""

    step: int
    items: dict[str, PyTree]
    progress: dict[str, Any]
    skipped: list[str]  # why newer steps were skipped


class Checkpoints:
    """The folder of one run's checkpoints: parameters, optimizer, moving average and progress of a step each."""

    def __init__(self, directory: Path, every: int = 1, keep_last: int = 1, clean: bool = True) -> None:
        """Open the folder, which the first save creates; for `every` and `keep_last` see `kept_steps`.

        `clean` removes the half-written checkpoints of a killed run and sets damaged ones aside. Do not clean to read:
        a run that is still training may be writing one.
        """
        self.directory = Path(directory if in_bucket(directory) else directory.absolute())
        self._every, self._keep_last, self._clean = every, keep_last, clean
        self._manifests: dict[int, Manifest] = {}  # those read or written so far
        patience = ocp.options.AsyncOptions(timeout_secs=SAVE_SECONDS)
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=patience)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        if clean and processes.is_main_process():
            remove_unfinished(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the completely saved steps, oldest first; reading one may still find it damaged.

        All processes call it and get the steps that all of them see.
        """
        found = read_together(self._own_steps, self.directory)
        return list(processes.agree(found, lambda everybody: sorted(set(everybody[0]).intersection(*everybody[1:]))))

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step. All processes call it; if one fails, all raise its error, as in `restore`."""
        return read_together(lambda: self._own_manifest(step), self.directory / str(step))

    def newest_manifest(self) -> Manifest:
        """Return the manifest of the newest step that has a readable one; raise UserError if there is none."""
        for step in reversed(self.steps()):
            with contextlib.suppress(DamagedError):
                return self.manifest(step)
        raise UserError(f"{self.directory}: no checkpoint is readable")

    def save(
        self, step: int, state: Mapping[str, PyTree], progress: Mapping[str, object], selection_cost: float | None
    ) -> None:
        """Start writing a checkpoint; returns once the arrays are copied, before they are on disk.

        The state maps item names ('params' among them) to trees; `progress` is plain JSON. With the selection cost of a
        validation at this step, it can become the best. Raises UserError if this save or the one before fails.
        """
        self.wait()
        self._manifests.pop(step, None)  # of an older save of this step
        manifest = Manifest.of(state, progress, selection_cost)
        items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
        items[MANIFEST] = ocp.args.JsonSave(manifest.to_json())
        kinds = (Exception,) if in_bucket(self.directory) else (OSError, ValueError, RuntimeError)  # buckets raise any
        try:
            if processes.is_main_process():
                self.directory.mkdir(parents=True, exist_ok=True)
            self._orbax.save(self.directory / str(step), args=ocp.args.Composite(**items), force=True)
        except kinds as error:
            raise self._clean_failure(step, error) from error
        self._saving = self._thread.submit(self._finish, step, manifest, on_host(state))

    def check_save(self) -> None:
        """Raise UserError if the last save has failed; does not wait if it is still running."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on disk. Raise UserError if it failed."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def close(self) -> None:
        """Wait until every save is on disk. Raise UserError if one failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def restore(self, step: int, abstract: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Return the items named in `abstract`, with its shardings, verified by their digests.

        Raises UserError if a shape, dtype or name in `abstract` differs from what was saved, DamagedError for a step
        that is proven to be damaged, and UnavailableError for one that cannot be read now. All processes call it; if
        one fails, all raise its error.
        """
        where, manifest = self.directory / str(step), self.manifest(step)
        for name, tree in abstract.items():
            if name not in manifest.arrays:
                raise UserError(f"{where}: has no {name}, only {', '.join(manifest.arrays)}")
            refuse_mismatch(manifest.arrays[name], entries(tree), str(where / name))
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})
        items = read_together(lambda: self._own_items(where, args), where)
        for name, tree in items.items():  # in turn: digests of an item are sums over the parts of all processes
            read_together(partial(refuse_damage, manifest.arrays[name], tree, str(where / name)), where)
        return items

    def restore_newest(self, abstract: Mapping[str, PyTree]) -> Restored:
        """Return the items of the newest intact step, and why newer ones were skipped.

        If the folder was opened to train, skipped steps are renamed, out of the way of future ones. Raises UserError if
        no step is intact or, as `restore` does, for arrays of another model.
        """
        skipped: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                items, progress = self.restore(step, abstract), self.manifest(step).progress
            except DamagedError as error:
                skipped[step] = f"skipped a damaged checkpoint: {error}"
                continue
            if self._clean and processes.is_main_process():
                for damaged in skipped:
                    quarantine(self.directory, damaged)
            return Restored(step, items, progress, list(skipped.values()))
        raise UserError(f"{self.directory}: no checkpoint is intact; {'; '.join(skipped.values()) or 'there is none'}")

    def _own_steps(self) -> list[int]:
        """Return the steps that this process sees. Raise UserError if it cannot list them."""
        try:
            return saved_steps(self.directory)
        except Exception as error:  # buckets also raise errors other than OSError
            raise UnavailableError(
                f"{self.directory}: cannot be listed now ({first_line(error)}); try again"
            ) from error

    def _own_manifest(self, step: int) -> Manifest:
        """Return the manifest as this process reads it, without Orbax, which would wait for the other processes."""
        if step not in self._manifests:
            where = self.directory / str(step)
            try:
                content = parse_object((where / MANIFEST / "metadata").read_bytes())
                self._manifests[step] = Manifest.from_json(content, str(where / MANIFEST))
            except Exception as error:  # buckets also raise errors other than OSError
                raise explain(error, where) from error
        return self._manifests[step]

    def _own_items(self, where: Path, args: ocp.args.Composite) -> dict[str, PyTree]:
        """Return the items as this process reads them.

        Orbax's checkpointers end with a barrier, where the other processes would wait forever if one fails; its
        handlers have none.
        """
        self._orbax.wait_until_finished()
        return dict(self._orbax.handler.restore(where, args=args))

    def _finish(self, step: int, manifest: Manifest, abstract: Mapping[str, PyTree]) -> None:
        """Wait for a save in a thread; once it is verified on disk, delete the steps that are no longer needed."""
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._clean_failure(step, error) from error
        if processes.is_main_process():
            try:
                self._own_manifest(step)  # as it is on disk
                costs = self._selection_costs()
                if "best_step" in manifest.progress:  # costs measured with other options are not comparable
                    best = manifest.progress["best_step"]
                    costs = {each: cost if each == best else None for each, cost in costs.items()}
                provable = processes.process_count() == 1 and not in_bucket(self.directory)
                keep_last = self._keep_last if provable else max(2, self._keep_last)  # a spare: one may be damaged
                old = costs.keys() - kept_steps(costs, self._every, keep_last)
                if old and provable:
                    prove(self.directory / str(step), manifest, abstract)
                for each in old:
                    delete(self.directory, each)
                    self._manifests.pop(each, None)
            except DamagedError as error:  # it must not displace one that can be restored
                quarantine(self.directory, step)
                raise self._failure(step, error) from error
            except Exception as error:  # this step is saved, even if the storage cannot delete the old ones
                line = f"{self.directory}: old checkpoints could not be deleted ({first_line(error)})"
                print(f"jformer: {line}; the next save tries again", file=sys.stderr)

    def _selection_costs(self) -> dict[int, float | None]:
        """Return the selection costs of all steps; set damaged ones aside, raise if one cannot be read now."""
        costs: dict[int, float | None] = {}
        for step in self._own_steps():
            try:
                costs[step] = self._own_manifest(step).selection_cost
            except DamagedError:  # a step that cannot be restored must not displace one that can
                quarantine(self.directory, step)
        return costs

    def _clean_failure(self, step: int, error: BaseException) -> UserError:
        """Remove what a failed save left behind; return the error to raise."""
        if processes.is_main_process():
            remove_failed(self.directory)
        return self._failure(step, error)

    def _failure(self, step: int, error: BaseException) -> UserError:
        try:
            steps = self._own_steps()
            left = f"step {steps[-1]} is the last that is saved" if steps else "no step is saved"
        except UserError:  # such as on a network failure, which also failed the save
            left = "the saved steps cannot be listed now"
        kind = UnavailableError if is_outage(error) else UserError
        return kind(f"{self.directory / str(step)}: could not be written ({first_line(error)}); {left}")


def kept_steps(costs: Mapping[int, float | None], every: int, count: int) -> set[int]:
    """Return the steps to keep: the newest, the last `count` regular ones, and the one with the lowest selection cost.

    Multiples of `every` are regular. A checkpoint written because a signal stopped the run is not: it must not replace
    one that averaging needs. `costs` maps every step to its selection cost, or None if it was not validated.

    >>> sorted(kept_steps({10: 1.0, 20: 2.0, 30: 3.0, 33: None}, every=10, count=1))
    [10, 30, 33]
    """
    regular = [step for step in sorted(costs) if step % every == 0]
    scored = [(cost, step) for step, cost in costs.items() if cost is not None]
    return {*sorted(costs)[-1:], *regular[-count:], *(step for _, step in sorted(scored)[:1])}


def open_run(workdir: Path) -> Checkpoints:
    """Open the checkpoints of a finished or running run for reading. Raise UserError if there are none."""
    checkpoints = Checkpoints(workdir / "checkpoints", clean=False)
    if not checkpoints.steps():
        checkpoints.close()
        raise UserError(f"{workdir}: holds no checkpoint; train there first, or give another --workdir")
    return checkpoints
