"""Run many trials of one question with workers that may die, and report the results with intervals.

python -m jformer.sweep --experiment=experiments/X.py --workdir=DIR [--workers=N] [--config.section.key=value ...]

  --experiment  a Python file, see below; experiments/ has examples
  --workdir     the directory of the sweep: trials/, a run directory each; report/, results.csv
  --config.K=V  sets a key in all trials, such as --config.data.dir=PATH
  --workers     trials that run at once here; cores or GPUs are divided among them (default: 1)
  --report      only report what has finished so far, also while workers run
  --output      folder of the report (default: DIR/report)
  --retry_failed  also rerun the trials that failed

Rerun the same command to resume a sweep that was stopped or killed: finished trials are skipped, others resume from
their last checkpoint. Other machines that see DIR join with the same command, or as workers:

  --worker      be one worker, which runs trials until none is left; no bar, no report
  --storage     the database of the trials, instead of a file in DIR: an Optuna URL, such as
                postgresql://USER:PASSWORD@HOST/DATABASE; all workers need the same one, and DIR as well
  --study       the sweep's name in the database (default: the experiment's)
  --lease       seconds that a worker may be silent before others take over its trial (default: 60)
  --slurm       submit the workers as Slurm jobs, with these submitit options, such as
                slurm_partition=gpu,gpus_per_node=1,timeout_min=600
  --command     runs a trial, instead of python -m jformer.main: launch.sh, for one TPU slice per trial; {trial} in it
                becomes a short, unique name of the trial

An experiment file defines these names; only BASE, METRIC and one of the functions are required:

  BASE, FIXED   a config file, and a dict of keys that all trials set over it, such as {"train.num_steps": 600}
  METRIC, GOAL  SPLIT/NAME: a score of results.json (test/bleu), or the last of metrics.jsonl (valid/loss); min or max,
                where the name does not imply it
  sweep()       returns the arms: a list of dicts of keys, or a dict of label to dict. jformer.sweep has product,
                zipped, chain and sample to combine them
  SEEDS         each arm runs with each seed (default: (0,))
  BASELINE      the label of the arm that others are compared with (default: the first)
  PLOTS         pairs of keys: the x axis, and a line for each value of the other or "" (default: every key that varies)
  ENVIRONMENT   a dict of environment variables for the trials
  conclude(trials)   returns lines for the report, from a list of jformer.sweep.Trial
  search(trial) instead of sweep(): returns the keys of a trial that Optuna suggests values for, as in
                {"optim.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True)}
  TRIALS, SAMPLER, PRUNER   of a search: how many; tpe (the default) or random; none (the default), median or hyperband
"""

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from etils.epath import Path

from jformer.errors import DONE, FAILED, STOPPED, UserError
from jformer.parallel.processes import readers_may_leave
from jformer.parallel.processes.children import signals_to
from jformer.storage import check_writable, in_bucket, os_errors_as_user_errors, run_path
from jformer.tools.sweep.experiment import RECORD, Experiment, load_experiment

if TYPE_CHECKING:
    from jformer.tools.sweep.queue import TrialQueue

