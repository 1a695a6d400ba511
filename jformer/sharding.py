"""The mesh of devices, and how arrays lie on it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jformer.errors import UserError

DATA = "data"
ROWS = PartitionSpec(None, DATA)  # batch leaves [a b …]: every microbatch's rows are split over the devices


def make_mesh(data: int = -1) -> Mesh:
    """Lay `data` devices (-1 = all) on the mesh's data axis; raise UserError for more than there are."""
    devices = jax.devices()
    count = len(devices) if data == -1 else data
    if not 1 <= count <= len(devices):
        raise UserError(f"mesh.data={data} needs {data} devices and {len(devices)} are here; -1 takes all of them")
    # Explicit axes, the default of jax.make_mesh, refuse Linen's embeddings: the compiler shards what we leave open.
    return Mesh(np.array(devices[:count]), (DATA,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(mesh: Mesh, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Move a batch of leaves [a b …] to the devices, rows split over the data axis."""
    return jax.device_put(batch, NamedSharding(mesh, ROWS))
