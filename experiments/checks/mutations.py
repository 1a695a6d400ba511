"""How many small mistakes would the tests notice, and which does one test file alone notice?

A mutation swaps a comparison, an `and` for an `or`, or the first two arguments of a call; adds 1 to a whole number;
removes a `not`; or drops a statement. Which ones are drawn follows from a digest of the changed line, so the samples of
two commits share every line that both have. The tests that reach the line are run, cheapest files first, until tests of
two files have failed; lines that only imports or other processes reach are not mutated. Rerun to resume.

Command:  coverage run -m pytest -p experiments.checks.costs_of_tests --costs=costs.jsonl; coverage combine --quiet
          python -m experiments.checks.mutations --reached=.coverage --costs=costs.jsonl --output=mutations.jsonl
          [--number=100] [--seed=0] [--timeout=240] [--smoke]
          python -m experiments.checks.costs_of_tests --before=costs.jsonl --mutations=mutations.jsonl
"""

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from absl import app, flags

from experiments.checks.costs_of_tests import REACHED, measure, reached, rows_of
from experiments.checks.judge import file_of
from experiments.measure import ROOT, smoke_sizes

NUMBER = flags.DEFINE_integer("number", 100, "Mutations to draw.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the draw.")
TIMEOUT = flags.DEFINE_integer("timeout", 240, "Seconds after which a mutation is given up.")
COSTS = flags.DEFINE_string("costs", None, "File with the costs of its tests.")
OUTPUT = flags.DEFINE_string("output", None, "File that gets a line per mutation, with the tests that noticed it.")
ENOUGH = 2  # test files that notice a mutation
TOGETHER = 8  # test files in a process: collecting them all takes longer than most of them
GRACE = 90.0  # seconds for a process to start, and for its last test to end
SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Mutation(NamedTuple):
    """A place in a file, and its replacement."""

    path: Path
    node: ast.expr | ast.stmt
    text: str

    def apply(self) -> str:
        """Return the file's text with the mutation; all other lines stay where they are."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        first, last = self.node.lineno - 1, (self.node.end_lineno or 0) - 1
        before, after = lines[first][: self.node.col_offset], lines[last][self.node.end_col_offset :]
        lines[first : last + 1] = [before, self.text.encode(), b" \\\n" * (last - first), after]
        return b"".join(lines).decode()

    def line(self) -> str:
        """Return the line it begins on."""
        return self.path.read_text().splitlines()[self.node.lineno - 1].strip()

    def rank(self) -> bytes:
        """Return where it stands in the order of the draw."""
        return hashlib.sha256(f"{SEED.value}|{self.line()}|{ast.unparse(self.node)}|{self.text}".encode()).digest()


def mutations(path: Path) -> Iterator[Mutation]:
    """Yield every mutation of a file; annotations, docstrings and imports have none."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                waiting += [child for child in (value if isinstance(value, list) else [value]) if is_node(child)]
        if isinstance(node, ast.expr | ast.stmt):
            yield from (Mutation(path, node, text) for text in replacements(node))


def is_node(child: object) -> bool:
    """Return whether a field of a node is a node that may be mutated; parts of f-strings have no exact positions."""
    return isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr)


def replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield the replacements of a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield f"({ast.unparse(ast.Compare(node.left, [SWAPPED[type(op)]()], node.comparators))})"
        case ast.BoolOp():
            other: ast.boolop = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            yield str(number + 1)
        case ast.Call(args=[first, second, *rest]) if ast.unparse(first) != ast.unparse(second):
            yield ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield "pass"


