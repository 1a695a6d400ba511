import errno
import signal
import subprocess
import sys

import pytest

from jformer.tools.sweep.__main__ import main
from tests.tools.sweep.sweeps import ROOT, SEARCH, SWEEP, journal, open_queue, stand_in, starts, write
from tests.watching import living, wait_until

NUMBER = {  # what makes a run of numbers of the base
    "task": "classify", "model.family": "encoder", "data.source": "labelled", "data.labels": "number",
    "data.dir": "nowhere", "evaluate.scores": (),
}  # fmt: skip


def words(folder, *options, code=SWEEP, **constants):
    return [f"--experiment={write(folder, code, **constants)}", f"--workdir={folder}/sweep", *options]


def refused(capsys, arguments):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("jformer: ")


def python(*arguments, **options):
    command = [sys.executable, "-m", "jformer.sweep", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Start processes without a function between fork and exec: JAX warns of that."""
    monkeypatch.setattr("jformer.tools.sweep.launch.die_with_parent", lambda: None)


@pytest.mark.slow
def test_a_sweep_from_nothing_to_its_report_goes_on_where_it_was(tmp_path, capsys):
    flag = tmp_path / "mended"
    code = f"options['config.optim.learning_rate'] == '2.0' and not Path('{flag}').exists() and sys.exit(2)"
    arguments = words(tmp_path, "--workers=2", f"--command={stand_in(code)}", "--config.train.num_steps=30")
    assert main(arguments) == 1
    out = capsys.readouterr()
    assert "6/6 " in out.err
    assert "learning_rate=1" in out.out
    assert (tmp_path / "sweep" / "report" / "results.csv").exists()
    assert main([*arguments, "--report"]) == 1
    flag.touch()
    assert main([*arguments, "--retry_failed"]) == 0
    trials = open_queue(tmp_path, keys=["train.num_steps=30"]).trials()
    assert [trial.state for trial in trials] == ["complete"] * 6
    assert [starts(tmp_path, trial) for trial in trials] == [1, 2, 1, 1, 2, 1]


def test_a_search_from_nothing_to_its_report(tmp_path, capsys):
    constants = {"SEEDS": (0,), "TRIALS": 5, "SAMPLER": "random", "code": SEARCH}
    assert main(words(tmp_path, "--workers=2", f"--command={stand_in()}", **constants)) == 0
    trials = open_queue(tmp_path, **constants).trials()
    assert [trial.state for trial in trials] == ["complete"] * 5
    assert all(starts(tmp_path, trial) == 1 for trial in trials)


def test_a_sweep_without_optuna_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jformer.tools.sweep.__main__.find_spec", lambda name: None)
    assert refused(capsys, words(tmp_path)) == 'a sweep needs Optuna: pip install -e ".[sweep]" -c constraints.txt'


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_whatever_ends_the_command_ends_all_it_started(tmp_path, number, code):
    queue = open_queue(tmp_path)
    arguments = words(tmp_path, "--workers=2", f"--command={stand_in(steps=1000, pause=0.05)}")
    command = [sys.executable, "-m", "jformer.sweep", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list((tmp_path / "sweep").glob("trials/*/metrics.jsonl"))) == 2)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    wait_until(lambda: not living(f"={tmp_path}/sweep"))
    expected = {
        signal.SIGTERM: ["waiting"] * 6,
        signal.SIGKILL: [*["running"] * 2, *["waiting"] * 4],
    }
    assert [trial.state for trial in queue.trials()] == expected[number]
    assert all(queue.claim() for _ in range(6))


def test_an_unknown_key_is_told_the_nearest_before_any_trial(tmp_path, capsys):
    arguments = words(tmp_path, code=SWEEP.replace("rate", "rat"))
    assert "unknown config key optim.learning_rat; did you mean optim.learning_rate?" in refused(capsys, arguments)
    assert "did you mean train.num_steps?" in refused(capsys, words(tmp_path, "--config.train.num_step=3"))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_metric_that_no_trial_reports_stops_all_workers(tmp_path, capfd):
    arguments = words(tmp_path, "--workers=2", f"--command={stand_in(pause=0.05)}", METRIC="train/loss", GOAL="min")
    assert main(arguments) == 2
    err = capfd.readouterr().err
    assert "no trial reports METRIC='train/loss'; did you mean valid/loss?" in err
    assert "Traceback" not in err
    assert not any(trial.state == "complete" for trial in open_queue(tmp_path, METRIC="train/loss").trials())


def test_a_sweep_whose_trials_all_failed_is_no_mistake_of_the_command(tmp_path, capfd):
    assert main(words(tmp_path, f"--command={sys.executable} -c exit(1)")) == 1
    err = capfd.readouterr().err
    assert "no trial succeeded, 6 failed" in err
    assert "Traceback" not in err


def test_a_bucket_needs_a_storage(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fsspec.get_filesystem_class", lambda protocol: None)  # gcsfs may not be there
    arguments = [words(tmp_path)[0], "--workdir=gs://bucket/sweep"]
    assert refused(capsys, arguments).endswith("which cannot hold the journal of the trials: give --storage")


def test_a_workdir_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "sweep").touch()
    assert "sweep: the trials cannot be reached ([Errno 17] File exists" in refused(capsys, words(tmp_path))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    queue = open_queue(tmp_path)
    queue.plan()
    queue.claim().complete(1.0, {}, 1.0)
    before = journal(tmp_path)
    arguments = words(tmp_path, f"--command={stand_in()}", "--lease=1")
    path = tmp_path / "sweep" / "trials.journal"
    script = f'ulimit -f {path.stat().st_size // 1024 + 1}; exec "$@"'  # no file may grow beyond
    full = ["bash", "-c", script, "-", sys.executable, "-m", "jformer.sweep", *arguments, "--worker"]
    result = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "sweep/trials.journal: the trials cannot be reached ([Errno 27] File too large" in result.stderr
    assert result.stderr.count("\n") == 1
    result = python(*arguments, "--worker")
    assert (result.returncode, result.stderr) == (0, "")
    assert journal(tmp_path)[: len(before)] == before
    assert [trial.state for trial in queue.trials()] == ["complete"] * 6
    assert queue.trials()[0].value == 1.0


def test_a_report_may_go_to_the_home_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    queue = open_queue(tmp_path)
    while claim := queue.claim():
        claim.complete(0.5, {"valid/loss": 0.5}, 1.0)
    assert main(words(tmp_path, "--report", "--output=~/found")) == 0
    assert (tmp_path / "home" / "found" / "index.html").exists()


def test_storage_that_is_away_is_not_a_mistake(tmp_path, capsys, monkeypatch):
    queue = open_queue(tmp_path)
    while claim := queue.claim():
        claim.complete(0.5, {"valid/loss": 0.5}, 1.0)

    def away(path, content, shared=False):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("jformer.tools.pages.page.replace_content", away)
    assert main(words(tmp_path, "--report")) == 75
    assert "could not be written now (Stale file handle); rerun the same command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--report", "--worker"], "--report and --worker exclude each other"),
        (["--worker", "--slurm="], "--worker and --slurm exclude each other"),
        (["--report", "--retry_failed"], "--retry_failed starts a sweep again: not with --report"),
        (["--config.optim.learning_rate=4.0"], "=1.0, but --config.optim.learning_rate is for all trials"),
        (["--config.seed=4"], "seeds are SEEDS=(0, 1, …), not an override"),
        (["--storage=postgresql+psycopg://me:secret@127.0.0.1:1/sweeps"], "psycopg://me:…@127.0.0.1:1"),
        (["--workers=0"], "--workers=0 and --lease=60.0 must be above 0"),
        (["--lease=0"], "--workers=1 and --lease=0.0 must be above 0"),
        (["--lease=inf"], "--workers=1 and --lease=inf must be above 0 and finite"),
        (["--worker_s=2"], "unexpected argument '--worker_s=2'; see --help"),
        (["--report"], "has no sweep; leave out --report"),
        (["--report", "--storage=sqlite://"], "has no sweep; leave out --report"),
        (["--output=ftp://host", "--command=false"], "ftp://host: a run is a directory or a folder of a Google bucket"),
        (["--output=/dev/null/x", "--command=false"], "--output=/dev/null/x: /dev/null is a file; name a folder"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(tmp_path, capsys, options, says):
    assert says in refused(capsys, words(tmp_path, *options))


@pytest.mark.parametrize(
    ("code", "constants", "says"),
    [
        ("def sweep(): return []", {}, "sweep() returned no overrides"),
        ("def sweep(): return product({'seed': 1})", {}, "not iterable"),
        ("def sweep(): yield from product(None)", {}, "not iterable"),
        ("def sweep(): return ['model.norm']", {}, "it returns dicts of keys"),
        ("def sweep(): return [{'seed': 1}]", {}, "arm 'base': seed=1, but seeds are SEEDS=(0, 1)"),
        ("def sweep(): return {1: {}, '1': {'model.norm': 'post'}}", {}, "two arms are '1': name them"),
        (SWEEP, {"SEEDS": 3}, "SEEDS=3 must be like SEEDS = (0, 1, 2)"),
        (SWEEP, {"SEEDS": (0, -1)}, "seed=-1 must be 0 to 4294967295"),
        ("def sweep(): return product({'seed': [1]}, {'seed': [2]})", {}, "ValueError: seed is in two factors"),
        ("def sweep(): return 1 / 0", {}, "ZeroDivisionError: division by zero"),
        (SWEEP, {"PLOTS": None}, "PLOTS=None must be like PLOTS = (("),
        (SWEEP, {"PLOTS": [("optim.learning_rate",)]}, "PLOTS has ('optim.learning_rate',), which must be a pair"),
        (SWEEP, {"PLOTS": ["optim.learning_rate"]}, "PLOTS has 'optim.learning_rate', which must be a pair of keys"),
        ("def sweep(): return [{'evaluate.scores': ('ter',)}]", {"METRIC": "test/bleu"}, "evaluate.scores=('ter',)"),
        (
            "def sweep(): return [{'data.test': ()}]",
            {"METRIC": "test/bleu"},
            "the trial reports metrics of train, valid",
        ),
        (SWEEP, {"METRIC": "test/blue", "GOAL": "max"}, "METRIC='test/blue'; of test did you mean bleu?"),
        (SWEEP, {"METRIC": "test/blue"}, "METRIC='test/blue' does not say which is better; did you mean bleu?"),
        (SWEEP, {"METRIC": "train/mfu"}, "METRIC='train/mfu' does not say which is better; add it"),
        (SWEEP, {"PRUNER": "median"}, "PRUNER='median' is for search(trial), and this is a sweep(): leave it out"),
        (SWEEP, {"TRIALS": 9}, "TRIALS=9 is for search(trial)"),
        (SEARCH, {"METRIC": "test/bleu", "TRIALS": 2, "SEEDS": (0,), "PRUNER": "median"}, "reported during training"),
        (
            SEARCH,
            {
                "METRIC": "valid/bleu",
                "TRIALS": 2,
                "SEEDS": (0,),
                "PRUNER": "median",
                "FIXED": {"data.test": ("valid",)},
            },
            "needs a METRIC reported during training",
        ),
        (
            SEARCH,
            {"TRIALS": 2, "SEEDS": (0,), "PRUNER": "hyperband", "FIXED": {"train.num_epochs": 3.0}},
            "PRUNER='hyperband' needs the length of a trial: set train.num_steps",
        ),
        (SWEEP, {"METRIC": "valid/nll", "FIXED": NUMBER}, "METRIC='valid/nll'; of valid choose one of: loss"),
        (SWEEP, {"METRIC": "train/los", "GOAL": "min"}, "METRIC='train/los'; of train did you mean loss?"),
        (SEARCH, {"METRIC": "test/acuracy", "GOAL": "max", "TRIALS": 2, "SEEDS": (0,)}, "did you mean token_accuracy?"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, capsys, code, constants, says):
    path = write(tmp_path, f"\nfrom jformer.sweep import product\n{code}\n", **constants)
    assert says in refused(capsys, [f"--experiment={path}", f"--workdir={tmp_path}/sweep"])
