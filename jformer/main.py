"""Flags to one config, one config to one mode.

python -m jformer.main --config=configs/X.py --workdir=DIR [--mode=MODE] [--config.section.key=value ...]

  --config   a Python file with get_config(); any of its keys can be set as --config.section.key=value. Once DIR holds a
             run, its saved config is used where --config is left out.
  --workdir  the directory of the run: config, tokenizer, checkpoints, metrics, results.
  --mode     train     train, or resume the run in DIR, then score its test sets (the default)
             evaluate  score the test sets again, with other --config.evaluate and --config.decode options if given
             predict   translate --input line by line to --output, or continue or label it
             score     tell the log-probability of each target in --input: lines of source, TAB, target
             describe  show parameters and FLOPs; needs no data and no DIR
             verify    check that all ways to decode with the run agree; exit code 1 if any does not
             explore   write a page, --output, that shows what the run attends to in the lines of --input, how it
                       searched for its answers, and how their tokens lie
             report    write a page, --output, of the run: curves, scores, worst answers, settings; also while it trains
             serve     answer over HTTP at --host and --port: a page to type into, JSON for programs
             export    write the run to the folder --output as --format, to be served without jformer
  --input    predict, score, explore: a text file (of several processes a plain one), or - for standard input (default)
  --output   predict, score: a file, or - for standard output (the default); export: a folder; explore, report: a page;
             evaluate: a folder for results.json and the outputs, DIR itself if it is not given
  --resume   predict, score: go on with a half-written --output
  --watch    report: seconds after which the page is written anew, and loaded by a browser, until the run is scored
  --host     serve: the address to listen at; 127.0.0.1, which only this machine reaches, if it is not given
  --port     serve: the port (default: 8000), 0 for any that is free
  --format   export: ctranslate2, stablehlo; explore: html, or png or svg of one line (default: as --output is named)
  --deterministic  on GPUs: operations alone that give the same bits every time, which are slower
  --topology describe: what the run would take of a TPU slice, such as v5e:16x16 or v5litepod-256; exit code 2 if it
             does not fit. Needs pip install -e ".[tpu-aot]", and a minute or two
  --price    describe with --topology: dollars for an hour of a chip, to tell the cost

Several processes are one run (train, evaluate, predict, score) if all are started with the same command and either
  --distributed  where Cloud TPU, Slurm, Open MPI, Kubernetes or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
                 JAX_PROCESS_ID say who is who, or
  --coordinator=HOST:PORT --processes=N --process=I
                 a free port of process 0's machine, how many there are, and which this is, from 0
Exit code 75, or 134 from JAX itself, says that one of them died, 76 that one was stuck: the same command for all goes
on from the last checkpoint. docs/processes.md has the rest. A process alone that is stuck ends with 76, too, and 75
says also that a checkpoint cannot be read just now.
Exit code 143 says that a signal asked the command to stop, and what there was to save is saved.
"""

import os
import signal
import sys
from types import FrameType

from jformer.errors import DONE, FAILED, LOST, STOPPED, UserError


def stop_early(number: int, frame: FrameType | None) -> None:
    """End the process with a line: nothing has begun yet, or all is over."""
    os.write(2, b"jformer: stopped\n")
    os._exit(STOPPED)


if __name__ == "__main__":  # before what takes seconds to import; `heed_signals` takes over
    for heeded in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(heeded) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(heeded, stop_early)

import contextlib
import dataclasses
from pathlib import Path

from absl import flags

from jformer.config import as_config_dict, load_config, resolve
from jformer.config.config_files import run_config_file
from jformer.config.options import Config, flatten
from jformer.config.overrides import override
from jformer.config.resume import resume_config
from jformer.data.progress import show_progress
from jformer.parallel import processes
from jformer.parallel.deterministic import choose_deterministic, deterministic_line
from jformer.parallel.libtpu import silence_libtpu
from jformer.storage import check_writable, is_step, refusals_told, refuse_file_of_run, run_path
from jformer.training.malloc import keep_freed_memory

MODES = ("train", "evaluate", "predict", "score", "describe", "verify", "explore", "report", "serve", "export")
TOGETHER = ("train", "evaluate", "predict", "score")  # what several processes can do
ONE_FILE = ("predict", "score", "explore", "report")  # is what they write
FORMATS = {"export": ("ctranslate2", "stablehlo"), "explore": ("html", "png", "svg")}
WORTH_KEEPING = 0.05  # seconds of compiling


