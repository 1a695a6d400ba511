"""A run's checkpoints: Orbax writes them in the background, and what training or averaging still needs is kept."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils.epath import Path

from jformer.errors import UserError
from jformer.storage import in_bucket

args = ocp.args


class Keep(ocp.checkpoint_managers.PreservationPolicy):
    """Keep the newest checkpoint, the last `count` at regular steps and the one with the lowest validation loss.

    A checkpoint written because the run was told to stop is not at a regular step: it must not push out one that
    averaging needs.
    """

    def __init__(self, every: int, count: int) -> None:
        self.every, self.count = every, count

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return, for each checkpoint, whether it stays."""
        steps = sorted(info.step for info in checkpoints)
        regular = [step for step in steps if step % self.every == 0]
        scored = [(info.metrics["valid_loss"], info.step) for info in checkpoints if info.metrics]
        scored = [(loss, step) for loss, step in scored if math.isfinite(loss)]
        kept = {*steps[-1:], *regular[-self.count :], *(step for _, step in sorted(scored)[:1])}
        return [info.step in kept for info in checkpoints]


class Checkpoints:
    """The folder of one run's checkpoints: parameters, optimizer, moving average and progress of a step each."""

    def __init__(self, directory: Path, every: int = 1, keep_last: int = 1, clean: bool = True) -> None:
        """Open the folder, creating it if need be; `clean` removes the half-written checkpoints of a killed run.

        Who only reads must not clean: a run that is still training may be writing one.
        """
        directory = directory if in_bucket(directory) else directory.absolute()
        policy = Keep(every, keep_last)
        # best_fn alone makes Orbax read the metrics of earlier checkpoints back when the folder is opened again.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, best_fn=lambda m: m["valid_loss"], cleanup_tmp_directories=clean
        )
        self._orbax = ocp.CheckpointManager(directory, options=options)

    def steps(self) -> list[int]:
        """Return the steps that can be restored, oldest first."""
        return sorted(self._orbax.all_steps())

    def save(self, step: int, state: Any, progress: dict[str, Any], valid_loss: float | None) -> None:
        """Start writing a checkpoint; returns once the arrays are copied, before they are on disk.

        The state is a mapping of items ('params' among them); `progress` is plain JSON. A validation loss measured at
        this very step makes it a candidate for the best.
        """
        items = {name: args.StandardSave(tree) for name, tree in state.items()}
        metrics = {"valid_loss": math.inf if valid_loss is None else valid_loss}
        self._orbax.save(step, args=args.Composite(**items, progress=args.JsonSave(progress)), metrics=metrics)

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Return the items named in `abstract`, with its shapes, dtypes and shardings."""
        items = {name: args.StandardRestore(tree) for name, tree in abstract.items()}
        return dict(self._orbax.restore(step, args=args.Composite(**items)))

    def progress(self, step: int) -> dict[str, Any]:
        """Return what `save` was told beside the arrays."""
        return self._orbax.restore(step, args=args.Composite(progress=args.JsonRestore()))["progress"]

    def close(self) -> None:
        """Wait until every save is on disk; raise the error of one that failed."""
        self._orbax.wait_until_finished()
        self._orbax.close()


def abstract_like(tree: Any, shardings: Any) -> Any:
    """Return shapes and dtypes of a tree of arrays, each placed with its own sharding."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def open_run(workdir: Path) -> Checkpoints:
    """Open the checkpoints of a finished or running run to read them; raise UserError where there are none."""
    directory = workdir / "checkpoints"
    checkpoints = Checkpoints(directory, clean=False) if directory.is_dir() else None
    if checkpoints is None or not checkpoints.steps():
        raise UserError(f"{workdir}: holds no checkpoint; train there first, or give another --workdir")
    return checkpoints
