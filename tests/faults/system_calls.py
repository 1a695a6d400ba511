"""Kill a process at the k-th call that changes something below a folder, whichever thread makes it.

A seccomp filter stops the process at every such call and a tracer looks at its path; so nothing of the call is done
when the process dies. For Linux on x86-64.
"""

import ctypes
import os
import platform
import signal
import struct
from pathlib import Path

from tests.faults.children import Child, Work

# Number of a call → where its path is: a file descriptor, a path, or a path below a folder's descriptor.
DESCRIPTOR = {1: "write", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 296: "pwritev"}
PATH = {2: "open", 76: "truncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink"}
BELOW = {257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 316: "renameat2"}
FLAGS = {2: 1, 257: 2}  # which argument says how a file is opened
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
HERE = 0xFFFFFF9C  # AT_FDCWD

TRACEME, CONT, SETOPTIONS = 0, 7, 0x4200
OPTIONS = 0x80 | 0x8 | 0x100000  # stop for the filter, follow threads, end with the tracer
EVENT_SECCOMP, WALL = 7, 0x40000000
NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of a filter
ALLOW, TRACE = 0x7FFF0000, 0x7FF00000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def kill_at(work: Work, log: Path, folder: Path, count: int) -> tuple[int, str, str]:
    """Run work and kill it at its count-th call below the folder.

    Returns its exit code, what it said, and the call at which it was killed; "" if it made fewer.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit("calls are counted on Linux on x86-64 only: give --calls=0")
    child = Child(work, log, _be_traced)
    os.waitpid(child.pid, 0)
    _libc.ptrace(SETOPTIONS, child.pid, None, OPTIONS)
    _libc.ptrace(CONT, child.pid, None, None)
    seen, last = 0, ""
    while True:
        thread, status = os.waitpid(-1, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == child.pid:
                return os.waitstatus_to_exitcode(status), child.said_so_far(), last
            continue
        if status >> 16 == EVENT_SECCOMP and not last and (call := _call(thread, str(folder))):
            seen += 1
            if seen == count:
                last = call
                os.kill(child.pid, signal.SIGKILL)
                continue
        number = os.WSTOPSIG(status)
        _libc.ptrace(CONT, thread, None, 0 if number in (signal.SIGTRAP, signal.SIGSTOP) else number)


def _be_traced() -> None:
    """Let the parent trace this process, and stop at the calls above."""
    calls = [*DESCRIPTOR, *PATH, *BELOW]
    jumps = [(EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    program = [(LOAD, 0, 0, 0), *jumps, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, TRACE)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    kept = ctypes.create_string_buffer(code, len(code))
    _libc.ptrace(TRACEME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    filtered = _Program(len(program), ctypes.addressof(kept))
    if _libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(SET_SECCOMP, FILTER, ctypes.byref(filtered), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


def _call(thread: int, folder: str) -> str:
    """Return the call at which a thread has stopped, if it changes something below the folder."""
    try:
        number, *arguments = (int(word, 0) for word in Path(f"/proc/{thread}/syscall").read_text().split())
        if number in FLAGS and not arguments[FLAGS[number]] & WRITING:
            return ""
        if number in DESCRIPTOR:
            path = _opened(thread, arguments[0])
        elif number in PATH:
            path = _text(thread, arguments[0])
        else:
            path = _text(thread, arguments[1])
            if not path.startswith("/") and arguments[0] & 0xFFFFFFFF != HERE:
                path = f"{_opened(thread, arguments[0])}/{path}"
    except (OSError, ValueError):  # the thread is gone, or the descriptor is no file's
        return ""
    name = {**DESCRIPTOR, **PATH, **BELOW}[number]
    return f"{name} {path.removeprefix(folder)}" if path.startswith(folder) else ""


def _opened(thread: int, descriptor: int) -> str:
    return str(Path(f"/proc/{thread}/fd/{descriptor}").readlink())


def _text(thread: int, address: int) -> str:
    """Return the text at an address of a thread's memory."""
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096).partition(b"\0")[0])
