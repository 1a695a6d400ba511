"""The rows of experiments/accelerator.py: what each checks or measures, in a process of its own.

Command:  python -m experiments.checks.accelerator_rows ROW [--smoke] [--wmt=DIR] [--trace=DIR]

A row yields findings, each printed as a line of JSON as soon as it is known, which experiments.accelerator reads.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from etils import epath
from jax.sharding import Mesh
from jaxtyping import PyTree

from experiments.accelerator import define_flags
from experiments.measure import ROOT, smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.plan import Shape
from jformer.data.tokenizers.symbols import NUM_SYMBOLS, Symbols
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference.generation import make_answer, make_setup
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.flops import update_flops, work_of
from jformer.parallel.backend import compiling_for, target_of
from jformer.parallel.devices import arithmetic, find_peak
from jformer.parallel.mesh import make_mesh
from jformer.parallel.processes import library_versions
from jformer.parallel.sharding import put_batch, row_shards, state_shardings
from jformer.tasks.batch_arrays import abstract_batch, id_limits, source_is_prefix
from jformer.tasks.build import build_task, sized_model
from jformer.tasks.task import Task, make_loss
from jformer.tools.forecast.compiled_ahead import figures
from jformer.tools.forecast.roofline import bound
from jformer.tools.forecast.topology import CHIPS, GPUS, Chip, Gpu, Topology
from jformer.training.introduction import kernel_line
from jformer.training.optim import build_optimizer
from jformer.training.profile import Profile
from jformer.training.state import create_state
from jformer.training.step import make_train_step

# Largest relative error of an update's gradients, by the arithmetic of products, against float32 on the machine's CPU.
TOLERANCE = {"float32": 1e-4, "bfloat16 x 3": 1e-3, "tf32": 2e-2, "bfloat16": 0.1}
SMALL = {"model.num_layers": 2, "model.d_model": 128, "model.d_ff": 256, "model.num_heads": 4, "data.vocab_size": 500}
SMALLEST = SMALL | {"model.num_layers": 1, "model.d_model": 32, "model.d_ff": 48}  # of --smoke
NUMERICS = {  # name → preset, options
    "encoder-decoder": ("transformer_base", {}),
    "decoder": ("gpt2", {"model.max_length": 512}),
    "relative positions": ("t5_small", {"model.d_k": 32, "model.d_v": 32}),
    "recurrent": ("rnnsearch_tiny", {"model.d_ff": 2048, "model.num_heads": 8}),
}
STEPS = {  # preset → options, rows, length of a side
    "transformer_base": ({"data.vocab_size": 32_000}, 64, 256),
    "transformer_big": ({"data.vocab_size": 32_000}, 32, 256),
    "gpt2": ({"data.vocab_size": 50_304}, 8, 1_024),
    "t5_base": ({"data.vocab_size": 32_128}, 16, 256),
}
OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # another choice than the default's → options; XLA's
    "the default": ({}, {}),
    "own attention": ({"model.execution.attention_kernel": "own"}, {}),
    "all queries at once": ({"model.execution.attention_chunk": 4_096}, {}),
    "scanned layers": ({"model.execution.unroll": 1}, {}),
    "Triton's products, too": ({}, {"xla_gpu_enable_triton_gemm": True}),
}
DECODED = {True: (4, 8, 4), False: (128, 32, 32)}  # in small? → rows, length of sources, tokens of outputs
SHORT = "tests/small_run.py"  # a config that trains in seconds
QUICKSTART = {100: 3.569, 200: 1.832, 300: 1.405}  # update → training loss on a CPU in float32
TPUS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
PACKAGES = {"pytest": "tests", "beartype": "tests", "orbax.checkpoint": "save and resume", "babel": "quickstart"}
TESTS = (  # those of tests/conftest.py's ON_ACCELERATORS that take minutes together, the most informative first
    *("models/layers/test_attention.py", "models/layers/test_matmul.py", "models/layers/test_precision.py"),
    *("decoding/test_greedy.py", "decoding/test_beam.py", "tasks/test_losses.py", "training/test_step.py"),
)


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    text: str
    ok: bool = True
    figures: Mapping[str, Any] = {}


class Update(NamedTuple):
    """A compiled update of a preset and its arguments."""

    config: Config
    task: Task
    model: ModelConfig
    shape: Shape
    compiled: Any
    state: PyTree
    batch: PyTree


def configured(preset: str, options: Mapping[str, Any]) -> Config:
    """Return the config of a preset with some options."""
    config = default_config(preset)
    config.model.num_decoder_layers = 0
    config.update_from_flattened_dict(dict(options))
    return resolve(config)


def small_config(name: str, **options: Any) -> Config:
    """Return a small config of NUMERICS, without dropout."""
    preset, own = NUMERICS[name]
    still = {f"model.{key}": 0.0 for key in ("dropout", "attention_dropout", "activation_dropout")}
    return configured(preset, {**SMALL, **own, **still, **options})


def random_batch(model: ModelConfig, task: Task, shape: Shape, mesh: Mesh, ragged: bool = False) -> PyTree:
    """Return a batch of random tokens on a mesh: full rows, or ragged ones with padding."""
    rng, found, limits = np.random.default_rng(0), {}, id_limits(model)
    for name, array in abstract_batch(model, task.answer, shape, mesh).items():
        size = array.shape[-1]
        positions = np.broadcast_to(np.arange(size), array.shape)
        lengths = np.random.default_rng(1).integers(size // 2, size + 1, (*array.shape[:-1], 1))  # equal on a side
        real = positions < (lengths if ragged else size)
        kind = name.rpartition("_")[2]
        if kind == "row":
            values = positions
        elif kind in ("segments", "weights"):
            values = real
        else:
            tokens = rng.integers(NUM_SYMBOLS, limits.get(name, NUM_SYMBOLS + 1), array.shape)
            values = real * (positions if kind == "positions" else tokens)
        found[name] = np.asarray(values, array.dtype)
    return put_batch(mesh, found)


def gradient(config: Config, shape: Shape, device: jax.Device) -> tuple[float, list[np.ndarray]]:
    """Return the loss of a fixed batch and fixed parameters, and its gradients, computed on a device."""
    task, mesh = build_task(config), make_mesh(1, devices=[device])
    model, _ = sized_model(config, task, None)
    with compiling_for(target_of(device)), jax.default_device(device):
        built = build_model(model)
        loss = make_loss(built, task.loss)
        with jax.default_device(jax.devices("cpu")[0]):
            params = init_params(built, jax.random.key(0))
        batch = jax.tree.map(lambda x: x[0], random_batch(model, task, shape, mesh, ragged=True))

        def mean_loss(params: PyTree, batch: PyTree) -> Any:
            sums = loss(params, batch, None)
            return sums["loss"].total / sums["loss"].count

        found, slopes = jax.jit(jax.value_and_grad(mean_loss))(jax.device_put(params, device), batch)
    return float(found), [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(slopes)]


def apart(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the norm of the difference of two gradients over that of the second."""
    differences = sum(float(np.square(a - b).sum()) for a, b in zip(found, wanted, strict=True))
    return float((differences / sum(float(np.square(b).sum()) for b in wanted)) ** 0.5)