def main(argv: list[str] | None = None) -> int:
    """Run one mode and return the exit code, one of those that `errors` lists with what they say."""
    argv = sys.argv if argv is None else argv
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print(__doc__)
        return DONE
    silence_libtpu()
    with processes.heed_signals("stopped"):
        return answer(argv)


def answer(argv: list[str]) -> int:
    """Do what the flags say and return the exit code; a mistake of the user becomes one line."""
    try:
        with refusals_told():
            options, overrides = read_flags(argv)
            if options.deterministic:
                choose_deterministic()
            with processes.join_run(coordinates(options)):
                config = configure(options, overrides)
                compare(options, config)
                return run(options, config)
    except (UserError, processes.AbsentError) as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        with contextlib.suppress(OSError):  # what standard output did not take would fail again at the end
            sys.stdout.flush()
        return error.code if isinstance(error, UserError) else LOST
    except BrokenPipeError:  # who read our output has left, as head does; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def compare(options: flags.FlagValues, config: Config) -> None:
    """Raise UserError, as `check_same` does, where processes were started differently or see different runs."""
    given = {f"--{name}": options[name].value for name in ("mode", "workdir", "resume", "deterministic")}
    processes.check_same({**given, **flatten(dataclasses.asdict(config), "config.")})
    if options.mode != "train" and processes.process_count() > 1:  # what trains sees to it that there is one workdir
        for workdir in (options.workdir, *config.decode.ensemble):
            processes.check_same(processes.saved_run(run_path(workdir), is_step))


def run(options: flags.FlagValues, config: Config) -> int:
    """Import the mode's module, and with it jax, only now: help and mistakes answer at once."""
    workdir, files = run_path(options.workdir or ""), (options.input, options.output, options.resume)
    if options.mode == "describe":
        return show(options, config, workdir if options.workdir else None)
    if options.mode in ONE_FILE:
        refuse_file_of_run(workdir, options.output)
    if options.mode == "report":
        from jformer.tools.pages.run_report import write_report

        for line in write_report(config, workdir, options.output, options.watch):
            print(line, flush=True)
        return DONE
    folder = run_path(options.output) if options.mode == "evaluate" and options.output != "-" else workdir
    if options.mode in ("train", "evaluate"):
        check_writable("--workdir" if folder == workdir else "--output", folder)
        check_writable("data.cache_dir", run_path(config.data.cache_dir))
    if options.mode == "train":
        keep_freed_memory()
    keep_compiled(config)
    if options.deterministic and processes.is_main_process():
        print(deterministic_line(), file=sys.stderr)
    processes.set_stall_limit(config.train.stall_seconds)
    if options.mode == "predict":
        from jformer.inference.answer_files import predict_file

        predict_file(config, workdir, *files)
    elif options.mode == "score":
        from jformer.inference.answer_files import score_file

        score_file(config, workdir, *files)
    elif options.mode == "verify":
        from jformer.inference.verify import verify

        return DONE if verify(config, workdir) else FAILED
    elif options.mode == "explore":
        from jformer.tools.pages.explorer import explore

        with show_progress("exploring"):
            line = explore(config, workdir, options.input, options.output, options.format)
        print(line)
    elif options.mode == "serve":
        from jformer.tools.server.serve import serve

        if not serve(config, workdir, options.host, options.port):
            return FAILED
        print("stopped", file=sys.stderr)
        return STOPPED
    elif options.mode == "export":
        from jformer.tools.export.folder import export

        with show_progress("exporting"):
            line = export(config, workdir, options.format, Path(options.output))
        print(line)
    else:
        return train_or_evaluate(options.mode, config, workdir, folder)
    return DONE


def show(options: flags.FlagValues, config: Config, workdir: Path | None) -> int:
    """Describe the run, on the devices here or on a TPU slice that is not."""
    if options.topology:
        from jformer.tools.forecast.tpu import describe_slice

        for line in describe_slice(config, workdir, options.topology, options.price):
            print(line, flush=True)
    else:
        from jformer.tools.forecast.describe import describe

        print(describe(config, workdir))
    return DONE


