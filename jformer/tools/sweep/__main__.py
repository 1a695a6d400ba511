"""Many runs of one question, done by workers that may die, and a report with intervals.

python -m jformer.sweep --experiment=experiments/X.py --workdir=DIR [--workers=N] [--config.section.key=value ...]

  --experiment  a Python file, see below; those in experiments/ are examples
  --workdir     the directory of the sweep: trials/, a run directory each; report/, results.csv
  --config.K=V  sets a key in all trials, such as --config.data.dir=PATH
  --workers     how many trials run at once here; cores or GPUs are divided among them (default: 1)
  --report      only report: what is there so far, also while workers run
  --output      where the report goes (default: DIR/report)
  --retry_failed  begin with the trials that failed

The same command goes on where it was stopped or killed: what has finished is skipped, what was begun is resumed.
Other machines that see DIR take part with the same command, or are asked to:

  --worker      be one worker, which works until nothing is left; no bar, no report
  --storage     where it is kept who does which trial, instead of a file in DIR: a URL of Optuna's, such as
                postgresql://USER:PASSWORD@HOST/DATABASE; all workers need the same, and DIR as well
  --study       the sweep's name there (default: the experiment's)
  --lease       seconds that a worker may say nothing before others take its trial (default: 60)
  --slurm       submit the workers as jobs of Slurm, with these options of submitit's, such as
                slurm_partition=gpu,gpus_per_node=1,timeout_min=600
  --command     what runs a trial, instead of python -m jformer.main: launch.sh, for a TPU slice a trial; {trial} in it
                is a name of the trial's own

An experiment file has these names; only BASE, METRIC and one of the functions must be there:

  BASE, FIXED   a config file, and a dict of keys that all trials set over it, such as {"train.num_steps": 600}
  METRIC, GOAL  SPLIT/NAME: a score of results.json (test/bleu), or the last of metrics.jsonl (valid/loss); min or max,
                where the name does not tell
  sweep()       returns a list of dicts of keys, or a dict of such with labels: the arms. jformer.sweep has product,
                zipped, chain and sample to combine them
  SEEDS         each arm is run with each (default: (0,))
  BASELINE      the label of the arm that others are compared with (default: the first)
  PLOTS         pairs of keys: along x, and a line for each value of the other or "" (default: every key that varies)
  ENVIRONMENT   a dict of variables for the trials' processes
  conclude(trials)   returns lines for the report, from a list of jformer.sweep.Trial
  search(trial) instead of sweep(): returns the keys of a trial that Optuna suggests values for, as in
                {"optim.learning_rate": trial.suggest_float("rate", 1e-4, 1e-2, log=True)}
  TRIALS, SAMPLER, PRUNER   of a search: how many; tpe (the default) or random; none (the default), median or hyperband
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from etils.epath import Path

from jformer.errors import DONE, FAILED, MISTAKE, STOPPED, UserError
from jformer.parallel.processes.children import signals_to
from jformer.storage import in_bucket, refusals_told, run_path
from jformer.tools.sweep.experiment import JOURNAL, Experiment, load_experiment

if TYPE_CHECKING:
    from jformer.tools.sweep.queue import Queue

TOLD = ("experiment", "workdir", "storage", "study", "lease", "command")  # options that workers are given
ALSO = signal.SIGUSR2  # what submitit asks Slurm for, some time before the end


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep and return the exit code: 0 all done, 1 not all could be done, 2 a mistake, 143 when told to stop."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if any(argument in ("--help", "-h") for argument in argv):
        print(__doc__)
        return 0
    try:
        with refusals_told():
            options, keys = parse(argv)
            experiment = load_experiment(Path(options.experiment), keys)
            return run(options, experiment, keys)
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return MISTAKE


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the arguments that set keys of all trials."""
    parser = Parser("jformer.sweep", allow_abbrev=False, add_help=False)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--output", default="")
    parser.add_argument("--retry_failed", action="store_true")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--share", default="")  # Local's to its workers
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
    if options.workers < 1 or not options.lease > 0:
        raise UserError(f"--workers={options.workers} and --lease={options.lease} must be above 0")
    return options, keys


