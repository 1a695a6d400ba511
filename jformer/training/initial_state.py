"""The state that a run starts from: its newest checkpoint, or new parameters.

New ones are drawn from the seed; parameters of another run and pretrained word vectors may replace them.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.checkpoint import Checkpoints, Restored
from jformer.checkpoints.weights import HEADS_OF_LABELS, adopt, load_parent, refuse_other_base
from jformer.checkpoints.word_vectors import match
from jformer.config import load_config
from jformer.config.options import Config, TrainConfig, flatten
from jformer.data.tokenizers import NUM_SYMBOLS, LabelTokenizer, NumberTokenizer, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import ModelConfig, init_params
from jformer.models.lora import rounded
from jformer.models.lora_config import HEADS, LoraConfig, is_factor
from jformer.models.model import Model
from jformer.parallel import processes
from jformer.parallel.sharding import abstract_like, device_bytes, named_leaves, state_shardings
from jformer.storage import run_path
from jformer.training.finiteness import by_layer
from jformer.training.machine import refuse_state
from jformer.training.state import Progress, TrainState, as_items, from_items

LABELS_SHOWN = 5  # in a note
# Model options that parameters do not depend on, or whose other values have other parameters.
TRAINED_WITH = re.compile(
    r".*drop|.*vocab_size|.*max_length|d_|num_(layers|decoder|kv)|dtype|precision|init|execution\.|lora\.|"
    r"head\.(?!pooling|pooler_activation)|vision\.(?!mean|deviation)"
)


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
    config: Config, tokenizers: Sequence[Tokenizer], mesh: Mesh, params: PyTree, new: bool = True
) -> tuple[PyTree, list[str], str]:
    """Return the new parameters with those of train.init_from and of word vectors, notes, and the parent's digest.

    Args:
        config: of the run.
        tokenizers: of the run, whose labels and numbers may differ from the parent's.
        mesh: where the parent's parameters are placed.
        params: the parameters that were drawn.
        new: False for a resumed run of adapters: it takes from its parent what it took when it began.

    Raises:
        UserError: they do not fit the model, or are not finite.
    """
    notes, digest = list[str](), ""
    if new:
        _refuse_dropout_of_heads(config.model.lora, params)
    if origin := config.train.init_from:
        parent, lora = load_parent(origin, mesh, whole=()), config.model.lora
        before = load_tokenizers(run_path(origin) / "tokenizer")[1]
        other = other_answers(origin, before, tokenizers[1], new)
        kept = {name: part for name, part in parent.params.items() if not other or name not in HEADS_OF_LABELS}
        if new:
            kept = in_unit(kept, before, tokenizers[1], origin, lora)
        params, notes = adopt(kept, params, origin, lora, config.train.freeze, new)
        notes += other if len(kept) < len(parent.params) else []
        notes += other_options(origin, config.model)
        params = rounded(lora, params)
        digest = parent.digest
        processes.check_same({"the parameters of train.init_from": digest})
    params, coverage = put_vectors(config.train, config.model, tokenizers, params)
    if notes or coverage:
        _refuse_not_finite(params, config.train)
    return params, notes + coverage, digest


def _refuse_dropout_of_heads(lora: LoraConfig, params: PyTree) -> None:
    """Raise UserError if a head has adapters and model.lora.dropout is set, which does not reach them."""
    heads = [name for name in named_leaves(params) if is_factor(name) and name.startswith(HEADS)]
    if lora.dropout and heads:
        raise UserError(
            f"model.lora.dropout={lora.dropout} does not reach the adapter {heads[0].rsplit('/', 1)[0]}: set it to 0, "
            f"or choose model.lora.kernels without heads, not {lora.kernels!r}"
        )


def in_unit(params: PyTree, before: Tokenizer, now: Tokenizer, origin: str, lora: LoraConfig) -> PyTree:
    """Return a parent's parameters, with the output of a head for numbers converted to the unit of this run.

    Args:
        params: of the parent.
        before, now: the tokenizers of the parent's targets and of this run's.
        origin: the parent's workdir, for errors.
        lora: which parameters train beside adapters.

    Raises:
        UserError: adapters would keep the parent's own head.
    """
    if not (isinstance(before, NumberTokenizer) and isinstance(now, NumberTokenizer)):
        return params
    scale, shift = before.deviation / now.deviation, (before.mean - now.mean) / now.deviation
    if "classifier" not in params or (scale, shift) == (1, 0):
        return params
    if not all(lora.trains(f"classifier/{name}") for name in params["classifier"]):
        raise UserError(
            f"train.init_from={origin!r} gives numbers with the mean {before.mean:g} and the deviation "
            f"{before.deviation:g}, not {now.mean:g} and {now.deviation:g}: add '^classifier/' to model.lora.also"
        )
    head = {name: leaf * scale + shift * (name == "bias") for name, leaf in params["classifier"].items()}
    return {**params, "classifier": head}


def other_answers(origin: str, parent: Tokenizer, target: Tokenizer, new: bool = True) -> list[str]:
    """Return a note if the parent learned other answers (labels, numbers, spans), so that its head is of no use."""
    kinds = [isinstance(each, LabelTokenizer) + 2 * isinstance(each, NumberTokenizer) for each in (parent, target)]
    if kinds[0] != kinds[1] and new:
        return [f"init_from {origin}: its head has answers of another kind"]
    if kinds != [1, 1] or parent.tokens == target.tokens:
        return []
    labels = (each.tokens[NUM_SYMBOLS:] for each in (parent, target))
    before, now = (", ".join([*each[:LABELS_SHOWN], *["…"] * (len(each) > LABELS_SHOWN)]) for each in labels)
    return [f"init_from {origin}: its labels are {before}, those of this run {now}"]


def other_options(origin: str, model: ModelConfig) -> list[str]:
    """Return a note for each option of the parent's model that differs and changes what its parameters compute.

    Sizes need no note: other shapes are refused.
    """
    before = dataclasses.asdict(load_config(run_path(origin) / "config.json").model)
    pairs = zip(flatten(before).items(), flatten(dataclasses.asdict(model)).values(), strict=True)
    return [
        f"init_from {origin}: it was trained with model.{key}={old!r}, and this run has {new!r}"
        for (key, old), new in pairs
        if old != new and (not TRAINED_WITH.match(key) or (model.shared_layers and key.endswith("_layers")))
    ]


def _refuse_not_finite(params: PyTree, train: TrainConfig) -> None:
    """Raise UserError for NaN or infinity; updates would not notice them where no gradient reaches."""
    for name, flags in named_leaves(jax.device_get(jax.jit(by_layer)(params))).items():
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
            content = hashlib.sha256(matched.ids.tobytes() + matched.vectors.tobytes()).hexdigest()
            processes.check_same({f"the vectors of train.{side}_vectors": content})
            name = table_of(model, side)
            name = name if name in params else "source_embedding"  # in task embed, an encoder reads both texts
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
