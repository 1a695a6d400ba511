"""Read config files, and set dotted keys on a config; shared by all command lines."""

import contextlib
import dataclasses
import difflib
import importlib.util
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jformer import plugins
from jformer.config import options, resolve
from jformer.config.options import Config
from jformer.errors import UserError, nearest

RECIPES = Path(__file__).parents[1] / "recipes"  # the folder configs/, which comes with the package


def load_module(path: Path, flag: str) -> ModuleType:
    """Return a Python file, run as a module; raise UserError naming flag, file and line if it cannot be run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        known = [each.stem for each in RECIPES.glob("*.py")] if flag == "config" else []
        hint = f": name a file, or a config that comes with jformer ({nearest(path.stem, known)})" if known else ""
        raise UserError(f"--{flag}={path}: no such Python file{hint}")
    module = importlib.util.module_from_spec(spec)
    with blaming(path, flag):
        spec.loader.exec_module(module)
    return module


def run_config_file(path: Path) -> ConfigDict:
    """Return the result of a config file's get_config(), and allow the import of the parts that it names.

    A name such as `quickstart`, which is not a file, means a config that comes with jformer.

    Raises UserError naming file and line if there is none.
    """
    path, bundled = path.expanduser(), RECIPES / f"{path}.py"
    module = load_module(bundled if not path.is_file() and bundled.is_file() else path, "config")
    if not hasattr(module, "get_config"):
        raise UserError(f"--config={path}: has no get_config()")
    with blaming(path, "config"):
        config = module.get_config()
    if not isinstance(config, ConfigDict):
        found = "nothing" if config is None else f"a {type(config).__name__}, not a config"
        raise UserError(f"--config={path}: get_config() returns {found}; end it with: return config")
    plugins.allow(*options.named_code(options.flatten(config.to_dict())))
    return config


@contextlib.contextmanager
def blaming(path: Path, flag: str) -> Iterator[None]:
    """Turn any exception of a user's file, SystemExit included, into a UserError that names its line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        trace, place = traceback.extract_tb(error.__traceback__), path.absolute()  # as the module's frames name it
        frames = [frame.lineno or 0 for frame in trace if Path(frame.filename) == place]
        number = frames[-1] if frames else 0
        if isinstance(error, SyntaxError) and Path(error.filename or "") == place:  # not of a file that it imports
            number = error.lineno or 0
        line, where = linecache.getline(str(path), number), f"--{flag}={path}" + (f":{number}" if number else "")
        raise UserError(f"{where}: {_unknown_key(error, line) or _in_short(error)}") from error


def _unknown_key(error: BaseException, line: str) -> str:
    """Return the nearest keys to one that a ConfigDict does not have, or nothing for another error."""
    found = re.match(r"""['"\\]*(?:Key ")?(\w+)\\?["']""", str(error))
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    if not found or not isinstance(error, AttributeError | KeyError) or "ml_collections" not in raised:
        return ""
    known = options.flatten(dataclasses.asdict(Config()))
    section = re.search(rf"(\w+)\.(?:update\(|{found[1]}\b)", line)
    key = f"{section[1]}.{found[1]}" if section and section[1] in vars(Config()) else found[1]
    return f"unknown config key {key}; {nearest_key(key, known)}"


def _in_short(error: BaseException) -> str:
    return str(error) if isinstance(error, SyntaxError | TypeError) else f"{type(error).__name__}: {error}"


def check_keys(keys: Iterable[str], known: Mapping[str, object]) -> None:
    """Raise UserError for the first dotted key that is not a key of a config, naming the nearest one."""
    for key in keys:
        if key not in known:
            raise UserError(f"unknown config key {key}; {nearest_key(key, known)}")


def nearest_key(key: str, known: Mapping[str, object]) -> str:
    """Return a hint to end an error message with: the key or section probably meant, or else all sections."""
    sections = dict.fromkeys(name.partition(".")[0] for name in known if "." in name)
    if inside := [name for name in known if name.startswith(f"{key}.")]:
        return f"it is a section: set one of its keys, such as {inside[0]}"
    # A key is also known by its last part; where two sections share one, the first section wins, so it comes last.
    meant = {name.rpartition(".")[2]: name for name in reversed(list(known))}
    meant |= {name: name for name in (*known, *sections)}
    close = difflib.get_close_matches(key, meant, n=1, cutoff=0.5)
    return f"did you mean {meant[close[0]]}?" if close else f"the sections are {', '.join(sections)}"


def override(config: ConfigDict, arguments: list[str]) -> ConfigDict:
    """Set the keys of --config.section.key=value arguments, and allow the import of the parts that they name.

    Each value is converted to the type of the default it replaces; nothing after the = is an empty tuple.
    """
    keys = [*map(_key_of, arguments)]
    known = options.flatten(config.to_dict())
    check_keys(keys, known)
    arguments = [
        f"{each}()" if each.endswith(f"{key}=") and isinstance(known[key], tuple) else each
        for key, each in zip(keys, arguments, strict=True)
    ]
    for key, argument in zip(keys, arguments, strict=True):
        if type(known[key]) is int:
            _check_whole(key, argument.partition("=")[2])
    arguments = [*dict(zip(keys, arguments, strict=True)).values()]  # the last of each key: lists would be extended
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", *arguments])
    try:
        values(["", *arguments])
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    given = options.flatten(values.config.to_dict())
    plugins.allow(*options.named_code({key: given[key] for key in keys}))
    return values.config


def _check_whole(key: str, text: str) -> None:
    """Raise UserError for an argument that is not a whole number, suggesting one for values such as 1e5."""
    if not re.fullmatch(r"\s*[+-]?\d(_?\d)*\s*", text):
        stands_for = re.fullmatch(r"\d+(\.\d*)?[eE]\+?\d", text) and float(text)
        hint = f": {int(stands_for)}" if stands_for and stands_for == int(stands_for) else ""
        raise UserError(f"--config.{key}={text} must be a whole number{hint}")


def with_keys(config: ConfigDict, overrides: Mapping[str, object]) -> Config:
    """Return the checked config with dotted keys set to Python values."""
    values = config.to_dict()
    check_keys(overrides, options.flatten(values))
    for key, value in overrides.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    return resolve(values)


def parse_keys(config: ConfigDict, arguments: Sequence[str]) -> dict[str, Any]:
    """Return dotted key → value of what --config.section.key=value arguments set; the config is changed, too."""
    flat = options.flatten(override(config, [*arguments]).to_dict())
    return {key: flat[key] for key in map(_key_of, arguments)}


def _key_of(argument: str) -> str:
    return argument.partition("config.")[2].partition("=")[0]


def as_flags(overrides: Mapping[str, object]) -> list[str]:
    """Return the arguments of jformer.main that set dotted keys."""
    return [f"--config.{key}={value}" for key, value in overrides.items()]
