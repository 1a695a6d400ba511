"""--mode=describe: parameters, FLOPs, time and memory of a config, and its attention kernel.

Everything follows from shapes: no data is read and no weight is allocated.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import jax

from jformer.config.checks import divide_rows
from jformer.config.options import Config
from jformer.evaluation.score_tables import aligned
from jformer.models import ModelConfig, build_model, param_shapes
from jformer.models.flops import forward_flops, text_work, update_flops
from jformer.models.parts import parameter_rows
from jformer.parallel.backend import target
from jformer.parallel.devices import known_peak, products_line
from jformer.parallel.mesh import make_mesh
from jformer.tasks.batch_arrays import source_is_prefix
from jformer.tasks.build import build_task, choose_dtype, choose_lengths, sized_model
from jformer.tasks.task import Task
from jformer.tools.forecast.compiled_ahead import estimate
from jformer.tools.forecast.shapes import (
    full_shape,
    full_update_flops,
    likely_shapes,
    mesh_sizes,
    refusal_note,
    untrained_parts,
)
from jformer.training.introduction import kernel_line
from jformer.training.optim import schedule_line

LENGTHS = (32, 128)  # of texts in the table of FLOPs; the last column is the longest that the config allows
UNITS = {
    "encdec": "target token, source and target having",
    "encoder": "token of a text that has",
    "decoder": "token of a text that has",
    "vit": "image",
}


def describe(config: Config, workdir: Path | None = None) -> str:
    """Return a summary of the model, its parameters with their shares, and the FLOPs of its matrix products.

    Vocabulary and classes are those of the run in `workdir`, or assumed from the config if there is no run.
    """
    sizes = mesh_sizes(config, jax.device_count())
    config, _ = choose_dtype(divide_rows(config, sizes["data"] * sizes["fsdp"]), "model", make_mesh(1))
    config, _ = choose_lengths(config, target())
    task = build_task(config)
    model, saved = sized_model(config, task, workdir)
    shapes = param_shapes(build_model(model))
    rows = list(parameter_rows(shapes))
    prefix, parts = source_is_prefix(model, task.answer), math.prod(sizes.values()) * config.train.accumulation
    total = sum(count for _, _, count in rows)
    cells = [["part", "shapes", "parameters", "share"]]
    cells += [[name, shape, f"{count:,}", f"{count / total:.1%}"] for name, shape, count in rows]
    cells += [["total", "", f"{total:,}", f"{1:.1%}"]]
    lines = [
        *summary(config),
        *_size_lines(config, model, task, saved),
        products_line(model.dtype, target(), model.precision),
        kernel_line(model, target(), likely_shapes(config), prefix, sizes["sequence"], parts),
    ]
    lines += [*update_lines(config, model), memory_line(config, task, model)]
    return "\n".join([*lines, "", *aligned(cells, 2), "", *aligned(flops_table(config, model), 1)])


def summary(config: Config) -> Iterator[str]:
    """Yield lines about the model and its options, the data, and the learning rate."""
    model, data = config.model, config.data
    decoder = f" + {model.decoder_layers}" if model.family == "encdec" else ""
    same = " with the same parameters" if model.shared_layers else ""
    yield f"model: {model.family} of {model.num_layers}{decoder} layers{same}, for task {config.task}"
    sizes = f"d_model {model.d_model}"
    if not model.recurrent.cell:
        shared = f" over {model.num_kv_heads} of keys and values" if model.num_kv_heads else ""
        heads = f"{model.num_heads} heads of {model.key_size}{shared}"
        yield f"  {model.norm} {model.norm_type}, {model.positions} positions, {model.activation}, {heads}"
        sizes += f", d_ff {model.d_ff}"
    inner = {"attention weights": model.attention_dropout, "feed-forwards": model.activation_dropout}
    more = "".join(f", of {what} {share}" for what, share in inner.items() if share)
    yield f"  {sizes}, dropout {model.dropout}{more}, init {model.init}, {model.dtype}"
    name = " ".join(part for part in (data.source, data.name, data.dir) if part)
    yield f"data: {name}, {data.tokenizer} tokenizer, {data.batching}, {data.tokens_per_update:,} tokens an update"
    epochs = f"; train.num_epochs={config.train.num_epochs:g} may end it sooner" if config.train.num_epochs else ""
    yield schedule_line(config.optim, config.train.num_steps, config.model.scale_width) + epochs


def update_lines(config: Config, model: ModelConfig) -> Iterator[str]:
    """Yield the FLOPs of an update without padding, and its time if the peak of the devices is known."""
    shape = full_shape(config)
    kind = jax.devices()[0].device_kind
    flops = full_update_flops(config, model)
    lengths = " + ".join(f"{length:,}" for length in shape[1:] if length)
    units = {"vit": "pixels"}.get(model.family, "pixels + tokens" if model.reads_images else "tokens")
    yield f"update: {shape.rows:,} full rows of {lengths} {units}: {flops:.3g} FLOPs forward and backward"
    yield from filter(None, [refusal_note(config)])
    peak = config.train.peak_flops or known_peak(kind, model.dtype)
    if peak:
        count = math.prod(mesh_sizes(config, jax.device_count()).values())
        times = (f"{flops / peak / count / share:.3g} s at {share:.0%} MFU" for share in (1, 0.4))
        yield f"its time on {count} x {kind}: " + ", ".join(times)


def memory_line(config: Config, task: Task, model: ModelConfig) -> str:
    """Return the memory that the same update needs on each device."""
    memory = estimate(config, task, model, full_shape(config), jax.device_count(), target())
    return f"its memory: {memory}"


def flops_table(config: Config, model: ModelConfig) -> list[list[str]]:
    """Return the cells of the table of FLOPs, a column for each length of text.

    FLOPs are per token for models that predict tokens or tags, and per text or image for classes and vectors.
    """
    limits = {"encoder": config.data.max_source_length, "decoder": config.data.max_target_length}
    longest = limits["decoder"] if model.vision.source else limits.get(model.family, max(limits.values()))
    lengths = [1] if model.family == "vit" else [*(length for length in LENGTHS if length < longest), longest]
    columns, work = [], text_work(longest, longest)
    times = update_flops(model, work, untrained_parts(config, model)) / sum(forward_flops(model, work).values())
    total = f"total; an update takes about {'three' if round(times, 1) == 3 else f'{times:.1f}'} times that"
    for length in lengths:
        tokens = 1 if model.pooled else length
        flops = forward_flops(model, text_work(length, length))
        column = {part: count / tokens for part, count in flops.items()}
        columns.append(column | {total: sum(column.values())})
    unit = "text that has" if model.family != "vit" and model.pooled else UNITS[model.family]
    unit = "target token of an image, the target having" if model.vision.source else unit
    heads = ["FLOPs"] if model.family == "vit" else [f"{length:,} tokens" for length in lengths]
    parts = [[f"  {part}", *(f"{column[part]:,.0f}" for column in columns)] for part in columns[0]]
    return [[f"forward FLOPs of one {unit}", *heads], *parts]


def _size_lines(config: Config, model: ModelConfig, task: Task, saved: bool) -> Iterator[str]:
    """Yield the numbers of rows and classes, and where they come from."""
    if model.family != "vit":
        origin = "of the run's tokenizer" if saved else "assumed from data.vocab_size"
        origin = "set by model.vocab_size" if config.model.vocab_size else origin
        noise = f"; {task.symbols} for noise symbols" if task.symbols else ""
        two = model.family == "encdec" and not model.vision.source
        target = f" source and {model.target_vocab_size:,} target" if two else ""
        yield f"vocabulary: {model.vocab_size:,}{target} rows ({origin}{noise})"
    if model.head.num_classes and task.answer != "number":
        origin = "of the run's labels" if saved else "assumed; model.head.num_classes sets another number"
        origin = "set by model.head.num_classes" if config.model.head.num_classes else origin
        yield f"classes: {model.head.num_classes:,} ({origin})"
