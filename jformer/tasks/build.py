"""Build the task, the model and the mesh of a config."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

from jformer import plugins
from jformer.config.options import Config
from jformer.data.data_config import DataConfig
from jformer.data.progress import show
from jformer.data.tokenizers import NUM_SYMBOLS, ImageTokenizer, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.layers.kernels import FUSED, LEAST_PAIRS, MULTIPLES, calls_of, choose_kernel, is_own_attention
from jformer.models.model import Model
from jformer.parallel import processes
from jformer.parallel.backend import Target
from jformer.parallel.devices import quicker_dtype
from jformer.parallel.mesh import SEQUENCE, TENSOR, make_mesh
from jformer.tasks.caption import caption
from jformer.tasks.classify import classify
from jformer.tasks.denoise import denoise
from jformer.tasks.embed import embed
from jformer.tasks.lm import lm
from jformer.tasks.metrics import tokenization
from jformer.tasks.mlm import mlm
from jformer.tasks.prefix_lm import prefix_lm
from jformer.tasks.qa import qa
from jformer.tasks.scoring_command import with_commands
from jformer.tasks.tag import tag
from jformer.tasks.task import CLASSES, VECTOR, Task, own_loss, sized
from jformer.tasks.translate import translate


class MakeTask(Protocol):
    """The factory that each task's module defines."""

    def __call__(
        self,
        data: DataConfig,
        *,
        label_smoothing: float,
        scores: Sequence[str],
        tokenize: str,
        lowercase: bool,
        crf: bool = False,
        family: str = "encdec",
        temperature: float = 1.0,
        symmetric: bool = False,
    ) -> Task:
        """Return the task. Raise UserError for options that it does not support."""


TASKS: Mapping[str, MakeTask] = {
    "translate": translate,
    "lm": lm,
    "prefix_lm": prefix_lm,
    "mlm": mlm,
    "denoise": denoise,
    "classify": classify,
    "tag": tag,
    "caption": caption,
    "qa": qa,
    "embed": embed,
}


ASSUMED_CLASSES = 2  # of a model without a trained run


def build_task(config: Config) -> Task:
    """Return the task that the config names. Raise UserError for options that it does not support."""
    make: MakeTask = plugins.find("task", config.task, TASKS)
    task = make(
        config.data,
        label_smoothing=config.optim.label_smoothing,
        scores=config.evaluate.scores,
        tokenize=tokenization(config),
        lowercase=config.evaluate.lowercase,
        crf=config.model.head.crf,
        family=config.model.family,
        temperature=config.optim.temperature,
        symmetric=config.optim.symmetric,
    )
    if config.evaluate.command and task.answer == "text":
        task = task._replace(score=with_commands(config, task.score))
    elif config.evaluate.command and not (config.decode.ranked_by and task.answer == "continuation"):
        hint = ", or name it in decode.rerank or decode.mbr_utility" if task.answer == "continuation" else ""
        raise UserError(
            f"evaluate.command={config.evaluate.command!r}: task={config.task!r} has no answers that are texts with "
            f"references: leave it out{hint}"
        )
    if config.optim.loss == "task":
        return task
    return task._replace(loss=own_loss(config.optim.loss, task.loss))


def build_scoring_task(config: Config) -> Task:
    """Return the task for a test set: examples over the limits are cut, not dropped, as each is answered and scored."""
    if config.data.overlong == "drop":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, overlong="cut"))
    return build_task(config)


def build_sized(config: Config, task: Task, tokenizers: tuple[Tokenizer, Tokenizer]) -> Model:
    """Return the model with the sizes of the tokenizers and the task.

    Raises UserError if the images of the run do not fit the model.
    """
    source, target = tokenizers
    vision = config.model.vision
    if isinstance(source, ImageTokenizer) and source.shape != (vision.image_size, vision.image_size, vision.channels):
        raise UserError(
            f"model.vision.image_size={vision.image_size} and channels={vision.channels} but the images are "
            f"{' x '.join(map(str, source.shape))} (height, width, channels): set them to these"
        )
    own_noise = bool(target.symbols.noise)
    return build_model(sized(with_rows(config, task), task, source.vocab_size, target.vocab_size, own_noise))


def sized_model(config: Config, task: Task, workdir: Path | None) -> tuple[ModelConfig, bool]:
    """Return the model with its vocabulary and classes, and whether they come from the run in `workdir`."""
    if workdir and (workdir / "tokenizer").is_dir():
        source, target = load_tokenizers(workdir / "tokenizer")
        counts = source.vocab_size, target.vocab_size, bool(target.symbols.noise)
        return sized(with_rows(config, task), task, *counts), True
    size, classes = config.data.vocab_size, config.model.head.num_classes or ASSUMED_CLASSES
    return sized(with_rows(config, task), task, size, NUM_SYMBOLS + classes if task.answer in CLASSES else size), False


