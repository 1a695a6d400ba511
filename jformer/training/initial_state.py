"""The state that a run starts from: its newest checkpoint, or new parameters.

New ones are drawn from the seed; parameters of another run and pretrained word vectors may replace them.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.checkpoint import Checkpoints, Restored
from jformer.checkpoints.weights import HEADS_OF_LABELS, adopt, load_parent, refuse_other_base
from jformer.checkpoints.word_vectors import match
from jformer.config.options import Config, TrainConfig
from jformer.data.tokenizers import NUM_SYMBOLS, LabelTokenizer, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import ModelConfig, init_params
from jformer.models.lora import rounded
from jformer.models.model import Model
from jformer.parallel.sharding import abstract_like, device_bytes, parameter_names, state_shardings
from jformer.storage import run_path
from jformer.training.finiteness import by_layer
from jformer.training.machine import refuse_state
from jformer.training.state import Progress, TrainState, as_items, from_items

LABELS_SHOWN = 5  # in a note


def open_state(
    create: Callable[[PyTree], TrainState],
    model: Model,
    mesh: Mesh,
    seed: int,
    checkpoints: Checkpoints,
    inherit: Callable[[PyTree], tuple[PyTree, list[str], str]],
) -> tuple[TrainState, Progress, list[str]]:
    """Return the state of the newest checkpoint, or a new one, with the progress of the run and notes on its origin.

    Args:
        create: parameters → the state before the first update; it is traced.
        model: whose parameters it holds.
        mesh: where the state is placed, in parts where parameters are split.
        seed: what new parameters are drawn from.
        checkpoints: of the run; damaged ones are skipped and named in the notes.
        inherit: new parameters → what the run starts from instead, notes on it, and the digest of the parent. On
            resuming, it is called for what checkpoints of adapters leave out.

    Raises:
        UserError: the state is larger than the memory, or no checkpoint can be read; and what `inherit` raises.
    """
    draw = functools.partial(init_params, model)
    key = jax.random.key(seed)
    shapes = jax.eval_shape(lambda key: create(draw(key)), key)
    shardings = state_shardings(mesh, shapes)
    abstract = abstract_like(shapes, shardings)
    refuse_state(device_bytes(abstract), mesh)
    restored = checkpoints.restore_newest(as_items(abstract)) if checkpoints.steps() else None
    if restored and not abstract.base:
        return from_items(abstract, restored.items), _progress(restored, checkpoints), restored.skipped
    params, notes, parent = inherit(jax.jit(draw, out_shardings=shardings.params)(key))
    params = jax.device_put(params, shardings.params)
    if restored:
        progress = _progress(restored, checkpoints)
        refuse_other_base(checkpoints.directory, progress.base, parent)
        return from_items(abstract.replace(params=params), restored.items), progress, restored.skipped
    return jax.jit(create, out_shardings=shardings)(params), Progress(base=parent if abstract.base else ""), notes


def _progress(restored: Restored, checkpoints: Checkpoints) -> Progress:
    return Progress.from_json(restored.progress, str(checkpoints.directory / str(restored.step)))


def inherit(
    config: Config, tokenizers: Sequence[Tokenizer], mesh: Mesh, params: PyTree
) -> tuple[PyTree, list[str], str]:
    """Return the new parameters with those of train.init_from and of word vectors, notes, and the parent's digest.

    Raises UserError if they do not fit the model, or are not finite.
    """
    notes, digest = list[str](), ""
    if config.train.init_from:
        parent = load_parent(config.train.init_from, mesh)
        other = other_labels(config.train.init_from, tokenizers[1])
        kept = {name: part for name, part in parent.params.items() if not other or name not in HEADS_OF_LABELS}
        params, notes = adopt(kept, params, config.train.init_from, config.model.lora)
        notes += other
        params = rounded(config.model.lora, params)
        digest = parent.digest
    params, coverage = put_vectors(config.train, config.model, tokenizers, params)
    if notes or coverage:
        _refuse_not_finite(params, config.train)
    return params, notes + coverage, digest


def other_labels(origin: str, target: Tokenizer) -> list[str]:
    """Return a note if the parent learned other labels, which its head is of no use for."""
    if not isinstance(target, LabelTokenizer):
        return []
    parent = load_tokenizers(run_path(origin) / "tokenizer")[1]
    if not isinstance(parent, LabelTokenizer) or parent.tokens == target.tokens:
        return []
    labels = (each.tokens[NUM_SYMBOLS:] for each in (parent, target))
    before, now = (", ".join([*each[:LABELS_SHOWN], *["…"] * (len(each) > LABELS_SHOWN)]) for each in labels)
    return [f"init_from {origin}: its labels are {before}, those of this run {now}"]


def _refuse_not_finite(params: PyTree, train: TrainConfig) -> None:
    """Raise UserError for NaN or infinity; updates do not notice those that no gradient reaches."""
    broken, names = jax.device_get(jax.jit(by_layer)(params)), parameter_names(params)
    for name, flags in zip(jax.tree.leaves(names), jax.tree.leaves(broken), strict=True):
        if flags.any():
            keys = [key for key in ("init_from", "source_vectors", "target_vectors") if getattr(train, key)]
            given = ", ".join(f"train.{key}={getattr(train, key)!r}" for key in keys)
            raise UserError(f"{given}: {name} is not finite there: start from something else")


def put_vectors(
    train: TrainConfig, model: ModelConfig, tokenizers: Sequence[Tokenizer], params: PyTree
) -> tuple[PyTree, list[str]]:
    """Return the parameters with the embeddings of known tokens replaced by word vectors, and the coverage.

    Raise UserError for a file that does not fit, or in which no token has a vector.
    """
    notes = []
    for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        path = getattr(train, f"{side}_vectors")
        if path:
            matched = match(tokenizer.tokens, Path(path).expanduser(), model.embedding_size)
            name = table_of(model, side)
            name = name if name in params else "source_embedding"  # both texts of task embed are read by an encoder
            table = params[name]["embedding"].at[matched.ids].set(jnp.asarray(matched.vectors))
            params = {**params, name: {**params[name], "embedding": table}}
            notes.append(f"{name}: {matched.coverage}")
    return params, notes


def table_of(model: ModelConfig, side: str) -> str:
    """Return the name of the table that embeds a side's tokens."""
    if model.family != "encdec":
        return "embedding"
    shared = model.shared_embedding and not model.vision.source
    return "source_embedding" if shared else f"{side}_embedding"
