"""Put a small run through faults of every kind and report how each case ended.

  --kills        kill -9 at a random moment, then again after the restart
  --calls        kill -9 at each of the first N system calls with which one save changes the folder of checkpoints
  --corruptions  damage to one file of a run: arrays, metadata and manifest of a checkpoint, config.json, tokenizer,
                 token cache, metrics.jsonl, results.json
  --stops        SIGTERM or Ctrl-C at a random moment of the real command
  --full         a full disk, or a limit on the size of files
  --resumes      resuming from each of 60 updates of a run: packed and in buckets, in float32 and in bfloat16
  --configs      mistakes in a config: typos, wrong types, impossible numbers
  --out          a folder for the runs, cases.jsonl and table.md; rerun the same command to resume
  --without      a guard of GUARDS to disable, to see which cases notice

A case passes if the run ends with the bits of an undisturbed one, or with one line that names the file. Exit code 1
means that a case failed.

Command:  python -m tests.faults --out=DIR     the whole CAMPAIGN, 100 minutes of a core
          python -m tests.faults --out=DIR --kills=10 --full=2
"""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tests.faults import config_errors, full_disk, guards, kills, save_kills, stops
from tests.faults.children import PATIENCE, import_everything, run
from tests.faults.runs import SAVED, Runs
from tests.faults.verdicts import GOOD, Verdict

KINDS = {
    "kills": "kill -9 at a random moment",
    "calls": "kill -9 at a call of one save",
    "corruptions": "damage to one file",
    "stops": "SIGTERM or SIGINT at a random moment",
    "full": "a full disk, or a limit of files",
    "resumes": "going on from an update of a run of three epochs",
    "configs": "a mistake in a config",
}
CAMPAIGN = {
    "kills": 300, "calls": 1_000, "corruptions": 1_000, "stops": 60, "full": 60, "resumes": 240, "configs": 10_000
}  # fmt: skip
for name in KINDS:
    flags.DEFINE_integer(name, None, "Cases; without any such flag, those of CAMPAIGN.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "Folder.", required=True)
SEED = flags.DEFINE_integer("seed", 0, "Of what is drawn.")
WITHOUT = flags.DEFINE_enum("without", None, sorted(guards.GUARDS), "A guard to do without.")

Case = Callable[[Runs, random.Random, int], tuple[str, Verdict] | None]


def main(_: Sequence[str]) -> None:
    """Go through the cases and print the table."""
    folder = Path(OUT.value).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    import_everything(folder / "compiled")
    runs = Runs(folder)
    mistakes = list(config_errors.mistakes())
    cases: dict[str, Case] = {
        "kills": kills.kill,
        "calls": save_kills.kill_save,
        "stops": stops.stop,
        "full": full_disk.fill,
        "configs": lambda runs, draw, number: config_errors.mistake(runs, mistakes, number),
    }
    with guards.without(WITHOUT.value) if WITHOUT.value else contextlib.nullcontext():
        for kind, case in cases.items():
            go_through(kind, case, runs)
        in_children("corruptions", corrupt, runs)
        in_children("resumes", resume, runs)
    lines = table(read(folder))
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if any(row["outcome"] not in GOOD for row in read(folder)):
        raise SystemExit(1)


def cases_of(kind: str) -> int:
    """Return how many cases of a kind to go through."""
    asked = {name: flags.FLAGS[name].value for name in KINDS}
    return CAMPAIGN[kind] if set(asked.values()) == {None} else asked[kind] or 0


def go_through(kind: str, case: Case, runs: Runs) -> None:
    """Do the cases of a kind that are not done yet, each with a line of its own."""
    done = {row["number"] for row in read(runs.folder) if row["kind"] == kind}
    for number in range(cases_of(kind)):
        if number in done:
            continue
        ended = case(runs, random.Random(f"{SEED.value} {kind} {number}"), number)
        if ended is None:
            return
        fault, verdict = ended
        note(runs.folder, kind, number, fault, verdict)


def note(folder: Path, kind: str, number: int, fault: str, verdict: Verdict) -> None:
    """Write down how a case ended, and tell it if that was not good."""
    row = {"kind": kind, "number": number, "fault": fault, **verdict._asdict()}
    with (folder / "cases.jsonl").open("a") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if verdict.outcome not in GOOD:
        print(f"{kind} {number}: {fault}: {verdict.outcome}: {verdict.said}", flush=True)


def in_children(kind: str, work: Callable[[Runs], None], runs: Runs) -> None:
    """Do the cases of a kind that compute in one child, or in one more for each that ends it."""
    while cases_of(kind):
        log, patience = runs.folder / "logs" / f"{kind}.txt", PATIENCE + PATIENCE * cases_of(kind) / 10
        end = run(lambda: work(runs) or 0, log, patience=patience)
        print(end.said, end="")
        if not end.code:
            return
        number = 1 + max((row["number"] for row in read(runs.folder) if row["kind"] == kind), default=-1)
        note(runs.folder, kind, number, "", Verdict(f"exit code {end.code}", end.said[-400:]))


def corrupt(runs: Runs) -> None:
    """Do the corruptions that are not done yet."""
    from jformer import main
    from tests.faults.corruptions import Damaged

    (folder := runs.folder / "corrupted").mkdir(exist_ok=True)
    arguments = [*runs.training(folder / "run", SAVED), f"--config.data.cache_dir={folder / 'cache'}"]
    config = main.configure(*main.read_flags(["jformer", *arguments]))
    damaged = Damaged(runs.base, runs.cache, config, folder)
    go_through("corruptions", lambda runs, draw, number: damaged.corrupt(draw, number), runs)


def resume(runs: Runs) -> None:
    """Go on with runs where that is not done yet."""
    from tests.faults.resumes import resume

    go_through("resumes", resume, runs)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the cases so far."""
    path = folder / "cases.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table: how many cases of a kind ended how."""
    lines = ["| fault | cases | ended as | defects |", "|---|---|---|---|"]
    for kind, words in KINDS.items():
        found = Counter(str(row["outcome"]) for row in rows if row["kind"] == kind)
        if found:
            ended = ", ".join(f"{outcome} {count}" for outcome, count in found.most_common())
            bad = sum(count for outcome, count in found.items() if outcome not in GOOD)
            lines.append(f"| {words} | {found.total()} | {ended} | {bad} |")
    return lines


if __name__ == "__main__":
    app.run(main)
