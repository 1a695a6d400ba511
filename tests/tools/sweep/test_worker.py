import errno
import fcntl
import signal
import threading

import pytest
from etils.epath import Path

from jformer.config.config_files import override
from jformer.errors import UserError
from jformer.parallel.processes.children import signals_to
from jformer.tools.sweep.worker import LEASE_LOST, Worker
from tests import small_run
from tests.tools.sweep.sweeps import SEARCH, SWEEP, folder_of, open_queue, stand_in, starts

ONE = SWEEP.replace("[1.0, 2.0, 3.0]", "[1.0]")
TELL = "def after(step): os.kill(os.getppid(), signal.SIGTERM) if attempt == 0 and step == 2 else None"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Start processes without a function between fork and exec: JAX, which the tests import, warns of that."""
    monkeypatch.setattr("jformer.tools.sweep.worker.die_with_parent", lambda: None)


def make_worker(folder, command, code=ONE, **options):
    queue = open_queue(folder, code, **{"SEEDS": (0,), **options})
    return Worker(queue, Path(folder) / "sweep", command)


def only(worker):
    (trial,) = worker._queue.trials()
    return trial


def test_all_trials_are_done_each_in_a_directory_of_its_own(tmp_path):
    worker = make_worker(tmp_path, stand_in(), SWEEP, SEEDS=(0, 1))
    assert worker.work() == 0
    trials = worker._queue.trials()
    assert [trial.state for trial in trials] == ["complete"] * 6
    assert [round(trial.value, 3) for trial in trials] == [1.333, 2.333, 3.333, 2.333, 3.333, 4.333]
    assert trials[0].metrics == {"valid/loss": trials[0].value, "run/updates": 3, "run/wall_seconds": 1.0}
    assert all(starts(tmp_path, trial) == trial.attempts == 1 and trial.seconds > 0 for trial in trials)
    assert len({trial.name for trial in trials}) == 6
    assert make_worker(tmp_path, "false", SWEEP, SEEDS=(0, 1)).work() == 0  # nothing is left to do


def test_a_process_that_dies_is_started_again_where_it_was(tmp_path):
    worker = make_worker(
        tmp_path, stand_in("def after(step): attempt < 2 and step == attempt + 1 and os.kill(os.getpid(), 9)")
    )
    assert worker.work() == 0
    assert (only(worker).state, only(worker).attempts, starts(tmp_path, only(worker))) == ("complete", 3, 3)
    assert len((folder_of(tmp_path, only(worker)) / "metrics.jsonl").read_text().splitlines()) == 3


MISTAKE = "print('jformer: d_model must be even', file=sys.stderr); print('warning'); sys.exit(2)"


@pytest.mark.parametrize(
    ("command", "attempts", "error"),
    [
        (stand_in("raise RuntimeError('out of memory')"), 3, "RuntimeError: out of memory (exit code 1)"),
        (stand_in(MISTAKE), 1, "d_model must be even"),
        ("false", 3, "no output (exit code 1)"),
    ],
    ids=["crashes", "a mistake", "silence"],
)
def test_a_trial_fails_after_three_crashes_or_a_mistake_with_its_last_error(tmp_path, command, attempts, error):
    worker = make_worker(tmp_path, command, SWEEP.replace("2.0, 3.0", "2.0"))
    assert worker.work() == 0
    trials = worker._queue.trials()
    assert [(trial.state, trial.attempts, trial.error) for trial in trials] == [("failed", attempts, error)] * 2


def test_a_metric_that_is_no_number_fails_its_trial_alone(tmp_path):
    code = "key = 'config.optim.learning_rate'; options[key] = options[key].replace('1.0', 'nan')"
    worker = make_worker(tmp_path, stand_in(code), SWEEP.replace(", 3.0", ""))
    assert worker.work() == 0
    first, second = worker._queue.trials()
    assert (first.state, first.error) == ("failed", "valid/loss is nan: the trial diverged")
    assert second.state == "complete"


def test_a_metric_that_no_trial_reports_stops_the_sweep(tmp_path):
    worker = make_worker(tmp_path, stand_in(), SWEEP, METRIC="valid/nll")
    with pytest.raises(UserError, match="no trial reports METRIC='valid/nll'; did you mean valid/loss"):
        worker.work()
    assert [trial.state for trial in worker._queue.trials()] == ["failed", "waiting", "waiting"]


def test_metrics_that_cannot_be_read_fail_their_trial_alone(tmp_path):
    code = "def after(step): options['config.optim.learning_rate'] == '1.0' and rows.write('garbage\\n')"
    worker = make_worker(tmp_path, stand_in(code), SWEEP.replace(", 3.0", ""))
    assert worker.work() == 0
    first, second = worker._queue.trials()
    assert first.state == "failed"
    assert "metrics.jsonl:2 is not a row of metrics" in first.error
    assert second.state == "complete"


def test_a_trial_whose_metrics_are_out_of_reach_for_a_moment_is_tried_again(tmp_path, monkeypatch):
    worker, kind, calls = make_worker(tmp_path, stand_in()), type(Path(tmp_path)), []
    read = kind.read_bytes

    def read_bytes(path):
        calls.extend([path] * (path.name == "metrics.jsonl"))
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    monkeypatch.setattr(kind, "read_bytes", read_bytes)
    assert worker.work() == 0
    assert (only(worker).state, only(worker).attempts, len(calls)) == ("complete", 2, 2)


def test_metrics_that_a_pruner_cannot_read_fail_their_trial_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("jformer.tools.sweep.worker.PRUNE", 0.0)
    options = {"TRIALS": 2, "SAMPLER": "random", "PRUNER": "median"}
    worker = make_worker(tmp_path, stand_in("def after(step): rows.write('garbage\\n')", pause=0.1), SEARCH, **options)
    assert worker.work() == 0
    assert ["metrics.jsonl:2 is not a row" in trial.error for trial in worker._queue.trials()] == [True, True]


def test_told_to_stop_it_lets_the_trial_save_and_gives_it_back(tmp_path):
    worker = make_worker(tmp_path, stand_in(TELL, steps=100, pause=0.01))
    with signals_to(worker.stop):
        assert worker.work() == 143
    trial = only(worker)
    assert (trial.state, trial.attempts, trial.error) == ("waiting", 1, "")
    rows = (folder_of(tmp_path, trial) / "metrics.jsonl").read_text()
    assert 2 <= rows.count("\n") < 100
    again = make_worker(tmp_path, stand_in(TELL, steps=100))
    assert again.work() == 0
    assert (only(again).state, only(again).attempts) == ("complete", 2)
    assert (folder_of(tmp_path, trial) / "metrics.jsonl").read_text().startswith(rows)


def test_told_to_stop_twice_it_ends_the_trial(tmp_path):
    code = """