def train_or_evaluate(mode: str, config: Config, workdir: Path, folder: Path) -> int:
    """Score the run, once it is trained; the scores go into a folder, the run's own or another."""
    with show_progress("loading JAX", quiet=not processes.is_main_process()):
        from jformer.evaluation.evaluate import evaluate, report_scores
        from jformer.tools.pages.run_report import write_own
        from jformer.trainer import train

    if mode == "train":
        processes.end_at_once("stopped before the first update")
        with processes.watched():
            finished = train(config, workdir)
        processes.end_at_once("stopped while scoring the run; --mode=evaluate scores it again")
        if not finished or processes.agree(processes.stop_requested(), any):
            if processes.is_main_process():
                further = "the same command scores it" if finished else f"the same command goes on from {workdir}"
                with contextlib.suppress(OSError):  # the terminal may be closed
                    print(f"{'trained' if finished else 'stopped'} and saved; {further}", file=sys.stderr)
            return STOPPED
    results = evaluate(config, workdir, folder)
    if processes.is_main_process():
        page = write_own(config, workdir) if folder == workdir else ""
        print(report_scores(results, config, workdir, folder, page))
    return DONE


def keep_compiled(config: Config) -> None:
    """Let JAX keep what takes long to compile beside the tokenized corpora, unless the environment names a place."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.data.cache_dir).expanduser() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


def read_flags(argv: list[str]) -> tuple[flags.FlagValues, list[str]]:
    """Return the flags, checked as far as they go, and the arguments that set keys of the config."""
    options = flags.FlagValues()
    flags.DEFINE_string("config", None, "A Python file with get_config().", flag_values=options)
    flags.DEFINE_string("workdir", None, "The directory of the run.", flag_values=options)
    flags.DEFINE_enum("mode", "train", MODES, "What to do.", flag_values=options)
    flags.DEFINE_string("input", "-", "Text to answer.", flag_values=options)
    flags.DEFINE_string("output", "-", "Where answers go.", flag_values=options)
    flags.DEFINE_bool("resume", False, "Go on with a half-written output.", flag_values=options)
    flags.DEFINE_float("watch", 0.0, "Seconds.", lower_bound=0.0, flag_values=options)
    flags.DEFINE_bool("deterministic", False, "Deterministic operations on GPUs.", flag_values=options)
    flags.DEFINE_string("host", "127.0.0.1", "Where to listen.", flag_values=options)
    flags.DEFINE_integer("port", 8000, "A port.", lower_bound=0, upper_bound=65535, flag_values=options)
    flags.DEFINE_string("format", None, "What to write.", flag_values=options)
    flags.DEFINE_string("topology", "", "A TPU slice.", flag_values=options)
    flags.DEFINE_float("price", 0.0, "Dollars for an hour of a chip.", lower_bound=0.0, flag_values=options)
    flags.DEFINE_bool("distributed", False, "One of several processes, as the cluster says.", flag_values=options)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.", flag_values=options)
    flags.DEFINE_integer("processes", None, "How many processes there are.", flag_values=options)
    flags.DEFINE_integer("process", None, "Which of them this is.", flag_values=options)
    overrides = [argument for argument in argv[1:] if argument.startswith(("--config.", "--noconfig."))]
    try:
        rest = options([argv[0], *(argument for argument in argv[1:] if argument not in overrides)])
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from error
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: options are written --name=value; see --help")
    if not options.workdir and options.mode != "describe":
        raise UserError("--workdir is missing: name the directory of the run")
    if options.format and options.format not in FORMATS.get(options.mode, ()):
        raise UserError(f"--format={options.format} is nothing that --mode={options.mode} writes; see --help")
    if options.mode == "export" and (not options.format or options.output == "-"):
        raise UserError("--mode=export needs --format and a folder as --output; see --help")
    return options, overrides


def coordinates(options: flags.FlagValues) -> processes.ProcessInfo | None:
    """Return which of how many processes this is, or None if it is the only one."""
    own = processes.from_flags(options.distributed, options.coordinator, options.processes, options.process)
    if own and options.mode not in TOGETHER:
        raise UserError(f"--mode={options.mode} is for one process: several can {', '.join(TOGETHER)}")
    return own


def configure(options: flags.FlagValues, overrides: list[str]) -> Config:
    """Return the config that the flags name, with what they set; raise UserError if it cannot work or go on."""
    saved = run_path(options.workdir or "") / "config.json"
    if not options.config and not (options.workdir and saved.exists()):
        if options.workdir and options.mode not in ("train", "describe"):
            raise UserError(f"--workdir={options.workdir} holds no run: name the directory of one, or train one there")
        raise UserError(f"--config is missing and {saved} does not exist: name a file such as configs/quickstart.py")
    values = run_config_file(Path(options.config)) if options.config else as_config_dict(load_config(saved))
    config = resolve(override(values, overrides))
    if options.mode != "train" and options.workdir and saved.exists():
        config = resume_config(load_config(saved), config)
    return config


if __name__ == "__main__":
    code = main()
    processes.ignore_signals()  # all is done and said: no signal may change the exit code while Python ends
    sys.exit(code)