def machine(small: bool) -> Iterator[Finding]:
    """Report devices, versions and missing packages. No accelerator is a failure."""
    device, count = jax.devices()[0], jax.device_count()
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    memory = f", JAX takes {limit / 2**30:.1f} GiB of each" if limit else ""
    there = small or device.platform != "cpu"
    text = f"{count} x {device.device_kind}{memory}; {device.client.platform_version.splitlines()[0]}"
    facts = {"platform": device.platform, "kind": device.device_kind, "devices": count}
    yield Finding("devices", text if there else f"JAX found no accelerator: {text}", there, facts)
    versions = library_versions()
    yield Finding("versions", ", ".join(f"{name} {each}" for name, each in versions.items()), True, versions)
    missing = [f"{name} ({use})" for name, use in PACKAGES.items() if not find_spec(name)]
    yield Finding("not installed", ", ".join(missing) or "nothing that rows need")


def numerics(small: bool) -> Iterator[Finding]:
    """Compare the gradients of an update with those that this machine's CPU computes in float32."""
    device, shape = jax.devices()[0], Shape(8, 32, 32) if small else Shape(8, 128, 128)
    names = [*NUMERICS][: 1 if small else None]
    for name in names:
        loss, wanted = gradient(small_config(name, **{"model.precision": "highest"}), shape, jax.devices("cpu")[0])
        for dtype, precision in (("float32", "highest"), ("float32", "default"), ("bfloat16", "default")):
            options = {"model.dtype": dtype, "model.precision": precision}
            other, found = gradient(small_config(name, **options), shape, device)
            far, used = apart(found, wanted), arithmetic(dtype, target_of(device), precision)
            text = f"in {used}: gradients {far:.1e} from the CPU's, allowed {TOLERANCE[used]:.0e}; loss {other:.5f}"
            ok = far <= TOLERANCE[used] and abs(other / loss - 1) <= TOLERANCE[used]
            yield Finding(f"{name}, {dtype}, {precision}", text, ok, {"apart": far, "arithmetic": used})


