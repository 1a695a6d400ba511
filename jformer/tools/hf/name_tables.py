"""Convert tensors to our parameters and back by a table: our parameter → their name and how to read it.

`{}` in a name is the number of a layer: ours has all layers of a stack in one array. All mismatches are reported in one
error, with names and shapes, before any tensor is read.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jformer.errors import UserError
from jformer.parallel.sharding import named_leaves, parameter_names
from jformer.tools.hf.tensors import Tensors

SHOWN = 8  # names in an error or a summary


class Entry(NamedTuple):
    """Where one of our parameters, or one layer of it, is in theirs."""

    theirs: str
    read: Callable[[np.ndarray], np.ndarray] = np.asarray
    write: Callable[[np.ndarray], np.ndarray] = np.asarray
    part: int = 0  # which of `parts` parameters of ours that theirs concatenates along the last axis
    parts: int = 1
    otherwise: str = ""  # the name to read if `theirs` is missing
    value: np.ndarray | None = None  # theirs computes this value and stores nothing


Table = dict[str, Entry]


def linear(ours: str, theirs: str, bias: bool = True) -> Table:
    """Map a projection, whose kernel is [out in] in torch."""
    table = {f"{ours}/kernel": Entry(f"{theirs}.weight", np.transpose, np.transpose)}
    return table | ({f"{ours}/bias": Entry(f"{theirs}.bias")} if bias else {})


def norm(ours: str, theirs: str, bias: bool = True) -> Table:
    """Map a norm."""
    return {f"{ours}/scale": Entry(f"{theirs}.weight")} | ({f"{ours}/bias": Entry(f"{theirs}.bias")} if bias else {})


def embedding(ours: str, theirs: str, first: int = 0) -> Table:
    """Map an embedding table; its rows before `first` are unused, and written as zeros."""
    if not first:
        return {f"{ours}/embedding": Entry(f"{theirs}.weight")}

    def pad(table: np.ndarray) -> np.ndarray:
        return np.pad(table, ((first, 0), (0, 0)))

    return {f"{ours}/embedding": Entry(f"{theirs}.weight", lambda table: table[first:], pad)}


def modules(names: Mapping[str, str], bias: bool = True) -> Table:
    """Map projections and norms, ours → theirs; a norm is one whose name ends so."""
    return {
        path: entry
        for ours, theirs in names.items()
        for path, entry in (norm if ours.endswith("norm") else linear)(ours, theirs, bias).items()
    }


def below(ours: str, theirs: str, *tables: Table) -> Table:
    """Nest tables below a module on both sides."""
    rows = [row for table in tables for row in table.items()]
    return {f"{ours}/{path}": entry._replace(theirs=f"{theirs}.{entry.theirs}") for path, entry in rows}


def from_source(table: Table, abstract: PyTree, source: Tensors, unread: Callable[[str], bool]) -> PyTree:
    """Return our parameters with the shapes and shardings of `abstract`; each device reads its own part.

    `unread` returns whether a tensor of theirs can be ignored. Raises UserError listing all mismatches.
    """
    names, shapes = parameter_names(abstract), source.shapes()
    _check(table, named_leaves(abstract), shapes, unread)

    def load(path: str, leaf: Any) -> jax.Array:
        entry = table[path]

        def shard(index: Any) -> np.ndarray:  # a slice of every axis
            if entry.value is not None:
                return entry.value[index]
            if "{}" not in entry.theirs:
                return source.read(_present(entry, shapes), lambda array: entry.read(array)[index])
            layers = range(leaf.shape[0])[index[0]]
            sizes = [len(range(size)[part]) for size, part in zip(leaf.shape, index, strict=True)]
            array = np.empty(sizes, np.float32)
            for row, layer in enumerate(layers):
                array[row] = source.read(entry.theirs.format(layer), lambda whole: entry.read(whole)[index[1:]])
            return array

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return jax.tree.map(load, names, abstract)


def to_tensors(table: Table, params: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator over their tensors. Raise UserError, at once, for a changed parameter that theirs computes."""
    leaves = named_leaves(params)
    together: dict[str, list[str]] = {}
    for path, entry in table.items():
        if entry.value is not None:
            if not np.array_equal(entry.value, leaves[path]):
                raise UserError(
                    f"{path} was trained, but transformers computes it: export a run that has it in train.freeze"
                )
        else:
            together.setdefault(entry.theirs, []).append(path)
    return _tensors(table, leaves, together)


def _tensors(
    table: Table, leaves: Mapping[str, Any], together: Mapping[str, list[str]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield their tensors, one at a time; `together` is their name → the parameters of ours that it holds."""
    for theirs, paths in together.items():
        stacked = "{}" in theirs
        for layer in range(leaves[paths[0]].shape[0] if stacked else 1):
            pieces = [np.asarray(leaves[path][layer] if stacked else leaves[path]) for path in paths]
            written = [table[path].write(piece) for path, piece in zip(paths, pieces, strict=True)]
            yield theirs.format(layer), np.concatenate(written, axis=-1) if len(written) > 1 else written[0]


def _present(entry: Entry, shapes: Mapping[str, PyTree]) -> str:
    return entry.theirs if entry.theirs in shapes or not entry.otherwise else entry.otherwise


def _check(
    table: Table, leaves: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], unread: Callable[[str], bool]
) -> None:
    """Raise UserError for names without a counterpart and for different shapes."""
    wrong = [f"our {path} has no counterpart" for path in leaves if path not in table]
    wrong += [f"our model has no {path}" for path in table if path not in leaves]
    read: set[str] = set()
    for path in leaves.keys() & table.keys():
        entry, shape = table[path], tuple(leaves[path].shape)
        if entry.value is not None:
            continue
        stacked = "{}" in entry.theirs
        for layer in range(shape[0] if stacked else 1):
            name = _present(entry, shapes).format(layer)
            read.add(name)
            if name not in shapes:
                wrong.append(f"{name} (our {path}) is missing")
            elif (found := _read_shape(entry, shapes[name])) != (wanted := shape[stacked:]):
                wrong.append(f"{name} {shapes[name]} gives {found}, our {path} needs {wanted}")
    wrong += [f"{name} {shapes[name]} has no place in ours" for name in shapes if name not in read and not unread(name)]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UserError(f"the weights do not fit config.json: {'; '.join(sorted(wrong)[:SHOWN])}{more}")


def _read_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...] | str:
    """Return the shape that reading gives, without allocating the tensor."""
    try:
        return entry.read(np.broadcast_to(np.float32(0), shape)).shape
    except ValueError as error:
        return str(error)
