"""A model that several processes share out becomes the run that one process makes of it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jformer.tools.hf.convert import Texts, import_model
from jformer.tools.hf.write_model import export_model
from tests.tools.hf import small_runs

ROOT = Path(__file__).parents[3]


def files(run):
    """Return what a run holds but for its arrays, which lie in other pieces."""
    return {
        path.relative_to(run): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and "params" not in path.parts and "manifest" not in path.parts and path.suffix == ".json"
    }


@pytest.fixture
def together(tmp_path):
    """Import a directory in two processes, and return how each ended and what it said."""

    def start(directories, workdir):
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = [f"--coordinator=127.0.0.1:{server.getsockname()[1]}", "--processes=2"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "jformer.hf", "import", directory, f"--workdir={workdir}", *place,
                 f"--process={i}"],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            )
            for i, directory in enumerate(directories)
        ]  # fmt: skip
        said = [process.communicate(timeout=120) for process in started]
        return [(process.returncode, *out) for process, out in zip(started, said, strict=True)]

    return start


@pytest.mark.slow
def test_two_processes_make_the_run_that_one_makes(tmp_path, together):
    export_model(str(small_runs.bart(tmp_path / "bart")), tmp_path / "model")
    import_model(tmp_path / "model", str(tmp_path / "one"), Texts())
    (first, out, err), (second, silent, _) = together([tmp_path / "model"] * 2, tmp_path / "two")
    assert (first, second, silent) == (0, 0, ""), err
    assert out.startswith(f"{tmp_path / 'two'}: bart, ")
    assert files(tmp_path / "two") == files(tmp_path / "one")
    for name in ("one", "two"):
        export_model(str(tmp_path / name), tmp_path / f"{name}-again")
    theirs = [(tmp_path / f"{name}-again" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert theirs[0] == theirs[1] == (tmp_path / "model" / "model.safetensors").read_bytes()
    pieces = [*(tmp_path / "two" / "checkpoints" / "0" / "params").glob("ocdbt.process_*")]
    assert len(pieces) == 2
    sizes = [sum(path.stat().st_size for path in piece.rglob("*") if path.is_file()) for piece in pieces]
    assert max(sizes) < 2 * np.mean(sizes)


@pytest.mark.slow
def test_processes_that_see_other_models_are_refused_by_all(tmp_path, together):
    for name in ("bart", "t5"):
        export_model(str(getattr(small_runs, name)(tmp_path / f"run-{name}")), tmp_path / name)
    ends = together([tmp_path / "bart", tmp_path / "t5"], tmp_path / "two")
    assert [code for code, _, _ in ends] == [2, 2]
    assert "config.json" in ends[0][2]
    assert not (tmp_path / "two").exists()
