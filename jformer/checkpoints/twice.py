"""What Orbax and TensorStore print of a failure that they raise as well: pages of tracebacks, around our one line."""

import logging
import sys

_print_unraisable = sys.unraisablehook


def say_failures_once() -> None:
    """Leave out what is raised, too: tracebacks that Orbax logs, and those of calls to its event loop that is over."""
    logging.getLogger("absl").addFilter(_is_said_here_alone)
    sys.unraisablehook = _unraisable


def _is_said_here_alone(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "/orbax/" in record.pathname)


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    """Print what nobody can catch, unless threads of TensorStore met it: they told of a write that failed too late."""
    if not (error.exc_type is RuntimeError and str(error.exc_value) == "Event loop is closed"):
        _print_unraisable(error)
