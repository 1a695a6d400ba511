"""The batches of a run, by update number, placed on the devices."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from jformer.data.pipeline import Batches
from jformer.models import ModelConfig
from jformer.models.batch import Batch
from jformer.models.flops import batch_work
from jformer.tasks.batch_arrays import place_batch
from jformer.training.log import Works

Feed = Callable[[int], tuple[Batch, Works]]
"""Number of an update, from 0 → its batch [a b …] on the devices, and its work."""


def make_feed(batches: Batches, model: ModelConfig, mesh: Mesh, accumulation: int) -> Feed:
    """Return the feed of a run, which raises UserError for ids that the model lacks.

    With several processes, each makes and counts only its own rows.
    """

    def feed(step: int) -> tuple[Batch, Works]:
        batch, arrays, mine = place_batch(batches, step, model, mesh, accumulation, f"update {step + 1}")
        rows = batches.plan.batch(step).shape.rows // accumulation
        counted = np.tile(first_holder(mesh, rows)[mine] == jax.process_index(), accumulation)
        return batch, Works(*batch_work({name: x[counted] for name, x in arrays.items()}))

    return feed


def first_holder(mesh: Mesh, rows: int) -> np.ndarray:
    """Return the process of the first device that holds each row of a batch; others may hold it too."""
    holders = [device.process_index for device in mesh.devices[:, 0, :, 0].flat]
    return np.repeat(holders, rows // len(holders))
