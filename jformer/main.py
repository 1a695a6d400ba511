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
             export    write the run to the folder --output as --format, to be served without jformer
  --input    predict, score: a text file, or - for standard input (the default); of several processes a plain file
  --output   predict, score: a file, or - for standard output (the default); export: a folder
  --resume   predict, score: go on with a half-written --output
  --format   export: ctranslate2 or stablehlo
  --topology describe: what the run would take of a TPU slice, such as v5e:16x16 or v5litepod-256; exit code 2 if it
             does not fit. Needs pip install -e ".[tpu-aot]", and a minute or two
  --price    describe with --topology: dollars for an hour of a chip, to tell the cost

Several processes are one run (train, evaluate, predict, score) if all are started with the same command and either
  --distributed  where Cloud TPU, Slurm, Open MPI, Kubernetes or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
                 JAX_PROCESS_ID say who is who, or
  --coordinator=HOST:PORT --processes=N --process=I
                 a free port of process 0's machine, how many there are, and which this is, from 0
Exit code 75 says that one of them died or stood still: the same command for all goes on.
"""

import dataclasses
import os
import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jformer import config as configs
from jformer import hosts
from jformer.config import Config
from jformer.config_files import check_keys, load_config
from jformer.errors import UserError
from jformer.heap import keep_freed_memory
from jformer.storage import run_path

MODES = ("train", "evaluate", "predict", "score", "describe", "verify", "export")
TOGETHER = ("train", "evaluate", "predict", "score")  # what several processes can do
FORMATS = ("ctranslate2", "stablehlo")
FAILED, STOPPED = 1, 143  # exit codes: a check did not pass; SIGTERM ended the process, after it saved
WORTH_KEEPING = 0.5  # seconds of compiling


def main(argv: list[str] | None = None) -> int:
    """Run one mode and return the exit code: 0, 2 for a mistake the user can mend, 143 when told to stop.

    Of several processes, one that is not there is exit code 75.
    """
    argv = sys.argv if argv is None else argv
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print(__doc__)
        return 0
    try:
        options, overrides = read_flags(argv)
        with hosts.joined(coordinates(options)):
            config = configure(options, overrides)
            compare(options, config)
            return run(options, config)
    except (UserError, hosts.AbsentError) as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else hosts.LOST
    except BrokenPipeError:  # who read our output has left, as head does; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def compare(options: flags.FlagValues, config: Config) -> None:
    """Raise UserError, in all processes, where they were started differently or see different runs."""
    given = {f"--{name}": options[name].value for name in ("mode", "workdir", "resume")}
    hosts.same({**given, **configs.flatten(dataclasses.asdict(config), "config.")})
    if options.mode != "train" and not hosts.alone():  # what trains sees to it that there is one workdir
        for workdir in (options.workdir, *config.decode.ensemble):
            hosts.same(hosts.saved_run(run_path(workdir)))


def run(options: flags.FlagValues, config: Config) -> int:
    """Import the mode's module, and with it jax, only now: help and mistakes answer at once."""
    workdir, files = run_path(options.workdir or ""), (options.input, options.output, options.resume)
    if options.mode == "describe":
        return show(options, config, workdir if options.workdir else None)
    if options.mode == "train":
        keep_freed_memory()
    keep_compiled(config)
    hosts.limit(config.train.stall_seconds)
    if options.mode == "predict":
        from jformer.stream import predict_file

        predict_file(config, workdir, *files)
    elif options.mode == "score":
        from jformer.stream import score_file

        score_file(config, workdir, *files)
    elif options.mode == "verify":
        from jformer.verify import verify

        return 0 if verify(config, workdir) else FAILED
    elif options.mode == "export":
        from jformer.export import export

        print(export(config, workdir, options.format, Path(options.output)))
    else:
        return train_or_evaluate(options.mode, config, workdir)
    return 0


def show(options: flags.FlagValues, config: Config, workdir: Path | None) -> int:
    """Describe the run, on the devices here or on a TPU slice that is not."""
    if options.topology:
        from jformer.slices import describe_slice

        for line in describe_slice(config, workdir, options.topology, options.price):
            print(line, flush=True)
    else:
        from jformer.describe import describe

        print(describe(config, workdir))
    return 0


def train_or_evaluate(mode: str, config: Config, workdir: Path) -> int:
    """Score the run, once it is trained."""
    from jformer.evaluate import evaluate, report_scores

    if mode == "train":
        from jformer.train import train

        if not train(config, workdir):
            if hosts.first():
                print(f"stopped and saved; the same command goes on from {workdir}", file=sys.stderr)
            return STOPPED
    results = evaluate(config, workdir)
    if hosts.first():
        print(report_scores(results, config, workdir))
    return 0


def keep_compiled(config: Config) -> None:
    """Let JAX keep what takes long to compile beside the tokenized corpora, unless the environment names a place."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.data.cache_dir).expanduser() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


def parse(argv: list[str]) -> tuple[flags.FlagValues, Config]:
    """Return the flags and the checked config; raise UserError for whatever is wrong with either."""
    options, overrides = read_flags(argv)
    return options, configure(options, overrides)


def read_flags(argv: list[str]) -> tuple[flags.FlagValues, list[str]]:
    """Return the flags, checked as far as they go, and the arguments that set keys of the config."""
    options = flags.FlagValues()
    flags.DEFINE_string("config", None, "A Python file with get_config().", flag_values=options)
    flags.DEFINE_string("workdir", None, "The directory of the run.", flag_values=options)
    flags.DEFINE_enum("mode", "train", MODES, "What to do.", flag_values=options)
    flags.DEFINE_string("input", "-", "Text to answer.", flag_values=options)
    flags.DEFINE_string("output", "-", "Where answers go.", flag_values=options)
    flags.DEFINE_bool("resume", False, "Go on with a half-written output.", flag_values=options)
    flags.DEFINE_enum("format", None, FORMATS, "What to export to.", flag_values=options)
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
    if options.mode == "export" and (not options.format or options.output == "-"):
        raise UserError("--mode=export needs --format and a folder as --output; see --help")
    return options, overrides


def coordinates(options: flags.FlagValues) -> hosts.Coordinates | None:
    """Return which of how many processes this is, or None if it is the only one."""
    own = hosts.from_flags(options.distributed, options.coordinator, options.processes, options.process)
    if own and options.mode not in TOGETHER:
        raise UserError(f"--mode={options.mode} is for one process: several can {', '.join(TOGETHER)}")
    return own


def configure(options: flags.FlagValues, overrides: list[str]) -> Config:
    """Return the config that the flags name, with what they set; raise UserError if it cannot work or go on."""
    saved = run_path(options.workdir or "") / "config.json"
    if not options.config and not (options.workdir and saved.exists()):
        raise UserError(f"--config is missing and {saved} does not exist: name a file such as configs/quickstart.py")
    values = load_config(Path(options.config)) if options.config else configs.as_config_dict(configs.load(saved))
    config = configs.resolve(override(values, overrides))
    if options.mode != "train" and options.workdir and saved.exists():
        configs.refuse_changes(configs.load(saved), config)
    return config


def override(config: ConfigDict, arguments: list[str]) -> ConfigDict:
    """Set the keys of --config.section.key=value arguments; each value takes the type of the default it replaces."""
    keys = [argument.partition("config.")[2].partition("=")[0] for argument in arguments]
    check_keys(keys, configs.flatten(config.to_dict()))
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", *arguments])
    try:
        values(["", *arguments])
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return values.config


if __name__ == "__main__":
    sys.exit(main())
