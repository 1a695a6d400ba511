"""SIGTERM and Ctrl-C at a random moment of the real command, from its first line on: training, its data, answers.

What comes before the first line of jformer.main is Python's own start, which ends as Python likes. Where the moment is
earlier, the signal waits until the command has a handler; from then on a death without a line is a defect.
"""

import shutil
import signal
import time
from pathlib import Path
from random import Random

from tests.faults.children import Child, End
from tests.faults.runs import LONG, SAVED, Runs, rows_until, saved_steps, wait_for_moment
from tests.faults.verdicts import Verdict, ending

STOPPED = 143
LIMIT = 10.0  # seconds
NEAR = 0.05  # seconds between two signals
TURN = 6  # cases of which one stops the making of data and one stops answers; the others stop training
PAIRS = 60_000  # of a corpus that takes some seconds to tokenize
LINES = 2_000  # to answer


def stop(runs: Runs, draw: Random, number: int) -> tuple[str, Verdict]:
    """Stop the run of all these cases once more; one that ends before is judged, and begins anew."""
    if number % TURN == TURN - 2:
        return stop_answers(runs, draw)
    if number % TURN == TURN - 1:
        return stop_preparation(runs, draw)
    workdir = runs.folder / "stopped"
    while True:
        child = Child(runs.arguments(workdir, LONG), runs.folder / "logs" / "stops.txt")
        moment = wait_for_moment(draw, workdir, child, runs.seconds_of_command)
        fault, end, seconds = ask_to_stop(child, draw, moment)
        if end.code:
            return fault, judge_training(workdir, end, seconds)
        verdict = runs.judge(end, workdir, LONG)
        shutil.rmtree(workdir)
        if verdict.outcome != "unharmed":
            return fault, verdict


def stop_preparation(runs: Runs, draw: Random) -> tuple[str, Verdict]:
    """Stop a run at its imports, or while its tokenizer is learned and its text is tokenized, for the first time."""
    workdir, cache = runs.folder / "prepared", runs.folder / "prepared_cache"
    for folder in (workdir, cache):
        shutil.rmtree(folder, ignore_errors=True)
    options = (f"--config.data.num_pairs={PAIRS}", f"--config.data.cache_dir={cache}")
    child = Child(runs.arguments(workdir, LONG, *options), runs.folder / "logs" / "stops.txt")
    fault, end, seconds = ask_to_stop(child, draw, wait(draw, runs.seconds_of_command))
    if (workdir / "config.json").exists():  # on a quick or idle machine it was training already, or compiling
        return f"training, {fault}", judge_training(workdir, end, seconds)
    verdict, checkpoints = judge_stop(end, seconds), workdir / "checkpoints"
    if verdict.outcome == "stopped" and checkpoints.exists():
        return f"preparing, {fault}", Verdict("left behind", str(checkpoints))
    return f"preparing, {fault}", verdict


def stop_answers(runs: Runs, draw: Random) -> tuple[str, Verdict]:
    """Stop a command that answers a file; --resume must end it with the lines of an undisturbed one."""
    source, whole, target = (runs.folder / name for name in ("asked.txt", "answers.txt", "stopped_answers.txt"))
    log = runs.folder / "logs" / "stops.txt"
    arguments = [*runs.arguments(runs.base, SAVED), "--mode=predict", f"--input={source}"]
    if not whole.exists():
        source.write_text("".join("abcdefgh"[number % 7 :] + "\n" for number in range(LINES)))
        if (end := Child([*arguments, f"--output={whole}"], log).wait()).code:
            return "answering", ending(end, ())
    for path in target.parent.glob(target.name + "*"):
        path.unlink()
    child = Child([*arguments, f"--output={target}"], log)
    fault, end, seconds = ask_to_stop(child, draw, wait(draw, runs.seconds_of_command))
    verdict = judge_stop(end, seconds) if end.code else Verdict("unharmed", "")
    if verdict.outcome in ("stopped", "unharmed"):
        again = Child([*arguments, f"--output={target}", "--resume"], log).wait()
        if again.code or target.read_bytes() != whole.read_bytes():
            return f"answering, {fault}", Verdict("other answers", again.said[-400:])
    return f"answering, {fault}", verdict


def ask_to_stop(child: Child, draw: Random, moment: str) -> tuple[str, End, float]:
    """Send a signal, or two, and return what was done, how the child ended, and after how many seconds."""
    kind, twice = draw.choice([signal.SIGTERM, signal.SIGINT]), draw.random() < 0.3
    while child.lives() and not catches(child.pid, signal.SIGTERM):
        time.sleep(0.001)
    asked = time.monotonic()
    child.signal(kind)
    if twice:
        time.sleep(NEAR)
        child.signal(signal.SIGTERM)  # a second SIGINT ends at once: docs/guide.md
    end = child.wait()
    seconds = time.monotonic() - asked
    return f"{kind.name}{' twice' if twice else ''} {moment}: {seconds:.1f} s until the end", end, seconds


def wait(draw: Random, seconds: float) -> str:
    """Wait for a moment of a command that takes about so long."""
    share = draw.random()
    time.sleep(share * seconds)
    return f"after {share * seconds:.1f} s"


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()
    return bool(caught) and bool(int(caught[0], 16) >> (number - 1) & 1)


def judge_training(workdir: Path, end: End, seconds: float) -> Verdict:
    """Tell whether a training command that was asked to stop did so as it should, and lost nothing."""
    lost = rows_until(workdir) - max(saved_steps(workdir), default=0)
    verdict = judge_stop(end, seconds)
    if verdict.outcome == "stopped" and lost > 1 and "saved" in verdict.said:
        return Verdict(f"{lost} updates lost", verdict.said)
    return verdict


def judge_stop(end: End, seconds: float) -> Verdict:
    """Tell whether a command that was asked to stop did so in time, with its exit code and a line."""
    if end.code != STOPPED or "Traceback" in end.said or not end.said:
        return ending(end, ())
    if seconds > LIMIT:
        return Verdict("stopped late", f"{seconds:.1f} s")
    return Verdict("stopped", end.said.splitlines()[-1])
