"""A process that answers lines of JSON with lines of JSON. Knows nothing of their content."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from experiments.measure import ROOT


class Worker:
    """A running command that finds this project, and no device but the CPU."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True, env=environment)

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Send a line and return the answer to it."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{' '.join(map(str, self.process.args))} ended: see its output for the reason")  # type: ignore[arg-type]
        return json.loads(line)

    def close(self) -> None:
        """Close its input and wait for its end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
