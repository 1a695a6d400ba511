"""What do the digests of a checkpoint cost? Saving and restoring a whole state, with them and without.

The state is that of Adam: parameters and two moments, random numbers of the shapes of `--preset`. Saving is timed
until all of it is on disk, restoring until all arrays are there, in turns. Files that were just written are read from
memory, so the share of the digests is larger here than where a disk or a bucket is waited for.

Command:  python -m experiments.speed.digest_cost [--preset=transformer_base] [--turns=7] [--smoke]
"""

import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from etils import epath
from jax.sharding import SingleDeviceSharding

from experiments.measure import commit, processor_name, seconds_in_turns, smoke_sizes
from jformer.checkpoints import manifest
from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import default_config, resolve
from jformer.models import build_model, init_params
from jformer.parallel.sharding import abstract_like, parameter_names

PRESET = flags.DEFINE_string("preset", "transformer_base", "Of the shapes.")
TURNS = flags.DEFINE_integer("turns", 7, "Savings and restorings of each kind.")

GOAL = 0.05  # of saving and restoring together
VOCABULARY = 8_000


def main(_: Sequence[str]) -> None:
    """Print the medians."""
    smoke_sizes(preset="transformer_tiny", turns=1)
    logging.set_verbosity(logging.WARNING)  # what Orbax tells of every step takes time, too
    state = random_state(PRESET.value)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"{PRESET.value}, {size / 2**20:,.0f} MiB, {TURNS.value} turns, {processor_name()}, {commit()}")
    with tempfile.TemporaryDirectory(prefix="digest-cost-") as folder:
        with_them, without = (sides(state, Path(folder) / name) for name in ("with", "without"))
        calls: dict[tuple[str, bool], Callable[[], Any]] = {
            ("save", True): with_them[0],
            ("save", False): functools.partial(without_digests, without[0]),
            ("restore", True): with_them[1],
            ("restore", False): functools.partial(without_digests, without[1]),
        }
        found = {side: statistics.median(times) for side, times in seconds_in_turns(calls, TURNS.value).items()}
    totals = []
    for digested in (True, False):
        save, restore = (found[what, digested] for what in ("save", "restore"))
        totals.append(save + restore)
        print(
            f"{'with' if digested else 'without':8} save {save:.3f} s, restore {restore:.3f} s, both {totals[-1]:.3f} s"
        )
    share = totals[0] / totals[1] - 1
    print(f"the digests cost {share:.1%} of saving and restoring (medians; the goal is at most {GOAL:.0%})")


def random_state(preset: str) -> dict[str, Any]:
    """Return random parameters and moments."""
    config = default_config(preset)
    config.model.vocab_size = VOCABULARY
    model = build_model(resolve(config).model)
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)

    def drawn(seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        arrays = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    return {"params": drawn(0), "rest": {"mu": drawn(1), "nu": drawn(2), "step": jnp.int32(1)}}


def sides(state: dict[str, Any], folder: Path) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return what saves a state into a folder until it is on disk, and what restores it from there."""
    here = SingleDeviceSharding(jax.devices()[0])
    abstract = abstract_like(state, jax.tree.map(lambda _: here, state))

    def save() -> None:
        with Checkpoints(epath.Path(folder)) as checkpoints:
            checkpoints.save(1, state, {}, None)

    def restore() -> Any:
        with Checkpoints(epath.Path(folder), clean=False) as checkpoints:
            return checkpoints.restore(1, abstract)

    return save, restore


def without_digests(work: Callable[[], Any]) -> Any:
    """Do some work in which no digest of an array is computed."""
    with mock.patch.object(manifest, "digests", empty_digests):
        return work()


def empty_digests(tree: Any) -> dict[str, str]:
    """Return the path of every array → nothing."""
    return dict.fromkeys(jax.tree.leaves(parameter_names(tree)), "")


if __name__ == "__main__":
    app.run(main)
