"""Every option once, with its default and its reason: what a config file edits, and what the rest of us reads.

A config file gets a locked ConfigDict from `default_config`, sets some keys and returns it. `resolve` turns it into
frozen, checked dataclasses; beyond it nobody sees a ConfigDict.
"""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from typing import Any

from etils.epath import Path
from ml_collections import ConfigDict

from jformer.data.config import DataConfig
from jformer.decoding.config import DecodeConfig
from jformer.errors import UserError, nearest
from jformer.models.config import ModelConfig
from jformer.presets import PRESETS, RECIPES

TASKS = {  # task → the families that can learn it
    "translate": ("encdec",),
    "lm": ("decoder",),
    "mlm": ("encoder",),
    "denoise": ("encdec",),
    "classify": ("encoder", "vit"),
}
OPTIMIZERS = ("adam", "adamw", "adafactor")
SCHEDULES = ("noam", "inverse_square_root", "cosine", "linear", "constant")
TEXT_SCORES = ("bleu", "chrf", "ter")
WEIGHTS = ("last", "best", "average", "ema")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate; the defaults are those of Vaswani et al. 2017, section 5.3."""

    optimizer: str = "adam"  # adam | adamw | adafactor (which reads only the learning rate)
    schedule: str = "noam"  # noam | inverse_square_root | cosine | linear | constant, all with warmup
    learning_rate: float = 1.0  # the peak; noam: a factor of d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)
    warmup_steps: int = 4_000
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0  # adamw, on matrices only
    clip_norm: float = 1.0  # of the global gradient norm; 0 = off
    label_smoothing: float = 0.1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long to train, what to keep and what to start from. Counts are updates."""

    num_steps: int = 100_000
    log_every: int = 100
    eval_every: int = 1_000  # validation loss and sample translations; 0 = never
    checkpoint_every: int = 1_000  # must divide eval_every, so that the best evaluation has a checkpoint
    keep_last: int = 5  # newest checkpoints kept, never fewer than evaluate.average_last; the best one is kept too
    patience: int = 0  # stop after so many evaluations in a row without a better validation loss; 0 = never
    accumulation: int = 1  # microbatches of one update, for batches that do not fit the memory at once
    ema_decay: float = 0.0  # moving average of parameters beside the trained ones; 0 = off
    max_skipped: int = 10  # stop after so many updates in a row that were not finite
    init_from: str = ""  # another run's workdir: start from its parameters, with a fresh optimizer and head
    source_vectors: str = ""  # a file of word vectors (word2vec, GloVe) that the source embedding begins with
    target_vectors: str = ""  # the same for the target embedding; one table that both sides share takes either
    freeze: tuple[str, ...] = ()  # regular expressions over parameter names; what they match is not trained
    samples: int = 3  # validation sentences translated at every evaluation; 0 = none
    profile_steps: str = ""  # "10:13" = trace updates 10, 11, 12 and 13 into WORKDIR/profile; "" = none
    # A process that stands still so long ends the run; 0 = 10 updates, at least a minute. What was never timed
    # (compiling, validating, saving), or took half of that, has ten times as long; a busy processor is progress there.
    stall_seconds: float = 0.0
    peak_flops: float = 0.0  # FLOPs a second of a device, which MFU is a share of; 0 = its data sheet's, or measured

    def profiled(self) -> range:
        """Return the updates to trace, counted from 1."""
        first, _, last = self.profile_steps.partition(":")
        return range(int(first), int(last) + 1) if self.profile_steps else range(0)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What the test sets are scored with."""

    weights: str = "last"  # last | best | average (of the last average_last checkpoints) | ema
    average_last: int = 5
    scores: tuple[str, ...] = TEXT_SCORES  # by sacreBLEU; exact match and perplexity are always there
    tokenize: str = "13a"  # sacreBLEU's tokenization; "none" for text that is tokenized already
    lowercase: bool = False


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are laid out; their number is the product of the three. Results do not depend on it."""

    data: int = -1  # parts that rows are split among, each with all parameters; -1 = as many as the devices allow
    fsdp: int = 1  # devices of a part that split its rows, and store parameters and optimizer split among them; or -1
    tensor: int = 1  # devices that work together on the same rows: on their heads, their part of d_ff and vocabulary


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0  # of parameters, dropout and the order of the data
    task: str = "translate"  # translate | lm | mlm | denoise | classify: what is learned, from which text
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()