def after(step):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
"""
    worker = make_worker(tmp_path, stand_in(code, steps=1000, pause=0.05))
    with signals_to(worker.stop):
        assert worker.work() == 143
    assert only(worker).state == "waiting"


def test_a_terminal_that_hangs_up_twice_lets_the_trial_save(tmp_path):
    code = """
def save(*_):
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(0.3)
    (folder / "saved").touch()
    sys.exit(143)

def after(step):
    signal.signal(signal.SIGTERM, save)
    os.kill(os.getppid(), signal.SIGHUP)
"""
    worker = make_worker(tmp_path, stand_in(code, steps=1000, pause=0.05))
    with signals_to(worker.stop):
        assert worker.work() == 143
    assert len([*tmp_path.rglob("saved")]) == 1


def test_a_signal_that_interrupts_the_answer_to_another_is_the_second_one(tmp_path, monkeypatch):
    worker, sent = make_worker(tmp_path, stand_in()), []
    worker._process = object()

    def interrupted(process, number):
        sent.append(number)
        if len(sent) < 3:
            worker.stop(signal.SIGHUP, None)

    monkeypatch.setattr("jformer.tools.sweep.worker.send_signal", interrupted)
    worker.stop(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]


def test_told_to_stop_while_it_starts_a_process_it_stops_that(tmp_path, monkeypatch):
    worker = make_worker(tmp_path, stand_in(steps=1000, pause=0.05))
    start = worker._start

    def told_meanwhile(*args):
        worker.stop(signal.SIGTERM, None)
        return start(*args)

    monkeypatch.setattr(worker, "_start", told_meanwhile)
    assert worker.work() == 143
    assert only(worker).state == "waiting"


def test_a_trial_that_is_anothers_now_is_ended_here(tmp_path, monkeypatch, capsys):
    worker = make_worker(tmp_path, stand_in(steps=1000, pause=0.05))
    claim = worker._queue.claim()
    claim.give_back(0.0)
    worker.run(claim)
    assert "another worker took over" in capsys.readouterr().err
    assert only(worker).state == "waiting"
    assert ended(tmp_path, only(worker))


def test_nothing_of_a_process_is_left_when_its_worker_fails(tmp_path, monkeypatch):
    worker = make_worker(tmp_path, stand_in("print('up', flush=True)", steps=1000, pause=0.05))
    claim = worker._queue.claim()
    log = tmp_path / "sweep" / "logs" / f"{claim.trial.name}.log"

    def fail(seconds):
        if log.read_text():
            raise UserError("storage is away")
        return True

    monkeypatch.setattr(claim, "renew", fail)
    worker._queue.lease = 0.1
    with pytest.raises(UserError, match="away"):
        worker.run(claim)
    assert ended(tmp_path, claim.trial)


def ended(folder, trial):
    """Return whether no process of a trial is there."""
    path = folder_of(folder, trial) / "starts.txt"
    return not path.exists() or not any(Path(f"/proc/{pid}").exists() for pid in path.read_text().split())


def test_a_process_that_trains_there_already_is_waited_for(tmp_path):
    worker = make_worker(tmp_path, stand_in())
    folder = folder_of(tmp_path, worker._queue.trials()[0])
    folder.mkdir(parents=True)
    lock = (folder / "training.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(0.4, lock.close)
    timer.start()
    assert worker.work() == 0
    timer.join()
    assert not (folder / "shared").exists()
    assert (only(worker).state, starts(tmp_path, only(worker))) == ("complete", 1)


def test_a_process_that_found_its_directory_in_use_has_not_failed(tmp_path, monkeypatch):
    worker = make_worker(tmp_path, stand_in())
    folder = folder_of(tmp_path, worker._queue.trials()[0])
    folder.mkdir(parents=True)
    monkeypatch.setattr(worker, "_wait_until_unused", lambda claim: True)
    with (folder / "training.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        worker.run(worker._queue.claim())
    assert (folder / "shared").exists()
    assert only(worker).state == "waiting"
    assert worker.work() == 0


def test_a_lost_trial_is_not_waited_for(tmp_path):
    worker = make_worker(tmp_path, stand_in())
    claim = worker._queue.claim()
    folder = folder_of(tmp_path, claim.trial)
    folder.mkdir(parents=True)
    claim.give_back(0.0)
    with (folder / "training.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert worker._run_process(claim) == LEASE_LOST


def test_a_trial_that_others_overtake_is_told_to_save_and_is_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr("jformer.tools.sweep.worker.PRUNE", 0.1)  # others were told of 19 updates only
    options = {"TRIALS": 6, "SAMPLER": "random", "PRUNER": "median", "lease": 0.3}
    bad = "options['config.optim.learning_rate'] = '9'"
    worker = make_worker(tmp_path, stand_in(), SEARCH, **options)
    for _ in range(5):
        claim = worker._queue.claim()
        claim.should_prune(dict.fromkeys(range(1, 20), 2.0))
        claim.complete(2.0, {}, 1.0)
    last = make_worker(tmp_path, stand_in(bad, steps=1000, pause=0.1), SEARCH, **options)
    assert last.work() == 0
    trial = last._queue.trials()[-1]
    assert trial.state == "pruned"
    assert trial.value == pytest.approx(trial.metrics["valid/loss"], abs=1)
    assert ended(tmp_path, trial)


def test_a_process_knows_its_config_directory_environment_and_name(tmp_path):
    code = "Path(options['workdir'], 'told').write_text(repr((sys.argv[1:], os.environ['FLAG'])))"
    worker = make_worker(
        tmp_path,
        stand_in(code) + " --name=sweep-{trial} --",
        FIXED={"train.num_steps": 7, "evaluate.scores": ()},
        ENVIRONMENT={"FLAG": "set"},
        keys=["data.dir=a b"],
    )
    assert worker.work() == 0
    trial = only(worker)
    words, flag = eval((folder_of(tmp_path, trial) / "told").read_text())
    assert flag == "set"
    assert words[words.index("--") - 1 :] == [
        f"--name=sweep-{trial.name[-8:]}",
        "--",
        f"--config={worker._experiment.base}",
        f"--workdir={tmp_path / 'sweep' / 'trials' / trial.name}",
        "--config.train.num_steps=7",
        "--config.evaluate.scores=()",
        "--config.data.dir=a b",
        "--config.optim.learning_rate=1.0",
        "--config.seed=0",
    ]


def test_values_that_are_no_numbers_reach_the_config_as_they_are(tmp_path):
    code = SWEEP.replace(
        '"optim.learning_rate": [1.0, 2.0, 3.0]', '"evaluate.scores": [("bleu",)], "data.name": ["copy"]'
    )
    worker = make_worker(tmp_path, stand_in("Path(options['workdir'], 'told').write_text(repr(sys.argv))"), code)
    worker._queue.plan()
    assert worker.work() == 0
    words = eval((folder_of(tmp_path, only(worker)) / "told").read_text())
    config = override(small_run.get_config(), [word for word in words if word.startswith("--config.")])
    assert (config.evaluate.scores, config.data.name, config.seed) == (("bleu",), "copy", 0)