def attention(small: bool) -> Iterator[Finding]:
    """Compare the gradients with the chosen attention kernel with those of our own code, on the same device."""
    device, length = jax.devices()[0], 32 if small else 512
    for name in [*NUMERICS][: 1 if small else 3]:
        for dtype in ("bfloat16", "float32"):
            options = {"model.dtype": dtype, "model.precision": "highest"}
            config = small_config(name, **options)
            own = small_config(name, **options, **{"model.execution.attention_kernel": "own"})
            shape = Shape(4, length, length)
            (_, found), (_, wanted) = (gradient(each, shape, device) for each in (config, own))
            far, task = apart(found, wanted), build_task(config)
            model, _ = sized_model(config, task, None)
            kernel = kernel_line(model, target_of(device), [shape], source_is_prefix(model, task.answer))
            text = f"gradients {far:.1e} from our own, allowed {TOLERANCE[dtype] / 2:.0e}; {kernel}"
            yield Finding(f"{name}, {dtype}, {length} positions", text, far <= TOLERANCE[dtype] / 2, {"apart": far})


def compiled_update(config: Config, shape: Shape, mesh: Mesh, asked: Mapping[str, Any] = {}) -> Update:
    """Build the update of a config with random parameters and tokens, and compile it as `asked` of XLA."""
    task = build_task(config)
    model, _ = sized_model(config, task, None)
    built = build_model(model)
    optimizer = build_optimizer(built, config.optim, config.train.num_steps, config.train.freeze)

    def create(key: jax.Array) -> PyTree:
        return create_state(init_params(built, key), optimizer.transform, ema=False)

    shardings = state_shardings(mesh, jax.eval_shape(create, jax.random.key(0)))
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    loss, keeps_finite = make_loss(built, task.loss), optimizer.keeps_finite
    step = make_train_step(loss, optimizer.transform, mesh, config.seed, keeps_finite=keeps_finite)
    batch = random_batch(model, task, shape, mesh)
    lowered = step.lower(state, batch)  # type: ignore[attr-defined]
    return Update(config, task, model, shape, lowered.compile(dict(asked)), state, batch)


def losses(update: Update, count: int) -> list[float]:
    """Return the mean loss of several updates on one batch."""
    state, found = update.state, []
    for _ in range(count):
        state, metrics = update.compiled(state, update.batch)
        found.append(float(metrics.sums["loss"].total / metrics.sums["loss"].count))
    return found


def updates(small: bool) -> Iterator[Finding]:
    """Update in bfloat16 on one device, then on meshes of all: losses are finite, fall, and agree."""
    options = {"model.dtype": "bfloat16", "optim.schedule": "constant", "optim.learning_rate": 1e-3, "optim.warmup": 1}
    count = jax.device_count()
    meshes = [(1, 1, 1), *([(count, 1, 1)] if count > 1 else [])]
    meshes += [(1, count // 2, 2)] if count > 3 and count % 2 == 0 else []
    first: list[float] = []
    for sizes in meshes:
        mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
        config = configured("transformer_base", {**(SMALLEST if small else {}), **options})
        rows = 8 * max(count, row_shards(mesh))
        found = losses(compiled_update(config, Shape(rows, 64, 64), mesh), 4)
        first = first or found
        ok = np.isfinite(found).all() and found[-1] < found[0] and abs(found[0] / first[0] - 1) < 0.01
        text = f"losses {' '.join(f'{loss:.3f}' for loss in found)}"
        yield Finding(f"bfloat16, mesh {'x'.join(map(str, sizes))}", text, bool(ok), {"losses": found})
    if count == 1:
        yield Finding("several devices", "not run: there is only one")


def resume(small: bool) -> Iterator[Finding]:
    """Train, save and resume to the bit: a run in one go, and the same in two parts."""
    from jformer.inference.restore import restore

    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("bfloat16", "float32")[: 1 if small else None]:
            runs = Path(folder) / dtype / "whole", Path(folder) / dtype / "parts"
            for workdir, steps in ((runs[0], 20), (runs[1], 10), (runs[1], 20)):
                options = {"model.dtype": dtype, "train.num_steps": steps}
                train([f"--config={SHORT}", f"--workdir={workdir}", "--deterministic"], options)
            one, two = (jax.tree.leaves(jax.device_get(restore(workdir).params)) for workdir in runs)
            same = all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))
            yield Finding(dtype, f"20 updates and 10 + 10: {'the same bits' if same else 'DIFFERENT parameters'}", same)


