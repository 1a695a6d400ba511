"""TPU slices and machines with GPUs by name: their devices, none of which need be present, and their specifications.

libtpu and the CUDA plugin of JAX describe them and compile for them on a CPU machine; `compiled_ahead` compiles.
"""

import ctypes
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from jformer.errors import UserError
from jformer.parallel.backend import Target
from jformer.parallel.devices import arithmetic, known_peak
from jformer.parallel.libtpu import SETTINGS
from jformer.parallel.mesh import slices_of

EXAMPLES = "v4:4x4x4, v5e:16x16, v5p:4x4x8, v6e:16x16, or as gcloud writes types: v5litepod-256, v6e-256, v5p-256"
GPU_EXAMPLES = "h100 for one GPU, h100:8 for a machine with eight, h100:8x4 for four such machines"
GIB = 2**30


class Chip(NamedTuple):
    """Specifications of a chip, from cloud.google.com/tpu/docs (v4, v5e, v5p, v6e: key specifications)."""

    dimensions: int  # of the network of chips
    hbm: float  # bytes
    bandwidth: float  # bytes a second between HBM and the cores
    network: float  # bytes a second sent over all links together: half of "bidirectional"
    largest: int  # chips of a slice
    config: str = "default"  # libtpu's name of the configuration with one device a chip
    type: str = ""  # prefix of gcloud's types, if not the family
    cores: int = 1  # per chip, as gcloud's types count


CHIPS = {
    "v4": Chip(dimensions=3, hbm=32 * GIB, bandwidth=1_228e9, network=300e9, largest=4_096, config="megacore", cores=2),
    "v5e": Chip(dimensions=2, hbm=16 * GIB, bandwidth=819e9, network=200e9, largest=256, type="v5litepod"),
    "v5p": Chip(dimensions=3, hbm=95 * GIB, bandwidth=2_765e9, network=600e9, largest=6_144, cores=2),
    "v6e": Chip(dimensions=2, hbm=32 * GIB, bandwidth=1_638e9, network=400e9, largest=256),
}


class Gpu(NamedTuple):
    """Specifications of a GPU: what XLA asks a driver for, and figures of NVIDIA's data sheets (A100 and H100: SXM)."""

    device: str  # JAX's device_kind
    capability: int  # major number of the compute capability
    cores: int  # streaming multiprocessors
    units: int  # for float32, of a core
    clock: float  # GHz
    hbm: int  # bytes
    bandwidth: float  # bytes a second between HBM and the cores
    shared: int  # bytes of shared memory of a core
    l2: int  # bytes
    network: float  # bytes a second sent over NVLink: half of "bidirectional"
    between: float  # bytes a second sent to other machines: one network card a GPU, as in NVIDIA's DGX machines
    largest: int = 8  # GPUs of a machine


GPUS = {
    "a100": Gpu(
        device="NVIDIA A100-SXM4-80GB", capability=8, cores=108, units=64, clock=1.41, hbm=85_100_068_864,
        bandwidth=2_039e9, shared=167_936, l2=41_943_040, network=300e9, between=25e9,
    ),
    "h100": Gpu(
        device="NVIDIA H100 80GB HBM3", capability=9, cores=132, units=128, clock=1.98, hbm=84_929_347_584,
        bandwidth=3_352e9, shared=233_472, l2=52_428_800, network=450e9, between=50e9,
    ),
    "h200": Gpu(
        device="NVIDIA H200", capability=9, cores=132, units=128, clock=1.98, hbm=151_397_597_184,
        bandwidth=4_800e9, shared=233_472, l2=52_428_800, network=450e9, between=50e9,
    ),
    "b200": Gpu(
        device="NVIDIA B200", capability=10, cores=148, units=128, clock=1.965, hbm=191_514_411_008,
        bandwidth=7_672e9, shared=233_472, l2=132_644_864, network=900e9, between=50e9,
    ),
}  # fmt: skip
SHARE_VARIABLE, DEFAULT_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75  # the share of a GPU's memory that JAX takes
LARGEST_SHARE = 0.92  # leaves room for the CUDA context, cuBLAS and NCCL
CUDA_PACKAGES = ("jax_cuda13_plugin", "jax_cuda12_plugin")
MOST_MACHINES = 512


