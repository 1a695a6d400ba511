"""What does each test file cost, which lines of the package does it alone reach, and which tests reach none alone?

As a pytest plugin it writes a line per test: CPU seconds of the process and of the children that it waited for, with
setup and teardown, and the number of programs compiled or loaded from the cache. CPU seconds do not depend on other
load; they include compilation where JAX_COMPILATION_CACHE_DIR is empty. Under coverage each line of the package is
attributed to the tests that reached it; what imports and children reach, to none.

Command:  python -m pytest -p experiments.checks.costs_of_tests --costs=costs.jsonl
          coverage run -m pytest -p experiments.checks.costs_of_tests; coverage combine --quiet; coverage report
          python -m experiments.checks.costs_of_tests --before=costs.jsonl [--after=later.jsonl] [--reached=.coverage]
          [--mutations=mutations.jsonl] [--over=SECONDS] [--smoke]
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from absl import app, flags

from experiments.measure import ROOT, smoke_sizes

BEFORE = flags.DEFINE_string("before", None, "File with the costs of a run.")
AFTER = flags.DEFINE_string("after", None, "File with those of a later run; a test's last line counts.")
REACHED = flags.DEFINE_string("reached", None, "Combined data file of coverage.")
MUTATIONS = flags.DEFINE_string("mutations", None, "What experiments.checks.mutations has written.")
OVER = flags.DEFINE_float("over", None, "Of tests that cost more seconds list those that could be slow.")
ROWS = 30  # files with a row of their own
COMPILED = "/jax/core/compile/backend_compile_duration"
KEPT = "/jax/compilation_cache/cache_hits"


class Costs:
    """What each test costs, written as it ends: processes append to one file, a line at a time."""

    def __init__(self, path: Path | None) -> None:
        import jax  # once tests/conftest.py has chosen its options

        self._path = path
        self._programs: Counter[str] = Counter()  # JAX's events → how many
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: self._programs.update([event]))
        jax.monitoring.register_event_listener(lambda event, **_: self._programs.update([event]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test, with its setup and teardown."""
        put_down_to(item.nodeid)
        before, programs = cpu_seconds(), self._programs.copy()
        result = yield
        seconds, programs = cpu_seconds() - before, self._programs - programs
        row = {"test": item.nodeid, "slow": "slow" in item.keywords, "seconds": round(seconds, 3)}
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(row | {"programs": programs[COMPILED], "kept": programs[KEPT]}) + "\n")
        return result


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def put_down_to(test: str) -> None:
    """Attribute the lines that are reached from now on to a test, if coverage runs."""
    try:
        from coverage import Coverage
    except ImportError:
        return
    if running := Coverage.current():
        running.switch_context(test)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --costs."""
    parser.addoption("--costs", default="", help="file that gets a line with the costs of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the processes that run tests."""
    path = config.getoption("--costs")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(Path(path).absolute() if path else None))


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return test → its row; for tests that ran twice the last line counts."""
    return {row["test"]: row for row in map(json.loads, path.read_text().splitlines())}


def costs(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return test file → its seconds, tests and programs."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for test, row in rows.items():
        values = row["seconds"], 1, row["programs"]
        found[test.partition("::")[0]] = [a + b for a, b in zip(found[test.partition("::")[0]], values, strict=True)]
    return dict(found)


def reached(path: Path) -> dict[tuple[str, int], list[str]]:
    """Return file and line of the package → the tests that reach it; "" for imports and children."""
    from coverage import CoverageData

    data = CoverageData(str(path))
    data.read()
    lines = ((file, data.contexts_by_lineno(file)) for file in data.measured_files())
    return {(file, line): tests for file, found in lines for line, tests in found.items()}


def only_reached(lines: Mapping[tuple[str, int], list[str]]) -> Counter[str]:
    """Return test file → the lines that no other test file reaches, nor any import or child."""
    files = ({test.partition("::")[0] for test in tests} for tests in lines.values())
    return Counter(file for (file, *others) in files if file and not others)


def noticed(path: Path) -> dict[str, tuple[int, int]]:
    """Return test file → the mutations that it alone notices, and how many it reaches."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    reached = Counter(file for row in rows for file in row["reached_by"])
    judged = [row for row in rows if row["in_time"]]
    alone = Counter(file for row in judged if len(row["noticed"]) == 1 for file in row["noticed"])
    return {file: (alone[file], reached[file]) for file in reached}


