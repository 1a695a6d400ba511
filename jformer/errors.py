"""The one exception that means: the user can mend this. Every room may raise it; only `main` catches it."""


class UserError(ValueError):
    """A mistake in a config, a data file or a run directory.

    Its text is one line that names the key or file:line, the value and the remedy; `main` prints it without a
    traceback and exits with code 2. Anything else that escapes is a defect of ours and keeps its traceback.
    """
