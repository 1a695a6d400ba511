"""The arrays of a batch: make them from ids, give their shapes by family, and move them to the devices.

Letters in shapes: a microbatches of an update, b rows.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jformer.data.pipeline import Arrays, Batches
from jformer.data.plan import Shape
from jformer.data.tokenizers.symbols import BOS, PAD
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.batch import Batch
from jformer.parallel.sharding import EVERY_ROW, local_rows, put_batch

__all__ = ["Batch", "abstract_batch", "id_limits", "make_batch", "place_batch"]


Ids = Sequence[Sequence[int]] | np.ndarray
"""The ids of each row, all of them tokens, or an array [b t] with padding."""


def make_batch(
    source: Ids | None = None, target: Ids | None = None, bos: int = BOS, pad: int = PAD, **arrays: np.ndarray
) -> Batch:
    """Return a batch [b …] made from ids alone, one example a row.

    Segments are 1 where there is a token, positions and rows count from 0, the decoder reads `bos` and the preceding
    tokens, and every target token has weight 1. The ids include the end symbol.

    Args:
        source, target: the ids of either side; None if the model has no such side.
        bos: the first input of the decoder.
        pad: the padding of arrays of ids. Imported vocabularies have their own: `run.tokenizers[1].symbols.pad`.
        arrays: further arrays (an image; classes as target_out), or replacements (the segments and positions of packed
            rows). `weights` of a given `target_out` default to 1, or to those of `target` if it has that shape.

    Raises:
        UserError: for ids that are not rows of integers, arrays whose name is close to one that models read, segments,
            positions or types of another shape than their ids, and arrays with different numbers of rows.
    """
    _refuse_misspelled(arrays)
    made: dict[str, Any] = {}
    for side, given in (("source", source), ("target", target)):
        if given is None:
            continue
        if not all(np.ndim(each) == 1 for each in given):
            raise UserError(f"{side}: give a list of token ids for each row, or an array [b t] of them")
        if any(len(each) and np.asarray(each).dtype.kind not in "iu" for each in given):
            raise UserError(f"{side}: token ids are integers, and these are not")
        ids = np.full((len(given), max(map(len, given), default=0)), PAD, np.int32)
        for row, each in zip(ids, given, strict=True):
            row[: len(each)] = each
        lengths = np.array([*map(len, given)])[:, None]
        real = (ids != pad if hasattr(given, "shape") else np.arange(ids.shape[1]) < lengths).astype(np.int32)
        ids = ids * real  # padding may be past the vocabulary
        positions = real * (np.cumsum(real, axis=1, dtype=np.int32) - 1)  # arrays may be padded in front
        for name in (f"{side}_{kind}" for kind in ("segments", "positions", "types")):
            if name in arrays and np.shape(arrays[name]) != ids.shape:
                raise UserError(
                    f"{name} {list(np.shape(arrays[name]))} must have the shape of {side} {list(ids.shape)}"
                )
        made |= {f"{side}_segments": real, f"{side}_positions": positions}
        if side == "source":
            made |= {"source": ids, "source_types": np.zeros_like(ids)}
        else:
            begins = np.asarray(arrays.get("target_positions", positions)) == 0
            read = np.where(begins, bos, np.roll(ids, 1, axis=1)).astype(np.int32)
            made |= {"target_in": read, "target_out": ids, "weights": real.astype(np.float32)}
    made |= arrays
    if "target_out" in arrays and "weights" not in arrays:
        shape = np.shape(arrays["target_out"])
        segments = made.get("target_segments", ())
        made["weights"] = (
            np.float32(np.asarray(segments) > 0) if np.shape(segments) == shape else np.ones(shape, np.float32)
        )
    rows = {name: len(array) for name, array in made.items()}
    if len(set(rows.values())) > 1:
        raise UserError(
            f"a batch of {', '.join(f'{name}: {count} rows' for name, count in rows.items())}: give all the same number"
        )
    made.setdefault("row", np.arange(next(iter(rows.values()), 0), dtype=np.int32))
    return cast(Batch, {name: jnp.asarray(array) for name, array in made.items()})


def _refuse_misspelled(names: Iterable[str]) -> None:
    """Raise UserError for a name close to that of an array of `Batch`; a user-defined loss may read others."""
    for name in names:
        nearest = difflib.get_close_matches(name, Batch.__annotations__, n=1, cutoff=0.9)
        if nearest and name.rstrip("_0123456789") not in Batch.__annotations__:  # source2 is a second source
            raise UserError(f"no model reads an array {name!r}: did you mean {nearest[0]!r}?")


def source_is_prefix(model: ModelConfig, answer: str) -> bool:
    """Return whether the source precedes the target in the target's arrays: a decoder that answers with a text."""
    return model.family == "decoder" and answer == "text"