# A resumed run may change these: what it computes for a given step stays the same.
MAY_CHANGE = (
    *(f"train.{key}" for key in ("num_steps", "log_every", "eval_every", "checkpoint_every", "keep_last", "patience")),
    *("train.max_skipped", "train.samples", "train.profile_steps", "train.peak_flops", "train.stall_seconds"),
    *("data.dir", "data.cache_dir", "data.test", "evaluate.", "decode.", "mesh.", "model.execution."),
)
DECAYING_SCHEDULES = ("cosine", "linear")  # their rates depend on num_steps


def default_config(preset: str = "transformer_base") -> ConfigDict:
    """Return every option with its default and what a preset sets, locked against unknown keys."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; {nearest(preset, PRESETS)}")
    config = as_config_dict(Config())
    config.model.update(PRESETS[preset])
    config.update_from_flattened_dict(RECIPES.get(preset, {}))
    return config


def resolve(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Return the frozen, checked config; raise UserError naming the first key that cannot work."""
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    resolved = _build(Config, values, "")
    check(resolved)
    return resolved


def load(path: Path) -> Config:
    """Read a config saved by `save`."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a saved config ({error}); is this a run's directory?") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: is no saved config; is this a run's directory?")
    return resolve(values)


def as_config_dict(config: Config) -> ConfigDict:
    """Return a resolved config as a locked ConfigDict again, to set keys of a saved run."""
    return ConfigDict(dataclasses.asdict(config)).lock()


def save(config: Config, path: Path) -> None:
    """Write the resolved config; it is all that is needed to rebuild the run."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (old, new) where two configs differ."""
    before, after = flatten(dataclasses.asdict(old)), flatten(dataclasses.asdict(new))
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def refuse_changes(saved: Config, given: Config) -> None:
    """Raise UserError if continuing the saved run under the given config would make it another run."""
    fixed = ("train.num_steps",) if saved.optim.schedule in DECAYING_SCHEDULES else ()
    for key, (old, new) in differences(saved, given).items():
        if key in fixed or not key.startswith(MAY_CHANGE):
            raise UserError(
                f"{key}={new!r} but this workdir was trained with {old!r}: set it back or use a new --workdir"
            )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as dotted key → value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def check(config: Config) -> None:
    """Raise UserError for the first combination of options that cannot work."""
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed={config.seed} must be 0 to {2**32 - 1}")
    _one_of("task", config.task, tuple(TASKS))
    config.model.check()
    config.data.check()
    _check_train(config)
    _check_optim(config)
    _check_decode(config)
    _check_task(config)
    _check_mesh(config)


def _check_mesh(config: Config) -> None:
    sizes = dataclasses.asdict(config.mesh)
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise UserError(f"mesh.{axis}={size} must be at least 1, or -1 for as many as there are devices")
    open_ended = [f"mesh.{axis}=-1" for axis, size in sizes.items() if size == -1]
    if len(open_ended) > 1:
        raise UserError(f"{open_ended[-1]} beside {open_ended[0]}: only one of them can be -1, what the others leave")


def _check_task(config: Config) -> None:
    model, data, train = config.model, config.data, config.train
    if model.family not in TASKS[config.task]:
        able = ", ".join(task for task, families in TASKS.items() if model.family in families)
        raise UserError(f"task={config.task!r} is not for model.family={model.family!r}, which learns {able}")
    sides = {"encoder": ("source",), "decoder": ("target",), "vit": ()}.get(model.family, ("source", "target"))
    limited = ("target",) if config.task == "denoise" else sides  # its source is made from its target
    longest = max((getattr(data, f"max_{side}_length") for side in limited), default=0)
    if model.positions == "learned" and longest > model.max_length:
        raise UserError(
            f"model.max_length={model.max_length} places fewer tokens than data allows ({longest}): raise it or lower "
            "data.max_source_length and data.max_target_length"
        )
    if config.task == "translate" and model.shared_embedding and not data.vocab_shared:
        raise UserError("model.shared_embedding=True needs data.vocab_shared=True: two vocabularies need two tables")
    for side in ("source", "target"):
        if getattr(train, f"{side}_vectors") and side not in sides:
            raise UserError(f"train.{side}_vectors: model.family={model.family!r} embeds no {side} tokens")
    if train.source_vectors and train.target_vectors and model.shared_embedding:
        raise UserError("train.source_vectors and train.target_vectors: one shared embedding begins with one of them")