def quickstart(small: bool) -> Iterator[Finding]:
    """Train the quickstart for 300 updates; the loss is finite and falls as it does on a CPU."""
    steps = 20 if small else 300
    every = steps // len(QUICKSTART)
    with tempfile.TemporaryDirectory() as folder:
        limits: dict[str, Any] = dict.fromkeys(("train.num_steps", "train.eval_every", "train.checkpoint_every"), steps)
        limits |= {"train.log_every": every, "data.num_pairs": 20_000}
        began = time.perf_counter()
        train(["--config=configs/quickstart.py", f"--workdir={folder}"], limits)
        seconds = time.perf_counter() - began
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("split") == "train"]
    found = {row["step"]: row["loss"] for row in rows}
    text = ", ".join(f"{loss:.3f} at {step}" for step, loss in found.items())
    curve = [*found.values()]
    ok = np.isfinite(curve).all() and curve[-1] < curve[0]
    if not small:
        ok = ok and all(abs(found[step] / loss - 1) < 0.15 for step, loss in QUICKSTART.items())
        text += f" (a CPU: {', '.join(f'{loss:.3f}' for loss in QUICKSTART.values())})"
    yield Finding(f"{steps} updates", f"loss {text}; {seconds:.0f} s with its scores", bool(ok), {"losses": found})


def timed(call: Callable[[], Any], small: bool) -> float:
    """Return the median seconds of a call that is made several times, after two that are not timed."""
    found = []
    for _ in range(4 if small else 12):
        began = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def timed_losses(run: Callable[[], tuple[float, float]], small: bool) -> tuple[float, list[float]]:
    """Return the median seconds of a peer's update, as of ours, and the losses of all that were made."""
    losses = list[float]()
    return timed(lambda: losses.append(run()[1]), small), losses


def chip_of(device: jax.Device) -> Chip | Gpu | None:
    """Return the specifications of a device, None where the forecast has none."""
    gpus = {gpu.device: gpu for gpu in GPUS.values()}
    return gpus.get(device.device_kind) or CHIPS.get(TPUS.get(device.device_kind, ""))


def step(preset: str, small: bool, dtype: str = "bfloat16") -> Iterator[Finding]:
    """Time the update of a preset, beside its forecast and beside Flax: examples/wmt or its own parts."""
    device = jax.devices()[0]
    config, shape = timed_work(preset, small, {"model.dtype": dtype})
    rows, _, length = shape
    update, times = timed_update(config, shape, device, small)
    work = work_of(*(np.full(rows, each) for each in shape[1:]))
    mfu = update_flops(update.model, work) / times.waited / find_peak(device, 1, dtype).flops
    used = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    facts = {**times.milliseconds(), "tokens_per_second": rows * length / times.waited, "mfu": mfu}
    facts |= {"peak_mib": used / 2**20, **forecast(update, device)}
    text = f"{times}, {rows * length / times.waited:,.0f} tokens/s, MFU {mfu:.1%}"
    text += f", peak {used / 2**20:,.0f} MiB; compiled: {facts['compiled_mib']:,.0f} MiB"
    text += f", at least {facts['bound_ms']:,.1f} ms, apart {facts['apart_ms']:,.1f}" if "bound_ms" in facts else ""
    sizes = f"{rows} x {' + '.join(str(each) for each in shape[1:] if each)}"
    with traced(f"{preset}_{dtype}"):
        found = losses(update, 3)
    yield Finding(f"{dtype}, {sizes}", text, bool(np.isfinite(found).all()), facts)
    yield from beside_flax(update, times.waited, small)


