"""The one exception that means: the user can mend this. Every room may raise it; only commands catch it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a config, a data file or a run directory.

    Its text is one line that names the key or file:line, the value and the remedy; `main` prints it without a
    traceback and exits with code 2. Anything else that escapes is a defect of ours and keeps its traceback.
    """


def nearest(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error's line: the choice that was probably meant, or else all of them, or another hint."""
    known = list(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise or f"choose one of: {', '.join(known)}"