def _check_optim(config: Config) -> None:
    optim = config.optim
    _one_of("optim.optimizer", optim.optimizer, OPTIMIZERS)
    _one_of("optim.schedule", optim.schedule, SCHEDULES)
    _within("optim", optim, ("b1", "b2", "label_smoothing"), 0, 1)
    _at_least("optim", optim, ("warmup_steps", "weight_decay", "clip_norm", "learning_rate", "epsilon"), 0)
    if optim.warmup_steps > config.train.num_steps:
        raise UserError(
            f"optim.warmup_steps={optim.warmup_steps} is more than train.num_steps={config.train.num_steps}: "
            "the learning rate would never arrive"
        )
    if optim.weight_decay and optim.optimizer != "adamw":
        raise UserError(f"optim.weight_decay={optim.weight_decay} is read by optim.optimizer='adamw' only")


def _check_train(config: Config) -> None:
    train = config.train
    _at_least(
        "train", train, ("num_steps", "log_every", "checkpoint_every", "keep_last", "accumulation", "max_skipped"), 1
    )
    _at_least("train", train, ("eval_every", "patience", "samples", "stall_seconds", "peak_flops"), 0)
    _within("train", train, ("ema_decay",), 0, 1)
    if train.eval_every % train.checkpoint_every:
        raise UserError(
            f"train.checkpoint_every={train.checkpoint_every} must divide train.eval_every={train.eval_every}, "
            "so that the best evaluation has a checkpoint"
        )
    if train.patience and not train.eval_every:
        raise UserError(f"train.patience={train.patience} needs evaluations: set train.eval_every")
    if train.profile_steps and not _are_updates(train.profile_steps, train.num_steps):
        raise UserError(
            f"train.profile_steps={train.profile_steps!r} must be FIRST:LAST, two updates from 1 to "
            f"train.num_steps={train.num_steps}, such as 10:13"
        )
    for pattern in train.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"train.freeze={pattern!r} is not a regular expression: {error}") from error
    if config.data.row_multiple % train.accumulation:
        raise UserError(
            f"train.accumulation={train.accumulation} must divide data.row_multiple={config.data.row_multiple}"
        )


def _are_updates(steps: str, count: int) -> bool:
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", steps)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= count


def _check_decode(config: Config) -> None:
    evaluate = config.evaluate
    _one_of("evaluate.weights", evaluate.weights, WEIGHTS)
    for name in evaluate.scores:
        _one_of("evaluate.scores", name, TEXT_SCORES)
    _at_least("evaluate", evaluate, ("average_last",), 1)
    config.decode.check()
    saved = -(-config.train.num_steps // config.train.checkpoint_every)
    if evaluate.weights == "average" and evaluate.average_last > saved:
        raise UserError(
            f"evaluate.average_last={evaluate.average_last} but train.num_steps={config.train.num_steps} with "
            f"train.checkpoint_every={config.train.checkpoint_every} makes {saved} checkpoints: lower one of them"
        )
    if evaluate.weights == "ema" and not config.train.ema_decay:
        raise UserError("evaluate.weights='ema' needs train.ema_decay above 0")
    if evaluate.weights == "best" and not config.train.eval_every:
        raise UserError("evaluate.weights='best' needs evaluations: set train.eval_every")
    for key in ("coverage_penalty", "alignments"):
        if getattr(config.decode, key) and config.model.family != "encdec":
            raise UserError(
                f"decode.{key}={getattr(config.decode, key)} reads attention to a source: model.family="
                f"{config.model.family!r} has none"
            )


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{key}={value!r}; choose one of: {', '.join(choices)}")


def _at_least(section: str, values: Any, keys: tuple[str, ...], least: float) -> None:
    for key in keys:
        if not getattr(values, key) >= least:
            raise UserError(f"{section}.{key}={getattr(values, key)} must be at least {least}")


def _within(section: str, values: Any, keys: tuple[str, ...], low: float, high: float) -> None:
    for key in keys:
        if not low <= getattr(values, key) < high:
            raise UserError(f"{section}.{key}={getattr(values, key)} must be at least {low} and below {high}")


def _build(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """Make the dataclass `kind`, refusing unknown keys and values of another type."""
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"unknown config key {prefix}{key}; {nearest(key, hints)}")
    return kind(**{key: _typed(hints[key], value, prefix + key) for key, value in values.items()})


def _typed(kind: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _build(kind, value, key + ".")
    if typing.get_origin(kind) is tuple and isinstance(value, (tuple, list)):
        item = typing.get_args(kind)[0]
        return tuple(_typed(item, v, f"{key}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    wanted = getattr(kind, "__name__", str(kind))
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise UserError(f"{key}={value!r} must be a {'finite ' if kind is float else ''}{wanted}")
    return value
