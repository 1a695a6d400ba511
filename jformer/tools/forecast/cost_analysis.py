"""The costs of one run of a compiled program, read from its HLO: FLOPs of its products, and bytes its kernels move."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jformer.models.layers.kernels import splash_blocks
from jformer.models.layers.row_kernel import stages
from jformer.tools.forecast.hlo import CONTROL, Computation, Instruction, Leaf, Program, runs

FREE = {  # move nothing, or only what is counted elsewhere
    *CONTROL, "after-all", "bitcast", "call-update", "constant", "get-tuple-element", "iota", "parameter",
    "partition-id", "tuple",
}  # fmt: skip
FUSIONS = ("fusion", "fusion-start")
KERNEL = re.compile(r"splash_\w+?_(fwd|dkv)_")  # JAX's names of the kernels of splash attention
ROW_KERNEL = re.compile(r"row_attention_(causal_)?(fwd|bwd)")  # ours, of models/layers/row_kernel
PRODUCTS = {"fwd": 2, "dkv": 5}  # products of a query and a key per pair
PRODUCTS_ONCE = {"fwd": 2, "dkv": 4}  # the same, without what the other kernel has already computed
LIBRARY = re.compile(r"__(cublas|cudnn)\$(\w+)")  # XLA:GPU's names of calls of NVIDIA's libraries
SCORES = re.compile(
    r'"intermediate_tensor_shape":\s*\{[^{}]*?"dimensions":\s*\[([^\]]*)\]'
)  # rows, heads, queries, keys
ATTENTION_PRODUCTS = {False: 2, True: 5}  # of a query and a key per pair, forward and backward, which recomputes scores
REMAT = "/rematted_computation/"  # in JAX's names of forward operations that a backward pass repeats
LAYOUTS = ("bitcast", "convert", "copy")  # in a fusion: they read only the part of their operand that is used
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; the values are this operand
SLICES = ("dynamic-slice", "slice", "gather", "slice-start")  # read as many bytes as they output


def flops(program: Program, once: bool = False) -> float:
    """Return the FLOPs of all matrix products; a multiply-add counts as two.

    `once`: counted as in `models.flops`: without the parts of the forward pass that the backward pass repeats (remat,
    and the scores of fused attention), and over all pairs of positions, even those that a causal kernel skips.
    """
    counts = runs(program)
    return sum(
        counts[name] * _work(computation, each, once)
        for name, computation in program.items()
        for each in computation.values()
    )


def traffic(program: Program) -> float:
    """Return the bytes that kernels read from HBM and write to it; each input and output of a kernel counts once.

    Splash attention reads one side once for every block of the other. On TPUs, arrays are as large as their tiles are.
    """
    return sum(count * _moved(program, program[name], each) for count, name, each in _kernels(program))


def kernels(program: Program) -> int:
    """Return how many kernels a run of a program has, loops included."""
    return sum(count for count, _, _ in _kernels(program))


class Kernel(NamedTuple):
    """Kernels of one operation of the model."""

    bytes: int  # that all runs of them move between HBM and cores
    times: int
    source: str  # JAX's name of the operation, its calls and modules
    makes: str  # the arrays of one


def largest_kernels(program: Program) -> list[Kernel]:
    """Return the kernels of a program, those of one operation together; those that move most are first."""
    found = dict[tuple[str, str], tuple[int, int]]()
    for count, name, each in _kernels(program):
        named = re.search(r'op_name="([^"]*)"', each.attributes)
        makes = ", ".join(f"{leaf.dtype}[{','.join(map(str, leaf.dims))}]" for leaf in each.leaves)
        key = re.sub(r"\.\d+$", "", each.name) if named is None else named[1], makes
        moved, times = found.get(key, (0, 0))
        found[key] = moved + count * _moved(program, program[name], each), times + count
    return sorted((Kernel(*costs, *key) for key, costs in found.items()), reverse=True)


def _kernels(program: Program) -> Iterator[tuple[int, str, Instruction]]:
    """Yield how often each kernel runs, its computation and its instruction."""
    for name, count in runs(program, kernels=False).items():
        for each in program[name].values():
            if each.opcode not in FREE and not each.opcode.endswith("-done") and not _allocates(each):
                yield count, name, each


def _allocates(each: Instruction) -> bool:
    """Return whether an instruction is XLA:TPU's way to allocate an array for loops to fill, which writes nothing."""
    return each.opcode == "custom-call" and each.attribute("custom_call_target").strip('"') == "AllocateBuffer"


def costs(program: Program, name: str, instructions: Iterable[Instruction]) -> tuple[int, int]:
    """Return the FLOPs and the bytes moved of some kernels of a computation; products inside fusions are left out."""
    computation, listed = program[name], list(instructions)
    work = sum(_work(computation, each, False) for each in listed)
    return work, sum(_moved(program, computation, each) for each in listed)


def kernel_of(each: Instruction) -> str:
    """Return the kernel of splash attention that an instruction is: fwd or dkv; '' for all others."""
    found = each.opcode == "custom-call" and KERNEL.match(each.name)
    return found[1] if found else ""