class Topology(NamedTuple):
    """Connected chips of a TPU slice, or the GPUs of one or several machines."""

    name: str  # family:AxB or family:AxBxC; of GPUs kind:GPUs of a machine or kind:GPUs x machines
    chip: Chip | Gpu
    devices: list[jax.Device]  # one a chip, in JAX's order; programs can be compiled for them

    @property
    def unit(self) -> str:
        """What a device is called."""
        return "GPU" if isinstance(self.chip, Gpu) else "chip"

    @property
    def memory(self) -> float:
        """Bytes of a device that a program may take."""
        return self.chip.hbm * (memory_share() if isinstance(self.chip, Gpu) else 1)

    @property
    def peak(self) -> float:
        """FLOPs a second of a chip in bfloat16."""
        found = known_peak(self.devices[0].device_kind, "bfloat16")
        assert found, self.devices[0].device_kind
        return found

    def peak_in(self, dtype: str, precision: str = "default") -> float:
        """Return FLOPs a second of products in a dtype, of float32 at a precision: see `arithmetic`."""
        used = arithmetic(dtype, Target("gpu" if isinstance(self.chip, Gpu) else "tpu"), precision)
        if not isinstance(self.chip, Gpu):
            return self.peak / {"bfloat16 x 3": 3, "float32": 6}.get(used, 1)  # passes of bfloat16
        of_units = 2e9 * self.chip.cores * self.chip.units * self.chip.clock  # a product and a sum a cycle
        return {"float32": of_units, "tf32": self.peak / 2}.get(used, self.peak)

    def __str__(self) -> str:
        """Return the line that describes them."""
        count = len(self.devices)
        if not isinstance(self.chip, Gpu):
            return f"slice: {self.name}, {count:,} chips of {self.chip.hbm / GIB:.0f} GiB"
        machines = len({*slices_of(self.devices)})
        where = "one machine" if machines == 1 else f"{machines} machines"
        size = f"{self.chip.hbm / GIB:.0f} GiB each, of which JAX takes {memory_share():.0%}"
        return f"GPUs: {count} x {self.chip.device} on {where}, {size}"


def memory_share() -> float:
    """Return the share of a GPU's memory that JAX takes. Raise UserError for an invalid variable."""
    given = os.environ.get(SHARE_VARIABLE, "")
    try:
        share = float(given or DEFAULT_SHARE)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"{SHARE_VARIABLE}={given!r} must be a share of a GPU's memory, such as 0.9")
    return share


def open_topology(name: str) -> Topology:
    """Return the slice of a name such as v5e:16x16 or v5litepod-256, or the GPUs of one such as h100:8.

    Raises UserError for invalid names, and without libtpu or the CUDA plugin.
    """
    family, sizes = read_name(name)
    jax.config.update("jax_platforms", "cpu")  # keeps JAX from looking for a TPU or GPU
    if family in GPUS:
        return _open_gpus(name, family, *sizes)
    chip, full = CHIPS[family], f"{family}:{'x'.join(map(str, sizes))}"
    if not find_spec("libtpu"):
        raise UserError(f'--topology={name} needs libtpu, which compiles for TPUs: pip install -e ".[tpu-aot]"')
    for key, value in SETTINGS.items():
        os.environ.setdefault(key, value)
    try:
        found = topologies.get_topology_desc(full, "tpu", chip_config_name=chip.config)
    except RuntimeError as error:
        raise UserError(f"--topology={name}: no such slice, says libtpu: {error}; try {EXAMPLES}") from error
    return Topology(full, chip, list(found.devices))


