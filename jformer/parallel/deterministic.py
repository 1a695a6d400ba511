"""Deterministic operations of XLA on GPUs."""

import os
import re

from jformer.errors import UserError

OPTION = "xla_gpu_deterministic_ops"  # slower; XLA raises for operations without a deterministic form
ON = ("", "=true", "=1")  # endings of an option in XLA_FLAGS that is on


def choose_deterministic() -> None:
    """Make XLA use only deterministic operations on GPUs. Call this before JAX initializes its devices.

    Raises UserError if XLA_FLAGS contradicts it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if given := re.search(rf"--{OPTION}(=\S*)?", flags):
        if (given[1] or "").lower() not in ON:
            raise UserError(f"--deterministic, but XLA_FLAGS has {given[0]}: leave out one of them")
        return
    os.environ["XLA_FLAGS"] = f"{flags} --{OPTION}=true".strip()


def asks_deterministic() -> bool:
    """Return whether XLA_FLAGS ask for deterministic operations, set by `choose_deterministic` or the user."""
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.findall(rf"--(?:{OPTION}|xla_gpu_exclude_nondeterministic_ops)(=\S*)?", flags)
    return bool(found) and found[-1].lower() in ON


def deterministic_line() -> str:
    """Return a line on what the option does on this platform; initializes JAX's devices."""
    import jax

    platform = jax.default_backend()
    if platform == "gpu":
        return f"only deterministic operations (XLA's {OPTION})"
    return f"--deterministic is for GPUs and changes nothing on {platform}"
