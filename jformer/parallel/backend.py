"""The target platform of a program: JAX's backend, unless the program is compiled here to run elsewhere."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

_CHOSEN: ContextVar[str] = ContextVar("platform", default="")


def target() -> str:
    """Return the platform that programs are currently traced for: cpu, gpu or tpu."""
    return _CHOSEN.get() or jax.default_backend()


def is_one_cpu(mesh: Mesh | None) -> bool:
    """Return whether programs are currently traced for a single CPU device."""
    return target() == "cpu" and (mesh is None or mesh.size == 1)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Trace as for a platform that need not be present."""
    token = _CHOSEN.set(platform)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
