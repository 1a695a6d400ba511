"""The parts that a model's parameters belong to, with their shapes and counts."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

STACKED = "block"  # the module whose parameters have a leading layer axis


def count_params(params: PyTree) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def split(params: PyTree, marks: PyTree) -> tuple[PyTree, PyTree]:
    """Return the parameters not marked in a tree of booleans, and those marked, each with None for the others.

    Without marks, the first tree is `params` and the second None.
    """
    if marks is None:
        return params, None
    trained = jax.tree.map(lambda leaf, mark: None if mark else leaf, params, marks)
    return trained, jax.tree.map(lambda leaf, mark: leaf if mark else None, params, marks)


def in_stack(path: tuple[Hashable, ...]) -> bool:
    """Return whether a leaf of this path belongs to a stack of layers, so that its first axis is theirs."""
    return jax.tree_util.DictKey(STACKED) in path


def in_stacks(params: PyTree) -> PyTree:
    """Return a tree of booleans that marks the parameters with a leading layer axis."""
    return jax.tree_util.tree_map_with_path(lambda path, _: in_stack(path), params)


def join(first: PyTree, second: PyTree) -> PyTree:
    """Return a tree with the leaves of the first, and those of the second where the first has None."""
    if second is None:
        return first
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def overlaid(tree: PyTree, own: PyTree) -> PyTree:
    """Return a tree with the leaves of another added; these replace leaves of the same names."""
    return unflatten_dict({**flatten_dict(tree), **flatten_dict(own)}) if isinstance(tree, Mapping) else own


def unshared(tree: PyTree, base: PyTree) -> PyTree:
    """Return the part of a tree whose leaves are not the same arrays as those in another tree."""
    others = flatten_dict(base)
    return unflatten_dict({path: leaf for path, leaf in flatten_dict(tree).items() if others.get(path) is not leaf})


def parameter_rows(params: Mapping[str, PyTree]) -> Iterator[tuple[str, str, int]]:
    """Yield (part, shapes, count) of every table, norm, projection and sublayer; stacks begin with their layers."""
    for name, part in _parts(params):
        largest, *others = sorted(jax.tree.leaves(part), key=lambda leaf: -leaf.size)
        shape = " x ".join(map(str, largest.shape)) + (" ..." if others else "")
        yield name, shape, count_params(part)


def _parts(tree: PyTree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name, parameters) of every part without parts of its own; a block's sublayers count as such."""
    inner = isinstance(tree, Mapping) and any(isinstance(part, Mapping) for part in tree.values())
    if inner and STACKED not in path[:-1]:
        for name, part in tree.items():
            yield from _parts(part, (*path, name))
    else:
        yield "/".join(path), tree
