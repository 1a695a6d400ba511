"""Operations of XLA that give the same bits every time, where a device has others: on GPUs."""

import os
import re

from jformer.errors import UserError

OPTION = "xla_gpu_deterministic_ops"  # slower; what has no deterministic form is refused by XLA


def choose_deterministic() -> None:
    """Let XLA take deterministic operations alone, on GPUs; to be called before JAX looks for devices.

    Raises UserError where XLA_FLAGS contradicts it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if said := re.search(rf"--{OPTION}(=\S*)?", flags):
        if said[1] and said[1].lower() not in ("=true", "=1"):
            raise UserError(f"--deterministic, but XLA_FLAGS has {said[0]}: leave out one of them")
        return
    os.environ["XLA_FLAGS"] = f"{flags} --{OPTION}=true".strip()


def deterministic_line() -> str:
    """Return what the choice means on the devices here, which JAX looks for now at the latest."""
    import jax

    platform = jax.default_backend()
    if platform == "gpu":
        return f"deterministic operations alone (XLA's {OPTION})"
    return f"--deterministic is for GPUs and changes nothing on {platform}"
