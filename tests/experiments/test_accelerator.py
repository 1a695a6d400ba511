import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from absl import app

from experiments.accelerator import WEIGHTS, Table, reason, run_rows
from experiments.checks import accelerator_rows
from experiments.checks.accelerator_rows import ROWS, visible_gpus

ROOT = Path(__file__).parents[2]
FOUND = "import json; print(json.dumps({'what': 'x', 'text': 'fine', 'ok': True, 'figures': {'ms': 1}}), flush=True)"
HANGS = f"{FOUND}; import time; time.sleep(60)"


def test_a_row_that_fails_crashes_or_hangs_costs_itself_alone(tmp_path, capsys):
    bodies = {
        "right": FOUND,
        "raises": f"{FOUND}; raise MemoryError('RESOURCE_EXHAUSTED: out of memory')",
        "crashes": "import os; os.abort()",
        "is wrong": FOUND.replace("True", "False"),
        "is silent": "",
        "hangs": HANGS,
        "last": FOUND,
    }
    table = Table(tmp_path / "here" / "found.json", {"commit": "of this test"})
    weights = dict.fromkeys(bodies, 1.0) | {"hangs": 0.01}
    began = time.monotonic()
    run_rows({row: [sys.executable, "-c", body] for row, body in bodies.items()}, 30.0, table, weights)
    assert time.monotonic() - began < 20
    written = json.loads((tmp_path / "here" / "found.json").read_text())
    assert written["commit"] == "of this test"
    assert written["rows"] == table.rows
    texts = {(each["row"], each["what"]): each["text"] for each in table.rows}
    assert texts["raises", "failed"] == "exit code 1: MemoryError: RESOURCE_EXHAUSTED: out of memory"
    assert texts["crashes", "failed"].startswith("signal SIGABRT")
    assert texts["is silent", "failed"] == "it found nothing"
    assert texts["hangs", "stopped"].startswith("not done after ")
    assert texts["raises", "x"] == texts["last", "x"] == "fine"  # what was found before and after
    assert table.rows[0]["ms"] == 1
    assert table.wrong == ["raises", "crashes", "is wrong", "is silent", "hangs"]
    assert len(capsys.readouterr().out.splitlines()) == len(table.rows)


def test_a_later_command_adds_its_rows_to_those_found_before(tmp_path):
    path, facts = tmp_path / "found.json", {"commit": "one"}
    for rows in (["a", "b"], ["b", "c"]):
        table = Table(path, facts)
        for row in rows:
            table.add(row, "x", f"of {rows}", True, 0.0)
    assert [(row["row"], row["text"]) for row in json.loads(path.read_text())["rows"]] == [
        ("a", "of ['a', 'b']"), ("b", "of ['b', 'c']"), ("c", "of ['b', 'c']"),
    ]  # fmt: skip
    assert {row["row"] for row in table.rows} == {"b", "c"}  # whose outcome counts
    with pytest.raises(app.UsageError, match=r"has findings of .*'one'.*name another --output"):
        Table(path, {"commit": "two"})


def test_rows_without_time_are_named_and_are_not_wrong(tmp_path, capsys):
    table = Table(tmp_path / "found.json", {})
    run_rows({"one": [], "two": []}, 1.0, table, {"one": 1.0, "two": 1.0})
    assert (table.rows, table.wrong) == ([], [])
    assert capsys.readouterr().out == "no time for: one, two; --rows=one,two runs them\n"


def test_the_reason_is_the_line_that_says_why():
    assert reason("Traceback\n  File x\njaxlib.XlaRuntimeError: INTERNAL: no\n\nwarning: slow") == (
        "jaxlib.XlaRuntimeError: INTERNAL: no"
    )
    assert (
        reason("jformer: mesh.data=3 must divide\nRuntimeError: training ended") == "jformer: mesh.data=3 must divide"
    )
    assert reason("\n") == "no output"


def test_every_row_has_its_share_of_the_time():
    assert [*WEIGHTS] == [*ROWS]


@pytest.mark.parametrize(
    ("count", "named", "found"),
    [
        (2, None, ["0", "1"]), (8, "3,5", ["3", "5"]), (8, "GPU-a, GPU-b", ["GPU-a", "GPU-b"]), (8, "", []),
        (8, "2,-1,3", ["2"]), (0, "0,1", []),
    ],
)  # fmt: skip
def test_gpus_are_those_that_the_environment_names(monkeypatch, count, named, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus(count) == found


def test_the_first_updates_of_pytorch_are_not_timed(monkeypatch):
    slow = [0.4, 0.4]  # seconds of what compiles

    def run():
        seconds = slow.pop() if slow else 0.0
        time.sleep(seconds)
        return seconds, 1.0

    peer = types.SimpleNamespace(STEPS={"transformer_base": lambda told: run}, has_gpu=lambda: False)
    peer.searches = lambda *_: []
    monkeypatch.setitem(sys.modules, "experiments.checks.accelerator_torch", peer)
    monkeypatch.setattr("experiments.checks.accelerator_torch", peer, raising=False)
    monkeypatch.setattr(accelerator_rows, "find_spec", lambda name: True)
    (found,) = accelerator_rows.pytorch(small=True)
    assert found.figures["ms"] < 100


@pytest.mark.slow
def test_every_row_works_in_small(tmp_path):
    output = tmp_path / "found.json"
    environment = {**os.environ, "JFORMER_TEST_PLATFORM": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "experiments.accelerator", "--smoke", "--minutes=30", f"--output={output}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each["row"] for each in json.loads(output.read_text())["rows"]} == {*ROWS}
