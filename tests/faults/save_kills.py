"""kill -9 at every call that changes something in the folder of checkpoints, from the first of one save to the last.

The save is that of a third step, which deletes the first; whoever comes next finds the second or the third, whole, and
saves the third again.
"""

import shutil
import signal
from pathlib import Path
from random import Random
from typing import Any

from etils import epath

from tests.faults.children import run
from tests.faults.runs import Runs
from tests.faults.system_calls import kill_at
from tests.faults.verdicts import Verdict

STEPS = (1, 2, 3)
RESTORED = "restored step "


def kill_save(runs: Runs, draw: Random, number: int) -> tuple[str, Verdict] | None:
    """Kill the save at call number + 1, and go on; None where the save has no such call."""
    whole, log = runs.folder / "saves" / "whole", runs.folder / "logs" / "calls.txt"
    if not whole.exists():
        for step in STEPS[:-1]:
            run(lambda step=step: save(whole, step), log)
    folder = runs.copy(runs.folder / "saves" / "killed", whole)
    code, said, call = kill_at(lambda: save(folder, STEPS[-1]), log, folder, number + 1)
    fault = f"call {number + 1}: {call}"
    if not call and not code:
        return None
    if code != -signal.SIGKILL:
        return fault, Verdict(f"exit code {code}, not killed", said[-400:])
    end = run(lambda: go_on(folder), log)
    shutil.rmtree(folder)
    if end.code or RESTORED not in end.said:
        return fault, Verdict("not restored", end.said[-400:])
    return fault, Verdict("unharmed", end.said[end.said.index(RESTORED) :].splitlines()[0])


def save(folder: Path, step: int) -> int:
    """Save a step."""
    from jformer.checkpoints.checkpoint import Checkpoints

    with Checkpoints(epath.Path(folder), keep_last=2) as checkpoints:
        checkpoints.save(step, state(step), {"step": step}, None)
    return 0


def go_on(folder: Path) -> int:
    """Restore the newest step, compare all its bits, and save the last one; fail where anything is not as it was."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from jformer.checkpoints.checkpoint import Checkpoints
    from jformer.parallel.sharding import abstract_like

    here = SingleDeviceSharding(jax.devices()[0])
    abstract = abstract_like(state(0), jax.tree.map(lambda _: here, state(0)))
    with Checkpoints(epath.Path(folder), keep_last=2) as checkpoints:
        found = checkpoints.restore_newest(abstract)
        assert found.step in STEPS[1:], found.step
        assert not found.skipped, found.skipped
    jax.tree.map(np.testing.assert_array_equal, found.items, state(found.step))
    save(folder, STEPS[-1])
    left = sorted(path.name for path in folder.iterdir())
    assert left == [str(step) for step in STEPS[1:]], left
    print(f"{RESTORED}{found.step}", flush=True)
    return 0


def state(step: int) -> dict[str, Any]:
    """Return what a step holds."""
    import jax.numpy as jnp

    return {
        "params": {
            "w": jnp.arange(600, dtype=jnp.float32).reshape(20, 30) / 7 + step,
            "b": jnp.full(5, step, jnp.bfloat16),
        },
        "rest": {"step": jnp.int32(step)},
    }