def abstract_batch(
    model: ModelConfig,
    answer: str,
    shape: Shape,
    mesh: Mesh,
    accumulation: int = 1,
    others: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes [a b …] of a task's batch, with the shardings of `put_batch`.

    Args:
        model: its family determines the arrays.
        answer: `Task.answer`; for "labels" every class is predicted.
        shape: the rows of all microbatches together, and the positions of either side.
        mesh: the mesh that splits b.
        accumulation: a, which divides the rows.
        others: rows of a batch, with the arrays that a user-defined task adds.
    """
    lengths: dict[str, tuple[int, ...]] = {"row": ()}
    if model.family in ("encdec", "encoder") and not model.reads_images:
        lengths |= dict.fromkeys(("source", "source_segments", "source_positions"), (shape.source_length,))
    if model.family == "decoder" or (model.family == "encdec" and not model.head.vectors):
        lengths |= dict.fromkeys(("target_in", "target_segments", "target_positions"), (shape.target_length,))
    if source_is_prefix(model, answer):
        lengths["target_prefix"] = (shape.target_length,)
    if model.family == "encoder" and model.head.num_classes:
        lengths["source_types"] = (shape.source_length,)
    if model.reads_images:
        size = model.vision.image_size
        lengths["image"] = (size, size, model.vision.channels)
    predicted = shape.source_length if model.family == "encoder" else shape.target_length
    if model.pooled:
        predicted = model.head.num_classes if answer == "labels" else 1
    lengths |= {"weights": (predicted,)} | ({} if model.head.vectors else {"target_out": (predicted,)})
    dtypes: dict[str, Any] = {"weights": jnp.float32, "image": jnp.uint8, "target_prefix": jnp.bool_}
    added = {name: array for name, array in others.items() if name not in lengths}
    lengths |= {name: array.shape[1:] for name, array in added.items()}
    dtypes |= {name: jax.dtypes.canonicalize_dtype(array.dtype) for name, array in added.items()}
    sharding = NamedSharding(mesh, PartitionSpec(None, *EVERY_ROW))
    lead = (accumulation, shape.rows // accumulation)
    return {
        name: jax.ShapeDtypeStruct((*lead, *length), dtypes.get(name, jnp.int32), sharding=sharding)
        for name, length in lengths.items()
    }


def id_limits(model: ModelConfig) -> dict[str, int]:
    """Return array → number of valid ids, for arrays of token ids; not for classes, marks and numbers."""
    target = model.target_vocab_size if model.family == "encdec" else model.vocab_size
    limits = {"source": model.vocab_size, "target_in": target, "prompt": target}
    limits |= {} if model.head.num_classes else {"target_out": target}
    return {name: limit for name, limit in limits.items() if limit}  # a model of images may have no vocabulary


def refuse_foreign_ids(arrays: Arrays, sizes: dict[str, int], where: str) -> None:
    """Raise UserError for an id outside the vocabulary of its array; `sizes` maps array to vocabulary size.

    A device would silently clamp it to the nearest valid id.
    """
    for name, size in sizes.items():
        ids = arrays.get(name)
        if ids is not None and ids.size and (ids.min() < 0 or ids.max() >= size):
            bad = int(ids[(ids < 0) | (ids >= size)][0])
            raise UserError(
                f"{where}: {name} holds the token id {bad}, but the model's vocabulary has the ids 0 to {size - 1}: "
                "delete data.cache_dir and restore the run's tokenizer"
            )


def place_batch(
    batches: Batches, number: int, model: ModelConfig, mesh: Mesh, accumulation: int, name: str
) -> tuple[Batch, dict[str, np.ndarray], np.ndarray]:
    """Return batch `number` on the devices [a b …], and this process's part: its arrays, and its rows of a microbatch.

    Each process makes only its own rows: those of the first microbatch, then of the next.

    Args:
        batches: of training, or of one evaluation pass.
        number: the batch's number, counted over all epochs.
        model: determines the valid ids.
        mesh: the mesh that splits b.
        accumulation: a, which divides the rows of every batch.
        name: the name of the batch in errors.

    Raises:
        UserError: for ids outside the model's vocabulary.
    """
    rows = batches.plan.batch(number).shape.rows // accumulation
    mine = local_rows(mesh, rows)
    arrays = batches.rows(number, np.add.outer(rows * np.arange(accumulation), mine).ravel())
    refuse_foreign_ids(arrays, id_limits(model), name)
    split = {key: x.reshape(accumulation, -1, *x.shape[1:]) for key, x in arrays.items()}
    return cast(Batch, put_batch(mesh, split, rows)), arrays, mine