def failures(tests: Sequence[str], root: Path, seconds: float, enough: int) -> dict[str, str]:
    """Run tests until enough files failed; return test file → the test that failed, or that never ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "judge.json")
        path.write_text(json.dumps({"tests": tests, "seconds": seconds, "enough": enough, "failed": {}, "running": ""}))
        files = dict.fromkeys(map(file_of, tests))
        plugins = ["-p", "no:cacheprovider", "-p", "experiments.checks.judge", f"--judge={path}"]
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "--continue-on-collection-errors", *plugins, *files]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        try:
            done = subprocess.run(command, cwd=root, env=environment, timeout=seconds + GRACE, capture_output=True)
        except subprocess.TimeoutExpired:
            found = json.loads(path.read_text())
            hung = {file_of(found["running"]): found["running"]} if found["running"] else {}  # or in collection
            return found["failed"] | hung
        if done.returncode == pytest.ExitCode.USAGE_ERROR:  # tests/conftest.py cannot be imported
            return {file: file for file in files}
        failed: dict[str, str] = json.loads(path.read_text())["failed"]
    return failed


def noticed(mutation: Mutation, tests: Sequence[str], root: Path) -> tuple[dict[str, str], bool]:
    """Return test file → the test that noticed a mutation, for at most ENOUGH, and whether there was time for all."""
    by_file = defaultdict(list)
    for test in tests:
        by_file[file_of(test)].append(test)
    files, found, end = list(by_file), dict[str, str](), time.monotonic() + TIMEOUT.value
    original = mutation.path.read_text()
    mutation.path.write_text(mutation.apply())
    try:
        for first in range(0, len(files), TOGETHER):
            seconds = end - time.monotonic()
            if len(found) >= ENOUGH or seconds <= 0:
                break
            some = [test for file in files[first : first + TOGETHER] for test in by_file[file]]
            found |= failures(some, root, seconds, ENOUGH - len(found))
    finally:
        mutation.path.write_text(original)
    return found, time.monotonic() < end


def in_order(tests: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """Return tests with the cheapest file first, and the cheapest of each file first."""
    of_file: dict[str, float] = defaultdict(float)
    for test in tests:
        of_file[file_of(test)] += seconds[test]
    return sorted(tests, key=lambda test: (of_file[file_of(test)], file_of(test), seconds[test]))


def measure_one_file(folder: Path) -> tuple[Path, Path]:
    """Return coverage's data and the costs of tests/data/test_text.py, by running it."""
    costs, data = folder / "costs.jsonl", folder / ".coverage"
    measure("tests/data/test_text.py", costs, "coverage", "run", f"--data-file={data}", "-m")
    combine = [sys.executable, "-m", "coverage", "combine", "--quiet", f"--data-file={data}"]
    subprocess.run(combine, cwd=ROOT, check=True)
    return data, costs


def main(argv: list[str]) -> None:
    """Print which tests noticed each mutation, and how many were noticed by two files, by one, and by none."""
    del argv
    smoke = smoke_sizes(number=1)
    if not smoke and not (REACHED.value and COSTS.value and OUTPUT.value):
        raise app.UsageError("--reached, --costs and --output name three files")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        data, costs = measure_one_file(Path(folder)) if smoke else (Path(str(REACHED.value)), Path(str(COSTS.value)))
        root, output = Path(folder, "clone"), Path(OUTPUT.value or Path(folder, "mutations.jsonl"))
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
        rows = judge(reached(data), {test: row["seconds"] for test, row in rows_of(costs).items()}, root, output)
        killers = sorted({test for row in rows for test in row["noticed"].values()})
        broken = {*failures(killers, root, TIMEOUT.value * len(rows), len(killers)).values()}
    if broken:
        print("these fail without a mutation, too:", *sorted(broken))
    print(summary(rows, broken))


def summary(rows: Sequence[Mapping[str, Any]], broken: Set[str]) -> str:
    """Return how many mutations were noticed, by tests that are not broken, and how many were given up."""
    noticing = [(len({*row["noticed"].values()} - broken), row["in_time"]) for row in rows]
    by_files = Counter(min(files, ENOUGH) for files, in_time in noticing if in_time or files >= ENOUGH)
    two, one, none = (by_files[files] for files in (ENOUGH, 1, 0))
    late = len(rows) - by_files.total()
    return f"noticed by two files: {two}, by one: {one}, by none: {none}; given up: {late}"


def judge(
    lines: Mapping[tuple[str, int], list[str]], seconds: Mapping[str, float], root: Path, output: Path
) -> list[dict[str, Any]]:
    """Judge the mutations that are drawn; return a row for each, written to the output as they are found."""
    reaching = {
        (root / Path(file).relative_to(ROOT), line): [test for test in tests if test in seconds]
        for (file, line), tests in lines.items()
    }
    possible = [each for path in sorted({path for path, _ in reaching}) for each in mutations(path)]
    drawn = sorted((each for each in possible if reaching.get((each.path, each.node.lineno))), key=Mutation.rank)
    print(f"{len(possible):,} possible mutations, {len(drawn):,} on lines that tests reach")
    output.touch()
    found = {row["mutation"]: row for row in map(json.loads, output.read_text().splitlines())}
    for each in drawn[: NUMBER.value]:
        place = f"{each.path.relative_to(root)}:{each.node.lineno}:{each.node.col_offset}"
        name = f"{place}  {each.line()}\n    {ast.unparse(each.node)!r} → {each.text!r}"
        if name not in found:
            tests = in_order(reaching[each.path, each.node.lineno], seconds)
            killers, in_time = noticed(each, tests, root)
            files = sorted({*map(file_of, tests)})
            found[name] = {"mutation": name, "noticed": killers, "in_time": in_time, "reached_by": files}
            with output.open("a") as file:
                file.write(json.dumps(found[name]) + "\n")
        print(name, ", ".join(found[name]["noticed"].values()) or "SURVIVED", sep=": ", flush=True)
    return [*found.values()]


if __name__ == "__main__":
    app.run(main)
