"""Everything a run needs, opened, checked and built: text, model, optimizer, compiled steps, newest checkpoint."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from etils.epath import Path
from jax.sharding import Mesh

from jformer import config as configs
from jformer import hosts, optim
from jformer.checkpoint import Checkpoints, abstract_like
from jformer.config import Config
from jformer.data.corpus import SIDES, Corpus, open_corpus
from jformer.data.pipeline import Batches, make_batches
from jformer.data.sources import Pair, open_split
from jformer.data.tokenizers import Tokenizer
from jformer.data.vocabularies import copy_tokenizers, learn_tokenizers, load_tokenizers
from jformer.errors import UserError
from jformer.evaluate import evaluation_batches
from jformer.models import init_params
from jformer.predict import Predictor, load
from jformer.restore import build_sized, build_task, open_mesh
from jformer.sharding import row_shards, state_shardings
from jformer.step import TrainState, create_state, make_eval_step, make_loss, make_train_step
from jformer.storage import run_path
from jformer.tasks import Task
from jformer.warm_start import adopt, put_vectors

PROMPT = 40  # characters of a validation text that a language model is shown going on from


@dataclasses.dataclass(frozen=True)
class Data:
    """The text of a run, ready to train on."""

    tokenizers: tuple[Tokenizer, Tokenizer]
    corpora: list[Corpus]  # that are trained on
    batches: Batches
    valid: Batches | None
    texts: dict[str, Corpus]  # by what it is for: those trained on, and the one for validation
    samples: list[Pair]  # validation examples that are answered at every evaluation


@dataclasses.dataclass
class Progress:
    """What a checkpoint says beside its arrays, as plain JSON."""

    step: int = 0
    seconds: float = 0.0  # over all restarts, up to this checkpoint
    best_loss: float | None = None  # lowest validation loss
    best_step: int = 0
    since_best: int = 0  # evaluations
    data: list[str] = dataclasses.field(default_factory=list)  # fingerprints of the token arrays


@dataclasses.dataclass
class Run:
    """A run, built."""

    config: Config
    mesh: Mesh
    data: Data
    schedule: optim.Schedule
    train_step: Callable
    eval_step: Callable
    sampler: Predictor
    checkpoints: Checkpoints
    state: TrainState
    progress: Progress
    notes: list[str]  # what the parameters began with, where that was not a draw

    @property
    def finished(self) -> bool:
        """Whether all updates are done, or patience is over."""
        train, progress = self.config.train, self.progress
        return progress.step >= train.num_steps or 0 < train.patience <= progress.since_best


def build(config: Config, workdir: Path) -> Run:
    """Open, check and build everything; a workdir that holds a run gives that run, at its newest checkpoint."""
    resumed = (workdir / "config.json").exists()
    if resumed:
        configs.refuse_changes(configs.load(workdir / "config.json"), config)
    mesh = open_mesh(config)
    check_rows(config, row_shards(mesh))
    task = build_task(config)
    with hosts.in_turn():  # process 0 makes what the others then find
        data = open_data(config, task, workdir, resumed or not hosts.first())
    hosts.same(fingerprints(data))
    model = build_sized(config, task, data.tokenizers)
    schedule, tx = build_optimizer(config, model)
    averaged = config.evaluate.average_last if config.evaluate.weights == "average" else 1
    keep = max(config.train.keep_last, averaged)
    checkpoints = Checkpoints(workdir / "checkpoints", config.train.checkpoint_every, keep)
    make = functools.partial(create_state, tx=tx, ema=bool(config.train.ema_decay))
    state, progress, notes = open_state(config, mesh, model, data.tokenizers, make, checkpoints)
    tokens = [corpus.fingerprint for corpus in data.corpora]
    if progress.data and progress.data != tokens:
        raise UserError(
            f"{workdir}: its training text or tokenizer has changed since update {progress.step}: restore it"
        )
    progress.data = tokens
    if hosts.first():
        configs.save(config, workdir / "config.json")  # last: what was refused above leaves no run behind
    loss = make_loss(model, task)
    train_step = make_train_step(loss, tx, mesh, config.seed, config.train.ema_decay)
    greedy: dict[str, Any] = {"search": "beam", "beam_size": 1, "beam_groups": 1, "n_best": 1, "alignments": False}
    sampling = dataclasses.replace(config.decode, **greedy, batch_size=max(1, len(data.samples)))
    sampler = Predictor(
        dataclasses.replace(config, decode=sampling), task, data.tokenizers, model, state.params, (), mesh
    )
    eval_step = make_eval_step(loss, mesh)
    return Run(config, mesh, data, schedule, train_step, eval_step, sampler, checkpoints, state, progress, notes)


def check_rows(config: Config, shards: int) -> None:
    """Raise UserError where the rows of a batch cannot be dealt evenly to devices and microbatches."""
    parts = shards * config.train.accumulation
    if config.data.row_multiple % parts:
        raise UserError(
            f"data.row_multiple={config.data.row_multiple} must be a multiple of {parts}: mesh.data x mesh.fsdp = "
            f"{shards} times train.accumulation={config.train.accumulation}; raise it, or lower one of them"
        )


def fingerprints(data: Data) -> dict[str, str]:
    """Return what identifies the text and the tokenizers that all processes must have."""
    sides = {f"the {side} tokenizer": each.fingerprint for side, each in zip(SIDES, data.tokenizers, strict=True)}
    return sides | {name: corpus.fingerprint for name, corpus in data.texts.items()}


def open_data(config: Config, task: Task, workdir: Path, learned: bool) -> Data:
    """Open every split, so that a missing file is known now; then the tokenizers and the token arrays.

    The tokenizers are in the workdir if they are `learned`, else they are learned now.
    """
    data = config.data
    parts = (data, *data.mixture)
    training = [open_split(part, part.train) for part in parts]
    for name in data.test_splits().values():
        open_split(data, name)
    valid = open_split(data, data.valid) if config.train.eval_every else None
    directory, text = workdir / "tokenizer", (data, training, task.vocabularies)
    if learned:
        tokenizers = load_tokenizers(directory)
    elif config.train.init_from:
        tokenizers = copy_tokenizers(run_path(config.train.init_from) / "tokenizer", directory, *text)
    else:
        tokenizers = learn_tokenizers(directory, *text)
    encoder, features = task.encoder(*tokenizers), task.features(*tokenizers)
    corpora = [open_corpus(split, encoder, data.cache_dir) for split in training]
    batches = make_batches(corpora, [part.weight for part in parts], data, config.seed, features)
    numbers = [f" {i + 1}" if len(parts) > 1 else "" for i in range(len(parts))]  # of a mixture, names may be the same
    names = [f"training text{number} {split.name}" for number, split in zip(numbers, training, strict=True)]
    texts = dict(zip(names, corpora, strict=True))
    if valid is None:
        return Data(tokenizers, corpora, batches, None, texts, [])
    valid_batches, texts[f"validation text {valid.name}"] = evaluation_batches(config, task, tokenizers, valid)
    samples = list(itertools.islice(valid.read(Counter()), config.train.samples)) if task.answer else []
    if task.answer == "continuation":
        samples = [Pair(" ".join(pair.target[:PROMPT].split("\n")), "") for pair in samples]
    return Data(tokenizers, corpora, batches, valid_batches, texts, samples)


def build_optimizer(config: Config, model: Any) -> tuple[optim.Schedule, Any]:
    """Return the learning-rate schedule and the optimizer of a run."""
    o = config.optim
    schedule = optim.make_schedule(
        o.schedule, o.learning_rate, o.warmup_steps, config.train.num_steps, config.model.d_model
    )
    names = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    adam = {"b1": o.b1, "b2": o.b2, "epsilon": o.epsilon, "weight_decay": o.weight_decay}
    freeze = config.train.freeze
    return schedule, optim.make_optimizer(o.optimizer, schedule, names, **adam, clip_norm=o.clip_norm, freeze=freeze)


def abstract_update(config: Config, task: Task, model: Any, mesh: Mesh) -> tuple[Callable, Any]:
    """Return the compiled update of a run and the shapes of its state, placed; nothing is allocated."""
    _, tx = build_optimizer(config, model)
    create = functools.partial(create_state, tx=tx, ema=bool(config.train.ema_decay))
    state = jax.eval_shape(lambda key: create(init_params(model, key)), jax.random.key(0))
    state = abstract_like(state, state_shardings(mesh, state))
    return make_train_step(make_loss(model, task), tx, mesh, config.seed, config.train.ema_decay), state


def open_state(
    config: Config,
    mesh: Mesh,
    model: Any,
    tokenizers: tuple[Tokenizer, Tokenizer],
    make: Callable,
    checkpoints: Checkpoints,
) -> tuple[TrainState, Progress, list[str]]:
    """Return the newest checkpoint's state, or a new one, drawn from the seed or begun with what the config names."""
    draw = functools.partial(init_params, model)
    key = jax.random.key(config.seed)
    blank = jax.eval_shape(lambda key: make(draw(key)), key)
    places = state_shardings(mesh, blank)
    if checkpoints.steps():
        newest = checkpoints.steps()[-1]
        blank = abstract_like(blank, places)
        items = checkpoints.restore(newest, as_items(blank))
        state = blank.replace(params=items["params"], ema=items.get("ema"), **items["rest"])
        return state, Progress(**checkpoints.progress(newest)), []
    params = jax.jit(draw, out_shardings=places.params)(key)
    notes: list[str] = []
    if config.train.init_from:
        params, notes = adopt(load(config.train.init_from, mesh=mesh).params, params, config.train.init_from)
    params, coverage = put_vectors(config, tokenizers, params)
    params = jax.device_put(params, places.params)
    return jax.jit(make, out_shardings=places)(params), Progress(), notes + coverage


def as_items(state: TrainState) -> dict[str, Any]:
    """Return the state as checkpoint items; parameters lie apart, so that they can be read without the rest."""
    rest = {name: getattr(state, name) for name in ("step", "opt_state", "skipped", "skipped_in_row")}
    return {"params": state.params, "rest": rest} | ({} if state.ema is None else {"ema": state.ema})