def with_rows(config: Config, task: Task) -> ModelConfig:
    """Return the model with execution.rows set to what rows of its batches hold; for user-defined tasks, any texts."""
    execution = config.model.execution
    several = config.data.batching == "packed" or task.answer == VECTOR or plugins.is_own(config.task)
    rows = "several" if several else "one_text"
    rows = rows if execution.rows == "auto" else execution.rows
    return dataclasses.replace(config.model, execution=dataclasses.replace(execution, rows=rows))


def open_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh of a config. Raise UserError if the model's heads do not divide over it."""
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices, config.mesh.sequence)
    check_heads(config.model, mesh)
    return mesh


def choose_dtype(config: Config, room: str, mesh: Mesh) -> tuple[Config, list[str]]:
    """Resolve dtype=auto of a section, model or decode, to the faster dtype on the devices; also return lines to log.

    All processes use the choice of the first one.
    """
    options = getattr(config, room)
    if options.dtype != "auto":
        return config, []
    device = [*mesh.local_devices, *mesh.devices.flat][0]
    dtype, reason = processes.agree(quicker_dtype(device), lambda found: found[0])
    chosen = dataclasses.replace(config, **{room: dataclasses.replace(options, dtype=dtype)})
    return chosen, [f"{room}.dtype=auto: {dtype} ({reason})"]


def choose_lengths(config: Config, target: Target) -> tuple[Config, list[str]]:
    """Resolve data.length_multiple=0 for a target; also return lines to log. The model's dtype must be chosen."""
    if config.data.length_multiple:
        return config, []
    multiple = math.lcm(MULTIPLES.get(target.platform, 1), max(config.mesh.sequence, 1))  # else rows are padded to it
    kernel = _kernel_of_longest(config, target, multiple)
    data = dataclasses.replace(config.data, length_multiple=multiple if kernel else 1)
    lines = [f"data.length_multiple: {multiple}, so that {kernel} attends"] if kernel else []
    return dataclasses.replace(config, data=data), lines


def _kernel_of_longest(config: Config, target: Target, multiple: int) -> str:
    """Return the fused kernel for the longest rows, if lengths that are multiples of `multiple` fit a batch, or ''.

    On TPUs, where rows are padded to 128 positions, short ones are not worth it.
    """
    model, data, prefix = config.model, config.data, config.task == "prefix_lm"
    if model.family == "vit" or not is_own_attention(model):
        return ""
    sides = data.max_source_length, data.max_target_length + prefix * data.max_source_length
    if config.task == "embed":  # a row holds both texts
        sides = (sum(sides),) * 2
    if data.batching == "packed":
        sides = data.packed_length, data.packed_length
    source, length = (-(-side // multiple) * multiple for side in sides)
    fits = max(source, length) * data.rows_divide_by() <= data.tokens_per_update
    divides = data.batching != "packed" or data.packed_length % multiple == 0
    if not (fits and divides):
        return ""
    least = LEAST_PAIRS if target.platform == "tpu" else 0
    calls = (call for call in calls_of(model, source, length, prefix) if call.queries * call.keys >= least)
    taken = (choose_kernel(model, target, call).kernel for call in calls)
    return next((kernel for kernel in taken if kernel in FUSED.get(target.platform, ())), "")


def choose_decoding_dtype(config: Config, mesh: Mesh) -> Config:
    """Resolve decode.dtype and log the choice to standard error."""
    config, chosen = choose_dtype(config, "decode", mesh)
    if processes.is_main_process():
        for note in chosen:
            show(note, "\n")
    return config


def check_heads(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise UserError if `tensor` does not divide a model's heads, or leaves too few for `sequence`."""
    for key, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.kv_heads)):
        if heads % mesh.shape[TENSOR]:
            raise UserError(f"mesh.tensor={mesh.shape[TENSOR]} must divide model.{key}={heads}: devices share heads")
    if mesh.shape[SEQUENCE] > model.kv_heads // mesh.shape[TENSOR]:
        raise UserError(
            f"mesh.sequence={mesh.shape[SEQUENCE]} x mesh.tensor={mesh.shape[TENSOR]} is more than the "
            f"{model.kv_heads} key/value heads that devices share: lower it"
        )
