"""What Orbax and TensorStore print of a failure that they raise as well: pages of tracebacks, around our one line."""

import logging
import sys
import warnings

# Of reads that Orbax had not begun when another one failed: it cancels them, and Python finds them when it collects.
CANCELLED = r"coroutine 'Store\._get_array_metadatas' was never awaited"
_print_unraisable = sys.unraisablehook


def say_failures_once() -> None:
    """Leave out what is raised, too: tracebacks that Orbax logs, calls to its loop that is over, what it cancelled."""
    logging.getLogger("absl").addFilter(_is_said_here_alone)
    sys.unraisablehook = _unraisable
    warnings.filterwarnings("ignore", CANCELLED, RuntimeWarning)


def _is_said_here_alone(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "/orbax/" in record.pathname)


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    """Print what nobody can catch, unless threads of TensorStore met it: they told of a write that failed too late."""
    if not (error.exc_type is RuntimeError and str(error.exc_value) == "Event loop is closed"):
        _print_unraisable(error)
