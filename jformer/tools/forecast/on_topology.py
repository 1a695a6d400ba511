"""--mode=describe --topology=…: what a run needs of a TPU slice or of GPUs that are not present.

The real programs are compiled for them; times are bounds (see `roofline`), not measurements.
"""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jformer.config import as_config_dict, resolve
from jformer.config.checks import divide_rows
from jformer.config.options import Config
from jformer.errors import UserError
from jformer.evaluation.score_tables import aligned
from jformer.inference.one_pass import HEADS
from jformer.models import ModelConfig
from jformer.parallel.backend import target_of
from jformer.parallel.devices import products_line
from jformer.parallel.mesh import SEQUENCE, slices_line
from jformer.parallel.sharding import row_shards
from jformer.tasks.batch_arrays import source_is_prefix
from jformer.tasks.build import build_task, choose_dtype, choose_lengths, open_mesh, sized_model, with_rows
from jformer.tasks.task import Task
from jformer.tools.forecast.compiled_ahead import Figures, compile_answer, compile_update, estimate
from jformer.tools.forecast.cost_analysis import kernels
from jformer.tools.forecast.describe import summary
from jformer.tools.forecast.roofline import ASSUMPTIONS, GPU_ASSUMPTIONS, Bound, beside_kernels, bound
from jformer.tools.forecast.shapes import (
    answer_shape,
    full_shape,
    full_update_flops,
    likely_shapes,
    mesh_sizes,
    refusal_note,
)
from jformer.tools.forecast.topology import GIB, LARGEST_SHARE, SHARE_VARIABLE, Gpu, Topology, open_topology
from jformer.training.introduction import kernel_line

MIB = 2**20
NEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM")
CHUNK = 512  # the proposed attention_chunk
SIZES = {"K": 2**10, "M": MIB, "G": GIB, "T": 2**40}


def describe_topology(config: Config, workdir: Path | None, topology: str, price: float) -> Iterator[str]:
    """Yield lines on a run on a slice or on GPUs; `price` is in dollars per hour of a device, 0 = unknown.

    Raises UserError if the run does not fit, with changes that make it fit.
    """
    chips = open_topology(topology)
    task = build_task(config)
    mesh = open_mesh(config, chips.devices)
    if mesh.size != len(chips.devices):
        raise UserError(
            f"the mesh has {mesh.size} of the {len(chips.devices)} {chips.unit}s of {chips.name}; -1 takes the rest"
        )
    config, _ = choose_dtype(config, "model", mesh)
    target = target_of(chips.devices[0])
    asked = config
    config, _ = choose_lengths(divide_rows(config, row_shards(mesh)), target)
    model, _ = sized_model(config, task, workdir)
    shape = full_shape(config)
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    yield from summary(config)
    yield products_line(model.dtype, target, model.precision)
    prefix, shared = source_is_prefix(model, task.answer), mesh.shape[SEQUENCE]
    parts = mesh.size * config.train.accumulation
    yield kernel_line(model, target, likely_shapes(config), prefix, shared, parts)
    yield f"{chips}; mesh {axes}"
    yield from filter(None, [slices_line(mesh)])
    lengths = " + ".join(f"{length:,}" for length in shape[1:] if length)
    each = f"a {chips.unit}" if shared == 1 else f"{shared} {chips.unit}s"
    yield f"\nupdate: {shape.rows:,} full rows of {lengths}, {shape.rows // row_shards(mesh):,} for {each}"
    yield from (f"  {line}" for line in [refusal_note(config)] if line)
    memory = estimate(config, task, model, shape, mesh.size, target)
    yield f"  memory by estimate: {memory}"
    state = sum(memory) - memory.gradients - memory.activations
    update = _compiled("update", chips, lambda: compile_update(config, task, model, shape, mesh), state)
    if not isinstance(update, Figures):
        ways = ways_to_fit(asked, task, model, chips, update / sum(memory))
        larger = larger_share_note(update, chips)
        raise UserError(f"{_too_large('update', update, chips)}; {larger}by estimate it fits with {ways}")
    yield from _program_lines(update, chips)
    yield from _update_lines(config, model, update, chips, price)
    if task.answer:
        yield from _answer_lines(config, task, model, chips, mesh, price)
    yield f"\nassumed: {GPU_ASSUMPTIONS if isinstance(chips.chip, Gpu) else ASSUMPTIONS}"


