"""The quality of a compiled program, read from its HLO: ideal traffic, repeated gathers, overlapped collectives."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from jformer.parallel.mesh import FSDP
from jformer.tools.forecast.collectives import KINDS, groups_of, instances
from jformer.tools.forecast.cost_analysis import kernel_of
from jformer.tools.forecast.hlo import Computation, Instruction, Program, fusion_callers, runs

PASS = "jvp"  # in the names of what autodiff makes in both passes
LOOP = "/while/body/"  # in the names of what is in a loop
ASYNC = "async-collective-start"  # name of the fusion that starts a collective which XLA:TPU spreads over later ones


class Overlap(NamedTuple):
    """Numbers of collectives in one run of a program."""

    hidden: int  # a kernel runs between start and done
    bare: int  # nothing runs between start and done
    blocking: int  # synchronous

    @property
    def share(self) -> float:
        """The share that may overlap with computation; 1 without collectives."""
        return self.hidden / sum(self) if sum(self) else 1.0


def overlap(program: Program) -> Overlap:
    """Count the collectives that overlap with kernels in the compiler's schedule."""
    found: Counter[str] = Counter()
    for name, times in runs(program, kernels=False).items():
        order = list(program[name].values())
        places = {each.name: place for place, each in enumerate(order)}
        for place, each in enumerate(order):
            kind = each.opcode.removesuffix("-start")
            if each.name.startswith(ASYNC) or (kind in KINDS and kind != each.opcode):
                done = places.get(each.name.replace("-start", "-done"), len(order))
                between = any(_computes(other) for other in order[place + 1 : done])
                found["hidden" if between else "bare"] += times
            elif kind in KINDS or _holds_collective(program, each):
                found["blocking"] += times
    return Overlap(found["hidden"], found["bare"], found["blocking"])


def gathered_twice(program: Program, mesh: Mapping[str, int], layers: int) -> list[str]:
    """Return the parameters that one computation gathers more than once over `fsdp` in one pass.

    Sharded parameters need one gather per pass; the first of a loop may come before it. Unrolled layers share the names
    of their parameters, so each of the `layers` of a stack may gather one of a name. Gathers written as permutes around
    a product are not counted.
    """
    callers = fusion_callers(program)
    found: Counter[tuple[str, str]] = Counter()
    for kind, name, each in instances(program):
        while name in callers:
            name = callers[name]
        made_for = re.search(r'op_name="([^"]*)"', each.attributes)
        if kind == "all-gather" and made_for and PASS in made_for[1] and FSDP in groups_of(each, mesh)[0]:
            found[name, made_for[1]] += 1
    return sorted(made_for for (_, made_for), count in found.items() if count > (1 if LOOP in made_for else layers))


def ideal_traffic(program: Program, state: int) -> float:
    """Return the bytes of an ideal update: each product reads and writes its arrays once, the state moves twice.

    Everything else (norms, dropout, softmax, casts, the optimizer) would be fused into products. It is a reference
    value, not a bound.
    """
    counts = runs(program)
    products = sum(
        counts[name] * _arrays(computation, each)
        for name, computation in program.items()
        for each in computation.values()
        if each.opcode in ("dot", "convolution") or kernel_of(each)
    )
    return products + 2.0 * state


def _arrays(computation: Computation, each: Instruction) -> int:
    read = (leaf.bytes for name in each.operands for leaf in computation[name].leaves)
    return sum(read) + sum(leaf.bytes for leaf in each.leaves)


def _computes(each: Instruction) -> bool:
    return each.opcode in ("fusion", "dot", "convolution", "reduce", "while") or bool(kernel_of(each))


def _holds_collective(program: Program, each: Instruction) -> bool:
    """Return whether a kernel is a synchronous collective inside a fusion."""
    if each.opcode != "fusion" or "async" in each.name or "scatter" not in each.name:
        return False
    return any(inner.opcode in KINDS for name in each.calls for inner in program[name].values())