def library_of(each: Instruction) -> str:
    """Return the library that an instruction calls: cublas or cudnn; '' for all others."""
    found = each.opcode.removesuffix("-start") == "custom-call" and LIBRARY.search(each.attribute("custom_call_target"))
    return found[1] if found else ""


def _work(computation: Computation, each: Instruction, once: bool) -> int:
    """Return the FLOPs of the products of an instruction."""
    if once and REMAT in each.attributes:
        return 0
    if each.opcode in ("dot", "convolution") or library_of(each) == "cublas":
        return _product(computation, each)
    if library_of(each) == "cudnn":
        return _attended_by_cudnn(computation, each, once)
    if each.opcode == "custom-call" and (row := ROW_KERNEL.search(each.name)):
        return _attended_in_rows(computation, each, bool(row[1]), row[2] == "bwd", once)
    return _attended(computation, each, once)[0] if kernel_of(each) else 0


def _attended_in_rows(computation: Computation, each: Instruction, causal: bool, backward: bool, once: bool) -> int:
    """Return the FLOPs of our own kernel; a causal one skips the keys after its stages."""
    q, k = (computation[name].leaves[0].dims for name in each.operands[:2])  # [b h k t], [b h k s]
    pairs = sum((end - first) * keys for first, end, keys in stages(q[-1], k[-1], causal and not once))
    return 2 * math.prod(q[:-1]) * pairs * (ATTENTION_PRODUCTS[backward] - (once and backward))


