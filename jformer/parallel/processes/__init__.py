"""The processes of one run: they find each other, start JAX, check that they agree, and end together.

Other rooms import this and need not know whether there are several processes.
"""

from jformer.parallel.processes.group import agree as agree
from jformer.parallel.processes.group import barrier as barrier
from jformer.parallel.processes.group import check_same as check_same
from jformer.parallel.processes.group import compile_together as compile_together
from jformer.parallel.processes.group import enter_phase as enter_phase
from jformer.parallel.processes.group import from_main_process as from_main_process
from jformer.parallel.processes.group import is_main_process as is_main_process
from jformer.parallel.processes.group import is_shared as is_shared
from jformer.parallel.processes.group import join_run as join_run
from jformer.parallel.processes.group import main_process_first as main_process_first
from jformer.parallel.processes.group import process_count as process_count
from jformer.parallel.processes.group import record_step_time as record_step_time
from jformer.parallel.processes.group import refuse_unshared as refuse_unshared
from jformer.parallel.processes.group import set_stall_limit as set_stall_limit
from jformer.parallel.processes.group import should_stop as should_stop
from jformer.parallel.processes.group import watched as watched
from jformer.parallel.processes.group import working_elsewhere as working_elsewhere
from jformer.parallel.processes.handshake import code_version as code_version
from jformer.parallel.processes.handshake import library_versions as library_versions
from jformer.parallel.processes.handshake import saved_run as saved_run
from jformer.parallel.processes.meeting import AbsentError as AbsentError
from jformer.parallel.processes.process_info import ProcessInfo as ProcessInfo
from jformer.parallel.processes.process_info import from_flags as from_flags
from jformer.parallel.processes.stop import defer_stop as defer_stop
from jformer.parallel.processes.stop import discard_output as discard_output
from jformer.parallel.processes.stop import end_at_once as end_at_once
from jformer.parallel.processes.stop import heed_signals as heed_signals
from jformer.parallel.processes.stop import ignore_signals as ignore_signals
from jformer.parallel.processes.stop import readers_may_leave as readers_may_leave
from jformer.parallel.processes.stop import stop_requested as stop_requested
