"""Restore a trained run from its directory for inference; write a run from your own parameters."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils.epath import Path
from flax import traverse_util
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.weights import abstract_params, load_weights, refuse_other_tokens, write_run
from jformer.config import as_config_dict, load_config, resolve
from jformer.config.checks import refuse_longer_texts, refuse_without_attention
from jformer.config.config_files import with_keys
from jformer.config.options import Config
from jformer.config.resume import resume_config
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.interventions import intervened_as
from jformer.models.model import Model
from jformer.parallel.mesh import make_mesh
from jformer.storage import check_writable, new_directory, run_path
from jformer.tasks.build import build_sized, build_task, check_heads, choose_decoding_dtype, open_mesh
from jformer.tasks.embed import embed
from jformer.tasks.task import VECTOR, Task


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model with its config, task and tokenizers."""

    config: Config
    task: Task
    tokenizers: tuple[Tokenizer, Tokenizer]  # of the source and of the target
    model: Model  # a Linen module
    params: PyTree  # its parameters
    steps: tuple[int, ...] = ()  # of the checkpoints that the parameters are from
    digest: str = ""  # of these checkpoints, which identifies the base of adapters


def saved_config(
    workdir: str | os.PathLike[str], options: Mapping[str, object] | None = None, **decode: object
) -> Config:
    """Return the config of a run with some options replaced: by dotted key, and those of decoding by name.

    Outputs need not be plain text: they may have alignments, for example. Raises UserError for an option that does not
    exist, cannot work, or cannot change after training.
    """
    saved = load_config(run_path(workdir) / "config.json")
    keys = {"decode.outputs": "jsonl", **(options or {}), **{f"decode.{name}": value for name, value in decode.items()}}
    return resume_config(saved, with_keys(as_config_dict(saved), keys), training=False)


def restore(workdir: str | os.PathLike[str], overrides: Config | None = None, mesh: Mesh | None = None) -> Trained:
    """Read a trained run with the weights that `evaluate.weights` names, to compute in decode.dtype.

    Its model takes batches of your own, whose rows may have padding in front, or hold several texts (a recurrent
    model reads them as one). `overrides` replaces the saved config. Without a mesh, that of `overrides` is made, or one
    of all devices. Raises UserError if there is no run, and if the mesh cannot share its heads.
    """
    run = restore_to_answer(workdir, overrides, mesh)
    execution = dataclasses.replace(run.model.config.execution, rows=run.config.model.execution.rows)
    return dataclasses.replace(run, model=build_model(dataclasses.replace(run.model.config, execution=execution)))


def restore_to_answer(
    workdir: str | os.PathLike[str], overrides: Config | None = None, mesh: Mesh | None = None
) -> Trained:
    """Read a run as `restore` does, with a model for the batches that its task makes."""
    path = run_path(workdir)
    config = overrides or load_config(path / "config.json")
    task, tokenizers = build_task(config), load_tokenizers(path / "tokenizer")
    return _restore(path, config, task, tokenizers, mesh or decoding_mesh(overrides))


def restore_adapter(workdir: str | os.PathLike[str], base: Trained, mesh: Mesh) -> Trained:
    """Read a run of adapters that modify the parameters of `base`, which the two share.

    It decodes like `base`, with the same interventions. Raises UserError for a run without adapters, and for one whose
    adapters modify other parameters.
    """
    path = run_path(workdir)
    own = load_config(path / "config.json")
    if not own.model.lora.rank:
        raise UserError(f"{workdir}: holds no adapters (it was trained without model.lora.rank); load it on its own")
    config = dataclasses.replace(own, decode=base.config.decode)
    if own.task == base.config.task and base.task.answer != VECTOR:  # rerank and search=mbr read these
        read = {key: getattr(base.config.evaluate, key) for key in ("command", "command_seconds", "tokenize")}
        config = dataclasses.replace(config, evaluate=dataclasses.replace(own.evaluate, **read))
    run = _restore(path, config, build_task(config), load_tokenizers(path / "tokenizer"), mesh, base)
    return dataclasses.replace(run, model=intervened_as(base.model, run.model))


def save_run(
    config: Any,
    params: PyTree,
    tokenizers: Tokenizer | tuple[Tokenizer, Tokenizer],
    workdir: str | os.PathLike[str],
) -> None:
    """Write a run from your own parameters, for inference, export, or to start another run from.

    Args:
        config: as `jformer.train` takes it; its numbers of tokens and classes are those of the tokenizers.
        params: names → arrays, nested or with names such as "encoder/block/self_attn/q/kernel"; the layers of a stack
            are one array, layers first.
        tokenizers: one for both sides, or those of source and target.
        workdir: a new directory.

    Raises:
        UserError: the names and shapes are not those of the model, which are listed; or the directory is not empty, or
            cannot be written.
    """
    path, config = new_directory(workdir), resolve(config)
    check_writable("workdir", path)
    config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, weights="last"))  # the only ones
    source, target = tokenizers if isinstance(tokenizers, tuple | list) else (tokenizers, tokenizers)
    sides = source, target
    model = build_sized(config, build_task(config), sides)
    abstract = traverse_util.flatten_dict(abstract_params(model, make_mesh(1)), sep="/")
    given = {name.strip("/"): np.asarray(leaf) for name, leaf in traverse_util.flatten_dict(params, sep="/").items()}
    wrong = [f"{name} {list(given[name].shape)} has no place" for name in given if name not in abstract]
    for name, leaf in abstract.items():
        if name not in given or given[name].shape != leaf.shape:
            found = f"is {list(given[name].shape)}, not" if name in given else "is missing:"
            wrong.append(f"{name} {found} {list(leaf.shape)}")
    if wrong:
        raise UserError(f"the arrays do not match the model that config describes: {'; '.join(wrong)}")
    placed = {name: jax.device_put(given[name].astype(np.float32), leaf.sharding) for name, leaf in abstract.items()}
    write_run(path, config, sides, traverse_util.unflatten_dict(placed, sep="/"))


