"""What do peers' programs cost? An update of ours and of peers, compiled for the same chip, shape and dtype.

Nothing is run. Peers are Flax's examples/wmt (encoder-decoders) or lm1b (decoders), from a checkout, and the same
layers in plain Flax with jax.nn's attention, float32 logits and Optax: experiments/speed/steps_flax. None drops
attention weights, and the Adam of peers neither clips nor looks for NaN. --kernels lists the kernels that move most.

Command:  pip install -e ".[tpu-aot]" or ".[gpu-aot]"; python -m experiments.faults.beside_peers [--topology=v6e:1x1]
          [--models=gpt2_1k,base] [--sides=ours,plain,example] [--examples=CHECKOUT/examples] [--kernels=10] [--smoke]
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.faults.programs import UPDATES, Update, compiled, model_flops, resolved
from experiments.measure import smoke_sizes
from experiments.speed.steps_flax import make_update
from jformer.parallel.backend import compiling_for, target_of
from jformer.parallel.mesh import DATA, make_mesh
from jformer.tools.forecast.compiled_ahead import Figures, figures
from jformer.tools.forecast.cost_analysis import kernels, largest_kernels
from jformer.tools.forecast.roofline import bound
from jformer.tools.forecast.topology import GIB, Topology, compiler_options, open_topology

MODELS = flags.DEFINE_list("models", ["gpt2_1k", "base"], "Rows of UPDATES.")
SIDES = flags.DEFINE_list("sides", ["ours", "plain", "example"], "Whose programs to compile.")
TOPOLOGY = flags.DEFINE_string("topology", "v6e:1x1", "The chips, over which the rows are split: v5e:2x4, h100.")
EXAMPLES = flags.DEFINE_string("examples", None, "The folder examples of a checkout of Flax; without it, no such side.")
LARGEST = flags.DEFINE_integer("kernels", 0, "How many kernels to list of each program.")
HEADS = ("FLOPs", "HBM", "kernels", "temps", "sent", "products", "memory", "apart", "MFU, apart", "at most")


def compile_peer(update: Update, chips: Topology, example: str | None) -> Figures:
    """Compile the update of an example of Flax, or of plain Flax where there is none, as its users would."""
    _, _, model = resolved(update)
    mesh = make_mesh(-1, 1, 1, chips.devices)
    split, whole = NamedSharding(mesh, P(DATA)), NamedSharding(mesh, P())
    rows = update.rows * mesh.size
    batch = {
        side: jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=split)
        for side, length in zip(("inputs", "targets"), update.lengths, strict=True)
        if length
    }
    told = {"model": dataclasses.asdict(model), "warmup": 100, "flax_wmt": example}
    with compiling_for(target_of(chips.devices[0])):
        create, step = make_update(told, batch)
        shapes = jax.eval_shape(lambda: (create(), jax.random.key(1)))
        state, key = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch, key)
        return figures(lowered.compile(compiler_options(chips.platform)), mesh)


def row_of(found: Figures, useful: float, chips: Topology) -> list[str]:
    """Return the cells of a program, whose model has `useful` FLOPs."""
    least = bound(found, chips)
    return [
        f"{found.flops / 1e12:.2f}e12", f"{found.traffic / 1e9:.1f} GB", f"{kernels(found.program):,}",
        f"{found.temporaries / GIB:.2f} GiB", f"{found.sent / 1e6:,.0f} MB", f"{least.products * 1e3:.1f} ms",
        f"{least.memory * 1e3:.1f} ms", f"{least.apart * 1e3:.1f} ms", f"{useful / least.apart / chips.peak:.1%}",
        f"{useful / least.overlapped / chips.peak:.1%}",
    ]  # fmt: skip


def programs(name: str, chips: Topology) -> Iterator[tuple[str, Figures]]:
    """Yield whose program each is, and its figures."""
    update = UPDATES[name]._replace(fsdp=1)
    example = "wmt" if update.lengths[0] else "lm1b"
    if "ours" in SIDES.value:
        yield "ours", compiled(update, chips)[0]
    if "plain" in SIDES.value:
        yield "plain Flax", compile_peer(update, chips, None)
    if "example" in SIDES.value and EXAMPLES.value:
        yield example, compile_peer(update, chips, f"{EXAMPLES.value}/{example}")


def main(argv: Sequence[str]) -> None:
    """Print a row for every program, and its kernels."""
    del argv
    smoke_sizes(models=["tiny"], sides=["ours", "plain"])
    chips = open_topology(TOPOLOGY.value)
    print(f"{chips.name}\n{'model':<10}{'of':<12}" + "".join(f"{head:>11}" for head in HEADS))
    for name in MODELS.value:
        for side, found in programs(name, chips):
            row: Any = row_of(found, model_flops(UPDATES[name]), chips)
            print(f"{name:<10}{side:<12}" + "".join(f"{cell:>11}" for cell in row), flush=True)
            for kernel in largest_kernels(found.program)[: LARGEST.value]:
                print(
                    f"    {kernel.bytes / 1e9:6.2f} GB in {kernel.times:5,}  {kernel.makes:.60}  {kernel.source[-90:]}"
                )


if __name__ == "__main__":
    app.run(main)
