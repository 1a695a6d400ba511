"""Load the last, best or averaged parameters of a run, for inference or to start another run from; write a run."""

import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils.epath import Path
from flax import traverse_util
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints import checkpoint
from jformer.config import load_config, save_config
from jformer.config.options import Config
from jformer.data.progress import counted
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.integrity import digest_of, seal
from jformer.models import param_shapes
from jformer.models.lora import merged
from jformer.models.lora_config import LoraConfig, is_factor
from jformer.models.model import Model
from jformer.models.parts import overlaid
from jformer.parallel import processes
from jformer.parallel.mesh import FSDP, TENSOR
from jformer.parallel.sharding import abstract_like, named_leaves, parameter_shardings
from jformer.storage import run_path


def abstract_params(model: Model, mesh: Mesh, whole: Sequence[str] = (FSDP,)) -> PyTree:
    """Return the shapes of a model's parameters with shardings for inference, not split over `whole` axes."""
    shapes = param_shapes(model)
    return abstract_like(shapes, parameter_shardings(mesh, shapes, whole))


HEADS_OF_LABELS = ("classifier", "transitions")
# Task-specific parameters, newly initialised unless the parent has them in the same shapes.
HEADS = ("head", "pooler", *HEADS_OF_LABELS)
# The parameters with an entry for each token → the axis of the tokens.
TABLES = {
    "embedding/embedding": 0, "source_embedding/embedding": 0, "target_embedding/embedding": 0, "head/output/kernel": 1,
    "head/bias": 0,
}  # fmt: skip
TEXTS = re.compile(r"input/(positions|segments)/embedding$")  # tables of the positions and the kinds of texts


class Weights(NamedTuple):
    """Parameters, the steps of their checkpoints, and the fingerprints of the tokenizers of the last one."""

    params: PyTree
    steps: tuple[int, ...]
    tokenizers: tuple[str, ...]  # fingerprints; empty if it was not trained here
    digest: str  # of everything read
    base: str  # for adapters: the digest of the parameters that they modify


def load_saved(
    workdir: Path, settings: Config, mesh: Mesh, abstract: PyTree = None, whole: Sequence[str] = (FSDP,)
) -> Weights:
    """Return the saved parameters that `evaluate.weights` names; adapters without their base.

    The last ones and their moving average come from the newest intact checkpoint; skipped ones are reported on standard
    error.

    Args:
        workdir: of the run.
        settings: its config; `evaluate.weights` names the parameters.
        mesh: where they are placed.
        abstract: their shapes and shardings; None = all that were saved.
        whole: axes of the mesh that do not split parameters, such as fsdp for inference.

    Raises:
        UserError: other checkpoints are needed and damaged.
    """
    with checkpoint.open_run(workdir) as saved:
        params, steps = _params_and_steps(saved, workdir, settings, abstract or _saved_shapes(saved, mesh, whole))
        manifests = [saved.manifest(step) for step in steps]
    progress, item = manifests[-1].progress, "ema" if settings.evaluate.weights == "ema" else "params"
    arrays = [{path: entry.digest for path, entry in manifest.arrays[item].items()} for manifest in manifests]
    base, tokenizers = progress.get("base", ""), tuple(progress.get("tokenizers", ()))
    digest = digest_of({"arrays": arrays, "base": base})
    return Weights(params=params, steps=steps, tokenizers=tokenizers, digest=digest, base=base)


def _saved_shapes(saved: checkpoint.Checkpoints, mesh: Mesh, whole: Sequence[str]) -> PyTree:
    """Return shapes and shardings as `abstract_params` does, but of all parameters that a run has saved."""
    arrays = saved.newest_manifest().arrays["params"]
    shapes = {path: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for path, entry in arrays.items()}
    tree = traverse_util.unflatten_dict(shapes, sep="/")
    try:
        shardings = parameter_shardings(mesh, tree, whole)
    except UserError:  # an axis does not divide one of them, which the new run may not even have
        shardings = parameter_shardings(mesh, tree, (FSDP, TENSOR))
    return abstract_like(tree, shardings)


def write_run(
    workdir: Path, config: Config, tokenizers: tuple[Tokenizer, Tokenizer], params: PyTree, base: str = ""
) -> None:
    """Write a workdir. All processes call it; process 0 writes everything but the shards of parameters.

    Args:
        workdir: the new run's.
        config: of the run.
        tokenizers: of source and target; equal ones are one file, shared.
        params: the parameters that the checkpoint holds.
        base: for adapters: the digest of the parameters that they modify.
    """
    processes.barrier()  # all have seen an empty workdir
    if processes.is_main_process():
        (workdir / "tokenizer").mkdir(parents=True, exist_ok=True)
        source, target = tokenizers
        if source.fingerprint == target.fingerprint:
            target.save(workdir / "tokenizer", "shared")
        else:
            source.save(workdir / "tokenizer", "source")
            target.save(workdir / "tokenizer", "target")
        seal(workdir / "tokenizer")
    processes.refuse_unshared(workdir)
    checkpoints = checkpoint.Checkpoints(workdir / "checkpoints")
    untrained = {"step": 0, "seconds": 0.0, "best_step": 0, "data": []}
    progress = {**untrained, "config": dataclasses.asdict(config), "base": base}
    checkpoints.save(0, {"params": params}, progress, None)
    checkpoints.close()
    if processes.is_main_process():
        save_config(config, workdir / "config.json")


