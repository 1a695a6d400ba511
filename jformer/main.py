"""Flags to one config, one config to one mode.

python -m jformer.main --config=configs/X.py --workdir=DIR [--mode=MODE] [--config.section.key=value ...]

  --config   a Python file with get_config(); any of its keys can be set as --config.section.key=value. Once DIR holds a
             run, its saved config is used where --config is left out.
  --workdir  the directory of the run: config, tokenizer, checkpoints, metrics, results.
  --mode     train     train, or resume the run in DIR, then score its test sets (the default)
             evaluate  score the test sets again, with other --config.evaluate and --config.decode options if given
             predict   translate --input line by line to --output
             describe  show parameters and FLOPs; needs no data and no DIR
  --input    predict: a text file, or - for standard input (the default)
  --output   predict: a file, or - for standard output (the default)
"""

import difflib
import importlib.util
import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jformer import config as configs
from jformer.config import Config
from jformer.errors import UserError

MODES = ("train", "evaluate", "predict", "describe")
STOPPED = 143  # the exit code of a process that SIGTERM ended, after it saved


def main(argv: list[str] | None = None) -> int:
    """Run one mode and return the exit code: 0, 2 for a mistake the user can mend, 143 when told to stop."""
    argv = sys.argv if argv is None else argv
    if any(argument in ("--help", "-h", "-help") for argument in argv):
        print(__doc__)
        return 0
    try:
        options, config = parse(argv)
        return run(options, config)
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run(options: flags.FlagValues, config: Config) -> int:
    """Import the mode's module, and with it jax, only now: help and mistakes answer at once."""
    if options.mode == "describe":
        from jformer.describe import describe

        print(describe(config, Path(options.workdir) if options.workdir else None))
        return 0
    workdir = Path(options.workdir)
    if options.mode == "predict":
        from jformer.predict import predict_file

        predict_file(config, workdir, options.input, options.output)
        return 0
    from jformer.evaluate import evaluate, report_scores

    if options.mode == "train":
        from jformer.train import train

        if not train(config, workdir):
            print(f"stopped and saved; the same command goes on from {workdir}", file=sys.stderr)
            return STOPPED
    print(report_scores(evaluate(config, workdir), config, workdir))
    return 0


def parse(argv: list[str]) -> tuple[flags.FlagValues, Config]:
    """Return the flags and the checked config; raise UserError for whatever is wrong with either."""
    options = flags.FlagValues()
    flags.DEFINE_string("config", None, "A Python file with get_config().", flag_values=options)
    flags.DEFINE_string("workdir", None, "The directory of the run.", flag_values=options)
    flags.DEFINE_enum("mode", "train", MODES, "What to do.", flag_values=options)
    flags.DEFINE_string("input", "-", "Text to translate.", flag_values=options)
    flags.DEFINE_string("output", "-", "Where translations go.", flag_values=options)
    overrides = [argument for argument in argv[1:] if argument.startswith(("--config.", "--noconfig."))]
    try:
        rest = options([argv[0], *(argument for argument in argv[1:] if argument not in overrides)])
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from error
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: options are written --name=value; see --help")
    if not options.workdir and options.mode != "describe":
        raise UserError("--workdir is missing: name the directory of the run")
    saved = Path(options.workdir or "") / "config.json"
    if not options.config and not (options.workdir and saved.exists()):
        raise UserError(f"--config is missing and {saved} does not exist: name a file such as configs/quickstart.py")
    values = load_file(Path(options.config)) if options.config else configs.as_config_dict(configs.load(saved))
    config = configs.resolve(override(values, overrides))
    if options.mode != "train" and options.workdir and saved.exists():
        configs.refuse_changes(configs.load(saved), config)
    return options, config


def load_file(path: Path) -> ConfigDict:
    """Return what a config file's get_config() gives."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"--config={path}: no such Python file; the ones that come along are in configs/")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.get_config()
    except (AttributeError, KeyError, TypeError) as error:
        if isinstance(error, AttributeError) and not hasattr(module, "get_config"):
            raise UserError(f"--config={path}: has no get_config()") from error
        raise UserError(f"--config={path}: {error}") from error


def override(config: ConfigDict, arguments: list[str]) -> ConfigDict:
    """Set the keys of --config.section.key=value arguments; each value takes the type of the default it replaces."""
    known = configs.flatten(config.to_dict())
    for argument in arguments:
        key = argument.partition("config.")[2].partition("=")[0]
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"the sections are {', '.join(config)}"
            raise UserError(f"unknown config key {key}; {hint}")
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", *arguments])
    try:
        values(["", *arguments])
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return values.config


if __name__ == "__main__":
    sys.exit(main())