def reaching_nothing_alone(
    lines: Mapping[tuple[str, int], list[str]], seconds: Mapping[str, float], over: float
) -> list[str]:
    """Return expensive tests, most expensive first, without all of which each line is reached as before."""
    left = {line: {*tests} for line, tests in lines.items()}
    by_test = defaultdict(list)
    for line, tests in lines.items():
        for test in tests:
            by_test[test].append(line)
    found = []
    for test in sorted(
        (test for test in by_test if seconds.get(test, 0) > over), key=seconds.__getitem__, reverse=True
    ):
        if all(len(left[line]) > 1 for line in by_test[test]):
            found.append(test)
            for line in by_test[test]:
                left[line].remove(test)
    return found


def table(
    before: Mapping[str, Any], after: Mapping[str, Any], only: Mapping[str, int], kills: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    """Yield the rows of the table, the most expensive files first and all others summed."""
    yield "| file | tests | programs | CPU seconds | later | lines it alone reaches | mutations it alone notices |"
    yield "|---|---|---|---|---|---|---|"
    files = sorted(before, key=lambda file: -before[file][0])
    parts = {**{file: [file] for file in files[:ROWS]}, "the others": files[ROWS:], "all": files}
    for name, part in parts.items():
        if not part:
            continue
        seconds, tests, programs = (sum(column) for column in zip(*(before[file] for file in part), strict=True))
        later = f"{sum(after.get(file, before[file])[0] for file in part):.1f}" if after else ""
        alone = str(sum(only.get(file, 0) for file in part)) if only else ""
        killed = sum(kills.get(file, (0, 0))[0] for file in part)
        of = f" of {kills.get(name, (0, 0))[1]}" if len(part) == 1 else ""
        noted = f"{killed}{of}" if kills else ""
        yield f"| {name.removeprefix('tests/')} | {tests} | {programs} | {seconds:.1f} | {later} | {alone} | {noted} |"


def measure(tests: str, costs: Path, *under: str) -> None:
    """Run tests with this plugin, below the module and arguments of `under`; append what each costs to a file."""
    plugin = ["-p", "no:cacheprovider", "-p", "experiments.checks.costs_of_tests", f"--costs={costs}"]
    subprocess.run([sys.executable, "-m", *under, "pytest", "-q", "-n0", *plugin, tests], cwd=ROOT, check=True)


def rows_of_one_file() -> dict[str, dict[str, Any]]:
    """Return what each test of tests/conftest.py costs, by running them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "costs.jsonl")
        measure("tests/test_conftest.py", path)
        return rows_of(path)


def main(_: list[str]) -> None:
    """Print the table."""
    if not smoke_sizes() and not BEFORE.value:
        raise app.UsageError("--before=FILE names the costs of a run")
    rows = rows_of(Path(BEFORE.value)) if BEFORE.value else rows_of_one_file()
    after = costs(rows_of(Path(AFTER.value))) if AFTER.value else {}
    lines = reached(Path(REACHED.value)) if REACHED.value else {}
    kills = noticed(Path(MUTATIONS.value)) if MUTATIONS.value else {}
    print("\n".join(table(costs(rows), after, only_reached(lines), kills)))
    if OVER.value is not None:
        seconds = {test: row["seconds"] for test, row in rows.items()}
        for test in reaching_nothing_alone(lines, seconds, OVER.value):
            print(f"{seconds[test]:6.1f} s, reaches no line alone: {test}")


if __name__ == "__main__":
    app.run(main)