def choices(preset: str, small: bool) -> Iterator[Finding]:
    """Time the update of a preset in bfloat16 with what the default does not choose on this platform."""
    device, default = jax.devices()[0], 0.0
    for name, (options, asked) in OTHERWISE.items():
        if asked and device.platform != "gpu":
            continue
        config, shape = timed_work(preset, small, {"model.dtype": "bfloat16", **options})
        update, times = timed_update(config, shape, device, small, asked)
        default = default or times.waited
        text = f"{times}, {times.waited / default:.2f} times the default"
        facts = {**times.milliseconds(), "times_default": times.waited / default, **forecast(update, device)}
        yield Finding(name, text, bool(np.isfinite(losses(update, 1))[0]), facts)
        del update  # its state is as large as the next one's


def traced(name: str) -> contextlib.AbstractContextManager[None]:
    """Trace the context, which waits for the device, into a folder of that name in --trace, if that is given."""
    folder = flags.FLAGS.trace
    return Profile(epath.Path(folder or "") / name, range(1, 2 if folder else 1), print).update(1, lambda: None)


def timed_work(preset: str, small: bool, options: Mapping[str, Any]) -> tuple[Config, Shape]:
    """Return the config of an update of STEPS with some options, and the shape of its batch."""
    sizes, rows, length = STEPS[preset]
    if small:
        sizes, rows, length = {**SMALLEST, "model.max_length": 512}, 2, 32
    config = configured(preset, {**sizes, **options})
    return config, Shape(rows, 0 if config.model.family == "decoder" else length, length)


def save_batch(folder: str, batch: PyTree) -> str:
    """Write a batch of one microbatch to a file for a peer, and return its path."""
    path = f"{folder}/batch.npz"
    np.savez(path, **{name: np.asarray(array[0]) for name, array in batch.items()})  # type: ignore[arg-type]
    return path


class Times(NamedTuple):
    """Seconds of an update that the host waits for, and of one of several dispatched at once."""

    waited: float
    dispatched: float

    def __str__(self) -> str:
        return f"{1e3 * self.waited:,.1f} ms, back to back {1e3 * self.dispatched:,.1f}"

    def milliseconds(self) -> dict[str, float]:
        """Return both in milliseconds."""
        return {"ms": 1e3 * self.waited, "back_to_back_ms": 1e3 * self.dispatched}


def timed_update(
    config: Config, shape: Shape, device: jax.Device, small: bool, asked: Mapping[str, Any] = {}
) -> tuple[Update, Times]:
    """Return the update of a config, compiled as `asked` of XLA, after some of them, and the time of one."""
    update = compiled_update(config, shape, make_mesh(1, devices=[device]), asked)
    state = update.state

    def run(count: int = 1) -> Any:
        nonlocal state
        for _ in range(count):
            state, metrics = update.compiled(state, update.batch)
        return metrics

    waited, count = timed(run, small), 2 if small else 10
    times = Times(waited, timed(functools.partial(run, count), small=True) / count)
    return update._replace(state=state), times


def forecast(update: Update, device: jax.Device) -> dict[str, float]:
    """Return what the compiler says of an update, and the least time of it where the chip is known."""
    compiled = figures(update.compiled, make_mesh(1, devices=[device]))
    found = {"compiled_mib": compiled.memory / 2**20, "compiled_gb": compiled.traffic / 1e9}
    if chip := chip_of(device):
        least = bound(
            compiled, Topology(device.device_kind, chip, [device]), update.model.dtype, update.model.precision
        )
        found |= {"bound_ms": 1e3 * least.overlapped, "apart_ms": 1e3 * least.apart}
    return found


