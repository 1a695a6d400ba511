"""A pytest plugin: the tests that judge a mutation, in a given order, until enough of their files have failed.

It has no flags of its own, which the experiments that are tested might define, too. mutations.py starts it.
"""

import json
import time
from pathlib import Path

import pytest


class Judge:
    """Runs the given tests in their order, each file until its first failure, and all until enough files failed."""

    def __init__(self, path: Path) -> None:
        self._path, given = path, json.loads(path.read_text())  # replaced by what failed, and what runs
        self._order = {test: place for place, test in enumerate(given["tests"])}
        self._end, self._enough = time.monotonic() + given["seconds"], given["enough"]
        self._failed: dict[str, str] = {}  # test file → the test

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the given tests, in their order."""
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip the tests of a file that noticed the mutation, and all when the rest does not matter."""
        if len(self._failed) >= self._enough or time.monotonic() > self._end:
            item.session.shouldstop = "judged"
        if item.session.shouldstop or file_of(item.nodeid) in self._failed:
            pytest.skip("the mutation is judged without it")
        self._write(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Note a test that fails, or a file that cannot be collected."""
        if report.failed:
            self._failed.setdefault(file_of(report.nodeid), report.nodeid)
            self._write("")

    pytest_collectreport = pytest_runtest_logreport

    def _write(self, running: str) -> None:
        self._path.write_text(json.dumps({"failed": self._failed, "running": running}))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --judge."""
    parser.addoption("--judge", help="file with the tests that judge a mutation")


def pytest_configure(config: pytest.Config) -> None:
    """Run the tests of --judge alone."""
    config.pluginmanager.register(Judge(Path(config.getoption("--judge"))))


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]