class Parser(argparse.ArgumentParser):
    """Says what is wrong as we do."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; see --help")


def run(options: argparse.Namespace, experiment: Experiment, keys: Sequence[str]) -> int:
    """Do what is asked for. Optuna is imported only now; raise UserError where it is missing."""
    if find_spec("optuna") is None:
        raise UserError('a sweep needs Optuna: pip install -e ".[sweep]" -c constraints.txt')
    from jformer.tools.sweep.queue import Queue

    workdir = run_path(options.workdir)
    check(options, experiment, workdir)
    queue = Queue(experiment, workdir, options.storage, options.study, options.lease)
    if options.worker:
        return work(options, queue, workdir)
    if options.report:
        return show(options, queue, workdir)
    queue.plan(options.retry_failed)
    options_told = [f"--{name}={getattr(options, name)}" for name in TOLD if getattr(options, name)]
    command = [sys.executable, "-m", "jformer.sweep", *options_told, *keys]
    if options.slurm is not None:
        return submit(options, workdir, command)
    return share_out(options, queue, workdir, command) or show(options, queue, workdir)


def check(options: argparse.Namespace, experiment: Experiment, workdir: Path) -> None:
    """Raise UserError for options that do not go together."""
    asked = [name for name in ("report", "worker", "slurm") if getattr(options, name) not in (False, None)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} are two ways to use a sweep: give one of them")
    if options.retry_failed and (options.report or options.worker):
        raise UserError(f"--retry_failed begins a sweep again: not with --{asked[0]}")
    if in_bucket(workdir) and not options.storage:
        raise UserError(f"--workdir={workdir} is a bucket, where the trials' journal cannot be: give --storage")
    if options.command and experiment.pruner != "none":
        raise UserError(f"PRUNER={experiment.pruner!r} ends trials of this machine, not those that --command runs")
    if options.report and not options.storage and not (workdir / JOURNAL).exists():
        raise UserError(f"--workdir={workdir}: no sweep was run here; leave out --report to begin")


def work(options: argparse.Namespace, queue: "Queue", workdir: Path) -> int:
    """Be one worker."""
    from jformer.tools.sweep.launch import take_share
    from jformer.tools.sweep.worker import Worker

    if options.share:
        take_share(options.share)
    worker = Worker(queue, workdir, options.command)
    with signals_to(worker.stop, ALSO):
        return worker.work()


def share_out(options: argparse.Namespace, queue: "Queue", workdir: Path, command: Sequence[str]) -> int:
    """Let workers of this machine do all trials."""
    from jformer.tools.sweep.launch import Local

    print(opening(options, queue, workdir), file=sys.stderr, flush=True)
    local = Local(queue, command, options.workers)
    with signals_to(local.stop, ALSO):
        code = local.run()
    if code == STOPPED:
        print(f"stopped and saved, {queue.left()} trials to do: the same command goes on", file=sys.stderr)
    return code


def opening(options: argparse.Namespace, queue: "Queue", workdir: Path) -> str:
    """Return what is about to be done, and where to look meanwhile."""
    from jformer.tools.sweep.worker import logs_of

    experiment = queue.experiment
    whole = f"{len(experiment.arms)} arms x {len(experiment.seeds)} seeds" if experiment.arms else experiment.sampler
    count = experiment.trials or len(experiment.planned())
    left, at_once = queue.left(), options.workers
    return f"""{experiment.title}
{count} trials ({whole}) of {experiment.base}, {left} to do, {at_once} at a time; metric: {experiment.metric}
what each says: {logs_of(workdir)}; so far: the same command with --report; Ctrl-C saves, and it goes on later"""


def submit(options: argparse.Namespace, workdir: Path, command: Sequence[str]) -> int:
    """Let jobs of Slurm be the workers."""
    from jformer.tools.sweep.launch import submit

    folder = Path("slurm").absolute() if in_bucket(workdir) else workdir / "slurm"
    jobs = submit(folder, command, options.workers, options.slurm)
    print(f"submitted: {', '.join(jobs)}; the same command with --report instead of --slurm tells how far they are")
    return DONE


def show(options: argparse.Namespace, queue: "Queue", workdir: Path) -> int:
    """Print the report and write its files; return 1 if any trial failed."""
    from jformer.tools.sweep.sweep_report import report

    trials = queue.trials()
    print(report(queue.experiment, trials, workdir, Path(options.output) if options.output else workdir / "report"))
    return FAILED if any(trial.state == "failed" for trial in trials) else DONE


if __name__ == "__main__":
    sys.exit(main())
