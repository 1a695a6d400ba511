"""Parse the optimized HLO of a compiled program: its computations, and how often each of them runs.

XLA's own `cost_analysis` counts the body of a loop once. Here it counts as often as the loop's condition allows: exact
for a scan, an upper bound for a search that may end early. `cost_analysis` and `collectives` compute the costs.
"""

import functools
import math
import re
from collections import Counter
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0}  # of types without a number in their name
HEADER = re.compile(r"^(ENTRY )?%([\w.-]+) .*\{$")
LINE = re.compile(r"^  (ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:, (.*))?$")
LEAF = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
TILE = re.compile(r"\{([\d,]+):T\(([\d,]+)\)")  # of a TPU's layout: axes, the last in memory first, and a tile's sizes
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
# These run their computations step by step; other instructions are kernels.
CONTROL = ("while", "call", "conditional", "async-start", "call-start")


class Leaf(NamedTuple):
    """An array in a type."""

    dtype: str
    dims: tuple[int, ...]
    fast: bool  # in on-chip memory, not in HBM
    padded: tuple[int, ...]  # dims in memory: TPUs store whole tiles

    @property
    def bytes(self) -> int:
        """Its size without padding."""
        return self._bytes_of(self.dims)

    @property
    def stored(self) -> int:
        """Its bytes in memory, with padding."""
        return self._bytes_of(self.padded)

    def _bytes_of(self, dims: tuple[int, ...]) -> int:
        bits = BITS[self.dtype] if self.dtype in BITS else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(dims) * bits // 8


class Instruction(NamedTuple):
    """An instruction of a program."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool
    literal: str  # the text in the parentheses of a constant or parameter

    @property
    def leaves(self) -> list[Leaf]:
        """Its output arrays."""
        return leaves(self.type)

    @property
    def calls(self) -> list[str]:
        """The computations that it calls."""
        branches = BRANCHES.search(self.attributes)
        return CALLED.findall(self.attributes) + (re.findall(r"%([\w.-]+)", branches[1]) if branches else [])

    def attribute(self, name: str) -> str:
        """Return the text of an attribute, which has no spaces or braces, or ''."""
        found = re.search(rf"\b{name}=[{{%]?([^,}}\s]*(?:,\d+)*)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]
"""Instructions by name, in the order they run."""

Program = dict[str, Computation]
"""Computations by name, each after those that it calls; the last is the entry."""


@functools.lru_cache(maxsize=4096)
def leaves(text: str) -> list[Leaf]:
    """Return the arrays of a type, of a tuple in order."""
    found = ((dtype, numbers(dims), layout) for dtype, dims, layout in LEAF.findall(text))
    return [Leaf(dtype, dims, "S(1)" in layout, _padded(dims, layout)) for dtype, dims, layout in found]


def _padded(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
    found, padded = TILE.match(layout), list(dims)
    if found:
        for axis, size in zip(numbers(found[1]), reversed(numbers(found[2])), strict=False):  # of the last in memory
            padded[axis] = -(-dims[axis] // size) * size
    return tuple(padded)


def numbers(text: str) -> tuple[int, ...]:
    """Return whole numbers that commas separate."""
    return tuple(int(each) for each in text.split(",") if each)


def parse(text: str) -> Program:
    """Read the text of an HLO module, as `compiled.as_text()` gives it."""
    program: Program = {}
    entry, body = "", {}
    for line in text.splitlines():
        if line[:2] == "  " and (found := LINE.match(line)):
            root, name, kind, opcode, inner, attributes = found.groups()
            operands = tuple(re.findall(r"%([\w.-]+)", inner))
            body[name] = Instruction(
                name=name,
                type=kind,
                opcode=opcode,
                operands=operands,
                attributes=attributes or "",
                root=bool(root),
                literal=inner,
            )
        elif found := HEADER.match(line):
            body = program.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
    program[entry] = program.pop(entry)
    return program


def fusion_callers(program: Program) -> dict[str, str]:
    """Return computation called by a fusion → computation with the fusion."""
    return {
        called: name
        for name, computation in program.items()
        for each in computation.values()
        if each.opcode == "fusion"
        for called in each.calls
    }


def runs(program: Program, kernels: bool = True) -> Counter[str]:
    """Return how often each computation runs; without `kernels`, only of those whose instructions are kernels."""
    counts = Counter({next(reversed(program)): 1})
    for name in reversed(program):
        for instruction in program[name].values():
            if kernels or instruction.opcode in CONTROL:
                times = trips(program, instruction) if instruction.opcode == "while" else 1
                for called in instruction.calls:
                    counts[called] += counts[name] * times
    return counts


def trips(program: Program, loop: Instruction) -> int:
    """Return how often the body of a loop runs, at most: as XLA knows, or else what its counter is compared with.

    A loop that the compiler has unrolled counts in larger steps.
    """
    known = TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    condition = program[loop.attribute("condition")]
    parts = [condition, *(program[name] for each in condition.values() for name in each.calls)]
    limit = max((int(each.literal) for part in parts for each in part.values() if _is_limit(each)), default=1)
    return -(-limit // _step(condition, program[loop.attribute("body")]))


def _step(condition: Computation, body: Computation) -> int:
    """Return what a loop's body adds to the counter that its condition reads; 1 where that is not seen."""
    (result,) = (each for each in body.values() if each.root)
    read = [each.attribute("index") for each in condition.values() if each.opcode == "get-tuple-element"]
    if len(read) != 1 or result.opcode != "tuple":
        return 1
    step, value = 0, body[result.operands[int(read[0])]]
    while value.opcode == "add":
        amounts = {name: body[name].literal for name in value.operands if body[name].opcode == "constant"}
        others = [name for name in value.operands if name not in amounts]
        if len(amounts) != 1 or len(others) != 1:
            return 1
        step, value = step + int(*amounts.values()), body[others[0]]
    return step if value.opcode == "get-tuple-element" and step > 0 else 1


def _is_limit(each: Instruction) -> bool:
    return each.opcode == "constant" and each.type.startswith(("s32[]", "u32[]", "s64[]")) and each.literal.isdigit()
