"""The command line: turn the flags into a config and run one mode with it.

python -m jformer.main --config=configs/X.py --workdir=DIR [--mode=MODE] [--config.section.key=value ...]

  --config   a Python file with get_config(), or the name of a config that comes with jformer, such as quickstart; any
             of its keys can be set as --config.section.key=value. Once DIR holds a run, its config is the default; for
             a new run with --config.train.init_from=PARENT the default is the parent's, model sizes included.
  --workdir  the directory of the run: config, tokenizer, checkpoints, metrics, results.
  --mode     train     train, or resume the run in DIR, then score its test sets (the default)
             prepare   tokenize the training text, or a --shard of it, for train; needs neither DIR nor devices
             evaluate  score the test sets again, with other --config.evaluate and --config.decode options if given
             predict   translate --input line by line to --output, or continue, label or fill it
             score     write the log-probability of each target in --input: lines of source, TAB, target
             embed     write the vector of each text in --input, as decode.pooling and decode.normalize set it
             describe  show parameters and FLOPs; needs no data and no DIR
             verify    check that all ways to compute the run's answers agree; exit code 1 if they do not
             explore   write a page, --output, that shows what the run attends to in the lines of --input, how it
                       searched for its answers, and where their tokens are
             report    write a page, --output, of the run: curves, scores, worst answers, settings; also while it trains
             gallery   write a page, --output, of what a Transformer is made of: a step of attention, masks, positions,
                       parameters, learning rates; needs neither --config (the base model) nor DIR
             serve     answer over HTTP at --host and --port: a page to type into, JSON for programs
             export    write the run to the folder --output as --format, to be served without jformer
  --input    predict, score, embed, explore: a text file (for several processes a plain one), or - for standard input
             (default)
  --output   predict, score, embed: a file, or - for standard output (the default); export: a folder; explore, report,
             gallery: a page; evaluate: a folder for results.json and the outputs (default: DIR)
  --shard    prepare: I/N, the I-th of N shares, from 0. Any number of commands may prepare shares, at any time and on
             machines that share data.cache_dir; --mode=train joins the shares and prepares those that are missing
  --resume   predict, score, embed: continue a half-written --output
  --against  verify: a directory of Hugging Face Transformers, such as the one that the run was imported from, to
             compare logits with. Needs pip install -e ".[parity]"
  --activations  predict: write internal activations to a safetensors file instead of answers, chosen by names such as
             '*/block/output,logits'; each line is a source, or a source, a TAB and a target. See docs/library.md
  --watch    report: rewrite the page every N seconds, which browsers reload, until the run is scored
  --host     serve: the address to listen at (default: 127.0.0.1, which only this machine reaches)
  --port     serve: the port (default: 8000), 0 for any free one
  --adapters serve: runs of adapters of the one in DIR, separated by commas; a request names one by its directory's name
  --format   export: ctranslate2, stablehlo; explore: html, or png or svg of one line; embed: jsonl, npy or safetensors
             (default: by --output's ending)
  --deterministic  on GPUs: use only bitwise deterministic operations, which are slower
  --topology describe: what the run would need on a TPU slice, such as v5e:16x16 or v5litepod-256, or on GPUs, such as
             h100:8, or h100:8x4 on four machines; exit code 2 if it does not fit. Needs pip install -e ".[tpu-aot]"
             or ".[gpu-aot]", and a few minutes
  --price    describe with --topology: dollars per hour of one chip or GPU, to estimate the cost

Several processes form one run (train, evaluate, predict, score, embed) if all are started with the same command and
either
  --distributed  where Cloud TPU, Slurm, Open MPI, Kubernetes or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
                 JAX_PROCESS_ID identify the processes, or
  --coordinator=HOST:PORT --processes=N --process=I
                 a free port of process 0's machine, the number of processes, and the number of this one, from 0
Exit code 75, or 134 from JAX itself: one of them died or never joined, or storage was unavailable. 76: one was stuck
(also a single process). Rerun the same command in all to resume from the last checkpoint; see docs/processes.md.
Exit code 143: a signal stopped the command, which has saved its progress.
"""

import os
import re
import signal
import sys
from types import FrameType

from jformer.errors import DONE, FAILED, LOST, STOPPED, UserError


def stop_early(number: int, frame: FrameType | None) -> None:
    """Print a line and end the process: nothing has started yet."""
    os.write(2, b"jformer: stopped\n")
    os._exit(STOPPED)


if __name__ == "__main__":  # before the slow imports; then `heed_signals` takes over
    for heeded in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(heeded) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(heeded, stop_early)

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from absl import flags
from etils import epath

