"""Does every kind of program compile for NVIDIA GPUs? Presets, tasks and ways to train, on meshes and in dtypes.

Nothing runs: XLA's compiler for GPUs needs none. Models have two layers of 64 features and 8,000 tokens: whether a
program compiles depends on its operations, not on its sizes. A cell of the table is the memory of a GPU in MiB, or the
error. With --results, each cell is saved to a file as soon as it is known, and a second run compiles the rest.

Command:  pip install -e ".[gpu-aot]"; python -m experiments.checks.gpu_programs [--topology=h100] [--cases=gpt2,t5]
          [--meshes=8x1x1] [--dtypes=bfloat16] [--programs=update,beam] [--sample=24] [--minutes=60]
          [--results=FILE] [--smoke]
"""

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags

from experiments.measure import commit, smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.checks import divide_rows
from jformer.errors import UserError
from jformer.evaluation.score_tables import aligned
from jformer.inference.one_pass import HEADS
from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import row_shards
from jformer.tasks.build import build_task, sized_model
from jformer.tools.forecast.compiled_ahead import Figures, compile_answer, compile_score, compile_update
from jformer.tools.forecast.shapes import answer_shape, full_shape
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
    "chunks": ("transformer_base", {"model.vocab_size": 2**20, "model.execution.attention_chunk": 8}),
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
SMALL = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "decode.batch_size": 16,
    "data.vocab_size": 8_000,  # from about a thousand XLA:GPU has a kernel of its own for the best tokens
    "data.max_source_length": 32,
    "data.max_target_length": 32,
    "data.tokens_per_update": 1_024,
    "decode.max_extra_length": 8,
}

CHOSEN = {
    name: flags.DEFINE_list(name, [*values], f"The {name} of the table.")
    for name, values in {"cases": CASES, "meshes": MESHES, "dtypes": DTYPES, "programs": PROGRAMS}.items()
}
TOPOLOGY = flags.DEFINE_string("topology", "h100", "The kind of GPU.")
SAMPLE = flags.DEFINE_integer("sample", 0, "Cells to compile, drawn at random; 0 compiles all.")
MINUTES = flags.DEFINE_float("minutes", 0.0, "Minutes after which no cell is started; 0 = no limit.")
RESULTS = flags.DEFINE_string("results", None, "File of cells, one a line; those of the same GPU and commit are kept.")


class Cell(NamedTuple):
    """A program to compile."""

    case: str
    program: str
    dtype: str
    mesh: str


def cells(
    cases: Sequence[str], programs: Sequence[str], dtypes: Sequence[str], meshes: Sequence[str], sample: int = 0
) -> list[Cell]:
    """Return all programs of the table, or a sample of them, which is the same every time."""
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
    """Return whether a task has a program: one that writes no text has a single program to answer, and no scoring."""
    if program == "update":
        return case != "ensemble"
    of_updates = {"data.batching", "train.accumulation", "train.ema_decay", "optim.r_drop", "model.execution.remat"}
    if of_updates & {*CASES[case][1]}:
        return False  # its searches are those of the same case without the option
    answer = build_task(configured(case, "greedy", "float32")).answer
    return program == "greedy" if answer in HEADS else bool(answer)


def configured(case: str, program: str, dtype: str) -> Any:
    """Return the resolved config of a cell."""
    preset, options = CASES[case]
    config = default_config(preset)
    both = {"model.num_decoder_layers": 2} if config.model.num_decoder_layers else {}
    transformer = {} if config.model.recurrent.cell else {"model.d_ff": 128, "model.num_heads": 4}
    given = SMALL | both | transformer | PROGRAMS[program] | options | {"model.dtype": dtype}
    config.update_from_flattened_dict(given)
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


class Outcome(NamedTuple):
    """The outcome of a cell."""

    kind: str  # compiled, refused (by a message of ours) or failed
    text: str  # the memory of a GPU in MiB, or the error
    seconds: float  # of the process's CPU time


