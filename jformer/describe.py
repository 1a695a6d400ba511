"""What a config costs before anything is spent: parameters, FLOPs, time and memory, and which attention runs.

All of it follows from shapes: no data is read and no weight allocated, whatever the size of the model.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jformer.ahead import estimate, mesh_sizes
from jformer.config import Config
from jformer.data.corrupt import span_lengths
from jformer.data.plan import Shape
from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.data.vocabularies import load_tokenizers
from jformer.flops import forward_flops, text_work, update_flops, work_of
from jformer.metrics import aligned
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.attention import choose_kernel
from jformer.peak import known_peak
from jformer.restore import build_task
from jformer.run import check_rows
from jformer.tasks import Task, sized

ASSUMED_CLASSES = 2
LENGTHS = (32, 128)  # of texts; the longest that the config allows is the last column
UNITS = {
    "encdec": "target token, source and target having",
    "encoder": "token of a text that has",
    "decoder": "token of a text that has",
    "vit": "image",
}


def describe(config: Config, workdir: Path | None = None) -> str:
    """Return what the model is, its parameters with their shares, and the FLOPs of its matrix products.

    Vocabulary and classes are those of the run in `workdir`; before there is one, what the config leads to expect.
    """
    task = build_task(config)
    model, saved = sized_model(config, task, workdir)
    rows = parameter_rows(jax.eval_shape(functools.partial(init_params, build_model(model)), jax.random.key(0)))
    total = sum(count for _, _, count in rows)
    cells = [["part", "shapes", "parameters", "share"]]
    cells += [[name, shape, f"{count:,}", f"{count / total:.1%}"] for name, shape, count in rows]
    cells += [["total", "", f"{total:,}", f"{1:.1%}"]]
    lines = [summary(config), *_size_lines(config, model, task, saved), kernel_line(model, jax.default_backend())]
    lines += [*update_lines(config, model), memory_line(config, task, model)]
    return "\n".join([*lines, "", *aligned(cells, 2), "", *aligned(flops_table(config, model), 1)])


def sized_model(config: Config, task: Task, workdir: Path | None) -> tuple[ModelConfig, bool]:
    """Return the model with its vocabulary and classes, and whether they are those of the run in `workdir`."""
    saved = bool(workdir and (workdir / "tokenizer").is_dir())
    counts = _tokenizer_sizes(workdir) if workdir and saved else _assumed_sizes(config, task)
    return sized(config.model, task, *counts), saved


def summary(config: Config) -> str:
    """Return the family, its layers and the task in one line."""
    model = config.model
    decoder = f" + {model.decoder_layers}" if model.family == "encdec" else ""
    return f"model: {model.family} of {model.num_layers}{decoder} layers, for task {config.task}"


def kernel_line(model: ModelConfig, platform: str) -> str:
    """Return which code attends on a platform, and why."""
    kernel = choose_kernel(model, platform)
    if kernel == "jax":
        why = f"jax.nn.dot_product_attention, on {platform}"
    elif model.attention_dropout:
        why = f"on {platform}: model.attention_dropout={model.attention_dropout} drops weights"
    elif model.key_size != model.value_size:
        why = f"on {platform}: keys of {model.key_size} and values of {model.value_size}"
    else:
        why = f"on {platform}, where the other is no quicker"
    return f"attention kernel: {kernel} ({why})"


def full_shape(config: Config) -> Shape:
    """Return rows and lengths of an update of texts as long as the config allows, or that fill packed rows."""
    data, family, size = config.data, config.model.family, config.model.vision.image_size
    source, target = data.max_source_length, data.max_target_length
    if config.task == "denoise":
        spans = (int(length) for length in span_lengths(np.array(target - 1), data.noise_density, data.mean_span))
        source, target = spans if data.noise == "t5" else (target, target)
    lengths = {"encdec": (source, target), "encoder": (source, 0), "decoder": (0, target), "vit": (size * size, 0)}
    source, target = lengths[family]
    if data.batching == "packed":
        source, target = (side * data.packed_length // max(source, target) for side in (source, target))
    rows = data.tokens_per_update // max(source, target) // data.row_multiple * data.row_multiple
    return Shape(max(rows, data.row_multiple), source, target)


def update_lines(config: Config, model: ModelConfig) -> Iterator[str]:
    """Say what an update without any padding costs, and how long it takes where the peak of the devices is known."""
    shape, kind = full_shape(config), jax.devices()[0].device_kind
    flops = update_flops(model, work_of(*(np.full(shape.rows, length) for length in shape[1:])))
    lengths = " + ".join(f"{length:,}" for length in shape[1:] if length)
    unit = "pixels" if model.family == "vit" else "tokens"
    yield f"update: {shape.rows:,} full rows of {lengths} {unit}: {flops:.3g} FLOPs forward and backward"
    peak = config.train.peak_flops or known_peak(kind, model.dtype)
    if peak:
        count = math.prod(mesh_sizes(config, jax.device_count()).values())
        times = (f"{flops / peak / count / share:.3g} s at {share:.0%} MFU" for share in (1, 0.4))
        yield f"time of it on {count} x {kind}: " + ", ".join(times)


def memory_line(config: Config, task: Task, model: ModelConfig) -> str:
    """Say what the same update takes of a device's memory."""
    sizes = mesh_sizes(config, jax.device_count())
    check_rows(config, sizes["data"] * sizes["fsdp"])
    memory = estimate(config, task, model, full_shape(config), jax.device_count(), jax.default_backend())
    return f"memory of it: {memory}"


