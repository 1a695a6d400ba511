"""What a new run may begin with instead of random numbers: another run's parameters, pretrained word vectors."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jformer.config.options import Config
from jformer.data.progress import counted
from jformer.data.tokenizers import Tokenizer
from jformer.data.word_vectors import match
from jformer.errors import UserError
from jformer.parallel.sharding import parameter_names

# Parameters that belong to a task: one that the parent did not learn begins anew.
HEADS = ("head", "pooler", "classifier", "transitions")


def adopt(parent: PyTree, fresh: PyTree, origin: str) -> tuple[PyTree, list[str]]:
    """Return the parent's parameters where it has them and fresh ones for a new head, and what was not one to one.

    Tables may have other numbers of rows (a task's symbols lie past the vocabulary): their common rows are taken over.
    Raise UserError naming the first other parameter that the parent has in another shape, or not at all.
    """
    have = dict(zip(jax.tree.leaves(parameter_names(parent)), jax.tree.leaves(parent), strict=True))
    leaves, tree = jax.tree.flatten(fresh)
    names = jax.tree.leaves(parameter_names(fresh))
    taken = [_taken(name, have.get(name), new, origin) for name, new in zip(names, leaves, strict=True)]
    notes = [note for _, note in taken if note]
    unused = [f"{name} has no use here" for name in have if name not in names]
    notes = [f"{counted(len(leaves) - len(notes), 'parameters')} taken over", *notes, *unused]
    return jax.tree.unflatten(tree, [leaf for leaf, _ in taken]), [f"init_from {origin}: {note}" for note in notes]


def _taken(name: str, old: jax.Array | None, new: jax.Array, origin: str) -> tuple[jax.Array, str]:
    """Return what a parameter begins with, and a note where that is not all of the parent's."""
    if old is not None and old.shape == new.shape:
        return old, ""
    if name.partition("/")[0] in HEADS:
        return new, f"{name} begins anew"
    if old is None or not name.endswith("embedding") or old.shape[1:] != new.shape[1:]:
        found = "nothing" if old is None else old.shape
        raise UserError(f"train.init_from={origin!r} has {found} for {name}, this model needs {new.shape}")
    rows = min(len(old), len(new))
    note = f"{name}: {rows:,} of {len(new):,} rows taken over, of {len(old):,}"
    return new.at[:rows].set(old[:rows]), note


def put_vectors(config: Config, tokenizers: Sequence[Tokenizer], params: PyTree) -> tuple[PyTree, list[str]]:
    """Return the parameters with the embeddings of known tokens replaced by word vectors, and the coverage.

    Raise UserError for a file that does not fit, or in which no token has a vector.
    """
    notes = []
    for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        path = getattr(config.train, f"{side}_vectors")
        if path:
            matched = match(tokenizer.tokens, Path(path), config.model.embedding_size)
            name = table_of(config, side)
            table = params[name]["embedding"].at[matched.ids].set(jnp.asarray(matched.vectors))
            params = {**params, name: {**params[name], "embedding": table}}
            notes.append(f"{name}: {matched}")
    return params, notes


def table_of(config: Config, side: str) -> str:
    """Return the name of the table that embeds a side's tokens."""
    if config.model.family != "encdec":
        return "embedding"
    shared = config.model.shared_embedding and not config.model.vision.source
    return "source_embedding" if shared else f"{side}_embedding"