def ways_to_fit(config: Config, task: Task, model: ModelConfig, chips: Topology, ratio: float) -> str:
    """Return changes to the config that each make an update fit, or advice if none does.

    Args:
        config: as requested, before its rows were divided over the devices and its lengths chosen.
        task: of the run.
        model: the options of the model with the sizes of its vocabularies or classes.
        chips: the slice or GPUs.
        ratio: of the compiler's bytes to the estimated ones, for the update that does not fit.
    """

    def fits(key: str, value: object) -> bool:
        changed, devices = as_config_dict(config), len(chips.devices)
        changed.update_from_flattened_dict({key: value})
        try:
            other = resolve(changed)
            sizes, own = (
                mesh_sizes(other, devices),
                dataclasses.replace(model, execution=with_rows(other, task).execution),
            )
            target = target_of(chips.devices[0])
            other, _ = choose_lengths(divide_rows(other, sizes["data"] * sizes["fsdp"]), target)
            memory = estimate(other, task, own, full_shape(other), devices, target)
            return math.prod(sizes.values()) == devices and ratio * sum(memory) < chips.memory
        except UserError:  # not divisible
            return False

    firsts = ((key, next((value for value in values if fits(key, value)), None)) for key, values in _changes(config))
    found = [f"{key}={value}" for key, value in firsts if value is not None]
    return (
        " or ".join(found) or "no such change alone: combine model.execution.remat=full, mesh.fsdp and a smaller update"
    )


def _changes(config: Config) -> Iterator[tuple[str, list[Any]]]:
    """Yield keys that save memory, and their values, the mildest first."""
    yield (
        "model.execution.remat",
        {"none": ["dots", "full"], "dots": ["full"], "full": []}[config.model.execution.remat],
    )
    longest = max(config.data.max_source_length, config.data.max_target_length)
    if not config.model.execution.attention_chunk and longest > CHUNK:
        yield "model.execution.attention_chunk", [CHUNK]
    if config.mesh.data == -1:
        yield "mesh.fsdp", [config.mesh.fsdp << i for i in range(1, 5)]
    yield "train.accumulation", [config.train.accumulation << i for i in range(1, 4)]
    yield "data.tokens_per_update", [config.data.tokens_per_update >> i for i in range(1, 5)]


