"""The blocks of docs/tutorials.md run one after the other, with trainings of a few updates."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorials.md"
BLOCK = re.compile(r"```(?P<language>python|bash)\n(?P<code>.*?)```", re.DOTALL)
UPDATES = re.compile(r"(num_steps|\w+_every)(\"?[=:] ?)(\d+)")
SHORTER = 100  # times


def shortened(code):
    """Return a block whose trainings have a hundredth of their updates, and at least one."""
    return UPDATES.sub(lambda found: f"{found[1]}{found[2]}{-(-int(found[3]) // SHORTER)}", code)


def test_blocks_have_a_hundredth_of_their_updates():
    assert shortened('num_steps=600, eval_every=0, "train.num_steps": 200') == (
        'num_steps=6, eval_every=0, "train.num_steps": 2'
    )


@pytest.mark.slow
def test_every_block_runs_in_an_empty_folder(tmp_path, monkeypatch):
    pytest.importorskip("optuna")  # of the extra for sweeps
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # those of the tests: the last block sets its own
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names = {}
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        code = shortened(block["code"])
        if block["language"] == "python":
            exec(compile(code, PAGE, "exec"), names)
        else:
            done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True)
            assert done.returncode == 0, code + done.stdout[-2_000:] + done.stderr[-4_000:]
    assert (tmp_path / "runs" / "parts" / "report" / "index.html").exists()
    assert (tmp_path / "runs" / "meshes").is_dir()
