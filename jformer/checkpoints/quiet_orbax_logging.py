"""Silence the tracebacks that Orbax and TensorStore print for failures that they also raise."""

import logging
import sys
import warnings

# Python's warning about reads that Orbax cancels before they start because another one failed.
CANCELLED = r"coroutine 'Store\._get_array_metadatas' was never awaited"
_print_unraisable = sys.unraisablehook


def log_failures_once() -> None:
    """Drop messages about errors that are also raised: Orbax's tracebacks, closed event loop and cancelled reads."""
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and "/orbax/" in record.pathname))
    sys.unraisablehook = _unraisable
    warnings.filterwarnings("ignore", CANCELLED, RuntimeWarning)


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    """Print errors that cannot be caught, except those of TensorStore's threads that report a failed write late."""
    if not (error.exc_type is RuntimeError and str(error.exc_value) == "Event loop is closed"):
        _print_unraisable(error)