def beside_flax(update: Update, ours: float, small: bool) -> Iterator[Finding]:
    """Time Flax on the same batch: its examples/wmt, if that is given and has the model, or else its own parts."""
    from experiments.speed.steps_flax import load

    model = update.model
    has_it = model.family == "encdec" and model.positions == "sinusoidal"
    wmt = flags.FLAGS.wmt if has_it else None
    with tempfile.TemporaryDirectory() as folder:
        told = {"model": dataclasses.asdict(model), "batch": save_batch(folder, update.batch)}
        run, facts = load({**told, "packed": False, "warmup": 100, "flax_wmt": wmt})
    seconds, losses = timed_losses(run, small)
    memory = facts["temp_bytes"] / 2**20
    text = f"{1e3 * seconds:,.1f} ms, {seconds / ours:.2f} times ours; temporaries {memory:,.0f} MiB"
    figures = {"ms": 1e3 * seconds, "times_ours": seconds / ours, "temporaries_mib": memory}
    name = "flax examples/wmt" if wmt else "plain flax"
    yield Finding(f"{model.dtype}, {name}", text, bool(np.isfinite(losses).all()), figures)


def decoding(small: bool) -> Iterator[Finding]:
    """Decode with random parameters of transformer_base, in bfloat16: outputs as long as there is room."""
    rows, length, room = DECODED[small]
    options = {**(SMALLEST if small else {"data.vocab_size": 32_000}), "model.dtype": "bfloat16"}
    config, mesh = configured("transformer_base", options), make_mesh(1, devices=jax.devices()[:1])
    task = build_task(config)
    model, _ = sized_model(config, task, None)
    built, symbols = build_model(model), Symbols()
    params = jax.jit(lambda key: init_params(built, key))(jax.random.key(0))
    source = jax.tree.map(lambda x: x[0], random_batch(model, task, Shape(rows, length, 1), mesh))
    batch = {name: array for name, array in source.items() if name.startswith("source")}
    batch |= {"prompt": np.full((rows, 1), symbols.bos, np.int32), "prompt_length": np.ones(rows, np.int32)}
    batch |= {"limit": np.full(rows, room, np.int32), "line": np.arange(rows, dtype=np.int32)}
    batch |= {"max_unfinished": np.int32(0)}
    for beam in (1, 4):
        vocabulary = np.ones(model.target_vocab_size or model.vocab_size, bool)
        vocabulary[[symbols.pad, symbols.bos]] = False
        setup = make_setup([built], DecodeConfig(beam_size=beam), vocabulary, symbols, mesh)
        answer = make_answer(setup, task.answer)
        found = jax.device_get(answer((params,), batch, room))
        seconds = timed(functools.partial(answer, (params,), batch, room), small)
        name = "greedy" if beam == 1 else f"beam {beam}"
        mean = float(np.mean(found.lengths[:, 0]))
        text = f"{rows / seconds:,.0f} sentences/s, {rows} x {length}, {mean:.0f} tokens each, {1e3 * seconds:,.0f} ms"
        with traced(f"beam_{beam}"):
            jax.block_until_ready(answer((params,), batch, room))
        ok = bool(np.isfinite(found.scores[:, 0]).all())
        yield Finding(name, text, ok, {"sentences_per_second": rows / seconds, "tokens": mean})