from jformer.config import as_config_dict, child_config, default_config, load_config, resolve
from jformer.config.config_files import override, run_config_file
from jformer.config.options import Config, flatten
from jformer.config.resume import resume_config
from jformer.data.progress import show_progress
from jformer.parallel import processes
from jformer.parallel.deterministic import choose_deterministic, deterministic_line
from jformer.parallel.libtpu import silence_libtpu
from jformer.storage import check_writable, is_step, os_errors_as_user_errors, refuse_file_of_run, run_path
from jformer.training.malloc import keep_freed_memory

TOGETHER = ("train", "evaluate", "predict", "score", "embed")  # modes that several processes can share
ONE_FILE = ("predict", "score", "embed", "explore", "report", "gallery")  # modes that write one file
BEFORE_RUN = ("train", "describe", "prepare")  # modes that need a config but no run
WITHOUT_RUN = ("describe", "gallery", "prepare")
WITHOUT_DEVICES = ("describe", "report", "prepare")
FORMATS = {
    "export": ("ctranslate2", "stablehlo"),
    "explore": ("html", "png", "svg"),
    "embed": ("jsonl", "npy", "safetensors"),
}
READ_BY = {  # flags that only some modes read
    "input": ("predict", "score", "embed", "explore"),
    "output": ("evaluate", "export", *ONE_FILE),
    "resume": ("predict", "score", "embed"),
    "shard": ("prepare",),
    "against": ("verify",),
    "activations": ("predict",),
    "watch": ("report",),
    **dict.fromkeys(("host", "port", "adapters"), ("serve",)),
    **dict.fromkeys(("topology", "price"), ("describe",)),
}
WORTH_KEEPING = 0.05  # seconds of compilation


def main(argv: list[str] | None = None) -> int:
    """Run one mode and return the exit code, one of those that `errors` lists."""
    argv = sys.argv if argv is None else argv
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        with contextlib.suppress(BrokenPipeError):  # the reader, such as head, has closed the pipe
            print(__doc__, flush=True)
        return DONE
    silence_libtpu()
    return run_command(argv)


def run_command(argv: list[str]) -> int:
    """Run the mode that the flags select and return the exit code; print a UserError as one line."""
    try:
        with os_errors_as_user_errors():
            options, overrides = read_flags(argv)
            if options.mode == "train":
                keep_freed_memory()  # before the thread of `heed_signals`
            if options.deterministic:
                choose_deterministic()
            with (
                processes.heed_signals("stopped"),
                processes.join_run(coordinates(options)),
                os_errors_as_user_errors(),  # then all processes print them
            ):
                config = configure(options, overrides)
                check_processes_agree(options, config)
                workdir = run_path(options.workdir or "")
                prepare(options, config, workdir)
                return MODES[options.mode](options, config, workdir)
    except (UserError, processes.AbsentError) as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        with contextlib.suppress(OSError):  # else unwritten output would fail again at exit
            sys.stdout.flush()
        return error.code if isinstance(error, UserError) else LOST
    except BrokenPipeError:  # the reader has closed our output, as head does; discard the rest
        processes.discard_output(sys.stdout)
        return DONE


def check_processes_agree(options: flags.FlagValues, config: Config) -> None:
    """Raise UserError, as `check_same` does, if processes were started differently or see different runs."""
    given = {f"--{name}": options[name].value for name in ("mode", "workdir", "resume", "deterministic")}
    processes.check_same({**given, **flatten(dataclasses.asdict(config), "config.")})
    if options.mode != "train" and processes.process_count() > 1:  # train itself refuses two workdirs
        for workdir in (options.workdir, *config.decode.ensemble):
            processes.check_same(processes.saved_run(run_path(workdir), is_step))


def prepare(options: flags.FlagValues, config: Config, workdir: Path) -> None:
    """Refuse paths that cannot be written, and set up this process for its mode."""
    if options.mode in ONE_FILE:
        refuse_file_of_run(workdir, options.output)
    if options.mode in ("train", "evaluate"):
        folder = scores_folder(options, workdir)
        check_writable("--workdir" if folder == workdir else "--output", folder)
    if options.mode in ("train", "evaluate", "prepare"):
        check_writable("data.cache_dir", run_path(config.data.cache_dir))
    if options.mode in WITHOUT_DEVICES:
        return
    keep_compiled(config)
    if options.deterministic and processes.is_main_process():
        print(deterministic_line(), file=sys.stderr)
    processes.set_stall_limit(config.train.stall_seconds)


# The modes. Each imports its modules, and with them JAX, only when it runs, so that help and errors are immediate.


