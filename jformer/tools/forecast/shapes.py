"""The mesh and batch shapes of a run, from its config alone."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from jformer.config.options import Config
from jformer.data.plan import LIMITS, Shape, shape_of
from jformer.errors import UserError
from jformer.models import ModelConfig, build_model
from jformer.models.flops import Frozen, update_flops, work_of
from jformer.parallel.mesh import fill_axes
from jformer.parallel.sharding import round_up_rows
from jformer.tasks.noise import span_lengths
from jformer.tasks.task import Task
from jformer.training.optim import build_optimizer


def mesh_sizes(config: Config, devices: int) -> dict[str, int]:
    """Return the size of each axis of a config's mesh on a number of devices."""
    return fill_axes(dataclasses.asdict(config.mesh), devices)


def answer_shape(config: Config, task: Task, mesh: Mesh) -> Shape:
    """Return rows, input length and most output tokens of a batch of inputs as long as the config allows."""
    decode = config.decode
    continues = task.answer == "continuation"
    length = config.data.max_target_length if continues else config.data.max_source_length
    if config.model.reads_images:  # patches do not add to the output length
        length = 0
    room = decode.max_extra_length + (0 if continues else length)
    room = min(room, decode.max_length or room)
    if config.model.positions == "learned":
        length, room = min(length, config.model.max_length), min(room, config.model.max_length)
    return Shape(round_up_rows(decode.batch_size, mesh), length, room)


def full_shape(config: Config) -> Shape:
    """Return rows and lengths of an update of texts as long as the config allows, or that fill packed rows."""
    data, family, size = config.data, config.model.family, config.model.vision.image_size
    source, target = data.max_source_length, data.max_target_length
    if config.task == "denoise":
        spans = (int(length) for length in span_lengths(np.array(target - 1), data.noise_density, data.mean_span))
        source, target = spans if data.noise == "t5" else (target, target)
    if config.task == "prefix_lm":
        target += source
    if config.task == "embed":
        source = target = source + target
    source = size * size if config.model.reads_images else source
    lengths = {"encdec": (source, target), "encoder": (source, 0), "decoder": (0, target), "vit": (source, 0)}
    source, target = lengths["encoder" if config.task == "embed" and family == "encdec" else family]
    if data.batching == "packed":
        source, target = (side * data.packed_length // max(source, target) for side in (source, target))
    multiple, length_multiple = data.rows_divide_by(), data.lengths_divide_by()
    source, target = (-(-side // length_multiple) * length_multiple if side > 1 else side for side in (source, target))
    rows = data.tokens_per_update // max(source, target) // multiple * multiple
    return Shape(max(rows, multiple), source, target)


def refusal_note(config: Config) -> str:
    """Return a note if training refuses texts that are as long as the config allows, or ''."""
    data = config.data
    limits = "data.packed_length" if data.batching == "packed" else LIMITS
    try:
        shape_of(*full_shape(config)[1:], data.tokens_per_update, data.rows_divide_by(), limits)
    except UserError as error:
        return f"note: training refuses rows as long as that: {error}"
    return ""


def likely_shapes(config: Config) -> list[Shape]:
    """Return the shapes of an update's batches, short to long, assuming that text lengths are spread evenly."""
    longest, data = full_shape(config), config.data
    count = 1 if data.batching == "packed" or config.model.family == "vit" else data.num_buckets
    unit = data.lengths_divide_by()

    def part(side: int, index: int) -> int:
        return side if side <= 1 else min(side, -(-side * index // (count * unit)) * unit)

    sides = ((part(longest.source_length, i), part(longest.target_length, i)) for i in range(1, count + 1))
    return [longest._replace(source_length=source, target_length=target) for source, target in dict.fromkeys(sides)]


def untrained_parts(config: Config, model: ModelConfig) -> Mapping[str, Frozen]:
    """Return the parts of the model that have frozen kernels, by adapters or train.freeze, for `update_flops`."""
    train = config.train
    return build_optimizer(build_model(model), config.optim, train.num_steps, train.freeze).frozen_parts


def full_update_flops(config: Config, model: ModelConfig) -> int:
    """Return the FLOPs of an update of full rows without padding."""
    shape = full_shape(config)
    texts = [np.full(shape.rows, length) for length in shape[1:]]
    if config.task == "embed":  # a row holds two, which do not attend to each other
        both = np.repeat([config.data.max_source_length, config.data.max_target_length], shape.rows)
        texts = [both * (length > 0) for length in shape[1:]]
    work = work_of(*texts)
    return config.optim.passes * update_flops(model, work, untrained_parts(config, model))
