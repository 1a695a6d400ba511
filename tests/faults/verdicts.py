"""One way to judge a case: what is good, and what a proper refusal is."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.faults.children import End

GOOD = ("unharmed", "recovered", "refused", "stopped", "as a run still going on")


class Verdict(NamedTuple):
    """What became of a case; the outcome is good if it is in GOOD."""

    outcome: str
    said: str


def refusal(line: str, names: Sequence[str]) -> Verdict:
    """Judge what a UserError says: one line that holds one of the names, if there are any."""
    if "\n" in line:
        return Verdict("refused in several lines", line)
    named = not names or any(name in line for name in names)
    return Verdict("refused" if named else "refused without a name", line)


def ending(end: End, names: Sequence[str]) -> Verdict:
    """Judge a command that did not do its work: exit code 2, and one line of ours in the end."""
    lines = end.said.splitlines()
    if "Traceback" in end.said:
        return Verdict("traceback", end.said[-400:])
    if end.code != 2 or not lines or not lines[-1].startswith("jformer: "):
        return Verdict(f"exit code {end.code}", end.said[-400:])
    return refusal(lines[-1], names)
