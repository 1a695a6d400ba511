"""End a process without the cleanup of Python and JAX, which would wait for other processes or might hang."""

import contextlib
import faulthandler
import os
import time
from typing import NoReturn


def leave(code: int, line: str = "", stacks: bool = False, linger: float = 0.0) -> NoReturn:
    """Print the stacks of all threads and a line, if asked to; end the process after `linger` seconds."""
    try:
        with contextlib.suppress(Exception):  # standard error may be closed
            if stacks:
                faulthandler.dump_traceback(all_threads=True)
            if line:
                os.write(2, f"jformer: {line}\n".encode())
        time.sleep(linger)
    finally:
        os._exit(code)