def _open_gpus(name: str, kind: str, count: int, machines: int) -> Topology:
    cudnn = next(iter(nvidia_folders("cudnn", "lib/libcudnn.so.9")), None)
    if not any(map(find_spec, CUDA_PACKAGES)) or not cudnn or not compiler_options("gpu"):
        raise UserError(f'--topology={name} needs XLA\'s compiler for GPUs: pip install -e ".[gpu-aot]"')
    ctypes.CDLL(str(cudnn / "lib/libcudnn.so.9"))  # XLA asks for its version
    shape, full = f"{machines}x1x{count}", f"{kind}:{count}" + (f"x{machines}" if machines > 1 else "")
    found = topologies.get_topology_desc(platform="cuda", target_config=target_config(GPUS[kind]), topology=shape)
    return Topology(full, GPUS[kind], list(found.devices))


def target_config(gpu: Gpu) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared} shared_memory_per_block_optin: {gpu.shared - 1024}
  core_count: {gpu.cores} fpus_per_core: {gpu.units} clock_rate_ghz: {gpu.clock} l2_cache_size: {gpu.l2}
  memory_bandwidth: {gpu.bandwidth:.0f} device_memory_size: {gpu.hbm}
  cuda_compute_capability {{ major: {gpu.capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{gpu.device}"
"""


def compiler_options(platform: str) -> dict[str, str | bool | int]:
    """Return the options with which XLA compiles for a device that is not there.

    Empty if none are needed, and where libdevice is not installed. Kernels that XLA would otherwise time are chosen by
    rules, and products are cuBLAS's.
    """
    cuda = nvidia_folders("cu13", "nvvm/libdevice") + nvidia_folders("cuda_nvcc", "nvvm/libdevice")
    if platform != "gpu" or not cuda:
        return {}
    return {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": str(cuda[0]), "xla_gpu_enable_triton_gemm": False}


def nvidia_folders(package: str, content: str) -> list[Path]:
    """Return the folders of a package of NVIDIA's that have some content."""
    found = find_spec("nvidia")
    roots = (found and found.submodule_search_locations) or []
    return [Path(root, package) for root in roots if Path(root, package, content).exists()]


def read_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the family of a slice and its chips along each dimension, or the kind of GPUs, their number and machines.

    Raises UserError for invalid names.
    """
    family, colon, shape = name.partition(":")
    if family in GPUS:
        found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", shape if colon else "1")
        gpus, machines = (int(each or 1) for each in found.groups()) if found else (0, 0)
        if 1 <= gpus <= GPUS[family].largest and machines <= MOST_MACHINES:
            return family, (gpus, machines)
        raise UserError(f"--topology={name}: no such machine, of at most {GPUS[family].largest} GPUs: {GPU_EXAMPLES}")
    if colon and family in CHIPS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape):
        sizes = tuple(map(int, shape.split("x")))
        if len(sizes) == CHIPS[family].dimensions and math.prod(sizes) <= CHIPS[family].largest:
            return family, sizes
    kind, _, count = name.rpartition("-")
    for family, chip in CHIPS.items():
        if kind and kind in (family, chip.type) and count.isdecimal():
            chips, rest = divmod(int(count), chip.cores)
            if not rest and 1 <= chips <= chip.largest and chips.bit_count() == 1:
                return family, most_even(chips, chip.dimensions)
    slices, others = f"the families are {', '.join(CHIPS)}: {EXAMPLES}", f"GPUs are {', '.join(GPUS)}: {GPU_EXAMPLES}"
    raise UserError(f"--topology={name}: no such slice; {slices}; {others}")


def most_even(chips: int, dimensions: int) -> tuple[int, ...]:
    """Return the shape that gcloud gives a power of two of chips: as even as possible, larger sides last."""
    sizes = [1] * dimensions
    while math.prod(sizes) < chips:
        sizes[-1 - sizes[::-1].index(min(sizes))] *= 2
    return tuple(sorted(sizes, key=lambda size: (size == 1, size)))
