"""jformer.main with a fault: python -m tests.parallel.processes.faulty KIND@UPDATE ARGUMENTS.

sleep:S@U sleeps S seconds in the main thread after update U was begun; late:S@0 comes S seconds late; compiler:S@0
takes S seconds longer until the first update is compiled; old@0 says that
it is another version of NumPy; blind@0 looks for the workdir somewhere else; cwd:DIR@0 starts in a folder; unread@0
has an output that nobody reads.
"""

import os
import sys
import time

from jformer import main
from jformer.parallel.processes import group
from jformer.training import step
from jformer.training.log import TrainingLog

KIND, _, UPDATE = sys.argv[1].partition("@")
NAME, _, SECONDS = KIND.partition(":")
calls = []
collect, software, appears, finite = TrainingLog.collect, group.software, group._appears, step.all_finite


def sleepy(log, *arguments):
    collect(log, *arguments)
    calls.append(None)
    if len(calls) == int(UPDATE):
        time.sleep(float(SECONDS))


def slowly_traced(tree):
    if not calls:
        calls.append(None)
        time.sleep(float(SECONDS))
    return finite(tree)


if NAME == "sleep":
    TrainingLog.collect = sleepy
elif NAME == "late":
    time.sleep(float(SECONDS))
elif NAME == "compiler":
    step.all_finite = slowly_traced
elif NAME == "cwd":
    os.chdir(SECONDS)
elif NAME == "unread":
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
elif NAME == "old":
    group.software = lambda: {**software(), "numpy": "0.1"}
elif NAME == "blind":
    group._appears = lambda path: appears(path.parent / "elsewhere" / path.name)
sys.exit(main.main([sys.argv[0], *sys.argv[2:]]))
