"""Which platform a program is being made for: that of JAX, unless it is compiled here to run elsewhere."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import Mesh

_CHOSEN: ContextVar[str] = ContextVar("platform", default="")


def target() -> str:
    """Return the platform for which what is traced now is meant: cpu, gpu or tpu."""
    return _CHOSEN.get() or jax.default_backend()


def is_one_cpu(mesh: Mesh | None) -> bool:
    """Tell whether what is traced now is meant for a CPU alone, which no mesh of several devices shares."""
    return target() == "cpu" and (mesh is None or mesh.size == 1)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Trace as for a platform that need not be present."""
    token = _CHOSEN.set(platform)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
