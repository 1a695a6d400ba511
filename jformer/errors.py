"""The one exception that means "the user can fix this", and the exit codes of the commands.

Every room may raise a UserError; only commands catch it.
"""

import dataclasses
import difflib
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any

DONE = 0  # exit codes: success
FAILED = 1  # a check did not pass, or trials of a sweep are not done and will not be
MISTAKE = 2  # the user can fix it: a UserError was printed
LOST = 75  # another process died or never joined, or storage was unavailable: rerun the same command to resume
STUCK = 76  # a process is stuck, perhaps this one; its stacks were shown: rerun the same command to resume
ABORTED = 134  # the same, if JAX's C++ aborted the process: 128 + SIGABRT, as a shell reports it
STOPPED = 143  # stopped by SIGTERM or SIGINT, after saving


class UserError(ValueError):
    """A mistake in a config, a data file or a run directory.

    Its text is one line that names the key or file:line, the value and the remedy; `main` prints it without a
    traceback and exits with its code. Any other exception is a bug in jformer and keeps its traceback.
    """

    code = MISTAKE


class UnavailableError(UserError):
    """Something cannot be read or written now, with no sign of damage: the same command may succeed later."""

    code = LOST


class BrokenRunError(UserError):
    """A run cannot answer or be scored, whatever it is asked: its weights or its scoring command are broken, say.

    In training, all processes of a run raise it together.
    """


def nearest(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return a hint to end an error message with: the choice probably meant, else `otherwise`, else all choices."""
    known = list(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise or f"choose one of: {', '.join(known)}"


def check_choice(key: str, value: str, choices: Collection[str], otherwise: str = "") -> None:
    """Raise UserError unless a value is one of the choices, and suggest the choice that was probably meant.

    `otherwise` is added to the message, for further values that the caller accepts.
    """
    if value in choices:
        return
    text = value if isinstance(value, str) else ""  # values set from Python are not type-checked yet
    begins = [choice for choice in choices if choice and (text.startswith(choice) or choice.startswith(text))]
    close = begins or difflib.get_close_matches(text, choices, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close and text else ""
    raise UserError(f"{key}={value!r}; choose one of: {', '.join(choices)}{otherwise}{hint}")


def check_choices(section: str, values: object, choices: Mapping[str, Collection[str]]) -> None:
    """Raise UserError for the first of a section's keys whose value is not among its choices."""
    for key, allowed in choices.items():
        check_choice(f"{section}.{key}", getattr(values, key), allowed)


def check_least(section: str, values: object, keys: tuple[str, ...], least: float) -> None:
    """Raise UserError for the first of a section's keys whose value is below a bound or of the wrong type."""
    for key in keys:
        value = _number(section, values, key)
        if not value >= least:
            raise UserError(f"{section}.{key}={value!r} must be at least {least}")


def check_range(section: str, values: object, keys: tuple[str, ...], low: float, high: float) -> None:
    """Raise UserError for the first of a section's keys whose value is out of range.

    Args:
        section: prefix of the key in the message, such as "optim".
        values: a record with the keys as numeric fields.
        keys: the fields to check, in this order.
        low: inclusive lower bound.
        high: exclusive upper bound.
    """
    for key in keys:
        value = _number(section, values, key)
        if not low <= value < high:
            raise UserError(f"{section}.{key}={value!r} must be at least {low} and below {high}")


def refuse_unknown(section: str, options: Any, known: Collection[str], reader: str) -> None:
    """Raise UserError for the first option that is not at its default and that a reader does not support.

    Call this in code that reads the options of a dataclass one by one. An option added later is then refused by name
    instead of silently ignored, until that code supports it and lists it.

    Args:
        section: prefix of the key in the message, such as "model".
        options: a dataclass whose fields all have defaults.
        known: the fields that the reader supports or that do not affect it.
        reader: the name of the reader in the message.
    """
    defaults = type(options)()
    for field in dataclasses.fields(options):
        value, default = getattr(options, field.name), getattr(defaults, field.name)
        if field.name not in known and value != default:
            raise UserError(f"{section}.{field.name}={value!r}: {reader} has no such option; use {default!r}")


def _number(section: str, values: object, key: str) -> Any:
    """Return the value of a numeric field; raise UserError for a wrong type, or a fraction in an integer field."""
    value, whole = getattr(values, key), type(getattr(type(values), key, None)) is int
    if not isinstance(value, numbers.Integral if whole else numbers.Real) or isinstance(value, bool):
        raise UserError(f"{section}.{key}={value!r} must be a {'whole ' * whole}number")
    return value
