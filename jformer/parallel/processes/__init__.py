"""The processes of one run: they find each other, start JAX, check that they agree, and end together.

Other rooms import this, and need not know whether there is more than one process.
"""

from jformer.parallel.processes.group import (
    agree,
    barrier,
    check_same,
    compile_together,
    enter_phase,
    from_main_process,
    is_main_process,
    is_shared,
    join_run,
    main_process_first,
    process_count,
    process_index,
    record_step_time,
    refuse_unshared,
    set_stall_limit,
    should_stop,
    watched,
    working_elsewhere,
)
from jformer.parallel.processes.handshake import code_version, library_versions, saved_run
from jformer.parallel.processes.meeting import AbsentError
from jformer.parallel.processes.process_info import ProcessInfo, from_flags
from jformer.parallel.processes.stop import (
    defer_stop,
    discard_output,
    end_at_once,
    heed_signals,
    ignore_signals,
    readers_may_leave,
    stop_requested,
)

__all__ = [
    "AbsentError",
    "ProcessInfo",
    "agree",
    "barrier",
    "check_same",
    "code_version",
    "compile_together",
    "defer_stop",
    "discard_output",
    "end_at_once",
    "enter_phase",
    "from_flags",
    "from_main_process",
    "heed_signals",
    "ignore_signals",
    "is_main_process",
    "is_shared",
    "join_run",
    "library_versions",
    "main_process_first",
    "process_count",
    "process_index",
    "readers_may_leave",
    "record_step_time",
    "refuse_unshared",
    "saved_run",
    "set_stall_limit",
    "should_stop",
    "stop_requested",
    "watched",
    "working_elsewhere",
]
