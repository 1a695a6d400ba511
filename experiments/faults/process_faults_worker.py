"""jformer.main whose main thread sleeps forever in the next update after SIGUSR1; `process_faults` starts it.

Command:  python -m experiments.faults.process_faults_worker ARGUMENTS OF jformer.main
"""

import signal
import sys
import threading
import time
from typing import Any

from jformer import main
from jformer.training.log import TrainingLog

if __name__ == "__main__":
    stuck, collect = threading.Event(), TrainingLog.collect

    def sleep_if_stuck(*arguments: Any) -> None:
        """Do what every update does, and sleep forever if the signal came."""
        collect(*arguments)
        if stuck.is_set():
            time.sleep(1e6)

    TrainingLog.collect = sleep_if_stuck  # type: ignore[assignment, method-assign]
    signal.signal(signal.SIGUSR1, lambda number, frame: stuck.set())
    sys.exit(main.main(sys.argv))
