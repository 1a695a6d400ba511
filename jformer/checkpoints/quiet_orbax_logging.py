"""What Orbax and TensorStore print of a failure that they raise as well: pages of tracebacks, around our one line."""

import logging
import sys
import warnings

# Of reads that Orbax had not begun when another one failed: it cancels them, and Python finds them when it collects.
CANCELLED = r"coroutine 'Store\._get_array_metadatas' was never awaited"
_print_unraisable = sys.unraisablehook


def log_failures_once() -> None:
    """Drop messages about errors that are raised as well: Orbax's tracebacks, its closed loop, what it cancelled."""
    logging.getLogger("absl").addFilter(_is_logged_here_alone)
    sys.unraisablehook = _unraisable
    warnings.filterwarnings("ignore", CANCELLED, RuntimeWarning)


def _is_logged_here_alone(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "/orbax/" in record.pathname)


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    """Print what nobody can catch, unless threads of TensorStore met it: they report a failed write too late."""
    if not (error.exc_type is RuntimeError and str(error.exc_value) == "Event loop is closed"):
        _print_unraisable(error)
