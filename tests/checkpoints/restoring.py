"""A process of a run that saves three steps, of which process 1 alone then finds two damaged, and restores the newest.

Command:  python -m tests.checkpoints.restoring PORT COUNT I FOLDER
"""

import sys

import jax
import numpy as np
from etils.epath import Path
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jformer.checkpoints import checkpoint
from jformer.checkpoints.checkpoint import Checkpoints
from jformer.checkpoints.manifest import DamagedError
from jformer.parallel import processes
from jformer.parallel.sharding import abstract_like

STEPS = (1, 2, 3)
SHAPE = (2048, 64)  # of an array of which each process holds a half
refuse_damage = checkpoint.refuse_damage


def state(step, split):
    """Return what a step holds."""
    array = np.random.default_rng(step).standard_normal(SHAPE).astype(np.float32)
    return {"params": {"w": jax.make_array_from_callback(SHAPE, split, lambda index: array[index])}}


def refuse_bits(saved, tree, where):
    """Find other bits in step 3 than were saved."""
    refuse_damage(saved, tree, where)
    if "/3/" in where:
        raise DamagedError(f"{where}: the bits of w are not those that were saved")


def damage(folder):
    """Flip bits of what process 1 has written of step 2, and so reads again."""
    for path in (folder / "2" / "params" / "ocdbt.process_1" / "d").iterdir():
        path.write_bytes(bytes(byte ^ 4 for byte in path.read_bytes()))
    checkpoint.refuse_damage = refuse_bits


def main(folder, process):
    """Save, damage and restore."""
    split = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
    with Checkpoints(folder, keep_last=len(STEPS)) as run:
        for step in STEPS:
            run.save(step, state(step, split), {"step": step}, None)
        run.wait()
        processes.barrier()
        if process:
            damage(folder)
        processes.barrier()
        found = run.restore_newest(abstract_like(state(0, split), {"params": {"w": split}}))
        print(found.step, *found.skipped, sep="\n", flush=True)


if __name__ == "__main__":
    port, count, process = map(int, sys.argv[1:4])
    with processes.join_run(processes.ProcessInfo("127.0.0.1", port, count, process)):
        main(Path(sys.argv[4]), process)
