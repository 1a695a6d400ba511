"""The collectives of a compiled program, read from its HLO: kind, axes of the mesh, number and bytes.

A pair of start and done counts once. XLA:TPU gives some other names: a fusion called all-reduce-scatter is a
reduce-scatter, and an asynchronous collective appears in every fusion that runs during it.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jformer.tools.forecast.cost_analysis import FREE, costs
from jformer.tools.forecast.hlo import Computation, Instruction, Program, fusion_callers, numbers, runs

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter")
HIDDEN = "all-reduce-scatter"
IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
NAMED = re.compile(r"mesh\[([^\]]*)\] \{([^}]*)\}")


class Overlap(NamedTuple):
    """The kernels that run between the start of a collective and its end, summed over all its runs."""

    bytes: int  # of the collective
    flops: int  # of the kernels
    traffic: int  # bytes that they move between HBM and cores


class Collective(NamedTuple):
    """Collectives of one kind over the same axes."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ; () = none
    devices: int  # in a group
    times: int  # in one run of the program, at most
    bytes: int  # of the whole array of a device, before scattering or after gathering; of all runs together
    slices: int = 1  # that the devices of a group are spread over; see `mesh.slices_of`
    overlaps: tuple[Overlap, ...] = ()  # unknown for TPUs

    @property
    def sent(self) -> float:
        """The bytes that a device sends over the fast network, in a ring of its group's devices in a slice."""
        inside = self.devices // self.slices
        if self.kind == "collective-permute":
            return self.bytes * (self.slices == 1)
        if self.kind == "all-to-all":
            return self.bytes * (inside - 1) / self.devices
        return self._ring(inside)

    @property
    def crossing(self) -> float:
        """The bytes that a device sends to other slices.

        The devices of a group in one slice first combine their own parts and then share the rest: a hierarchical
        collective, where a ring would send up to twice as much. In an all-to-all, each device sends its own.
        """
        if self.kind == "collective-permute":
            return self.bytes * (self.slices > 1)
        if self.kind == "all-to-all":
            return self.bytes * (self.slices - 1) / self.slices
        return self._ring(self.slices) * self.slices / self.devices

    def _ring(self, devices: int) -> float:
        return self.bytes * (devices - 1) / devices * (2 if self.kind == "all-reduce" else 1)


def collectives(program: Program, mesh: Mapping[str, int], slices: np.ndarray | None = None) -> list[Collective]:
    """Return the collectives of a program on a mesh, axis → size; those that send most are first.

    `slices` is the number of each device's slice, in the order of the mesh, if there are several.
    """
    found: dict[tuple[Any, ...], tuple[int, int, tuple[Overlap, ...]]] = {}
    for (kind, name, instruction), (times, size) in instances(program).items():
        axes, devices = groups_of(instruction, mesh)
        spread = 1 if slices is None else _spread(slices[device_groups(instruction.attributes, slices.size)])
        if devices > 1:
            key = kind, axes, devices, spread
            count, total, overlaps = found.get(key, (0, 0, ()))
            during = costs(program, name, _kernels_during(program[name], instruction))
            overlap = Overlap(times * size, *(times * cost for cost in during))
            found[key] = count + times, total + times * size, (*overlaps, overlap)
    listed = [
        Collective(
            kind=kind,
            axes=axes,
            devices=devices,
            times=times,
            bytes=total,
            slices=spread,
            overlaps=tuple(overlap for overlap in overlaps if overlap.flops or overlap.traffic),
        )
        for (kind, axes, devices, spread), (times, total, overlaps) in found.items()
    ]
    return sorted(listed, key=lambda each: (-each.crossing, -each.sent))


def _kernels_during(computation: Computation, start: Instruction) -> list[Instruction]:
    """Return the kernels between the start of a collective and its end."""
    if not start.opcode.endswith("-start"):
        return []
    after = itertools.dropwhile(lambda each: each != start, computation.values())
    during = itertools.takewhile(
        lambda each: not (each.opcode.endswith("-done") and start.name in each.operands), after
    )
    return [each for each in during if each.opcode not in FREE and not each.opcode.endswith(("-start", "-done"))]


def _spread(slices: np.ndarray) -> int:
    """Return the most slices over which a group is spread, given the slice of each device [groups devices]."""
    return max(len(set(group)) for group in slices.tolist())


def groups_of(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the axes along which the devices of a collective's group differ, and the size of a group."""
    groups = device_groups(instruction.attributes, math.prod(mesh.values()))
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())))  # [axes groups devices]
    differ = (places != places[..., :1]).any((1, 2))
    return tuple(itertools.compress(mesh, differ)), groups.shape[1]


def device_groups(attributes: str, devices: int) -> np.ndarray:
    """Return the groups [groups devices] of a collective, or the pairs of a permutation.

    Devices are numbered in the order of the mesh. HLO lists groups, or writes them as an iota or as axes of a mesh.
    """
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        return _listed(pairs[1])
    named = NAMED.search(attributes)
    if named:
        return _along(dict(re.findall(r"'(\w+)'=(\d+)", named[1])), re.findall(AXIS, named[2]))
    iota = IOTA.search(attributes)
    if iota:
        shape, sizes, order = (numbers(part) for part in iota.groups(""))
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order or range(len(sizes))).reshape(shape)
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", attributes)
    return _listed(listed[1]) if listed else np.arange(devices)[None]  # an empty list is one group of all


def _along(mesh: Mapping[str, str], axes: Sequence[tuple[str, str, str]]) -> np.ndarray:
    """Return the groups along some axes of a mesh; (before)size takes the middle of an axis split in three."""
    cuts = {name: (int(before or 1), int(size or mesh[name])) for name, before, size in axes}
    shape: list[int] = []
    chosen = []
    for name, whole in mesh.items():
        before, size = cuts.get(name, (int(whole), 1))
        chosen.append(len(shape) + 1)
        shape += [before, size, int(whole) // before // size]
    moved = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), chosen, range(-len(chosen), 0))
    return moved.reshape(-1, math.prod(size for _, size in cuts.values()))


def instances(program: Program) -> dict[tuple[str, str, Instruction], tuple[int, int]]:
    """Return (kind, computation, instruction) of every collective → how often it runs, and its bytes.

    Those of one channel in fusions of the same computation count once.
    """
    counts = runs(program)
    callers = fusion_callers(program)
    found, channels = {}, set()
    for name, computation in program.items():
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            channel = (callers.get(name), kind, instruction.attribute("channel_id"))
            if kind in KINDS and counts[name] and not (name in callers and channel in channels):
                channels.add(channel)
                kind = "reduce-scatter" if HIDDEN in name and kind == "all-reduce" else kind
                found[kind, name, instruction] = counts[name], _size(computation, instruction)
    return found


def _size(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes of the whole array of a collective; the type of a start includes the operands."""
    given = sum(leaf.bytes for name in instruction.operands for leaf in computation[name].leaves)
    if instruction.opcode == "all-gather-start":
        return sum(leaf.bytes for leaf in instruction.leaves) - given
    return max(given, sum(leaf.bytes for leaf in instruction.leaves) * (not instruction.opcode.endswith("-start")))


def _listed(text: str) -> np.ndarray:
    return np.array([numbers(group) for group in re.findall(r"\d[\d,]*", text)])
