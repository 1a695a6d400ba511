"""How good are the programs for TPUs and GPUs? Updates compiled for absent chips, against their ideal and peers' own.

Nothing is run. Five goals: the model's FLOPs are 97 % of the program's or more; it moves at most 1.3 times the bytes of
the ideal (each product reads and writes its arrays once, the state goes twice); no parameter is gathered twice in a
pass; collectives run beside kernels; temporaries are at most 15 % over what is predicted.

Peers are Flax's examples/wmt (encoder-decoders) or lm1b (decoders), from a checkout, and the same layers in plain Flax
with jax.nn's attention, float32 logits and Optax: experiments/speed/steps_flax. Their state is on every chip, and their
Adam neither clips nor looks for NaN. --kernels lists the kernels that move most.

Command:  pip install -e ".[tpu-aot]" or ".[gpu-aot]"; python -m experiments.faults.programs [--models=gpt2_1k,big]
          [--topology=v5e:2x4,v6e-256,h100] [--fsdp=1,4] [--chip_rows=16,32] [--sides=ours,plain,example]
          [--examples=CHECKOUT/examples] [--kernels=10] [--smoke]      (1 to 3 minutes each)
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.faults.program_quality import gathered_twice, ideal_traffic, overlap
from experiments.measure import smoke_sizes
from experiments.speed.steps_flax import make_update
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.plan import Shape
from jformer.models import ModelConfig
from jformer.models.flops import update_flops, work_of
from jformer.parallel.backend import compiling_for, target_of
from jformer.parallel.mesh import DATA, FSDP, make_mesh
from jformer.tasks.build import build_task
from jformer.tasks.task import Task, sized
from jformer.tools.forecast.compiled_ahead import Figures, compile_update, estimate, figures
from jformer.tools.forecast.cost_analysis import Kernel, kernels, largest_kernels
from jformer.tools.forecast.roofline import bound
from jformer.tools.forecast.topology import GIB, Topology, compiler_options, open_topology


class Update(NamedTuple):
    """An update to compile: `rows` of a chip, with `lengths` tokens on the two sides."""

    preset: str
    topology: str
    fsdp: int
    rows: int
    lengths: tuple[int, int]
    vocabulary: int
    options: Mapping[str, Any] = MappingProxyType({})


FUSED = {"model.attention_dropout": 0.0}
DROPOUT = {"model.attention_dropout": 0.1}
EIGHT = {**FUSED, "train.accumulation": 8}
LONG = {**FUSED, "model.max_length": 8_192, "model.execution.remat": "full"}
NLLB = {"model.num_layers": 12, "model.norm": "pre", "model.dropout": 0.1, "optim.optimizer": "adamw"}
LORA = {**NLLB, "train.init_from": "BASE", "model.lora.rank": 8}
LORA_BF16 = {**LORA, "model.lora.base_dtype": "bfloat16"}
UPDATES = {  # *_batch: the batch of a paper on 8 chips, 512 rows, 393,216 target tokens (Ott et al. 2018) and 128 rows
    "gpt2_1k": Update("gpt2", "v5e:2x4", 1, 8, (0, 1_024), 50_304, FUSED),
    "gpt2_batch": Update("gpt2", "v5e:2x4", 1, 64, (0, 1_024), 50_304, EIGHT),
    "gpt2_unrolled": Update("gpt2", "v6e:2x4", 1, 64, (0, 1_024), 50_304, {**EIGHT, "model.execution.unroll": 12}),
    "gpt2_8k": Update("gpt2", "v5e:2x4", 1, 2, (0, 8_192), 50_304, LONG),
    "base": Update("transformer_base", "v5e:2x4", 1, 32, (256, 256), 32_000, FUSED),
    "base_1": Update("transformer_base", "v5e:2x4", 1, 32, (256, 256), 32_000, {**FUSED, "model.num_layers": 1}),
    "big": Update("transformer_big", "v5e:2x4", 8, 16, (256, 256), 37_120),
    "big_batch": Update("transformer_big", "v5e:2x4", 1, 192, (256, 256), 37_120, {"train.accumulation": 12}),
    "gpt2_dropout": Update("gpt2", "h100", 1, 8, (0, 1_024), 50_304),
    "base_dropout": Update("transformer_base", "h100", 1, 32, (256, 256), 32_000, DROPOUT),
    "t5_base": Update("t5_base", "h100", 1, 16, (256, 256), 32_128, {"optim.optimizer": "adam"}),
    "t5_large": Update("t5_large", "v5p:2x2x2", 8, 8, (512, 128), 32_128),
    "t5_large_batch": Update("t5_large", "v5p:2x2x2", 1, 16, (512, 128), 32_128, {"train.accumulation": 2}),
    "t5_adam": Update("t5_large", "h100", 1, 8, (512, 128), 32_128, {"optim.optimizer": "adam"}),
    "t5_3": Update("t5_large", "v5p-2", 1, 8, (512, 128), 32_128, {"model.num_layers": 3}),
    "scaled_base": Update("transformer_base", "v5p-8", 1, 32, (256, 256), 37_120),
    "scaled_big": Update("transformer_big", "v5p-8", 1, 32, (256, 256), 37_120),
    "nllb_600m": Update("transformer_big", "v6e:1x1", 1, 32, (128, 128), 256_206, NLLB),
    "nllb_lora": Update("transformer_big", "v6e:1x1", 1, 32, (128, 128), 256_206, LORA),
    "nllb_lora_bf16": Update("transformer_big", "v6e:1x1", 1, 32, (128, 128), 256_206, LORA_BF16),
    "tiny": Update("transformer_tiny", "v5e:2x2", 2, 8, (32, 32), 512),
}
MODELS = flags.DEFINE_list("models", ["gpt2_1k", "gpt2_8k", "big", "t5_large"], "Rows of UPDATES.")
TOPOLOGIES = flags.DEFINE_list(
    "topology", [], "The chips, instead of those that UPDATES names: v5e:1x1, v6e-256, h100."
)
FSDPS = flags.DEFINE_list("fsdp", [], "Sizes of the mesh's axis fsdp, instead of those that UPDATES names.")
ROWS = flags.DEFINE_list("chip_rows", [], "Rows of a chip, instead of those that UPDATES names.")
SIDES = flags.DEFINE_list("sides", ["ours"], "Whose programs to compile: ours, plain, example (not of decoding).")
EXAMPLES = flags.DEFINE_string("examples", None, "The folder examples of a checkout of Flax, for --sides=example.")
LARGEST = flags.DEFINE_integer("kernels", 0, "How many kernels to list of each program.")
HEADS = (
    "of", "data x fsdp", "TFLOP", "model's", "HBM, GB", "of ideal", "kernels", "twice", "beside", "waited",
    "over data", "fsdp, MB", "state, GiB", "temps", "of pred.", "memory", "prod., ms", "HBM", "apart", "MFU", "at most",
)  # fmt: skip


def resolved(update: Update) -> tuple[Config, Task, ModelConfig]:
    """Return the config of an update in bfloat16, its task, and the model with the sizes of its vocabulary."""
    settings = default_config(update.preset)
    settings.model.dtype = "bfloat16"
    settings.update_from_flattened_dict(dict(update.options))
    config = resolve(settings)
    task = build_task(config)
    return config, task, sized(config.model, task, update.vocabulary, update.vocabulary)


def compile_ours(update: Update, mesh: Mesh) -> tuple[Figures, float]:
    """Return the figures of an update, and how many bytes of temporaries are predicted."""
    config, task, model = resolved(update)
    shape = Shape(update.rows * mesh.size, *update.lengths)
    predicted = estimate(config, task, model, shape, mesh.size, target_of(mesh.devices.flat[0]))
    return compile_update(config, task, model, shape, mesh), predicted.gradients + predicted.activations


def compile_peer(side: str, update: Update, mesh: Mesh) -> tuple[Figures, float]:
    """Return the figures of the update of an example of Flax, or of plain Flax, which predict no temporaries."""
    _, _, model = resolved(update)
    split, whole = NamedSharding(mesh, P((DATA, FSDP))), NamedSharding(mesh, P())
    batch = {
        name: jax.ShapeDtypeStruct((update.rows * mesh.size, length), jnp.int32, sharding=split)
        for name, length in zip(("inputs", "targets"), update.lengths, strict=True)
        if length
    }
    example = f"{EXAMPLES.value}/{'wmt' if update.lengths[0] else 'lm1b'}" if side == "example" else None
    told = {"model": dataclasses.asdict(model), "warmup": 100, "flax_wmt": example}
    device = mesh.devices.flat[0]
    with compiling_for(target_of(device)):
        create, step = make_update(told, batch)
        shapes = jax.eval_shape(lambda: (create(), jax.random.key(1)))
        state, key = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch, key)
        return figures(lowered.compile(compiler_options(device.platform)), mesh), np.nan


def row_of(update: Update, mesh: Mesh, found: Figures, predicted: float, chips: Topology) -> list[str]:
    """Return the cells of a program; `predicted` are bytes of temporaries."""
    work = work_of(*(np.full(update.rows, length) for length in update.lengths))
    model, least = resolved(update)[2], bound(found, chips)
    useful, twice = update_flops(model, work), gathered_twice(found.program, mesh.shape, model.num_layers)
    hidden, bare, blocking = overlap(found.program)
    sent = {axis: sum(each.sent for each in found.collectives if axis in each.axes) for axis in (DATA, FSDP)}
    return [
        f"{mesh.shape[DATA]} x {mesh.shape[FSDP]}", f"{found.flops / 1e12:.3f}", f"{useful / found.flops:.3f}",
        f"{found.traffic / 1e9:.1f}", f"{found.traffic / ideal_traffic(found.program, found.arguments):.2f}",
        f"{kernels(found.program):,}", f"{len(twice)}", f"{hidden:,}",
        f"{bare + blocking:,}", *(f"{each / 1e6:,.0f}" for each in sent.values()),
        f"{found.arguments / GIB:.2f}", f"{found.temporaries / GIB:.2f}", f"{found.temporaries / predicted:.2f}",
        f"{found.memory / GIB:.2f}", f"{least.products * 1e3:.1f}", f"{least.memory * 1e3:.1f}",
        f"{least.apart * 1e3:.1f}", f"{useful / least.apart / chips.peak:.1%}",
        f"{useful / least.overlapped / chips.peak:.1%}",
    ]  # fmt: skip


def print_kernels(found: Iterable[Kernel], runs: int = 1) -> None:
    """List as many kernels as --kernels asks for, with what they move in one of `runs` repetitions."""
    for kernel in itertools.islice(found, LARGEST.value):
        moved = f"{kernel.bytes / runs / 1e6:10,.1f} MB in {kernel.times / runs:5,.0f}"
        print(f"    {moved}  {kernel.makes:.60}  {kernel.source[-90:]}")


def main(argv: Sequence[str]) -> None:
    """Print a row for every model, slice and side."""
    del argv
    smoke_sizes(models=["tiny"], sides=["ours", "plain"])
    if not {*SIDES.value} <= {"ours", "plain", "example"}:
        raise app.UsageError(f"--sides={','.join(SIDES.value)}: there are ours, plain and example")
    if "example" in SIDES.value and not EXAMPLES.value:
        raise app.UsageError("--sides=example needs --examples=CHECKOUT/examples")
    updates = [UPDATES[name] for name in MODELS.value]
    for update in (each._replace(rows=int(rows)) for each in updates for rows in ROWS.value or [str(each.rows)]):
        for chips in map(open_topology, TOPOLOGIES.value or [update.topology]):
            title = f"\n{update.preset} on {chips.name}, {update.rows} rows a chip\n"
            print(title + "".join(f"{head:>12}" for head in HEADS))
            for fsdp, side in itertools.product(
                FSDPS.value or [f"{min(update.fsdp, len(chips.devices))}"], SIDES.value
            ):
                mesh = make_mesh(-1, int(fsdp), 1, chips.devices)
                compiled = compile_ours(update, mesh) if side == "ours" else compile_peer(side, update, mesh)
                print("".join(f"{cell:>12}" for cell in (side, *row_of(update, mesh, *compiled, chips))), flush=True)
                print_kernels(largest_kernels(compiled[0].program))


if __name__ == "__main__":
    app.run(main)
