"""Do two processes of two devices train as one process of four does? Fifty updates of each, loss by loss.

Both are the real command on virtual CPU devices, with dropout on and a row for every update: with --dir the model of
configs/multi30k_tiny.py on Multi30k, else the quickstart's.

Command:  python -m experiments.faults.processes [--dir=FOLDER] [--updates=50] [--smoke]
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.measure import ROOT, smoke_sizes
from experiments.runs import flags_of, small_run
from jformer.config import resolve
from jformer.config.config_files import run_config_file
from jformer.evaluation import records

DIR = flags.DEFINE_string("dir", "", "Folder of Multi30k; none: the quickstart's generated text.")
UPDATES = flags.DEFINE_integer("updates", 50, "Updates of each run.")

FIRST = 10


def arguments(workdir: Path, cache: Path) -> list[str]:
    """Return the flags of a run, which is the first updates of a config, at that config's learning rates."""
    config = ROOT / "configs" / ("multi30k_tiny.py" if DIR.value else "quickstart.py")
    given = [f"--config={config}", f"--workdir={workdir}", f"--config.data.cache_dir={cache}"]
    if smoke_sizes():
        return [*given, *flags_of(small_run(UPDATES.value))]
    whole, updates = resolve(run_config_file(config)), UPDATES.value
    warmup = min(updates, whole.warmup_steps())
    share = warmup / whole.warmup_steps()  # of the warmup, which is to be done in these updates
    options: dict[str, object] = {"train.num_steps": updates, "train.log_every": 1, "train.eval_every": 0}
    options |= {"optim.warmup": warmup, "optim.learning_rate": share * whole.optim.learning_rate}
    options |= {"train.patience": 0, "evaluate.weights": "last"}
    options |= {"data.num_buckets": 2, "data.tokens_per_update": 2_048, "data.test": "()"}
    options |= {"data.dir": DIR.value} if DIR.value else {}
    return [*given, *flags_of(options)]


def train(folder: Path, processes: int, devices: int) -> tuple[list[float], float]:
    """Train with so many processes of so many devices each; return the losses and the seconds of an update."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"--coordinator=127.0.0.1:{server.getsockname()[1]}"
    given = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    workdir = folder / f"{processes}x{devices}"
    command = [sys.executable, "-m", "jformer.main", *arguments(workdir, folder / "cache")]
    running = []
    try:
        for i in range(processes):
            several = [place, f"--processes={processes}", f"--process={i}"] if processes > 1 else []
            environment = {**os.environ, **given}
            running.append(subprocess.Popen([*command, *several], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise SystemExit(f"{processes} processes did not come to their end: what they printed says why")
    rows = [row for row in records.rows(workdir) if row["split"] == "train"]
    return [row["loss"] for row in rows], sorted(row["seconds_per_update"] for row in rows)[len(rows) // 2]


def main(argv: Sequence[str]) -> None:
    """Print the figures."""
    del argv
    smoke_sizes(updates=2)
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        one, alone = train(Path(name), 1, 4)
        two, together = train(Path(name), 2, 2)
        differences = [abs(a - b) / abs(a) for a, b in zip(one, two, strict=True)]
        print(f"losses                    {one[0]:.6f} … {one[-1]:.6f}, {two[0]:.6f} … {two[-1]:.6f}")
        print(f"largest relative difference, first {FIRST} updates  {max(differences[:FIRST]):.2g}")
        print(f"largest relative difference, all {len(one)} updates   {max(differences):.2g}")
        print(f"seconds of an update      1 x 4: {alone:.3f}, 2 x 2: {together:.3f}")
        print(f"all of it took            {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    app.run(main)
