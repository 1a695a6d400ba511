"""How many small mistakes would the tests notice? Each mutation of the package is run against the tests of its module.

A mutation swaps a comparison, an `and` for an `or`, or the first two arguments of a call; adds 1 to a whole number;
removes a `not`; or drops a statement. Which ones are drawn follows from a digest of the changed line, so the samples of
two commits share every line that both have. A mutation is killed when a test fails, or does not end in time. The tests
are those that mirror the module, then those of its room and those that import it, then whole runs; none marked slow.

Command:  python -m experiments.checks.mutations [--number=100] [--seed=0] [--timeout=600]
          [--commit=HEAD] [--own] [--smoke]
"""

import ast
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from experiments.measure import ROOT, smoke_sizes

NUMBER = flags.DEFINE_integer("number", 100, "Mutations to draw.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the draw.")
COMMIT = flags.DEFINE_string("commit", "HEAD", "The commit to mutate.")
TIMEOUT = flags.DEFINE_integer("timeout", 600, "Seconds until a step of a mutation's tests counts as hanging.")
OWN = flags.DEFINE_bool("own", False, "Run only the tests that mirror the module: quicker, but kills fewer.")
NOTHING_RAN = 5  # pytest's exit code where all tests are marked slow, or need a library that is not installed
WHOLE_RUNS = ["tests/training/test_loop.py", "tests/test_main.py", "tests/test_every_task.py"]
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


@functools.cache  # thousands of mutations ask, and the answer takes reading all tests
def tests_of(path: Path, root: Path) -> list[list[str]]:
    """Return the steps of tests for a module, each a list of paths: its own, its room's and its users', whole runs."""
    module = path.relative_to(root / "jformer").with_suffix("")
    if module.name == "__init__":
        module = module.parent
    name, tests = ".".join(("jformer", *module.parts)), root / "tests"
    own = {tests / module.parent / f"test_{module.name}.py", tests / module / f"test_{module.name}.py"}
    near = {file for file in tests.rglob("test_*.py") if re.search(rf"\b{name}\b", file.read_text())}
    if len(module.parts) > 1:
        near |= set((tests / module.parts[0]).rglob("test_*.py"))
    whole = {root / run for run in WHOLE_RUNS}
    steps = [own, near - own - whole, whole - own]
    return [sorted(str(file.relative_to(root)) for file in step if file.exists()) for step in steps]


def fate(mutation: Mutation, steps: list[list[str]], root: Path) -> str:
    """Run the tests on the mutated package; return the fate of the mutation.

    A test that fails without the mutation too kills nothing, and is left out.
    """
    original, broken = mutation.path.read_text(), list[str]()
    try:
        for step in filter(None, steps):
            while True:
                mutation.path.write_text(mutation.apply())
                failed = first_failure([*step, *(f"--deselect={test}" for test in broken)], root)
                mutation.path.write_text(original)
                if not failed:
                    break
                if not first_failure([failed], root):
                    return f"killed by {failed}"
                broken.append(failed)
    except subprocess.TimeoutExpired:
        return "killed, hangs"
    finally:
        mutation.path.write_text(original)
    return "SURVIVED"


def first_failure(arguments: list[str], root: Path) -> str:
    """Run tests until one fails; return its name, or the file that cannot be collected, or nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, timeout=TIMEOUT.value, capture_output=True, text=True)
    if done.returncode in (0, NOTHING_RAN):
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return re.sub(r"^\w+ | - .*", "", failed[0]) if failed else arguments[0]


def main(argv: list[str]) -> None:
    """Print the fate of each mutation, and the share killed."""
    del argv
    smoke = smoke_sizes(number=1)  # of one small module, against the tests that mirror it
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        archive = subprocess.run(["git", "archive", COMMIT.value], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        files = [root / "jformer" / "data" / "text.py"] if smoke else sorted((root / "jformer").rglob("*.py"))
        drawn = sorted((each for file in files for each in mutations(file)), key=Mutation.rank)
        if OWN.value:
            drawn = [each for each in drawn if tests_of(each.path, root)[0]]
        found = []
        for each in drawn[: NUMBER.value]:
            steps = tests_of(each.path, root)
            found.append(fate(each, steps[:1] if smoke or OWN.value else steps, root))
            place = f"{each.path.relative_to(root)}:{each.node.lineno}"
            print(f"{place}  {each.line()}\n    {ast.unparse(each.node)!r} → {each.text!r}: {found[-1]}", flush=True)
    killed = sum(each.startswith("killed") for each in found)
    print(f"{len(drawn):,} possible mutations, {len(found)} drawn, {killed} killed: {killed / len(found):.0%}")


if __name__ == "__main__":
    app.run(main)