def load_weights(
    workdir: Path,
    settings: Config,
    model: Model | None,
    mesh: Mesh,
    base: tuple[PyTree, str] | None = None,
    whole: Sequence[str] = (FSDP,),
) -> Weights:
    """Return the parameters of a run as `load_saved` does, but adapters together with their base.

    Args:
        workdir: of the run.
        settings: its config; `evaluate.weights` names the parameters.
        model: the model they are for: one with adapters keeps these separate, others merge them. None = all saved ones.
        mesh: where they are placed.
        base: the parameters that adapters modify, and their digest; None = those of train.init_from.
        whole: axes of the mesh that do not split them.

    Raises:
        UserError: as `load_saved` does, and for adapters whose base is gone or has other parameters.
    """
    lora, origin = settings.model.lora, settings.train.init_from
    wanted = abstract_params(model, mesh, whole) if model else None
    own = load_saved(workdir, settings, mesh, None if lora.rank else wanted, whole)
    if not lora.rank:
        return own
    if base:
        refuse_other_base(workdir, own.base, base[1], "the run that they are to be added to")
    else:
        if not (run_path(origin) / "config.json").exists():
            raise UserError(
                f"{workdir}: holds adapters of the run in {origin!r}, which is not there: restore it, or name its new "
                "location with --config.train.init_from"
            )
        parent = load_parent(origin, mesh, whole)
        refuse_other_base(workdir, own.base, parent.digest)
        base = parent.params, parent.digest
    params = overlaid(base[0], own.params)
    if model is None or not model.config.lora.rank:
        params = merged(lora, params)
    if wanted:
        params, _ = adopt(params, wanted, origin, new=False)
        params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, wanted))
    return own._replace(params=params)


def load_parent(workdir: str, mesh: Mesh, whole: Sequence[str] = (FSDP,)) -> Weights:
    """Return the parameters of a run that another starts from, split over the axes that are not in `whole`.

    Raises UserError if its tokenizer has changed.
    """
    path = run_path(workdir)
    weights = load_weights(path, load_config(path / "config.json"), None, mesh, whole=whole)
    refuse_other_tokens(path, weights, load_tokenizers(path / "tokenizer"))
    return weights


def refuse_other_base(
    workdir: Path,
    trained: str,
    found: str,
    base: str = "train.init_from has now: restore its checkpoints, or evaluate.weights in its config.json",
) -> None:
    """Raise UserError if adapters were trained with other parameters than those of their base."""
    if trained != found:
        raise UserError(f"{workdir}: holds adapters of other parameters than {base}")


def refuse_other_tokens(workdir: Path, weights: Weights, tokenizers: Sequence[Tokenizer]) -> None:
    """Raise UserError if parameters were trained with other tokenizers."""
    if weights.tokenizers and weights.tokenizers != tuple(tokenizer.fingerprint for tokenizer in tokenizers):
        raise UserError(f"{workdir / 'tokenizer'}: its tokens are not those that the run was trained with: restore it")


def adopt(
    parent: PyTree,
    fresh: PyTree,
    origin: str,
    lora: LoraConfig = LoraConfig(),  # noqa: B008  # it is frozen
    freeze: Sequence[str] = (),
    new: bool = True,
) -> tuple[PyTree, list[str]]:
    """Return the parent's parameters where it has them, fresh ones for a new head and adapters, and notes.

    Tables of tokens and of text positions may differ in their number of rows (a task's symbols follow the vocabulary):
    the rows that both have are copied.

    Args:
        parent: the parameters of the run to start from.
        fresh: newly drawn ones.
        origin: the parent's workdir, for notes and errors.
        lora: which parameters train beside adapters.
        freeze: patterns of the names of parameters that do not train.
        new: False when a run is reopened as it began: then any table may differ in its number of rows.

    Raises:
        UserError: naming the first other parameter that the parent lacks or has in another shape; or for parameters
            that would keep their initial values because they are not trained.
    """
    have, wanted = named_leaves(parent), named_leaves(fresh)
    of_patches = ("input/positions/embedding", "source_input/positions/embedding") if "patches" in fresh else ()
    rows = TEXTS if new else re.compile("embedding$")
    tables = [name for name in wanted if name in TABLES or (rows.search(name) and not (new and name in of_patches))]
    taken = [_taken(name, have.get(name), leaf, origin, name in tables) for name, leaf in wanted.items()]
    untrained = [name for name, (_, whole, _) in zip(wanted, taken, strict=True) if not whole]
    _refuse_untrained(untrained, origin, lora, freeze if new else ())
    notes = [note for *_, note in taken if note]
    unused = [f"{name} is not used here" for name in have if name not in wanted]
    factors = sum(map(is_factor, wanted))
    adapted = [f"{counted(factors // 2, 'kernels')} with adapters"] * bool(factors)
    notes = [f"{counted(len(wanted) - len(notes) - factors, 'parameters')} copied", *adapted, *notes, *unused]
    adopted = jax.tree.unflatten(jax.tree.structure(fresh), [leaf for leaf, *_ in taken])
    return adopted, [f"init_from {origin}: {note}" for note in notes]


