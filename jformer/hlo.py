"""What a compiled program does, read from the text of its optimized HLO: how often each part runs, FLOPs and bytes.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs. Here a loop counts as often as its
condition allows: exactly for a scan, at most for a search that may end early. Collectives have a room of their own.
"""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "s4": 4, "u4": 4, "token": 0, "opaque": 0}
HEADER = re.compile(r"^(ENTRY )?%([\w.-]+) .*\{$")
LINE = re.compile(r"^  (ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:, (.*))?$")
LEAF = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
CONTROL = (
    "while",
    "call",
    "conditional",
    "async-start",
)  # what they call runs as it stands; of others it is one kernel
FREE = {  # moves nothing, or what its counterpart has moved
    *CONTROL, "after-all", "bitcast", "constant", "get-tuple-element", "iota", "parameter", "partition-id", "tuple",
}  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather", "slice-start")  # read as much as they give


class Leaf(NamedTuple):
    """An array of a type."""

    dtype: str
    dims: tuple[int, ...]
    fast: bool  # in the memory beside the cores, not in HBM

    @property
    def bytes(self) -> int:
        """Its size, without padding."""
        bits = BITS.get(self.dtype) if self.dtype in BITS else int(re.sub(r"\D+(\d+).*", r"\1", self.dtype))
        return math.prod(self.dims) * (bits or 0) // 8


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool
    literal: str  # what a constant or parameter has in its parentheses

    @property
    def leaves(self) -> list[Leaf]:
        """The arrays that it gives."""
        return leaves(self.type)

    @property
    def calls(self) -> list[str]:
        """The computations that it calls."""
        branches = BRANCHES.search(self.attributes)
        return CALLED.findall(self.attributes) + (re.findall(r"%([\w.-]+)", branches[1]) if branches else [])

    def attribute(self, name: str) -> str:
        """Return the text of an attribute without spaces or braces in it, or ''."""
        found = re.search(rf"\b{name}=[{{%]?([^,}}\s]*(?:,\d+)*)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]
"""Instructions by name, in the order they run."""


class Program(NamedTuple):
    """Computations by name, each after those that it calls; the last is where the program begins."""

    computations: dict[str, Computation]

    @property
    def entry(self) -> str:
        """The name of the computation that calls all others."""
        return next(reversed(self.computations))


@functools.lru_cache(maxsize=4096)
def leaves(text: str) -> list[Leaf]:
    """Return the arrays of a type, those of tuples in order."""
    return [
        Leaf(dtype, tuple(int(size) for size in dims.split(",") if size), "S(1)" in layout)
        for dtype, dims, layout in LEAF.findall(text)
    ]


def parse(text: str) -> Program:
    """Read the text of an HLO module, as `compiled.as_text()` gives it."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, body = "", {}
    for line in text.splitlines():
        if line[:2] == "  " and (found := LINE.match(line)):
            root, name, kind, opcode, inner, attributes = found.groups()
            operands = tuple(re.findall(r"%([\w.-]+)", inner))
            body[name] = Instruction(name, kind, opcode, operands, attributes or "", bool(root), inner)
        elif found := HEADER.match(line):
            body = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
    computations[entry] = computations.pop(entry)
    return Program(computations)


def runs(program: Program, kernels: bool = True) -> Counter[str]:
    """Return how often each computation runs; without `kernels`, only of those whose instructions are kernels."""
    counts = Counter({program.entry: 1})
    for name in reversed(program.computations):
        for instruction in program.computations[name].values():
            if kernels or instruction.opcode in CONTROL:
                times = trips(program, instruction) if instruction.opcode == "while" else 1
                for called in instruction.calls:
                    counts[called] += counts[name] * times
    return counts


def trips(program: Program, loop: Instruction) -> int:
    """Return how often the body of a loop runs, at most: what XLA knows, else what its counter is compared with."""
    known = TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    condition = program.computations[loop.attribute("condition")]
    parts = [condition, *(program.computations[name] for each in condition.values() for name in each.calls)]
    return max((int(each.literal) for part in parts for each in part.values() if _is_limit(each)), default=1)


def flops(program: Program) -> float:
    """Return the FLOPs of all products of matrices; multiply and add are two."""
    counts = runs(program)
    return sum(
        counts[name] * _product(computation, each)
        for name, computation in program.computations.items()
        for each in computation.values()
        if each.opcode in ("dot", "convolution")
    )


def traffic(program: Program) -> float:
    """Return the bytes that kernels read from HBM and write to it, each input and output of a kernel once."""
    counts = runs(program, kernels=False)
    return sum(
        count * _moved(program, program.computations[name], each)
        for name, count in counts.items()
        for each in program.computations[name].values()
        if each.opcode not in FREE and not each.opcode.endswith("-done")
    )


def _is_limit(each: Instruction) -> bool:
    return each.opcode == "constant" and each.type.startswith(("s32[]", "u32[]", "s64[]")) and each.literal.isdigit()


def _product(computation: Computation, each: Instruction) -> int:
    left, right = (computation[name].leaves[0].dims for name in each.operands[:2])
    out = each.leaves[0].dims
    if each.opcode == "dot":
        axes = each.attribute("lhs_contracting_dims")
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in axes.split(",") if axis)
    inputs, kernels, outputs = re.split(r"_|->", each.attribute("dim_labels"))
    window = dict(part.split("=") for part in re.findall(r"\w+=[\dx_]+", _window(each)))
    pairs = 1
    for axis, size in enumerate(part for part in window.get("size", "").split("x") if part):
        at = str(axis)
        options = {key: values.split("x")[axis] for key, values in window.items()}
        pairs *= _pairs(left[inputs.index(at)], int(size), out[outputs.index(at)], options)
    return 2 * out[outputs.index("b")] * out[outputs.index("f")] * right[kernels.index("i")] * pairs


def _window(each: Instruction) -> str:
    found = re.search(r"window=\{([^}]*)\}", each.attributes)
    return found[1] if found else ""


def _pairs(inputs: int, size: int, outputs: int, options: Mapping[str, str]) -> int:
    """Count the places of an output and a kernel along an axis that meet an input: others are padding or holes."""
    stride, spread, holes = (int(options.get(key, 1)) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    before = int(options.get("pad", "0_0").split("_")[0])
    places = (o * stride - before + k * spread for o, k in itertools.product(range(outputs), range(size)))
    return sum(0 <= place <= (inputs - 1) * holes and place % holes == 0 for place in places)


def _moved(program: Program, computation: Computation, each: Instruction) -> int:
    """Return the bytes that a kernel moves; of an array that it slices or writes a slice of, only the slice."""
    if each.opcode == "fusion":
        return sum(_moved_by_fusion(program, computation, each))
    operands = [computation[name] for name in each.operands]
    if each.opcode in SLICES:
        return 2 * _slow(each.leaves[:1])
    if each.opcode == "dynamic-update-slice":
        return 2 * _slow(operands[1].leaves)
    if each.opcode.endswith("-start"):  # its type also has the operand
        return 2 * _slow(operands[0].leaves) if operands else 0
    return _slow(each.leaves) + sum(_slow(operand.leaves) for operand in operands)


def _moved_by_fusion(program: Program, outer: Computation, each: Instruction) -> Iterator[int]:
    inner = program.computations[each.calls[0]]
    for place, name in enumerate(each.operands):
        if not any(leaf.fast for leaf in outer[name].leaves):
            yield _read(program, inner, _parameter(inner, place))
    (root,) = (instruction for instruction in inner.values() if instruction.root)
    written = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for result, leaf in zip(written, each.leaves, strict=False):
        if not leaf.fast:
            yield _updated(result, inner)


def _parameter(computation: Computation, place: int) -> Instruction:
    found = (each for each in computation.values() if each.opcode == "parameter" and each.literal == str(place))
    return next(found)


def _read(program: Program, computation: Computation, value: Instruction) -> int:
    """Return how many bytes of a value the instructions of a fusion read, those of fusions in it included."""
    whole = sum(leaf.bytes for leaf in value.leaves)
    total = 0
    for reader in computation.values():
        for place, name in enumerate(reader.operands):
            if name != value.name:
                continue
            if reader.opcode == "fusion":
                inner = program.computations[reader.calls[0]]
                total += _read(program, inner, _parameter(inner, place))
            elif reader.opcode == "bitcast":
                total += _read(program, computation, reader)
            elif reader.opcode in SLICES and not place:
                total += sum(leaf.bytes for leaf in reader.leaves)
            elif reader.opcode != "dynamic-update-slice" or place:
                total += whole
    return min(total, whole)


def _updated(result: Instruction, inner: Computation) -> int:
    while result.opcode == "bitcast":
        result = inner[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        result = inner[result.operands[1]]
    return sum(leaf.bytes for leaf in result.leaves)


def _slow(arrays: list[Leaf]) -> int:
    return sum(leaf.bytes for leaf in arrays if not leaf.fast)
