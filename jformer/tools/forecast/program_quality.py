"""Whether a compiled program is a good one: the bytes it should move, what it gathers twice, and what it hides.

Read from the program's text. What a program costs in bytes, FLOPs and collectives is said in the neighbouring modules.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from jformer.parallel.mesh import FSDP
from jformer.tools.forecast.collectives import KINDS, groups_of, instances
from jformer.tools.forecast.cost_analysis import kernel_of
from jformer.tools.forecast.hlo import Computation, Instruction, Program, fusion_callers, runs

PASS = "jvp"  # in the names of what autodiff makes, forward and backward
ASYNC = "async-collective-start"  # how a fusion is called that begins what XLA:TPU spreads over the fusions after it


class Overlap(NamedTuple):
    """Collectives of one run of a program."""

    hidden: int  # begun, and waited for after another kernel
    bare: int  # begun, and waited for at once
    blocking: int  # that nothing runs beside

    @property
    def share(self) -> float:
        """How many of them may hide behind computation; 1 where there are none."""
        return self.hidden / sum(self) if sum(self) else 1.0


def overlap(program: Program) -> Overlap:
    """Count the collectives that kernels run beside, in the order in which the compiler has put them."""
    found: Counter[str] = Counter()
    for name, times in runs(program, kernels=False).items():
        order = list(program.computations[name].values())
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


def gathered_twice(program: Program, mesh: Mapping[str, int]) -> list[str]:
    """Return the parameters that one computation gathers more than once over `fsdp` in a forward or a backward pass.

    One gather for each pass is what sharded parameters cost; the first of a loop may stand before it. Those that are
    spelled as permutes around a product, from neighbour to neighbour, are not looked at.
    """
    callers = fusion_callers(program)
    found: Counter[tuple[str, str]] = Counter()
    for kind, name, each in instances(program):
        while name in callers:
            name = callers[name]
        made_for = re.search(r'op_name="([^"]*)"', each.attributes)
        if kind == "all-gather" and made_for and PASS in made_for[1] and FSDP in groups_of(each, mesh)[0]:
            found[name, made_for[1]] += 1
    return sorted(made_for for (_, made_for), count in found.items() if count > 1)


def ideal_traffic(program: Program, state: int) -> float:
    """Return the bytes an update should move: each product reads and writes its arrays once, the state goes twice.

    All else (norms, dropout, softmax, casts, the optimizer's own gradients) would be part of a product that is at its
    arrays anyway, and nothing would stay beside the cores. It is a measure to compare with, and no bound.
    """
    counts = runs(program)
    products = sum(
        counts[name] * _arrays(computation, each)
        for name, computation in program.computations.items()
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
    """Tell whether a kernel is a collective that the compiler wrote into a fusion, and waits for."""
    if each.opcode != "fusion" or "async" in each.name or "scatter" not in each.name:
        return False
    return any(inner.opcode in KINDS for name in each.calls for inner in program.computations[name].values())
