"""The manifest of a checkpoint: the progress of the run, and the shape, dtype and digest of every array.

The file has a digest of itself, so that damage to it is detected like damage to an array.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from jaxtyping import PyTree

from jformer.checkpoints.digests import digests
from jformer.errors import UserError
from jformer.integrity import DIGEST, digest_of, refuse_newer, with_digest
from jformer.parallel.sharding import named_leaves

SCHEMA = 1


class DamagedError(UserError):
    """A checkpoint is proven to be damaged; an older one may be intact."""


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """The shape, dtype and digest of a saved array."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{' '.join(map(str, self.shape))}]"


Entries = dict[str, dict[str, ArrayEntry]]
"""Item, such as params → path of an array in it → its entry."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The metadata of a checkpoint."""

    progress: dict[str, Any]  # plain JSON
    selection_cost: float | None  # of a validation at this step, lower is better; may be a negated score
    arrays: Entries

    @classmethod
    def of(cls, items: Mapping[str, PyTree], progress: Mapping[str, object], selection_cost: float | None) -> Self:
        """Describe items before saving them. All processes call it: each adds up its own shards.

        A selection cost that is not finite is none: it can never be the best.
        """
        arrays = {name: entries(tree) for name, tree in items.items()}
        for name, tree in items.items():
            for path, digest in digests(tree).items():
                arrays[name][path] = dataclasses.replace(arrays[name][path], digest=digest)
        finite = selection_cost is not None and math.isfinite(selection_cost)
        return cls(dict(progress), selection_cost if finite else None, arrays)

    def to_json(self) -> dict[str, object]:
        """Return the manifest as plain JSON, with its own digest."""
        return with_digest({"schema": SCHEMA, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, content: Any, where: str) -> Self:
        """Parse the output of `to_json`. Raise DamagedError if damaged, UserError if its schema is newer."""
        try:
            if content.pop(DIGEST) != digest_of(content):
                raise DamagedError(f"{where}: has changed since it was written")
            refuse_newer(content.pop("schema", None), SCHEMA, where)
            arrays = {
                item: {path: ArrayEntry(tuple(one["shape"]), one["dtype"], one["digest"]) for path, one in tree.items()}
                for item, tree in content["arrays"].items()
            }
            return cls(dict(content["progress"]), content["selection_cost"], arrays)
        except UserError:  # those above
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{where}: is not a manifest of a checkpoint") from error


def entries(tree: PyTree) -> dict[str, ArrayEntry]:
    """Return path → shape and dtype of every array, or abstract array, in a tree."""
    return {path: ArrayEntry(tuple(x.shape), str(x.dtype)) for path, x in named_leaves(tree).items()}


def refuse_mismatch(saved: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry], where: str) -> None:
    """Raise UserError for the first array that one side lacks, or whose shape or dtype differs."""
    for path in [*wanted, *saved]:
        ours, theirs = (str(side[path]) if path in side else "nothing" for side in (wanted, saved))
        if ours != theirs:
            raise UserError(
                f"{where}: has {theirs} for {path}, this model needs {ours}; give the config that the run was trained "
                "with, or another --workdir"
            )


def refuse_damage(saved: Mapping[str, ArrayEntry], tree: PyTree, where: str) -> None:
    """Raise DamagedError for the first array whose digest differs. All processes call it."""
    for path, digest in digests(tree).items():
        if digest != saved[path].digest:
            raise DamagedError(f"{where}: the bits of {path} are not those that were saved")
