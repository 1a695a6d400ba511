"""Does everything work on this machine's GPUs or TPUs, and how fast is it? One command, in minutes.

Each row runs in its own process, the most informative first: one that fails, crashes or hangs affects no other, and is
reported with its reason. Findings are printed, and written to --output as JSON, as soon as they are known. Rows that
time did not allow are listed at the end. The exit code is 0 only if every row that ran was right, and 1 otherwise.

Command:  python -m experiments.accelerator [--minutes=25] [--rows=numerics,updates] [--wmt=CHECKOUT/examples/wmt]
          [--output=runs/accelerator.json] [--trace=DIR] [--smoke]

Rows are those of experiments/checks/accelerator_rows.py. All data is generated or comes with the project. --smoke tries
every row in small sizes, also on a CPU. --trace=DIR writes traces of updates and searches, for XProf or Perfetto.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from experiments.measure import ROOT, commit, smoke_sizes

WEIGHTS = {  # row → its share of the time, in the order in which rows run
    "machine": 1, "numerics": 4, "updates": 3, "attention": 3, "resume": 3, "quickstart": 4, "step transformer_base": 3,
    "decoding": 3, "pytorch": 6, "processes": 2, "tests": 8, "step gpt2": 3, "step t5_base": 3,
    "step transformer_big": 3, "choices transformer_base": 4, "choices gpt2": 4, "choices t5_base": 4,
    "float32 transformer_base": 3,
}  # fmt: skip
LEAST = 5.0  # seconds that must be left to start a row
PATIENCE = 3  # times its share that a row may take, as most take less
QUICK = " --xla_backend_optimization_level=0 --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"  # to compile, in --smoke


class Table:
    """The findings so far, on the screen and in a file."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Keep other rows that an earlier command found of the same `facts` in the file; refuse other findings."""
        self.path, self.facts, self.rows, self.earlier = path, facts, list[dict[str, Any]](), list[dict[str, Any]]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = json.loads(path.read_text())
            self.earlier = found.pop("rows")
            if found != facts:
                raise app.UsageError(f"{path} has findings of {found}, not of {facts}: name another --output")

    def add(self, row: str, what: str, text: str, ok: bool, seconds: float, figures: Mapping[str, Any] = {}) -> None:
        """Print a finding and write all of them; a crash of the machine loses none that was printed."""
        self.rows.append({"row": row, "what": what, "ok": ok, "text": text, "seconds": round(seconds, 1), **figures})
        print(f"{'right' if ok else 'WRONG'}  {seconds:6.1f} s  {row:22} {what:34} {text}", flush=True)
        half = self.path.with_name(f"{self.path.name}.tmp")
        new = {each["row"] for each in self.rows}
        rows = [*(each for each in self.earlier if each["row"] not in new), *self.rows]
        half.write_text(json.dumps({**self.facts, "rows": rows}, indent=1))
        half.replace(self.path)

    @property
    def wrong(self) -> list[str]:
        """The rows that failed."""
        return [*dict.fromkeys(each["row"] for each in self.rows if not each["ok"])]


def run_rows(commands: Mapping[str, Sequence[str]], seconds: float, table: Table, weights: Mapping[str, float]) -> None:
    """Run rows one after the other; each may take PATIENCE times its share of what is left.

    Args:
        commands: row → the command that prints its findings as lines of JSON.
        seconds: time limit for all rows together.
        table: collects the findings.
        weights: row → its share.
    """
    end, rest = time.monotonic() + seconds, [*commands]
    while rest:
        row, left = rest[0], end - time.monotonic()
        if left < LEAST:
            print(f"no time for: {', '.join(rest)}; --rows={','.join(rest)} runs them")
            return
        share = weights[row] / sum(weights[each] for each in rest)
        run_row(row, commands[row], left * min(1, PATIENCE * share), table)
        rest.pop(0)


def run_row(row: str, command: Sequence[str], limit: float, table: Table) -> None:
    """Run a row for at most `limit` seconds; add its findings and, if it ended early, the reason."""
    began, late = time.monotonic(), threading.Event()
    found, before = 0, began
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)  # and what it started

        timer = threading.Timer(limit, stop)
        timer.start()
        assert process.stdout
        for line in process.stdout:
            finding, now = json.loads(line), time.monotonic()
            table.add(row, finding["what"], finding["text"], finding["ok"], now - before, finding["figures"])
            found, before = found + 1, now
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        said = errors.read()
    if late.is_set():
        table.add(row, "stopped", f"not done after {limit:.0f} s; {found} findings", False, time.monotonic() - before)
    elif code:
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        table.add(row, "failed", f"{name}: {reason(said)}", False, time.monotonic() - before)
    elif not found:
        table.add(row, "failed", "it found nothing", False, time.monotonic() - before)


def reason(said: str) -> str:
    """Return the line of an output that says why a process ended: our command's, an exception's, or the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("jformer: ")]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (ours or raised or lines or ["no output"])[-1][:300]


def define_flags() -> None:
    """Define the flags; not on import, as other commands here define flags of the same names."""
    flags.DEFINE_float("minutes", 25.0, "Minutes for all rows together.")
    flags.DEFINE_list("rows", [*WEIGHTS], "Rows to run.")
    flags.DEFINE_string("output", "runs/accelerator.json", "JSON file for the findings.")
    flags.DEFINE_string("trace", None, "Folder for traces of updates and searches.")
    flags.DEFINE_string("wmt", None, "The folder examples/wmt of a checkout of flax, to time instead of plain Flax.")


def commands(rows: Sequence[str], arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (row, its command)."""
    for row in rows:
        yield row, [sys.executable, "-m", "experiments.checks.accelerator_rows", row, *arguments]


def main(argv: list[str]) -> int:
    """Run the rows; return 1 if one is wrong."""
    del argv
    small, given = smoke_sizes(minutes=6.0), flags.FLAGS
    if unknown := {*given.rows} - {*WEIGHTS}:
        raise app.UsageError(f"--rows={','.join(sorted(unknown))}: no such rows; there are {', '.join(WEIGHTS)}")
    arguments = ["--smoke"] if small else []
    folders = {"wmt": given.wmt, "trace": given.trace}
    arguments += [f"--{name}={Path(folder).resolve()}" for name, folder in folders.items() if folder]
    if small:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + QUICK
    if (platforms := os.environ.get("JAX_PLATFORMS", "")) and "cpu" not in platforms:
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"  # rows compare with the machine's CPU
    began = time.monotonic()
    table = Table(Path(given.output), {"commit": commit(), "smoke": small})
    run_rows(dict(commands(given.rows, arguments)), given.minutes * 60, table, WEIGHTS)
    wrong = table.wrong
    print(f"{len(table.rows)} findings in {time.monotonic() - began:.0f} s, in {table.path}; wrong: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
