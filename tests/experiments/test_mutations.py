import json
import subprocess

from experiments.checks import mutations
from experiments.checks.costs_of_tests import noticed


def row(in_time, *files):
    return {"noticed": {file: f"{file}::test" for file in files}, "in_time": in_time, "reached_by": ["a.py", "b.py"]}


def test_mutations_that_were_given_up_count_as_nothing_else():
    rows = [row(True), row(False), row(True, "a.py"), row(False, "a.py"), row(False, "a.py", "b.py")]
    assert mutations.summary(rows, set()) == "noticed by two files: 1, by one: 1, by none: 1; given up: 2"
    assert mutations.summary(rows, {"b.py::test"}) == "noticed by two files: 0, by one: 1, by none: 1; given up: 3"


def test_a_file_notices_alone_what_others_had_time_to_notice(tmp_path):
    path = tmp_path / "mutations.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (row(True, "a.py"), row(False, "a.py"))))
    assert noticed(path) == {"a.py": (1, 2), "b.py": (0, 2)}


def test_a_hang_before_any_test_is_put_down_to_no_file(tmp_path, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert mutations.failures(["tests/a.py::test"], tmp_path, 1.0, 2) == {}
