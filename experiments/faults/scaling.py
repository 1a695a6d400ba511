"""How an update scales on paper: compiled for slices of 4 to 1,024 chips, with the same number of tokens per chip.

Nothing is run. A chip's FLOPs, memory and bytes sent are those of the compiled program; its time is the bound of
`jformer.tools.forecast.roofline`. Needs libtpu: pip install -e ".[tpu-aot]".

Command:  python -m experiments.faults.scaling [--presets=transformer_base,transformer_big] [--rows=32] [--family=v5p]
          [--chips=4,16,64,256,1024] [--fsdp=1,4] [--smoke]
"""

import itertools
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from experiments.measure import smoke_sizes
from jformer.config import default_config, resolve
from jformer.data.plan import Shape
from jformer.models.flops import update_flops, work_of
from jformer.parallel.mesh import AXES, make_mesh
from jformer.tasks.build import build_task
from jformer.tasks.task import sized
from jformer.tools.forecast.compiled_ahead import Figures, compile_update
from jformer.tools.forecast.roofline import bound
from jformer.tools.forecast.topology import CHIPS, GIB, Topology, open_topology

PRESETS = flags.DEFINE_list("presets", ["transformer_base", "transformer_big"], "Models, in bfloat16.")
ROWS = flags.DEFINE_integer("rows", 32, "Rows of a chip.")
FAMILY = flags.DEFINE_enum("family", "v5p", CHIPS, "Family of the chips.")
COUNTS = flags.DEFINE_list("chips", ["4", "16", "64", "256", "1024"], "Chips of a slice.")
FSDP = flags.DEFINE_list("fsdp", ["1", "4"], "Sizes of the mesh's axis fsdp; data gets the rest.")
LENGTH, VOCABULARY = 256, 37_120  # tokens of either side; entries
HEADS = ("chips", "mesh", "compiled", "TFLOP", "memory", "HBM", "over data", "over fsdp", "bound", "MFU", "tokens/s")


def figures_of(preset: str, chips: Topology, fsdp: int) -> tuple[Figures, float]:
    """Return the figures of a compiled update, and the FLOPs of a chip that are the model's."""
    settings = default_config(preset)
    settings.model.dtype = "bfloat16"
    config = resolve(settings)
    task = build_task(config)
    model = sized(config.model, task, VOCABULARY, VOCABULARY)
    shape, mesh = Shape(ROWS.value * len(chips.devices), LENGTH, LENGTH), make_mesh(-1, fsdp, 1, chips.devices)
    useful = update_flops(model, work_of(*(np.full(ROWS.value, length) for length in shape[1:])))
    return compile_update(config, task, model, shape, mesh), useful


def row_of(chips: Topology, fsdp: int, figures: Figures, useful: float, seconds: float) -> list[str]:
    """Return the cells of a row."""
    least, count = bound(figures, chips).overlapped, len(chips.devices)
    sent = {axis: sum(each.sent for each in figures.collectives if axis in each.axes) for axis in AXES}
    return [
        f"{count:,}", f"{count // fsdp} x {fsdp}", f"{seconds:.0f} s", f"{figures.flops / 1e12:.3f}",
        f"{figures.memory / GIB:.2f} GiB", f"{figures.traffic / 1e9:.1f} GB",
        *(f"{sent[axis] / 1e6:,.1f} MB" for axis in AXES[:2]), f"{least * 1e3:.1f} ms",
        f"{useful / least / chips.peak:.1%}", f"{count * ROWS.value * LENGTH / least / 1e6:,.2f} M",
    ]  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Print a table for each model."""
    del argv
    smoke_sizes(presets=["transformer_tiny"], rows=1, chips=["4"], fsdp=["2"])
    for preset in PRESETS.value:
        print(f"\n{preset}, {FAMILY.value}, {ROWS.value} rows of {LENGTH} + {LENGTH} tokens a chip")
        print("".join(f"{head:>12}" for head in HEADS))
        for count, fsdp in itertools.product(map(int, COUNTS.value), map(int, FSDP.value)):
            chips = open_topology(f"{FAMILY.value}-{count * CHIPS[FAMILY.value].cores}")
            began = time.perf_counter()
            figures, useful = figures_of(preset, chips, fsdp)
            row = row_of(chips, fsdp, figures, useful, time.perf_counter() - began)
            print("".join(f"{cell:>12}" for cell in row), flush=True)


if __name__ == "__main__":
    app.run(main)
