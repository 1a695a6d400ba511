"""Start jformer.main as the processes of one run on this machine, and leave none of them behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "tests" / "small_run.py"
PATIENCE = 300  # seconds


class Processes:
    """The running processes of a run; what process I says is in FOLDER/I.log, what it answers in FOLDER/I.out."""

    def __init__(self, folder, commands, environments):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.all = folder, []
        for i, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            with (folder / f"{i}.out").open("w") as out, (folder / f"{i}.log").open("w") as log:
                options = {"env": environment, "cwd": ROOT, "start_new_session": True}
                self.all.append(subprocess.Popen(command, stdout=out, stderr=log, **options))

    def said(self, process):
        return (self.folder / f"{process}.log").read_text()

    def lines(self, process):
        """Return what the process says of itself as the program, without the stacks."""
        return [line for line in self.said(process).splitlines() if line.startswith("jformer: ")]

    def wait(self, seconds=PATIENCE):
        """Return the exit codes; how soon processes end is for experiments/faults/process_faults.py to tell."""
        began = time.monotonic()
        try:
            return [process.wait(max(0.1, began + seconds - time.monotonic())) for process in self.all]
        except subprocess.TimeoutExpired as error:
            heard = "\n".join(f"process {i}: {self.said(i)[-2_000:]}" for i in range(len(self.all)))
            raise AssertionError(heard) from error

    def end(self, *codes):
        """Wait for these exit codes."""
        found = self.wait()
        assert found == list(codes), "\n".join(f"process {i}: {self.said(i)[-3_000:]}" for i in range(len(found)))

    def kill(self):
        """End what is left of every process and of what it started."""
        for process in self.all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_for(self, path, text):
        """Wait until a file holds a text."""
        deadline = time.monotonic() + PATIENCE
        while not path.exists() or text not in path.read_text():
            ended = [i for i, process in enumerate(self.all) if process.poll() is not None]
            assert not ended, "\n".join(self.said(i)[-2_000:] for i in ended)
            assert time.monotonic() < deadline, self.said(0)[-2_000:]
            time.sleep(0.02)


@contextlib.contextmanager
def running(folder, workdir, *arguments, processes=2, devices=1, faults=None, own=None, program="jformer.main"):
    """Start the small run as some processes with so many virtual devices each.

    `faults` has what goes wrong in a process (see `faulty`), `own` the arguments of one alone.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"--coordinator=127.0.0.1:{server.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    shared = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    commands = []
    for i in range(processes):
        module = ["tests.parallel.processes.faulty", faults[i]] if i in (faults or {}) else [program]
        given = [f"--config={CONFIG}", f"--workdir={workdir}", "--config.mesh.data=-1", *map(str, arguments)]
        if processes > 1:
            given += [place, f"--processes={processes}", f"--process={i}"]
        commands.append([sys.executable, "-m", *module, *given, *map(str, (own or {}).get(i, ()))])
    group = Processes(folder, commands, [shared] * processes)
    try:
        yield group
    finally:
        group.kill()
