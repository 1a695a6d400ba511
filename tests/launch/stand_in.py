"""Plays the part of jformer.main: notes its arguments and runs the Python of --code.

That knows which `process` it is, and which `attempt`; attempts are counted in the workdir, or for one on gs:// in the
folder that plays the bucket.
"""

import json
import os
import sys
from pathlib import Path

options = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
workdir = Path(options["workdir"])
if options["workdir"].startswith("gs://"):
    workdir = Path(os.environ["FAKE_CLOUD"]) / "bucket"
home = Path.home().name if "distributed" in options else 0  # a worker of the fake cloud
process = int(options.get("process", os.environ.get("JAX_PROCESS_ID", home)))
workdir.mkdir(parents=True, exist_ok=True)
starts = workdir / f"starts-{process}.jsonl"
attempt = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")


def checkpoint(step):
    """Leave what a complete checkpoint leaves."""
    (workdir / "checkpoints" / str(step)).mkdir(parents=True)
    (workdir / "checkpoints" / str(step) / "commit_success.txt").touch()


exec(options["code"])
