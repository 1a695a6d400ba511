"""How good are the programs for TPUs? Updates compiled for absent slices, against what they should cost.

Five goals: the model's FLOPs are 97 % of the program's or more; it moves at most 1.3 times the bytes of the ideal (each
product reads and writes its arrays once, the state goes twice); no parameter is gathered twice in a pass; collectives
run beside kernels; temporaries are at most 15 % over what is predicted. Nothing is run. Needs libtpu:
pip install -e ".[tpu-aot]".

Command:  python -m experiments.faults.programs [--programs=gpt2_1k,big] [--chips=8,256] [--family=v6e] [--smoke]
          (1 to 2 minutes each)
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from experiments.faults.program_quality import gathered_twice, ideal_traffic, overlap
from experiments.measure import smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.plan import Shape
from jformer.models import ModelConfig
from jformer.models.flops import update_flops, work_of
from jformer.parallel.backend import target_of
from jformer.parallel.mesh import make_mesh
from jformer.tasks.build import build_task
from jformer.tasks.task import Task, sized
from jformer.tools.forecast.compiled_ahead import Figures, compile_update, estimate
from jformer.tools.forecast.roofline import bound
from jformer.tools.forecast.topology import CHIPS, GIB, Topology, open_topology
from jformer.training.memory import UpdateMemory


class Update(NamedTuple):
    """An update to compile: `rows` of a chip, with `lengths` tokens on the two sides."""

    preset: str
    family: str  # of the chips
    fsdp: int
    rows: int
    lengths: tuple[int, int]
    vocabulary: int
    options: Mapping[str, Any] = MappingProxyType({})


FUSED = {"model.attention_dropout": 0.0}
LONG = {**FUSED, "model.max_length": 8_192, "model.execution.remat": "full"}
NLLB = {"model.num_layers": 12, "model.norm": "pre", "model.dropout": 0.1, "optim.optimizer": "adamw"}
LORA = {**NLLB, "train.init_from": "BASE", "model.lora.rank": 8}
UPDATES = {
    "gpt2_1k": Update("gpt2", "v5e", 1, 8, (0, 1_024), 50_304, FUSED),
    "gpt2_8k": Update("gpt2", "v5e", 1, 2, (0, 8_192), 50_304, LONG),
    "base": Update("transformer_base", "v5e", 1, 32, (256, 256), 32_000, FUSED),
    "base_1": Update("transformer_base", "v5e", 1, 32, (256, 256), 32_000, {**FUSED, "model.num_layers": 1}),
    "big": Update("transformer_big", "v5e", 8, 16, (256, 256), 37_120),
    "t5_large": Update("t5_large", "v5p", 8, 8, (512, 128), 32_128),
    "nllb_600m": Update("transformer_big", "v6e", 1, 32, (128, 128), 256_206, NLLB),
    "nllb_lora": Update("transformer_big", "v6e", 1, 32, (128, 128), 256_206, LORA),
    "nllb_lora_bf16": Update(
        "transformer_big", "v6e", 1, 32, (128, 128), 256_206, {**LORA, "model.lora.base_dtype": "bfloat16"}
    ),
    "tiny": Update("transformer_tiny", "v5e", 2, 8, (32, 32), 512),
}
NAMES = flags.DEFINE_list("programs", ["gpt2_1k", "gpt2_8k", "big", "t5_large"], "Rows of UPDATES.")
COUNTS = flags.DEFINE_list("chips", ["8", "256"], "Chips of a slice.")
FAMILY = flags.DEFINE_enum("family", None, CHIPS, "Family of the chips, instead of the one that UPDATES names.")
HEADS = ("FLOPs", "HBM", "of ideal", "twice", "beside", "waited", "state", "temps", "of pred.", "bound", "apart", "MFU")


def resolved(update: Update) -> tuple[Config, Task, ModelConfig]:
    """Return the config of an update in bfloat16, its task, and the model with the sizes of its vocabulary."""
    settings = default_config(update.preset)
    settings.model.dtype = "bfloat16"
    settings.update_from_flattened_dict(dict(update.options))
    config = resolve(settings)
    task = build_task(config)
    return config, task, sized(config.model, task, update.vocabulary, update.vocabulary)


def model_flops(update: Update) -> float:
    """Return the model's FLOPs of an update on a chip."""
    work = work_of(*(np.full(update.rows, length) for length in update.lengths))
    return update_flops(resolved(update)[2], work)


def compiled(update: Update, chips: Topology) -> tuple[Figures, list[str], UpdateMemory, float]:
    """Return figures of an update, what it gathers twice, its predicted memory, and the model's FLOPs on a chip."""
    config, task, model = resolved(update)
    mesh = make_mesh(-1, update.fsdp, 1, chips.devices)
    shape = Shape(update.rows * len(chips.devices), *update.lengths)
    predicted = estimate(config, task, model, shape, mesh.size, target_of(chips.devices[0]))
    figures = compile_update(config, task, model, shape, mesh)
    return figures, gathered_twice(figures.program, mesh.shape), predicted, model_flops(update)


def row_of(figures: Figures, twice: list[str], predicted: UpdateMemory, useful: float, chips: Topology) -> list[str]:
    """Return the cells of a row."""
    least, (hidden, bare, blocking) = bound(figures, chips), overlap(figures.program)
    ideal = ideal_traffic(figures.program, figures.arguments)
    return [
        f"{useful / figures.flops:.3f}", f"{figures.traffic / 1e9:.1f} GB", f"{figures.traffic / ideal:.2f}",
        f"{len(twice)}", f"{hidden:,}", f"{bare + blocking:,}",
        f"{figures.arguments / GIB:.2f} GiB", f"{figures.temporaries / GIB:.2f} GiB",
        f"{figures.temporaries / (predicted.gradients + predicted.activations):.2f}",
        f"{least.overlapped * 1e3:.1f} ms", f"{least.apart * 1e3:.1f} ms",
        f"{useful / least.overlapped / chips.peak:.1%}",
    ]  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Print a row for every program and slice."""
    del argv
    smoke_sizes(programs=["tiny"], chips=["4"])
    print(f"{'program':<10}{'slice':>12}" + "".join(f"{head:>10}" for head in HEADS))
    for name in NAMES.value:
        for count in map(int, COUNTS.value):
            update = UPDATES[name]
            chips = open_topology(_slice(FAMILY.value or update.family, count))
            row = row_of(*compiled(update, chips), chips)
            print(f"{name:<10}{chips.name:>12}" + "".join(f"{cell:>10}" for cell in row), flush=True)


def _slice(family: str, count: int) -> str:
    """Return gcloud's name of a slice of `count` chips."""
    chip = CHIPS[family]
    return f"{chip.type or family}-{count * chip.cores}"


if __name__ == "__main__":
    app.run(main)
