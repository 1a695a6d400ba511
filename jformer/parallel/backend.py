"""The target that programs are compiled for: the local devices, unless a program is to run elsewhere."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import jax
from jax.sharding import Mesh


class Target(NamedTuple):
    """A kind of device, with the properties that decide which kernels may run on it."""

    platform: str  # cpu | gpu | tpu
    kind: str = ""  # what JAX calls it
    capability: str = ""  # of a GPU: its compute capability, such as 9.0; gfx942 and the like with ROCm

    @property
    def cuda(self) -> float:
        """The compute capability of an NVIDIA GPU, otherwise 0."""
        return float(self.capability) if re.fullmatch(r"\d+\.\d", self.capability) else 0.0


_CHOSEN: ContextVar[Target | None] = ContextVar("target", default=None)


def target_of(device: jax.Device) -> Target:
    """Return the target of a device, which may come from a topology."""
    return Target(device.platform, device.device_kind, str(getattr(device, "compute_capability", "")))


def target() -> Target:
    """Return the target that programs are currently traced for."""
    return _CHOSEN.get() or target_of(jax.devices()[0])


def xla_options(by_platform: Mapping[str, Mapping[str, str | bool]]) -> dict[str, str | bool]:
    """Return the compiler's options for the target's platform, without those that the user set in XLA_FLAGS."""
    given = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in by_platform.get(target().platform, {}).items() if name not in given}


def is_one_cpu(mesh: Mesh | None) -> bool:
    """Return whether programs are currently traced for a single CPU device."""
    return target().platform == "cpu" and (mesh is None or mesh.size == 1)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """In this context, trace programs for a target that need not be present."""
    token = _CHOSEN.set(target)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
