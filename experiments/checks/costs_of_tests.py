"""What does each test file cost, and which lines of the package does it alone reach?

As a pytest plugin it writes a line per test: CPU seconds of the process and of the children that it waited for, with
setup and teardown, and the number of programs compiled or loaded from the cache. CPU seconds do not depend on other
load; they include compilation where JAX_COMPILATION_CACHE_DIR is empty. Under coverage each line and branch of the
package is attributed to the test file that reached it; what imports and children reach, to none.

Command:  python -m pytest -p experiments.checks.costs_of_tests --costs=costs.jsonl
          coverage run -m pytest -p experiments.checks.costs_of_tests; coverage combine --quiet; coverage report
          python -m experiments.checks.costs_of_tests --before=costs.jsonl [--after=later.jsonl] [--reached=.coverage]
          [--smoke]
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
        put_down_to(item.nodeid.partition("::")[0])
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


def put_down_to(file: str) -> None:
    """Attribute the lines that are reached from now on to a test file, if coverage runs."""
    try:
        from coverage import Coverage
    except ImportError:
        return
    if running := Coverage.current():
        running.switch_context(file)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --costs."""
    parser.addoption("--costs", default="", help="file that gets a line with the costs of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in the processes that run tests."""
    path = config.getoption("--costs")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(Path(path).absolute() if path else None))


def costs(path: Path) -> dict[str, list[float]]:
    """Return test file → its seconds, tests and programs; for tests that ran twice the last line counts."""
    rows = {row["test"]: row for row in map(json.loads, path.read_text().splitlines())}
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for test, row in rows.items():
        values = row["seconds"], 1, row["programs"]
        found[test.partition("::")[0]] = [a + b for a, b in zip(found[test.partition("::")[0]], values, strict=True)]
    return dict(found)


def only_reached(path: Path) -> Counter[str]:
    """Return test file → the lines that no other test file reaches, nor any import or child."""
    from coverage import CoverageData

    data, found = CoverageData(str(path)), Counter[str]()
    data.read()
    for file in data.measured_files():
        found.update(names[0] for names in data.contexts_by_lineno(file).values() if len(names) == 1 and names[0])
    return found


def table(before: Mapping[str, Any], after: Mapping[str, Any], only: Mapping[str, int]) -> Iterator[str]:
    """Yield the rows of the table, the most expensive files first and all others summed."""
    yield "| file | tests | programs | CPU seconds | later | lines that it alone reaches |\n|---|---|---|---|---|---|"
    files = sorted(before, key=lambda file: -before[file][0])
    parts = {**{file: [file] for file in files[:ROWS]}, "the others": files[ROWS:], "all": files}
    for name, part in parts.items():
        if not part:
            continue
        seconds, tests, programs = (sum(column) for column in zip(*(before[file] for file in part), strict=True))
        later = f"{sum(after.get(file, before[file])[0] for file in part):.1f}" if after else ""
        alone = str(sum(only.get(file, 0) for file in part)) if only else ""
        yield f"| {name.removeprefix('tests/')} | {tests} | {programs} | {seconds:.1f} | {later} | {alone} |"


def cost_of_one_file() -> dict[str, list[float]]:
    """Return what the tests of tests/conftest.py cost, by running them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "costs.jsonl")
        plugin = ["-p", "no:cacheprovider", "-p", "experiments.checks.costs_of_tests", f"--costs={path}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n0", *plugin, "tests/test_conftest.py"], cwd=ROOT, check=True
        )
        return costs(path)


def main(_: list[str]) -> None:
    """Print the table."""
    if not smoke_sizes() and not BEFORE.value:
        raise app.UsageError("--before=FILE names the costs of a run")
    before = costs(Path(BEFORE.value)) if BEFORE.value else cost_of_one_file()
    after = costs(Path(AFTER.value)) if AFTER.value else {}
    only = only_reached(Path(REACHED.value)) if REACHED.value else {}
    print("\n".join(table(before, after, only)))


if __name__ == "__main__":
    app.run(main)