def _taken(
    name: str, old: jax.Array | None, new: jax.Array, origin: str, is_table: bool
) -> tuple[jax.Array, bool, str]:
    """Return the initial value of a parameter, whether all of it is the parent's, and a note if it is not the same."""
    if old is not None and old.shape == new.shape:
        return old, True, ""
    if is_factor(name):
        return new, True, ""
    axis = TABLES.get(name, 0)
    if old is not None and is_table and _without(old.shape, axis) == _without(new.shape, axis):
        before, now = old.shape[axis], new.shape[axis]
        common = (*[slice(None)] * axis, slice(min(before, now)))
        note = f"{name}: {min(before, now):,} of {now:,} rows copied, of {before:,}"
        return (old[common], True, note) if now <= before else (new.at[common].set(old[common]), False, note)
    if name.partition("/")[0] not in HEADS:
        found = "nothing" if old is None else old.shape
        raise UserError(
            f"train.init_from={origin!r} has {found} for {name}, this model needs {new.shape}: without "
            "--config, a run takes its parent's model"
        )
    return new, False, f"{name} is newly initialised"


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _refuse_untrained(names: Sequence[str], origin: str, lora: LoraConfig, freeze: Sequence[str]) -> None:
    """Raise UserError if a parameter that is new, at least in part, would keep its initial value."""
    for name in names:
        part = name.partition("/")[0]
        if not lora.trains(name):
            pattern = f"^{part}/" if part in HEADS else f"^{name}$"
            raise UserError(f"train.init_from={origin!r} lacks part of {name}: add {pattern!r} to model.lora.also")
    for pattern in freeze:
        if frozen := [name for name in names if re.search(pattern, name)]:
            spared = "|".join(dict.fromkeys(f"{name.partition('/')[0]}/" for name in frozen))
            other = "leave it out" if pattern.startswith("^") else f"use '^(?!{spared}).*(?:{pattern})'"
            raise UserError(
                f"train.init_from={origin!r} lacks part of {frozen[0]}, which train.freeze={pattern!r} would leave as "
                f"it was drawn: {other}"
            )


def _params_and_steps(
    saved: checkpoint.Checkpoints, workdir: Path, settings: Config, abstract: PyTree
) -> tuple[PyTree, tuple[int, ...]]:
    weights = settings.evaluate.weights
    if weights == "average":
        count = settings.evaluate.average_last
        steps = average_steps(saved.steps(), settings.train.checkpoint_every, count)
        if len(steps) < count:
            left = [step for step in saved.steps() if step < steps[0]]
            gap = f", from step {steps[0]} on: step {left[-1]} is further back" if left else ""
            found = counted(len(steps), "checkpoints")
            _say(f"evaluate.average_last={count}, but {workdir} has {found} in a row to average{gap}")
        params = average(saved.restore(step, {"params": abstract})["params"] for step in steps)
        return params, tuple(steps)
    if weights == "best":
        step = saved.newest_manifest().progress["best_step"]
        if step not in saved.steps():  # a damaged newer one may have replaced it
            lacks = f"checkpoint of update {step}, the best" if step else "finite validation scored with these options"
            raise UserError(f"evaluate.weights='best': {workdir} has no {lacks}; use 'last'")
        return saved.restore(step, {"params": abstract})["params"], (step,)
    item = "ema" if weights == "ema" else "params"
    restored = saved.restore_newest({item: abstract})
    for note in restored.skipped:
        _say(note)
    return restored.items[item], (restored.step,)


def _say(text: str) -> None:
    if processes.is_main_process():
        print(f"jformer: {text}", file=sys.stderr)


def average_steps(steps: Sequence[int], every: int, count: int) -> list[int]:
    """Return the last step and those before it in a row, `every` apart, at most `count`, oldest first.

    A step further back, such as an early best one, has parameters too different to average.
    """
    row, before = [steps[-1]], (steps[-1] - 1) // every * every
    while len(row) < count and before in steps:
        row, before = [before, *row], before - every
    return row


def average(trees: Iterable[PyTree]) -> PyTree:
    """Return the mean of several parameter trees in float32, computed on their devices, one in memory at a time.

    It adds differences to the first, so that parameters that are equal in all, such as frozen ones, stay so.
    """
    mean = None
    for count, tree in enumerate(trees, start=1):
        if mean is None:
            mean = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
        else:
            mean = jax.tree.map(lambda mean, x, count=count: mean + (x - mean) / count, mean, tree)
    return mean
