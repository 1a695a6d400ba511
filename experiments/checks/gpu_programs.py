"""Does every kind of program compile for NVIDIA GPUs? Presets, tasks and ways to train, on meshes and in dtypes.

Nothing runs: XLA's compiler for GPUs makes the programs on a machine without one. Models have two layers and small
vocabularies. A cell of the table is the memory of a GPU in MiB, or the error.

Command:  pip install -e ".[gpu-aot]"; python -m experiments.checks.gpu_programs [--topology=h100] [--cases=gpt2,t5]
          [--meshes=8x1x1] [--dtypes=bfloat16] [--programs=update,beam] [--sample=24] [--minutes=60]
          [--smoke]
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app, flags

from experiments.measure import smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.checks import divide_rows
from jformer.evaluation.score_tables import aligned
from jformer.inference.one_pass import HEADS
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import row_shards
from jformer.tasks.build import build_task
from jformer.tools.forecast.compiled_ahead import Figures, compile_answer, compile_score, compile_update
from jformer.tools.forecast.shapes import answer_shape, full_shape, sized_model
from jformer.tools.forecast.topology import open_topology

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name → preset, options
    "base": ("transformer_base", {}),
    "highest": ("transformer_base", {"model.precision": "highest"}),
    "packed": ("transformer_base", {"data.batching": "packed"}),
    "accumulation": ("transformer_base", {"train.accumulation": 2}),
    "remat": ("transformer_base", {"model.execution.remat": "full"}),
    "ema": ("transformer_base", {"train.ema_decay": 0.999}),
    "r_drop": ("transformer_base", {"optim.r_drop": 1.0}),
    "ensemble": ("transformer_base", {}),
    "gpt2": ("gpt2", {}),
    "gpt2 packed": ("gpt2", {"data.batching": "packed", "model.attention_dropout": 0.0}),
    "llama": ("tinyllama_1b", {}),
    "t5": ("t5_small", {}),
    "t5 denoise": ("t5_small", {"task": "denoise", "model.vocab_size": 8_192}),
    "bart": ("bart_base", {"model.vocab_size": 8_192}),
    "marian": ("marian", {}),
    "bert mlm": ("bert_base", {"task": "mlm", "model.vocab_size": 8_192}),
    "bert classify": ("bert_base", {"task": "classify"}),
    "bert tag": ("bert_base", {"task": "tag", "data.source": "conll"}),
    "vit": ("vit_s16", {}),
    "rnnsearch": ("rnnsearch_tiny", {}),
    "lstm": ("lstm_medium", {}),
}
MESHES = ("1x1x1", "8x1x1", "1x4x2", "2x2x2")  # data, fsdp, tensor
DTYPES = ("float32", "bfloat16")
PROGRAMS: dict[str, dict[str, Any]] = {
    "update": {},
    "greedy": {"decode.beam_size": 1},
    "beam": {"decode.beam_size": 4},
    "sample": {"decode.search": "sample"},
    "score": {},
}
SMALL = {"model.num_layers": 2, "data.vocab_size": 8_000, "data.tokens_per_update": 4_096, "decode.batch_size": 16}

CHOSEN = {
    name: flags.DEFINE_list(name, [*values], "Of the table.")
    for name, values in {"cases": CASES, "meshes": MESHES, "dtypes": DTYPES, "programs": PROGRAMS}.items()
}
TOPOLOGY = flags.DEFINE_string("topology", "h100", "The kind of GPU.")
SAMPLE = flags.DEFINE_integer("sample", 0, "Cells to compile, drawn at random; 0 compiles all.")
MINUTES = flags.DEFINE_float("minutes", 0.0, "After which no cell is begun; 0 = none.")


class Cell(NamedTuple):
    """A program to compile."""

    case: str
    program: str
    dtype: str
    mesh: str


def cells(
    cases: Sequence[str], programs: Sequence[str], dtypes: Sequence[str], meshes: Sequence[str], sample: int = 0
) -> list[Cell]:
    """Return the programs that there are, or a sample of them, which is the same every time."""
    found = [
        Cell(case, program, dtype, mesh)
        for case in cases
        for program in programs
        if exists(case, program)
        for dtype in dtypes
        for mesh in meshes
    ]
    return random.Random(0).sample(found, min(sample, len(found))) if sample else found


def exists(case: str, program: str) -> bool:
    """Return whether a task has a program: only searches differ in how they search, only texts are scored."""
    if program == "update":
        return case != "ensemble"
    if {"data.batching", "train.accumulation", "train.ema_decay", "optim.r_drop"} & {*CASES[case][1]}:
        return False  # the searches are those of the same case without
    answer = build_task(configured(case, program, "float32")).answer
    return program == "greedy" if answer in HEADS else bool(answer)


def configured(case: str, program: str, dtype: str) -> Any:
    """Return the resolved config of a cell."""
    preset, options = CASES[case]
    config = default_config(preset)
    both = {"model.num_decoder_layers": 2} if config.model.num_decoder_layers else {}
    config.update_from_flattened_dict(SMALL | both | PROGRAMS[program] | options | {"model.dtype": dtype})
    config.decode.dtype = dtype
    return resolve(config)


def compiled(cell: Cell, kind: str = "h100") -> Figures:
    """Compile a program."""
    data, fsdp, tensor = map(int, cell.mesh.split("x"))
    mesh = make_mesh(data, fsdp, tensor, open_topology(f"{kind}:{data * fsdp * tensor}").devices)
    config = configured(cell.case, cell.program, cell.dtype)
    task = build_task(config)
    config = divide_rows(config, row_shards(mesh))
    model, _ = sized_model(config, task, None)
    if cell.program == "update":
        return compile_update(config, task, model, full_shape(config), mesh)
    if cell.program == "score":
        return compile_score(config, task, model, full_shape(config), mesh)
    count = 2 if cell.case == "ensemble" else 1
    return compile_answer(config, task, model, answer_shape(config, task, mesh), mesh, count)


def outcome(cell: Cell, kind: str) -> str:
    """Return the memory of a program in MiB, or why it does not compile, and print it."""
    began = time.perf_counter()
    try:
        found = f"{compiled(cell, kind).memory / 2**20:,.0f}"
    except Exception as error:  # the table shows them all
        found = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    print(*cell, found, f"{time.perf_counter() - began:.0f} s", sep="  ", flush=True)
    return found


def main(argv: Sequence[str]) -> None:
    """Compile and print the table."""
    del argv
    smoke_sizes(cases=["rnnsearch"], meshes=["1x1x1"], dtypes=["float32"], programs=["greedy"])
    cases, meshes, dtypes, programs = (CHOSEN[name].value for name in ("cases", "meshes", "dtypes", "programs"))
    end = time.monotonic() + MINUTES.value * 60 if MINUTES.value else math.inf
    found = {
        cell: outcome(cell, TOPOLOGY.value)
        for cell in cells(cases, programs, dtypes, meshes, SAMPLE.value)
        if time.monotonic() < end
    }
    rows = [["program, MiB", "", "", *meshes]]
    for key in dict.fromkeys(cell[:3] for cell in found):
        marks = (found.get(Cell(*key, mesh), "") for mesh in meshes)
        rows.append([*key, *("FAILED" if ":" in mark else mark for mark in marks)])
    print("", *aligned(rows, 3), sep="\n")
    failed = sum(":" in mark for mark in found.values())
    print(f"\n{len(found) - failed} of {len(found)} programs compiled for {TOPOLOGY.value}")


if __name__ == "__main__":
    app.run(main)
