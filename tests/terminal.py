"""A pseudo-terminal: what a program shows to somebody who sits before it."""

import contextlib
import os
import pty
import re
import sys
import termios
import threading

MOVES = {"\x1b[K", "\x1b[A"}  # sequences that delete and move; all others are colours, or worse


def opened(columns=120):
    """Return both ends of a terminal of so many columns: what is read, and what is written to."""
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, columns))
    return reader, writer


def read_all(reader):
    """Read what is said until the other end is closed; a terminal then raises an error."""
    said = b""
    with contextlib.suppress(OSError):
        while part := os.read(reader, 65_536):
            said += part
    os.close(reader)
    return said.decode()


@contextlib.contextmanager
def standard_error(monkeypatch, columns=120):
    """Let standard error be a terminal; the list that is given has what was shown there, once this is over."""
    reader, writer = opened(columns)
    said = []
    listener = threading.Thread(target=lambda: said.append(read_all(reader)))
    listener.start()
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as stream:
        patch.setattr(sys, "stderr", stream)
        yield said
    listener.join()


def sequences(said):
    """Return the control sequences in what a terminal was sent."""
    return set(re.findall(r"\x1b\[[\d;?]*[A-Za-z]", said))
