"""A slice of the campaign: two damages of every kind of file, on a run that is saved and not trained."""

import dataclasses
import gc
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from etils import epath

from jformer import main
from jformer.evaluation import results
from jformer.trainer import train
from jformer.training.record import JsonlWriter
from jformer.training.state import as_items
from tests.faults import __main__ as campaign
from tests.faults.children import run
from tests.faults.corruptions import KINDS, Damaged, damage, flip
from tests.faults.guards import GUARDS, without
from tests.faults.runs import EVERY, OPTIONS, ROOT, SAVED
from tests.faults.verdicts import GOOD
from tests.slow import slow_but

# Coroutines of Orbax that are not finished when reading fails, and that Python tells of some time later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Return a run with two checkpoints, rows and scores, to be damaged."""
    folder, options = tmp_path_factory.mktemp("faults"), {**OPTIONS, "train.num_steps": SAVED}

    def config(cache):
        flags = [f"--config.{key}={value}" for key, value in {**options, "data.cache_dir": cache}.items()]
        arguments = ["jformer", f"--config={ROOT}/tests/small_run.py", f"--workdir={folder}", *flags]
        return main.configure(*main.read_flags(arguments))

    def saved(*, state, progress, checkpoints, **_):
        rows = JsonlWriter(folder / "base" / "metrics.jsonl")
        for step in range(1, SAVED + 1):
            rows.write({"step": step, "split": "train", "loss": 1 / step})
            progress.step = progress.rows = step
            if step % EVERY == 0:
                items = as_items(state.replace(step=jnp.int32(step)))
                checkpoints.save(step, items, dataclasses.asdict(progress), None)
        rows.close()

    train(config(folder / "tokens"), epath.Path(folder / "base"), saved)
    test = {"bleu": {"score": 30.0}, "checksum": "of the text"}
    results.save(folder / "base", {"test": test, "run": {"updates": SAVED}})
    (folder / "copies").mkdir()
    yield Damaged(folder / "base", folder / "tokens", config(folder / "copies" / "cache"), folder / "copies")
    gc.collect()  # what pytestmark leaves unsaid must be said before the last test ends


@pytest.mark.parametrize(("given", "expected"), [({}, [300, 1000]), ({"kills": 2}, [2, 0])])
def test_without_a_kind_the_campaign_is_whole(monkeypatch, given, expected):
    values = {name: SimpleNamespace(value=given.get(name)) for name in campaign.KINDS}
    monkeypatch.setattr(campaign.flags, "FLAGS", values)
    assert [campaign.cases_of(kind) for kind in ("kills", "calls")] == expected


@pytest.mark.parametrize("number", slow_but(range(2 * len(KINDS)), 1, 3, 5, 7, 9, 10, 12, 14, 15))
def test_damage_is_repaired_passed_over_or_refused_by_name(damaged, number):
    fault, verdict = damaged.corrupt(random.Random(f"test {number}"), number)
    assert verdict.outcome in GOOD, (fault, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, guard in GUARDS.items() if guard.kinds])
def test_a_guard_that_is_missing_is_noticed(damaged, name):
    with without(name):
        cases = damaged.cases(GUARDS[name].kinds, range(60))  # some damage is noticed by others, too
        assert any(verdict.outcome not in GOOD for _, verdict in cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, guard in GUARDS.items() if guard.test])
def test_a_test_fails_without_its_guard(name):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.faults.guards", f"--without={name}"]
    done = subprocess.run([*command, f"tests/{GUARDS[name].test}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr


def test_what_is_damaged_is_never_what_it_was(tmp_path):
    for seed in range(300):
        path = tmp_path / "file"
        path.write_bytes(bytes(range(40, 60)))
        damage(path, random.Random(seed))
        assert not path.exists() or path.read_bytes() != bytes(range(40, 60))


def test_a_flip_changes_one_bit():
    content = bytearray(8)
    flip(content, random.Random(0))
    assert sum(byte.bit_count() for byte in content) == 1


@pytest.mark.slow
def test_a_child_heeds_signals_that_the_campaign_was_started_to_ignore(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a command in the background of a script
    try:
        end = run(lambda: signal.getsignal(signal.SIGINT) == signal.SIG_IGN, tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.code == 0


@pytest.mark.slow
def test_the_command_goes_through_every_kind_and_ends_in_a_table(tmp_path):
    asked = {"kills": 2, "calls": 3, "corruptions": 8, "stops": 1, "full": 2, "configs": 50}
    command = [sys.executable, "-m", "tests.faults", f"--out={tmp_path}", *(f"--{k}={n}" for k, n in asked.items())]
    for _ in range(2):  # the second time all is done
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert [int(line.split("|")[2]) for line in table] == list(asked.values())
    assert all(line.endswith("| 0 |") for line in table)
    assert len((tmp_path / "cases.jsonl").read_text().splitlines()) == sum(asked.values())