def _attended_by_cudnn(computation: Computation, each: Instruction, once: bool) -> int:
    """Return the FLOPs of attention in cuDNN; a causal one skips the pairs above the diagonal and before its window."""
    found = SCORES.search(each.attributes)
    if not found:  # a convolution, which our models do not have on GPUs, or a norm
        return 0
    b, h, t, s = (int(size) for size in re.findall(r"\d+", found[1]))
    q = math.prod(computation[each.operands[0]].leaves[0].dims)
    causal = t == s and not once and re.search(r'"mask_type":\s*"\w*CAUSAL', each.attributes)
    window = re.search(r'"sliding_window_length":\s*"?([1-9]\d*)', each.attributes)
    w = min(t, int(window[1])) if window else t
    pairs = t * w - w * (w - 1) // 2 if causal else t * s
    backward = "Backward" in each.attribute("custom_call_target")
    return 2 * b * h * pairs * (q // (b * h * t)) * (ATTENTION_PRODUCTS[backward] - (once and backward))


def _attended(computation: Computation, each: Instruction, once: bool = False) -> tuple[int, int]:
    """Return FLOPs and bytes of a kernel of splash attention; a causal one skips the blocks above the diagonal."""
    leaves = [leaf for name in each.operands for leaf in computation[name].leaves]
    whole_numbers = [leaf for leaf in leaves if leaf.dtype[0] == "s"]
    wide = [leaf for leaf in leaves if leaf not in whole_numbers]
    q, k, v = wide[:3]
    (b, h), t = (1, *q.dims)[-4:-2], each.leaves[0].dims[-2]  # a single row has no axis
    size = math.prod(q.dims[-2:]) // t  # q and k may have positions last, outputs have not
    s = math.prod(k.dims[-2:]) // size
    kernel = kernel_of(each)
    rows, columns = splash_blocks(t, s, size)[kernel]
    segments = 2 if "segmented" in each.name else 0  # of both sides; further whole numbers are positions for a mask
    causal = sum(leaf.dtype == "s32" for leaf in leaves) > segments
    starts = [(i, j) for i in range(t // rows) for j in range(s // columns)]
    visited = sum(not causal or (i + 1) * rows > j * columns for i, j in starts)
    again = [wide[0], *wide[3:]] if kernel == "dkv" else [k, v]  # for every block of the other side
    times = visited / (t // rows if kernel == "dkv" else s // columns)
    moved = _slow([*leaves, *each.leaves]) + _slow(again) * (max(times, 1.0) - 1.0)
    pairs = t * s if once else visited * rows * columns
    return 2 * b * h * pairs * size * (PRODUCTS_ONCE if once else PRODUCTS)[kernel], int(moved)


def _product(computation: Computation, each: Instruction) -> int:
    left, right = (computation[name].leaves[0].dims for name in each.operands[:2])
    out = each.leaves[0].dims
    if each.opcode != "convolution":
        found = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\s*\[)([^\]}]*)', each.attributes)
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in re.findall(r"\d+", found[1] if found else ""))
    inputs, kernels, outputs = re.split(r"_|->", each.attribute("dim_labels"))
    window = dict(re.findall(r"(\w+)=([\dx_]+)", each.attributes.partition("window={")[2].partition("}")[0]))
    pairs = 1
    for axis, size in enumerate(part for part in window.get("size", "").split("x") if part):
        at = str(axis)
        options = {key: values.split("x")[axis] for key, values in window.items()}
        pairs *= _pairs(left[inputs.index(at)], int(size), out[outputs.index(at)], options)
    return 2 * out[outputs.index("b")] * out[outputs.index("f")] * right[kernels.index("i")] * pairs


def _pairs(inputs: int, size: int, outputs: int, options: Mapping[str, str]) -> int:
    """Count the pairs of output and kernel positions along an axis that meet an input, not padding or a hole."""
    stride, spread, holes = (int(options.get(key, 1)) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    before = int(options.get("pad", "0_0").split("_")[0])
    places = (o * stride - before + k * spread for o, k in itertools.product(range(outputs), range(size)))
    return sum(0 <= place <= (inputs - 1) * holes and place % holes == 0 for place in places)


def _moved(program: Program, computation: Computation, each: Instruction) -> int:
    """Return the bytes that a kernel moves; for arrays that it slices or updates, only the slice counts."""
    if each.opcode in FUSIONS:
        return round(sum(_moved_by_fusion(program, computation, each)))
    if kernel_of(each):
        return _attended(computation, each)[1]
    operands = [computation[name] for name in each.operands]
    if each.opcode == "slice-start":  # its type has the operand, the slice and a handle
        source, *_, result, _ = each.leaves
        return result.stored * (2 - source.fast - result.fast)
    if each.opcode in SLICES:
        return 2 * _slow(each.leaves[:1])
    if each.opcode == "dynamic-update-slice":
        return 2 * _slow(operands[1].leaves)
    if each.opcode == "scatter":  # adds to existing values
        return _slow(operands[1].leaves) + 3 * _slow(operands[2].leaves)
    if each.opcode == "copy-start":  # into, out of or within HBM
        return _slow(each.leaves[:2])
    if each.opcode.endswith("-start"):  # its type includes the operand
        return 2 * _slow(operands[0].leaves) if operands else 0
    return _slow(_results(each)) + sum(_slow(operand.leaves) for operand in operands)


def _results(each: Instruction) -> list[Leaf]:
    """Return the output arrays of an instruction without the workspace of a library, the last of several."""
    return each.leaves[:-1] if library_of(each) and len(each.leaves) > 1 else each.leaves


def _moved_by_fusion(program: Program, outer: Computation, each: Instruction) -> Iterator[float]:
    inner = program[each.calls[0]]
    read = _shares_read(program, inner)
    for place, name in enumerate(each.operands):
        if not any(leaf.fast for leaf in outer[name].leaves):
            value = _parameter(inner, place)
            yield read[value.name] * sum(leaf.stored for leaf in value.leaves)
    root = _root(inner)
    written = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    given = sum(len(outer[name].leaves) for name in each.operands) if each.opcode == "fusion-start" else 0
    for result, leaf in zip(written, each.leaves[given:], strict=False):  # the type of a start includes the operands
        if not leaf.fast:
            yield _updated(program, result, inner)


def _parameter(computation: Computation, place: int) -> Instruction:
    found = (each for each in computation.values() if each.opcode == "parameter" and each.literal == str(place))
    return next(found)


def _root(computation: Computation) -> Instruction:
    (root,) = (each for each in computation.values() if each.root)
    return root


def _shares_read(program: Program, computation: Computation, output: float = 1.0) -> dict[str, float]:
    """Return the share of each value that a fusion reads to compute a share of its output; slices read only a part."""
    shares = dict.fromkeys(computation, 0.0) | {_root(computation).name: output}
    for each in reversed(computation.values()):
        for place, name in enumerate(each.operands):
            value, share = computation[name], 1.0
            if each.opcode in FUSIONS:
                inner = program[each.calls[0]]
                share = _shares_read(program, inner, shares[each.name])[_parameter(inner, place).name]
            elif each.opcode in SLICES and not place:
                share = shares[each.name] * _size(each) / (_size(value) or 1)
            elif each.opcode in UPDATES and not place:  # the rest stays where it is
                added = _size(computation[each.operands[2]]) if each.opcode == "scatter" else 0
                share = added / (_size(value) or 1)
            elif each.opcode in LAYOUTS and _size(each) == _size(value):
                share = shares[each.name]
            shares[name] = min(1.0, shares[name] + share)
    return shares


def _size(value: Instruction) -> int:
    return sum(math.prod(leaf.dims) for leaf in value.leaves)


def _updated(program: Program, result: Instruction, inner: Computation) -> int:
    if result.opcode == "bitcast":
        return _updated(program, inner[result.operands[0]], inner)
    if result.opcode == "fusion":
        fused = program[result.calls[0]]
        return _updated(program, _root(fused), fused)
    if result.opcode in UPDATES:
        result = inner[result.operands[UPDATES[result.opcode]]]
    if result.opcode == "get-tuple-element" and (called := inner[result.operands[0]]) and library_of(called):
        result = result if int(result.attribute("index")) < len(_results(called)) else result._replace(type="")
    return sum(leaf.stored for leaf in _results(result))


def _slow(arrays: list[Leaf]) -> int:
    return sum(leaf.stored for leaf in arrays if not leaf.fast)
