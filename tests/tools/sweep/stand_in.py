"""Plays the part of jformer.main in sweeps: a run of quick updates, alone in its directory and resumed there.

The Python of --code runs before it, and knows which `attempt` in this directory it is; it may define what comes `after`
an update.
"""

import fcntl
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

options = {"code": "", "steps": "3", "pause": "0"}
options |= dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
folder, steps = Path(options["workdir"]), int(options["steps"])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts.txt").open("a+") as file:
    file.write(f"{os.getpid()}\n")
    file.seek(0)
    attempt = len(file.readlines()) - 1


def after(step):
    """Do nothing."""


told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
exec(options["code"])
lock = (folder / "training.lock").open("w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (folder / "shared").touch()
    print(f"jformer: {folder}: another process is training here", file=sys.stderr)
    sys.exit(2)


path = folder / "metrics.jsonl"
done = path.read_text().count("\n") if path.exists() else 0
with path.open("a") as rows:
    for step in range(done + 1, steps + 1):
        time.sleep(float(options["pause"]))
        loss = float(options.get("config.optim.learning_rate", 1)) + int(options.get("config.seed", 0)) + 1 / step
        told_loss = loss if math.isfinite(loss) else None  # as a run's own rows
        rows.write(json.dumps({"step": step, "split": "valid", "loss": told_loss}) + "\n")
        rows.flush()
        after(step)
        if told and step < steps:
            sys.exit(143)
(folder / "results.json").write_text(json.dumps({"schema": 1, "run": {"updates": steps, "wall_seconds": 1.0}}))