def parameter_rows(params: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return (part, shapes, count) of every table, norm, projection and sublayer; stacks begin with their layers."""
    rows = []
    for name, part in _parts(params):
        leaves = jax.tree.leaves(part)
        largest = max(leaves, key=lambda leaf: leaf.size)
        shape = " x ".join(map(str, largest.shape)) + (" ..." if len(leaves) > 1 else "")
        rows.append((name, shape, sum(leaf.size for leaf in leaves)))
    return rows


def flops_table(config: Config, model: ModelConfig) -> list[list[str]]:
    """Return the cells of the table of FLOPs, a column for each length of text.

    What predicts tokens is counted for one of them, what predicts a class for the whole text or image.
    """
    limits = {"encoder": config.data.max_source_length, "decoder": config.data.max_target_length}
    longest = limits.get(model.family, max(limits.values()))
    lengths = [1] if model.family == "vit" else [*(length for length in LENGTHS if length < longest), longest]
    columns = []
    for length in lengths:
        tokens = 1 if model.head.num_classes else length
        flops = forward_flops(model, text_work(length, length))
        column = {part: count / tokens for part, count in flops.items()}
        columns.append(column | {"total; an update takes about three times that": sum(column.values())})
    unit = "text that has" if model.family == "encoder" and model.head.num_classes else UNITS[model.family]
    heads = ["FLOPs"] if model.family == "vit" else [f"{length:,} tokens" for length in lengths]
    parts = [[f"  {part}", *(f"{column[part]:,.0f}" for column in columns)] for part in columns[0]]
    return [[f"forward FLOPs of one {unit}", *heads], *parts]


def _tokenizer_sizes(workdir: Path) -> tuple[int, int]:
    source, target = load_tokenizers(workdir / "tokenizer")
    return source.vocab_size, target.vocab_size


def _assumed_sizes(config: Config, task: Task) -> tuple[int, int]:
    size, classes = config.data.vocab_size, config.model.head.num_classes or ASSUMED_CLASSES
    return size, NUM_SYMBOLS + classes if task.answer == "label" else size


def _size_lines(config: Config, model: ModelConfig, task: Task, saved: bool) -> Iterator[str]:
    """Say how many rows and classes there are, and who says so."""
    if model.family != "vit":
        origin = "of the run's tokenizer" if saved else "assumed from data.vocab_size"
        origin = "set by model.vocab_size" if config.model.vocab_size else origin
        noise = f"; {task.symbols} for what the noise puts in" if task.symbols else ""
        target = f" source and {model.target_vocab_size:,} target" if model.family == "encdec" else ""
        yield f"vocabulary: {model.vocab_size:,}{target} rows ({origin}{noise})"
    if model.head.num_classes:
        origin = "of the run's labels" if saved else "assumed; model.head.num_classes sets another number"
        origin = "set by model.head.num_classes" if config.model.head.num_classes else origin
        yield f"classes: {model.head.num_classes:,} ({origin})"


def _parts(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name, parameters) of what has no parts of its own; a block's sublayers count as such."""
    inner = isinstance(tree, Mapping) and any(isinstance(part, Mapping) for part in tree.values())
    if inner and "block" not in path[:-1]:
        for name, part in tree.items():
            yield from _parts(part, (*path, name))
    else:
        yield "/".join(path), tree