def outcome(cell: Cell, kind: str) -> Outcome:
    """Compile a program; print and return the outcome."""
    began = time.process_time()
    try:
        found = "compiled", f"{compiled(cell, kind).memory / 2**20:,.0f}"
    except UserError as error:
        found = "refused", str(error)
    except Exception as error:  # the table shows them all
        found = "failed", f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    jax.clear_caches()
    result = Outcome(*found, round(time.process_time() - began, 1))
    print(*cell, *result[:2], f"{result.seconds:.0f} s", sep="  ", flush=True)
    return result


def recorded(path: Path | None, key: list[str]) -> dict[Cell, Outcome]:
    """Return a file's cells of a kind of GPU and a commit; if a cell has several lines, the last one counts."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {Cell(*cell): Outcome(*result) for cell, result, *of in map(json.loads, lines) if of == key}


def outcomes(todo: Sequence[Cell], kind: str, path: Path | None, end: float) -> dict[Cell, Outcome]:
    """Return the outcomes of cells, from a file, or else compiled and added to it."""
    key = [kind, commit()]
    found = recorded(path, key)

    def record(cell: Cell, result: Outcome) -> None:
        found[cell] = result
        if path:
            with path.open("a") as file:
                file.write(json.dumps([cell, result, *key]) + "\n")

    for cell in todo:
        if cell not in found and time.monotonic() < end:
            record(cell, Outcome("failed", "the process ended", 0.0))  # as when XLA aborts, until the next line
            record(cell, outcome(cell, kind))
    return {cell: found[cell] for cell in todo if cell in found}


def tables(found: dict[Cell, Outcome], meshes: Sequence[str]) -> Iterator[str]:
    """Yield the lines of two tables, of all programs and of their numbers, and of errors."""
    rows = [["program, MiB", "", "", *meshes]]
    for key in dict.fromkeys(cell[:3] for cell in found):
        marks = (found.get(Cell(*key, mesh)) for mesh in meshes)
        rows.append(
            [*key, *("" if not mark else mark.text if mark.kind == "compiled" else mark.kind for mark in marks)]
        )
    yield from aligned(rows, 3)
    counts = Counter((cell.program, cell.dtype, cell.mesh, result.kind) for cell, result in found.items())
    rows = [["compiled / refused / failed", "", *meshes]]
    for program, dtype in dict.fromkeys((cell.program, cell.dtype) for cell in found):
        kinds = ([counts[program, dtype, mesh, kind] for kind in ("compiled", "refused", "failed")] for mesh in meshes)
        rows.append([program, dtype, *(" / ".join(map(str, each)) for each in kinds)])
    yield from ("", *aligned(rows, 2), "")
    yield from (f"{' '.join(cell)}: {result.text}" for cell, result in found.items() if result.kind != "compiled")


def main(argv: Sequence[str]) -> None:
    """Compile and print the tables."""
    del argv
    smoke_sizes(cases=["rnnsearch"], meshes=["1x1x1"], dtypes=["float32"], programs=["greedy"])
    cases, meshes, dtypes, programs = (CHOSEN[name].value for name in ("cases", "meshes", "dtypes", "programs"))
    end = time.monotonic() + MINUTES.value * 60 if MINUTES.value else math.inf
    todo = cells(cases, programs, dtypes, meshes, SAMPLE.value)
    found = outcomes(todo, TOPOLOGY.value, Path(RESULTS.value) if RESULTS.value else None, end)
    print("", *tables(found, meshes), sep="\n")
    kinds = Counter(result.kind for result in found.values())
    seconds = sum(result.seconds for result in found.values())
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("compiled", "refused", "failed"))
    print(f"\n{len(found)} of {len(todo)} programs for {TOPOLOGY.value}: {counts}; {seconds / 60:,.0f} minutes of CPU")


if __name__ == "__main__":
    app.run(main)