def _compiled(what: str, chips: Topology, compile_it: Callable[[], Figures], arguments: float = 0.0) -> Figures | float:
    """Return the figures of a program, or the bytes that it needs if it does not fit.

    `arguments` are the bytes of its arguments, which a compiler that gives up does not count.
    """
    print(f"compiling the {what} for {chips.name}, which may take minutes ...", file=sys.stderr, flush=True)
    began = time.perf_counter()
    try:
        figures = compile_it()
        return figures.memory if figures.memory > chips.memory else figures  # XLA compiles even what no GPU can hold
    except RuntimeError as error:
        over = NEEDED.search(str(error))
        if not over:
            raise
        return float(over[1]) * SIZES[over[2]] + arguments
    finally:
        print(f"  {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def larger_share_note(needed: float, chips: Topology) -> str:
    """Return a note if a program would fit if JAX took a larger share of a GPU's memory, or ''."""
    share = needed / chips.chip.hbm
    if not isinstance(chips.chip, Gpu) or share > LARGEST_SHARE:
        return ""
    return f"{SHARE_VARIABLE}={math.ceil(share * 100) / 100:g} in the environment is enough for it, and "


def _too_large(what: str, needed: float, chips: Topology) -> str:
    room = f"{needed / GIB:.1f} GiB of a {chips.unit}'s {chips.memory / GIB:.0f}"
    return f"{chips.name}: the {what} does not fit: it needs {room}"


def _program_lines(figures: Figures, chips: Topology) -> Iterator[str]:
    """Yield lines on a compiled program: memory, work and collectives of each device."""
    names = ("arguments", "outputs", "temporaries", "code")
    parts = ", ".join(f"{name} {getattr(figures, name) / MIB:,.1f}" for name in names)
    yield f"  memory by the compiler: {figures.memory / MIB:,.1f} MiB, {figures.memory / chips.memory:.1%}: {parts}"
    moved = f"{figures.traffic / 1e9:,.2f} GB between HBM and cores, {kernels(figures.program):,} kernels"
    yield f"  {figures.flops:.3g} FLOPs, {moved}"
    if figures.collectives:
        crossing = any(each.crossing for each in figures.collectives)
        cells = [["collectives over", "", "count", "MB whole", "MB sent"] + ["to other machines"] * crossing]
        for each in figures.collectives:
            sizes = [each.bytes, each.sent] + [each.crossing] * crossing
            row = [" and ".join(each.axes), each.kind, f"{each.times:,}"]
            cells.append([*row, *(f"{size / 1e6:,.2f}" for size in sizes)])
        yield from (f"  {line}" for line in aligned(cells, 2))


def _update_lines(config: Config, model: ModelConfig, figures: Figures, chips: Topology, price: float) -> Iterator[str]:
    """Yield lines on the least time of an update, its MFU at most, and its cost."""
    shape = full_shape(config)
    count = len(chips.devices)
    least = bound(figures, chips, model.dtype, model.precision)
    useful = full_update_flops(config, model)
    once = f"the program has {figures.flops_once:.3g} without recomputation and with pairs that a causal kernel skips"
    yield f"  {useful / count:.3g} FLOPs of the model; {once}"
    yield _time_line(least)
    if least.network and isinstance(chips.chip, Gpu):
        hidden = beside_kernels(figures, chips, model.dtype, model.precision)
        yield f"  {hidden / least.network:.0%} of the network's time overlaps with kernels in the compiler's schedule"
    peak = chips.peak_in(model.dtype, model.precision)
    shares = (f"{useful / count / seconds / peak:.1%}" for seconds in (least.overlapped, least.apart))
    yield f"  MFU at most {' or '.join(shares)}"
    tokens = shape.rows * (shape.target_length or shape.source_length)
    yield f"  {_rate(tokens, least)} {'target ' if shape.target_length else ''}tokens/s"
    if price:
        hours = count * price / 3600
        million, whole = 1e6 / tokens * hours, config.train.num_steps * hours
        yield f"  {_cost(million, least)} for a million such tokens"
        yield f"  {_cost(whole, least)} for {config.train.num_steps:,} updates"


def _answer_lines(
    config: Config, task: Task, model: ModelConfig, chips: Topology, mesh: Mesh, price: float
) -> Iterator[str]:
    """Yield lines on answering one batch of inputs, with searches that run to their limit."""
    shape = answer_shape(config, task, mesh)
    room = "" if task.answer in HEADS else f", at most {shape.target_length:,} tokens each"
    yield f"\nanswers: {shape.rows:,} inputs of {shape.source_length:,}{room}"
    config, _ = choose_dtype(config, "decode", mesh)
    model = dataclasses.replace(model, dtype=config.decode.dtype or model.dtype)
    figures = _compiled("answers", chips, lambda: compile_answer(config, task, model, shape, mesh))
    if not isinstance(figures, Figures):
        raise UserError(
            f"{_too_large('batch of answers', figures, chips)}; lower decode.batch_size or raise mesh.tensor"
        )
    least = bound(figures, chips, model.dtype, model.precision)
    yield from _program_lines(figures, chips)
    yield _time_line(least)
    yield f"  {_rate(shape.rows, least)} inputs/s"
    if price:
        each = len(chips.devices) * price / 3600 / shape.rows
        yield f"  {_cost(1e6 * each, least)} for a million inputs"


def _time_line(least: Bound) -> str:
    parts = ", ".join(f"{name} {seconds * 1e3:,.2f}" for name, seconds in least._asdict().items())
    return f"  at least {least.overlapped * 1e3:,.2f} ms overlapped, {least.apart * 1e3:,.2f} ms apart: {parts}"


def _rate(count: int, least: Bound) -> str:
    return f"at most {count / least.overlapped:,.0f} or {count / least.apart:,.0f}"


def _cost(dollars: float, least: Bound) -> str:
    """Return the range of a cost in dollars, given the cost of one second."""
    return f"${dollars * least.overlapped:,.4g} to ${dollars * least.apart:,.4g}"
