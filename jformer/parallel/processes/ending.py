"""The end of a process without the cleanup of Python and JAX, which would wait for other processes or might hang."""

import contextlib
import faulthandler
import os
import time
from typing import NoReturn


def leave(code: int, line: str = "", stacks: bool = False, linger: float = 0.0) -> NoReturn:
    """End the process with the stacks of all threads and a line, if there are any; it stays `linger` seconds longer."""
    try:
        with contextlib.suppress(Exception):  # standard error may be closed
            if stacks:
                faulthandler.dump_traceback(all_threads=True)
            if line:
                os.write(2, f"jformer: {line}\n".encode())
        time.sleep(linger)
    finally:
        os._exit(code)
