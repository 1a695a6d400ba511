"""A row of metrics.jsonl or samples.jsonl, read back and checked. Needs no JAX."""

import sys
from typing import Any, NamedTuple

from jformer.errors import UserError
from jformer.integrity import parse_object, without_digest


class Sample(NamedTuple):
    """The answer to a validation example."""

    source: str
    reference: str  # "" if there is none
    answer: str


SAMPLE = {"step": int, "sample": int, **dict.fromkeys(Sample._fields, str)}  # a row of samples.jsonl


def read_row(line: bytes, where: str) -> dict[str, Any]:
    """Return a row of metrics.jsonl; raise UserError, naming its place, if it is invalid or damaged."""
    row = _parsed(line, where, "metrics")
    if not all(map(_fits, row, row.values())) or not {"step", "split"} <= row.keys():
        raise UserError(f"{where} is not a row of metrics; fix or delete this line")
    return row


def read_sample(line: bytes, where: str) -> dict[str, Any]:
    """Return a row of samples.jsonl; raise UserError as `read_row` does.

    `sample` counts the validation examples from 1.
    """
    row = _parsed(line, where, "samples")
    if {key: type(value) for key, value in row.items()} != SAMPLE:
        raise UserError(f"{where} is not a row of samples; fix or delete this line")
    return row


def _parsed(line: bytes, where: str, kind: str) -> dict[str, Any]:
    try:
        content = parse_object(line)
    except ValueError as error:
        raise UserError(f"{where} is not a row of {kind} ({error}); fix or delete this line") from error
    return dict(without_digest(content, where))


def _fits(key: str, value: object) -> bool:
    """Return whether a field of a row may have this value: `split` is a word, null means not finite."""
    if key == "split":
        return isinstance(value, str)
    return (type(value) is int and 0 <= value < 2**63) if key == "step" else is_figure(value)


def is_figure(value: object) -> bool:
    """Return whether a value is a finite number, or null for a missing or non-finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value is None
    return abs(value) <= sys.float_info.max