def train(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Train the run, or resume it, and score it."""
    with show_progress("loading JAX", quiet=not processes.is_main_process()):
        from jformer.evaluation import evaluate as _  # noqa: F401 (loaded now, so that scoring begins at once)
        from jformer.evaluation import results
        from jformer.trainer import train as train_run

    results.read(workdir)  # refuses those of a newer version before training
    processes.end_at_once("stopped before the first update")
    with processes.watched():
        finished = train_run(config, workdir)
    processes.end_at_once("stopped while scoring the run; --mode=evaluate scores it again")
    if finished and not processes.agree(processes.stop_requested(), any):
        return score_test_sets(options, config, workdir)
    if processes.is_main_process():
        done = "trained" if finished else "stopped"
        further = "score it" if finished else f"resume from {workdir}"
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"{done} and saved; rerun the same command to {further}", file=sys.stderr)
    return STOPPED


def prepare_text(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Tokenize the training text, or a share of it."""
    from jformer.training.corpora import prepare_data

    number, _, count = options.shard.partition("/")
    prepare_data(config, (int(number), int(count)))
    return DONE


def score_test_sets(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Score the run; the scores go into its own directory, or into another folder."""
    with show_progress("loading JAX", quiet=not processes.is_main_process()):
        from jformer.evaluation.evaluate import evaluate, report_scores
        from jformer.tools.pages.run_report import write_own

    folder = scores_folder(options, workdir)
    results = evaluate(config, workdir, folder)
    if processes.is_main_process():
        page = write_own(config, workdir) if folder == workdir else ""
        print(report_scores(results, config, workdir, folder, page))
    return DONE


def scores_folder(options: flags.FlagValues, workdir: Path) -> Path:
    """Return the folder for the scores: the run's own, or with --mode=evaluate that of --output."""
    return run_path(options.output) if options.mode == "evaluate" and options.output != "-" else workdir


def answer(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Answer the lines of a file, score their targets, or write their vectors or the model's activations for them."""
    from jformer.inference import answer_files as files

    given = config, workdir, options.input, options.output
    if options.activations:
        files.write_activations(*given, options.activations)
    elif options.mode == "predict":
        files.predict_file(*given, options.resume)
    elif options.mode == "score":
        files.score_file(*given, options.resume)
    else:
        files.embed_file(*given, options.resume, options.format)
    return DONE


def describe(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Describe the run on the local devices, or on TPUs or GPUs that need not be present."""
    run = workdir if options.workdir else None
    if options.topology:
        from jformer.tools.forecast.on_topology import describe_topology

        return print_lines(describe_topology(config, run, options.topology, options.price))
    from jformer.tools.forecast.describe import describe as describe_here

    return print_lines([describe_here(config, run)])


def verify(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Check that all ways to compute answers agree and, with --against, that transformers computes the same logits."""
    from jformer.inference.verify import verify as agrees

    further = []
    if options.against:
        from jformer.tools.hf.against import check_against

        further = [check_against(Path(options.against), workdir)]
    return DONE if agrees(config, workdir, further) else FAILED


def explore(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Write the page that shows what the run attends to."""
    from jformer.tools.pages.explorer import explore as write_page

    with show_progress("exploring"):
        line = write_page(config, workdir, options.input, options.output, options.format)
    return print_lines([line])


def report(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Write the report on the run."""
    from jformer.tools.pages.run_report import write_report

    return print_lines(write_report(config, workdir, options.output, options.watch))


def gallery(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Write the page that explains the parts of a Transformer."""
    from jformer.tools.pages.gallery import write_gallery

    with show_progress("drawing"):
        line = write_gallery(config, workdir if options.workdir else None, options.output)
    return print_lines([line])


def serve(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Answer over HTTP until a signal asks to stop."""
    from jformer.tools.server.serve import serve as serve_until_stopped

    if not serve_until_stopped(config, workdir, options.host, options.port, options.adapters):
        return FAILED
    print("stopped", file=sys.stderr)
    return STOPPED


def export(options: flags.FlagValues, config: Config, workdir: Path) -> int:
    """Export the run for serving without jformer."""
    from jformer.tools.export.folder import export as write_folder

    with show_progress("exporting"):
        line = write_folder(config, workdir, options.format, options.output)
    return print_lines([line])


def print_lines(lines: Iterable[str]) -> int:
    """Print lines as they come."""
    for line in lines:
        print(line, flush=True)
    return DONE


MODES: dict[str, Callable[[flags.FlagValues, Config, Path], int]] = {
    "train": train,
    "prepare": prepare_text,
    "evaluate": score_test_sets,
    **dict.fromkeys(("predict", "score", "embed"), answer),
    "describe": describe,
    "verify": verify,
    "explore": explore,
    "report": report,
    "gallery": gallery,
    "serve": serve,
    "export": export,
}


def keep_compiled(config: Config) -> None:
    """Cache compiled programs beside the tokenized corpora, unless the environment names a directory.

    Several processes use a cache only if all see it: JAX writes the programs of process 0 alone, and XLA divides GPU
    autotuning among hosts, so the others would wait for process 0's part, which it skips with a cached program.
    """
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:
        folder = str(Path(config.data.cache_dir).expanduser() / "compiled")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    if processes.process_count() > 1 and not (
        processes.agree(bool(folder), all) and processes.is_shared(epath.Path(folder))
    ):
        jax.config.update("jax_enable_compilation_cache", False)


def read_flags(argv: list[str]) -> tuple[flags.FlagValues, list[str]]:
    """Return the flags, checked without the config, and the arguments that set keys of the config."""
    options = flags.FlagValues()
    texts = {"config": None, "workdir": None, "format": None, "coordinator": None, "host": "127.0.0.1"}
    texts |= {"input": "-", "output": "-", "shard": "0/1", "against": "", "topology": ""}
    for name, default in texts.items():  # `main` prints the docstring of this module as their help
        flags.DEFINE_string(name, default, "", flag_values=options)
    for name in ("resume", "deterministic", "distributed"):
        flags.DEFINE_bool(name, False, "", flag_values=options)
    for name in ("activations", "adapters"):
        flags.DEFINE_list(name, [], "", flag_values=options)
    for name in ("watch", "price"):
        flags.DEFINE_float(name, 0.0, "", lower_bound=0.0, flag_values=options)
    for name in ("processes", "process"):
        flags.DEFINE_integer(name, None, "", flag_values=options)
    flags.DEFINE_integer("port", 8000, "", lower_bound=0, upper_bound=65535, flag_values=options)
    flags.DEFINE_enum("mode", "train", list(MODES), "", flag_values=options)
    overrides = [argument for argument in argv[1:] if argument.startswith(("--config.", "--noconfig."))]
    try:
        rest = options([argv[0], *(argument for argument in argv[1:] if argument not in overrides)])
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from error
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: options are written --name=value; see --help")
    if not options.workdir and options.mode not in WITHOUT_RUN:
        raise UserError("--workdir is missing: name the directory of the run")
    if options.format and options.format not in FORMATS.get(options.mode, ()):
        raise UserError(f"--format={options.format} is not written by --mode={options.mode}; see --help")
    for name, modes in READ_BY.items():
        if options[name].present and options.mode not in modes:
            raise UserError(
                f"--mode={options.mode} does not read --{name}, which is for {', '.join(modes)}; see --help"
            )
    share = re.fullmatch(r"(\d+)/(\d+)", options.shard, re.ASCII)
    if not share or int(share[1]) >= int(share[2]):
        raise UserError(f"--shard={options.shard} is not I/N with I from 0 to N - 1, such as 0/16")
    if options["activations"].present and not options.activations:
        raise UserError("--activations= names none: choose some, such as --activations=logits; see --help")
    if options.activations and options.resume:
        raise UserError("--activations are written without --resume; see --help")
    if options["price"].present and not options.topology:
        raise UserError("--price needs --topology; see --help")
    if options.mode == "export" and (not options.format or options.output == "-"):
        raise UserError("--mode=export needs --format and a folder as --output; see --help")
    return options, overrides


def coordinates(options: flags.FlagValues) -> processes.ProcessInfo | None:
    """Return this process's number and address in its run, or None for a run of one process."""
    own = processes.from_flags(options.distributed, options.coordinator, options.processes, options.process)
    if own and options.mode not in TOGETHER:
        raise UserError(f"--mode={options.mode} is for one process: several can {', '.join(TOGETHER)}")
    return own


def configure(options: flags.FlagValues, overrides: list[str]) -> Config:
    """Return the config that the flags name, with its overrides; raise UserError if it cannot work or resume."""
    saved = run_path(options.workdir or "") / "config.json"
    parents = [argument.partition("=")[2] for argument in overrides if argument.startswith("--config.train.init_from=")]
    if options.config:
        values = run_config_file(Path(options.config))
    elif options.workdir and saved.exists():
        values = as_config_dict(load_config(saved))
    elif options.mode == "gallery" and not options.workdir:
        values = default_config()
    elif parents and options.mode in BEFORE_RUN:
        values = child_config(parents[-1])
    elif options.workdir and options.mode not in BEFORE_RUN:
        raise UserError(f"--workdir={options.workdir} holds no run: name the directory of one, or train one there")
    else:
        raise UserError(f"--config is missing and {saved} does not exist: name a file such as configs/quickstart.py")
    config = resolve(override(values, overrides))
    if options.mode != "train" and options.workdir and saved.exists():
        config = resume_config(load_config(saved), config, training=options.mode == "prepare")
    return config


if __name__ == "__main__":
    code = main()
    processes.ignore_signals()  # a signal must not change the exit code while Python shuts down
    sys.exit(code)