FORWARDED = ("experiment", "workdir", "storage", "study", "lease", "command")  # options that workers get as well
SUBMITIT_SIGNAL = signal.SIGUSR2  # what submitit asks Slurm to send some time before the end


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep; return 0 if all trials finished, 1 if some failed, 143 if stopped, or the code of a UserError."""
    try:
        with os_errors_as_user_errors():
            options, keys = parse(sys.argv[1:] if argv is None else argv)
            experiment = load_experiment(Path(options.experiment), keys)
            return run(options, experiment, keys)
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return error.code


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments that set keys of all trials; exit with code 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        "jformer.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--output", default="")
    parser.add_argument("--retry_failed", action="store_true")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)  # from LocalWorkers to each worker
    parser.add_argument("--storage", default="")
    parser.add_argument("--study", default="")
    parser.add_argument("--lease", type=float, default=60.0)
    parser.add_argument("--slurm")
    parser.add_argument("--command", default="")
    options, rest = parser.parse_known_args(argv)
    keys = [argument for argument in rest if argument.startswith("--config.")]
    for argument in rest:
        if argument not in keys:
            raise UserError(f"unexpected argument {argument!r}; see --help")
    if options.workers < 1 or not 0 < options.lease < math.inf:
        raise UserError(f"--workers={options.workers} and --lease={options.lease} must be above 0 and finite")
    return options, keys


def run(options: argparse.Namespace, experiment: Experiment, keys: Sequence[str]) -> int:
    """Do what the options ask for. Imports Optuna only now; raises UserError if it is missing."""
    if find_spec("optuna") is None:
        raise UserError('a sweep needs Optuna: pip install -e ".[sweep]" -c constraints.txt')
    from jformer.tools.sweep import launch
    from jformer.tools.sweep.queue import TrialQueue
    from jformer.tools.sweep.worker import Worker

    workdir = run_path(options.workdir)
    check(options, experiment, workdir)
    queue = TrialQueue(experiment, workdir, options.storage, options.study, options.lease)
    if options.report:
        return show(options, queue, workdir)
    if options.worker:
        if options.share:
            launch.take_share(options.share)
        worker = Worker(queue, workdir, options.command)
        with signals_to(worker.stop, SUBMITIT_SIGNAL):
            return worker.work()
    queue.plan(options.retry_failed)
    forwarded = [f"--{name}={getattr(options, name)}" for name in FORWARDED if getattr(options, name)]
    command = [sys.executable, "-m", "jformer.sweep", *forwarded, *keys]
    if options.slurm is not None:
        folder = Path("slurm").absolute() if in_bucket(workdir) else workdir / "slurm"
        jobs = launch.submit(folder, command, options.workers, options.slurm)
        print(f"submitted: {', '.join(jobs)}; rerun with --report instead of --slurm for their progress")
        return DONE
    print(opening(options, queue, workdir), file=sys.stderr, flush=True)
    local = launch.LocalWorkers(queue, command, options.workers)
    with signals_to(local.stop, SUBMITIT_SIGNAL), readers_may_leave(partial(local.stop, signal.SIGHUP, None)):
        code = local.run()
        if code == STOPPED:
            left = f"{queue.left()} trials left"
            print(f"stopped and saved with {left}; rerun the same command to resume", file=sys.stderr)
    return code or show(options, queue, workdir)


def check(options: argparse.Namespace, experiment: Experiment, workdir: Path) -> None:
    """Raise UserError for options that do not go together."""
    asked = [name for name in ("report", "worker", "slurm") if getattr(options, name) not in (False, None)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} exclude each other: give one of them")
    if options.retry_failed and (options.report or options.worker):
        raise UserError(f"--retry_failed starts a sweep again: not with --{asked[0]}")
    if in_bucket(workdir) and not options.storage:
        raise UserError(f"--workdir={workdir} is a bucket, which cannot hold the journal of the trials: give --storage")
    if options.command and experiment.pruner != "none":
        raise UserError(f"PRUNER={experiment.pruner!r} ends trials of this machine, not those that --command runs")
    if options.output:
        check_writable("--output", run_path(options.output))
    if options.report and not (workdir / RECORD).exists():
        raise UserError(f"--workdir={workdir} has no sweep; leave out --report to start one")


def opening(options: argparse.Namespace, queue: "TrialQueue", workdir: Path) -> str:
    """Return what is about to run, and where to look meanwhile."""
    from jformer.tools.sweep.worker import log_folder

    experiment = queue.experiment
    whole = f"{len(experiment.arms)} arms x {len(experiment.seeds)} seeds" if experiment.arms else experiment.sampler
    count = experiment.trials or len(experiment.planned())
    return f"""{experiment.title}
{count} trials ({whole}) of {experiment.base}, {queue.left()} left, {options.workers} at a time; \
metric: {experiment.metric}
logs: {log_folder(workdir)}; results so far: rerun with --report; Ctrl-C saves, and rerunning resumes"""


def show(options: argparse.Namespace, queue: "TrialQueue", workdir: Path) -> int:
    """Print the report and write its files; return 1 if any trial failed."""
    from jformer.tools.sweep.sweep_report import report

    trials = queue.trials()
    failed = [trial for trial in trials if trial.state == "failed"]
    try:
        print(report(queue.experiment, trials, workdir, run_path(options.output or workdir / "report")))
    except UserError as error:
        if not failed or len(failed) < len(trials):
            raise
        print(f"jformer: {error}", file=sys.stderr)
    return FAILED if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