def pytorch(small: bool) -> Iterator[Finding]:
    """Time PyTorch and Transformers at the same work, in bfloat16."""
    if not find_spec("torch"):
        yield Finding("pytorch", "not run: it is not installed")
        return
    from experiments.checks import accelerator_torch as peer

    jax.config.update("jax_platforms", "cpu")  # the accelerator's memory is PyTorch's here
    if not (small or peer.has_gpu()):
        yield Finding("pytorch", "not run: it sees no GPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        for preset, load in peer.STEPS.items():
            config, shape = timed_work(preset, small, {"model.dtype": "bfloat16"})
            task, (rows, _, length) = build_task(config), shape
            model, _ = sized_model(config, task, None)
            batch = random_batch(model, task, shape, make_mesh(1, devices=jax.devices()[:1]))
            told = {"model": dataclasses.asdict(model), "batch": save_batch(folder, batch)}
            for compiled in (False, True)[: 1 if small else None]:
                seconds, losses = timed_losses(load({**told, "compiled": compiled}), small)
                text = f"{1e3 * seconds:,.1f} ms, {rows * length / seconds:,.0f} tokens/s"
                name = f"{preset}, {rows} x {length}" + (", compiled" if compiled else "")
                yield Finding(name, text, bool(np.isfinite(losses).all()), {"ms": 1e3 * seconds})
    rows, length, room = DECODED[small]
    config = configured("transformer_base", SMALLEST if small else {"data.vocab_size": 32_000})
    model, _ = sized_model(config, build_task(config), None)
    for beam, search in peer.searches(dataclasses.asdict(model), rows, length, room):
        seconds = timed(search, small)
        text = f"{rows / seconds:,.0f} sentences/s, {rows} x {length}, {room} tokens each, {1e3 * seconds:,.0f} ms"
        yield Finding("greedy" if beam == 1 else f"beam {beam}", text, True, {"sentences_per_second": rows / seconds})


def processes(small: bool) -> Iterator[Finding]:
    """Train as two processes with a GPU each; this process holds no device."""
    gpus = visible_gpus(len([*Path("/proc/driver/nvidia/gpus").glob("*")]))
    if len(gpus) < 2 and not small:
        yield Finding("two processes", f"not run: {len(gpus)} NVIDIA GPUs, two are needed")
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = [
        f"--config={SHORT}",
        "--config.mesh.data=-1",
        "--config.train.num_steps=10",
        "--config.model.dtype=bfloat16",
    ]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i in range(2):
            own = {"JAX_PLATFORMS": "cpu"} if len(gpus) < 2 else {"CUDA_VISIBLE_DEVICES": gpus[i]}
            place = [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={i}", f"--workdir={folder}/run"]
            command = [sys.executable, "-m", "jformer.main", *given, *place]
            with Path(f"{folder}/{i}").open("w") as log:
                started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **own}, stdout=log, stderr=log))
        codes = [process.wait() for process in started]
        said = [Path(f"{folder}/{i}").read_text().strip().splitlines()[-1:] for i in range(2)]
    ok = codes == [0, 0]
    yield Finding("two processes", f"exit codes {codes}" + ("" if ok else f": {said}"), ok)


def visible_gpus(count: int) -> list[str]:
    """Return CUDA's names of the machine's GPUs: those of CUDA_VISIBLE_DEVICES, where it is set, before a "-1"."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [*itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, named))] if count else []


def tests(small: bool) -> Iterator[Finding]:
    """Run the tests that make sense on an accelerator, file by file."""
    if not find_spec("pytest"):
        yield Finding("tests", 'not run: no pytest here; pip install -e ".[dev]"')
        return
    environment = {**os.environ, "JFORMER_TEST_PLATFORM": os.environ.get("JFORMER_TEST_PLATFORM", test_platform())}
    for name in TESTS[2:3] if small else TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"tests/{name}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
        text = last + (f": {', '.join(failed[:6])}" if failed else "")
        yield Finding(name, text, done.returncode == 0, {"failed": failed})


def test_platform() -> str:
    """Return JAX's name of the platform of the first device, found in another process: this one takes no device."""
    code = "import jax; d = jax.devices()[0]; print({'gpu': 'cuda'}.get(d.platform, d.platform))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]


def train(arguments: list[str], options: Mapping[str, Any]) -> None:
    """Train by the command, in this process; its output goes to standard error, apart from a row's findings.

    Raises RuntimeError if it fails; the command has printed why.
    """
    from jformer import main

    with contextlib.redirect_stdout(sys.stderr):
        code = main.main(["jformer", *arguments, *(f"--config.{key}={value}" for key, value in options.items())])
    if code:
        raise RuntimeError(f"training ended with exit code {code}")


ROWS: dict[str, Callable[[bool], Iterator[Finding]]] = {
    "machine": machine,
    "numerics": numerics,
    "updates": updates,
    "attention": attention,
    "resume": resume,
    "quickstart": quickstart,
    "step transformer_base": functools.partial(step, "transformer_base"),
    "decoding": decoding,
    "pytorch": pytorch,
    "processes": processes,
    "tests": tests,
    **{f"step {preset}": functools.partial(step, preset) for preset in ("gpt2", "t5_base", "transformer_big")},
    **{f"choices {preset}": functools.partial(choices, preset) for preset in ("transformer_base", "gpt2", "t5_base")},
    "float32 transformer_base": functools.partial(step, "transformer_base", dtype="float32"),
}


def main(argv: list[str]) -> None:
    """Print the findings of a row."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not a finding
    for finding in ROWS[argv[1]](smoke_sizes()):
        print(json.dumps(finding._asdict()), file=out, flush=True)


if __name__ == "__main__":
    define_flags()
    app.run(main)
