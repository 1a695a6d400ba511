"""What one process alone finds damaged, several real processes over Gloo pass over together."""

import os
import sys

import pytest

from jformer.parallel.processes.children import free_port
from tests.parallel.processes.processes import ROOT, Processes


@pytest.mark.slow
def test_damage_that_one_of_two_processes_finds_lets_both_take_the_same_older_step(tmp_path):
    place = [sys.executable, "-m", "tests.checkpoints.restoring", str(free_port()), "2"]
    commands = [[*place, str(i), str(tmp_path / "checkpoints")] for i in range(2)]
    flags = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}  # one device each
    group = Processes(tmp_path / "said", commands, [os.environ | flags] * 2)
    try:
        group.end(0, 0)
    finally:
        group.kill()
    for i in range(2):
        step, bits, undecodable = (group.folder / f"{i}.out").read_text().splitlines()
        assert step == "1"
        assert "/checkpoints/3/params: the bits of w are not those that were saved" in bits
        assert "/checkpoints/2: " in undecodable
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "broken-2", "broken-3"}