def _barely_read(model: ModelConfig) -> tuple[str, ...]:
    """Return the poolings of a position where the recurrent state of some direction has read only one token."""
    if not model.recurrent.cell:
        return ()
    if model.recurrent.bidirectional:
        return ("first", "last")
    return ("last",) if model.recurrent.reverse_source else ("first",)


def embedding_run(run: Trained) -> Trained:
    """Return a run whose answers are vectors: those that decode.pooling takes from the model of another run.

    Raises UserError for a run of images, and for a pooling that the model has no parameters for.
    """
    config, tokenizers, model = run.config, run.tokenizers, run.model.config
    pooling = config.decode.pooling or ("" if model.head.vectors else "mean")
    if model.reads_images:
        raise UserError(f"task={config.task!r}: this run reads images, and only texts have vectors")
    if pooling == "pooler" and "pooler" not in run.params:
        raise UserError("decode.pooling='pooler': the model has no pooler; use 'mean', 'first' or 'last'")
    if pooling == "first" and model.family == "decoder":
        raise UserError("decode.pooling='first' takes BOS in a decoder: use 'last' or 'mean'")
    if pooling in _barely_read(model):
        raise UserError(f"decode.pooling={pooling!r} reads a recurrent state that has read one token: use 'mean'")
    data = dataclasses.replace(config.data, batching="buckets", overlong="cut", vocab_shared=True, source="files")
    if run.task.answer != VECTOR:  # texts may be as long as those that the run reads
        written = model.family == "decoder" or run.task.answer == ""
        longest = data.max_target_length if written else data.max_source_length
        data = dataclasses.replace(data, max_source_length=longest, max_target_length=longest)
    task = embed(dataclasses.replace(data, mixture=()), label_smoothing=0.0, family=model.family)
    side = tokenizers[model.family == "decoder"]
    embedding = intervened_as(run.model, build_model(model.with_vectors("" if pooling == "pooler" else pooling)))
    config = dataclasses.replace(config, task="embed", decode=dataclasses.replace(config.decode, alignments=False))
    return dataclasses.replace(run, config=config, task=task, tokenizers=(side, side), model=embedding)


def restore_member(workdir: str | os.PathLike[str], run: Trained, mesh: Mesh) -> Trained:
    """Read another run of the ensemble of `run`, in the dtype that `run` decodes in.

    Raises UserError as `member_config` does.
    """
    own = member_config(workdir, run.config, run.tokenizers)
    decoding = dataclasses.replace(own, decode=run.config.decode)
    return _restore(run_path(workdir), decoding, run.task, run.tokenizers, mesh)


def member_config(workdir: str | os.PathLike[str], config: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> Config:
    """Return the config of another run that may form an ensemble with the run of `config` and `tokenizers`.

    Raises UserError where there is none, for one of another task, other languages or another vocabulary, and for a
    model that cannot read the same texts or has no attention that decoding reads.
    """
    path = run_path(workdir)
    if not (path / "config.json").exists():
        raise UserError(f"decode.ensemble: {workdir} holds no run; name the workdirs of trained ones")
    own, others = load_config(path / "config.json"), load_tokenizers(path / "tokenizer")
    if own.task != config.task:
        raise UserError(f"decode.ensemble: {workdir} has task={own.task!r}, this run {config.task!r}; leave it out")
    symbols = own.data.language_symbols, config.data.language_symbols
    languages = [(run.data.source_language, run.data.target_language) for run in (own, config)]
    if all(symbols) and symbols[0] != symbols[1]:
        key = f"data.language_symbols={symbols[0]!r}"
        raise UserError(f"decode.ensemble: {workdir} has {key}, this run {symbols[1]!r}; leave it out")
    if not all(symbols) and languages[0] != languages[1]:
        member, own_run = (" to ".join(pair) for pair in languages)
        raise UserError(f"decode.ensemble: {workdir} was trained on {member}, this run on {own_run}; leave it out")
    for side, ours, theirs in zip(("source", "target"), tokenizers, others, strict=True):
        if ours.fingerprint != theirs.fingerprint:
            raise UserError(
                f"decode.ensemble: {workdir} has another {side} vocabulary than this run, so their tokens mean "
                "different things; train it with train.init_from, or leave it out"
            )
    try:
        refuse_longer_texts(config, own.model)
        refuse_without_attention(config.decode, own.model)
    except UserError as error:
        raise UserError(f"decode.ensemble: {workdir}: {error}, or leave it out") from error
    return own


def decoding_mesh(config: Config | None) -> Mesh:
    """Return the mesh of a config; without a config, one of all devices."""
    return open_mesh(config) if config else make_mesh()


def _restore(
    workdir: Path,
    config: Config,
    task: Task,
    tokenizers: tuple[Tokenizer, Tokenizer],
    mesh: Mesh,
    base: Trained | None = None,
) -> Trained:
    config = choose_decoding_dtype(config, mesh)
    dtype = config.decode.dtype or config.model.dtype
    model_config = config.model if base else config.model.merged
    computing = dataclasses.replace(config, model=dataclasses.replace(model_config, dtype=dtype))
    model = build_sized(computing, task, tokenizers)
    check_heads(model.config, mesh)
    weights = load_weights(workdir, config, model, mesh, (base.params, base.digest) if base else None)
    refuse_other_tokens(workdir, weights, tokenizers)
    read = {"params": weights.params, "steps": weights.steps, "digest": weights.digest}
    return Trained(config=config, task=task, tokenizers=tokenizers, model=model, **read)
