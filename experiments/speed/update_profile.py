"""Where does the time of an update go? Its kernels by kind, as XLA's own trace times them on a CPU.

A kernel is of the first kind that it fits: products hold a matrix product, with all that is fused into it; masks hold
the hash of dropout; softmax holds exponentials or logarithms, those of the loss too; copies only move; casts change the
dtype and do nothing else but move; what no derivative belongs to is the optimizer's; norms and sums hold reductions;
the rest is elementwise. Kernels that run side by side on two threads both count, so shares are told beside times.

Command:  python -m experiments.speed.update_profile [--sizes=tiny,base] [--dtypes=float32,bfloat16] [--updates=5]
          [--smoke]
"""

import dataclasses
import gzip
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from experiments.measure import commit, processor_name, smoke_sizes
from experiments.speed import steps_shapes
from experiments.speed.steps_jformer import build_step
from jformer.tools.forecast import hlo

SIZES = flags.DEFINE_list("sizes", ["tiny", "base"], "Models of steps_shapes.SIZES.")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Of activations.")
UPDATES = flags.DEFINE_integer("updates", 5, "Traced, after two that are not.", lower_bound=1)

MOVES = {"parameter", "constant", "copy", "transpose", "bitcast", "reshape", "broadcast", "slice", "concatenate", "pad",
         "dynamic-slice", "dynamic-update-slice", "tuple", "get-tuple-element", "gather", "iota"}  # fmt: skip
KINDS: dict[str, Callable[[set[str], str], bool]] = {  # kind → whether it fits (opcodes of a kernel, its scope)
    "products": lambda opcodes, _: "dot" in opcodes,
    "masks": lambda opcodes, _: {"xor", "shift-right-logical"} <= opcodes,
    "softmax": lambda opcodes, _: bool({"exponential", "log"} & opcodes),
    "copies": lambda opcodes, _: opcodes <= MOVES,
    "casts": lambda opcodes, _: opcodes <= MOVES | {"convert"},
    "optimizer": lambda _, scope: bool(scope) and "jvp(" not in scope,
    "norms and sums": lambda opcodes, _: bool({"reduce", "reduce-window", "rsqrt"} & opcodes),
    "elementwise": lambda *_: True,
}


def main(_: list[str]) -> None:
    """Print the milliseconds of each kind in an update, a line for each model and dtype."""
    smoke_sizes(sizes=["smoke"], dtypes=["float32"], updates=1)
    print(f"ms an update and share of it; {processor_name()}, {commit()}, jax {jax.__version__}")
    print(f"{'':<16}{'all':>8}" + "".join(f"{kind:>18}" for kind in KINDS))
    for size, dtype in itertools.product(SIZES.value, DTYPES.value):
        found = times_by_kind(size, dtype)
        whole = sum(found.values())
        cells = (f"{found[kind]:.1f} ({found[kind] / whole:.0%})" for kind in KINDS)
        print(f"{f'{size} {dtype}':<16}{whole:>8.1f}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def times_by_kind(size: str, dtype: str) -> dict[str, float]:
    """Return the milliseconds that the kernels of each kind take in an update."""
    config = dataclasses.replace(steps_shapes.model_config(size), dtype=dtype)
    _, vocabulary, pairs = steps_shapes.SIZES[size]
    step, state, batch = build_step(config, steps_shapes.make_batch("full", pairs, vocabulary), warmup=4_000)
    compiled = step.lower(state, batch).compile()
    kinds = kinds_of(hlo.parse(compiled.as_text()))
    for _ in range(2):
        state, _ = jax.block_until_ready(compiled(state, batch))
    found = dict.fromkeys(KINDS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(UPDATES.value):
                state, _ = jax.block_until_ready(compiled(state, batch))
        for name, milliseconds in kernels(Path(folder)):
            if name in kinds:  # a loop is not: its kernels are told by themselves
                found[kinds[name]] += milliseconds / UPDATES.value
    return found


def kinds_of(program: hlo.Program) -> dict[str, str]:
    """Return name of a kernel → its kind."""
    found = {}
    for computation in program.computations.values():
        for name, instruction in computation.items():
            if instruction.opcode in hlo.CONTROL:
                continue
            inner = [each.opcode for called in instruction.calls for each in program.computations[called].values()]
            opcodes = {*inner} if instruction.opcode == "fusion" else {instruction.opcode, *inner}
            scope = re.search(r'op_name="([^"]*)"', instruction.attributes)
            found[name] = next(kind for kind, fits in KINDS.items() if fits(opcodes, scope[1] if scope else ""))
    return found


def kernels(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the name and milliseconds of everything of a program in a trace."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            yield event["args"]["hlo_op"], event["dur"] / 1e3


if __name__ == "__main__":
    app.run(main)
