"""Matrix products on devices: their arithmetic, peak FLOPs a second, and the faster dtype."""

import contextlib
import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jformer.parallel.backend import Target, target_of

# Dense bfloat16 TFLOP/s of what JAX calls a device, by its device_kind; the longest matching prefix counts. NVIDIA:
# the data sheets of A100, L4, L40S, H100, H200 and DGX B200, halved where they give sparse figures. A V100 has no
# bfloat16. TPU: cloud.google.com/tpu/docs/system-architecture-tpu-vm, where chips of v2, v3 and 7x are two devices.
PEAKS = {
    "NVIDIA A100": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA B200": 2_250.0,
    "TPU v2": 23.0,
    "TPU v3": 61.5,
    "TPU v4": 275.0,
    "TPU v4 lite": 138.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v5e": 197.0,
    "TPU v5 lite": 197.0,
    "TPU v6e": 918.0,
    "TPU v6 lite": 918.0,
    "TPU7x": 1_153.5,
}
# How XLA multiplies float32 arrays, by the names of jax.lax.Precision: TF32 rounds them to 10 bits of mantissa; passes
# of bfloat16 keep 8 bits each (Henry et al. 2019), and six make a float32.
ARITHMETIC = {
    "gpu": {"default": "tf32", "high": "tf32", "highest": "float32"},
    "tpu": {"default": "bfloat16", "high": "bfloat16 x 3", "highest": "float32"},
}
TF32_NEEDS = 8.0  # compute capability: Ampere
WORTH_ROUNDING = 1.5  # the speedup that bfloat16 must give to be chosen
TIMED_PRODUCTS = 5  # an odd number, so that one slow product does not move the median; some milliseconds each


class Peak(NamedTuple):
    """The peak of all devices of a run together."""

    flops: float  # a second
    origin: str  # the source of the figure


def arithmetic(dtype: str, target: Target, precision: str = "default") -> str:
    """Return the arithmetic of products of arrays of a dtype: float32, tf32, bfloat16 x 3 or the dtype itself.

    Args:
        dtype: of activations.
        target: the device; a GPU of unknown compute capability has TF32.
        precision: model.precision; `default` is JAX's own setting, if there is one (JAX_DEFAULT_MATMUL_PRECISION).
    """
    if dtype != "float32" or target.platform not in ARITHMETIC:
        return dtype
    asked = (jax.config.jax_default_matmul_precision or precision) if precision == "default" else precision
    with contextlib.suppress(ValueError):  # the name of an algorithm, such as BF16_BF16_F32
        asked = jax.lax.Precision(asked).name.lower()  # each has several names
    used = ARITHMETIC[target.platform].get(asked, asked)
    return "float32" if used == "tf32" and 0 < target.cuda < TF32_NEEDS else used


def products_line(dtype: str, target: Target, precision: str) -> str:
    """Return the line about the arithmetic of products."""
    used = arithmetic(dtype, target, precision)
    return f"products on {target.platform}: of {dtype} in {used} (model.precision={precision})"


def known_peak(kind: str, dtype: str) -> float | None:
    """Return the FLOPs a second of a kind of device by its data sheet, or None if there is none, as for a MIG slice."""
    if " MIG " in kind:  # a part of the GPU that the kind begins with
        return None
    names = [name for name in PEAKS if kind == name or kind.startswith((f"{name} ", f"{name}-"))]
    return PEAKS[max(names, key=len)] * 1e12 if names and dtype == "bfloat16" else None


def find_peak(device: jax.Device, count: int, dtype: str, given: float = 0.0, precision: str = "default") -> Peak:
    """Return the peak of `count` devices like this one: `given` for each, else by data sheet, else measured here.

    Args:
        device: of this process.
        count: devices of the run.
        dtype: of activations.
        given: FLOPs a second of each; 0 = not known.
        precision: of the products that are measured, model.precision.
    """
    if given:
        return Peak(given * count, "train.peak_flops")
    sold = known_peak(device.device_kind, dtype)
    if sold:
        return Peak(sold * count, f"data sheet of {device.device_kind}, {dtype}")
    if device.platform == "cpu":
        count = 1  # CPU devices share the cores of the machine, and a product uses all of them
    used = arithmetic(dtype, target_of(device), precision)
    return Peak(measured_peak(device, dtype, precision) * count, f"measured by matrix products in {used}")


@functools.cache
def quicker_dtype(device: jax.Device) -> tuple[str, str]:
    """Return the dtype that a device should compute in, and why.

    It is bfloat16 if the device multiplies much faster in it than in float32, by data sheet or measured here.

    CPUs do if they have instructions for it (AMX, AVX-512 BF16) and JAX uses them.
    """
    if known_peak(device.device_kind, "bfloat16"):
        return "bfloat16", f"data sheet of {device.device_kind}"
    share = measured_peak(device, "float32") / measured_peak(device, "bfloat16")
    dtype = "bfloat16" if share * WORTH_ROUNDING <= 1 else "float32"
    return dtype, f"measured here: products in bfloat16 take {share:.2f} times those in float32"


def measured_peak(device: jax.Device, dtype: str, precision: str = "default") -> float:
    """Return the median FLOPs a second of a few products of two square matrices."""
    size = 1_024 if device.platform == "cpu" else 8_192  # some milliseconds
    x = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)
    multiply = jax.jit(functools.partial(jnp.matmul, precision=None if precision == "default" else precision))
    multiply(x, x).block_until_ready()
    seconds = []
    for _ in range(TIMED_PRODUCTS):
        began = time.perf_counter()
        multiply(x, x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds)
