"""Config files and keys set from outside: what the command lines have in common. Knows no flag and no experiment."""

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from jformer import config as configs
from jformer.config import Config
from jformer.errors import UserError, nearest


def load_module(path: Path, flag: str) -> ModuleType:
    """Return a Python file, run as a module; raise UserError naming the flag if it is not there or has a mistake."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"--{flag}={path}: no such Python file; the ones that come along are in {flag}s/")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (AttributeError, ImportError, KeyError, SyntaxError, TypeError) as error:
        raise UserError(f"--{flag}={path}: {error}") from error
    return module


def load_config(path: Path) -> ConfigDict:
    """Return what a config file's get_config() gives."""
    module = load_module(path, "config")
    if not hasattr(module, "get_config"):
        raise UserError(f"--config={path}: has no get_config()")
    try:
        return module.get_config()
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"--config={path}: {error}") from error


def check_keys(keys: Iterable[str], known: Mapping[str, Any]) -> None:
    """Raise UserError for the first dotted key that is no key of a config, naming the nearest one."""
    for key in keys:
        if key not in known:
            sections = dict.fromkeys(name.partition(".")[0] for name in known if "." in name)
            hint = nearest(key, known, otherwise=f"the sections are {', '.join(sections)}")
            raise UserError(f"unknown config key {key}; {hint}")


def with_keys(config: ConfigDict, overrides: Mapping[str, Any]) -> Config:
    """Return the checked config with dotted keys set to values of Python."""
    values = config.to_dict()
    check_keys(overrides, configs.flatten(values))
    for key, value in overrides.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    return configs.resolve(values)


def parse_keys(config: ConfigDict, arguments: Iterable[str]) -> dict[str, Any]:
    """Return what --config.section.key=value arguments set: text where a config has text, else a value of Python."""
    known = configs.flatten(config.to_dict())
    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.removeprefix("--config.").partition("=")
        check_keys([key], known)
        try:
            overrides[key] = text if isinstance(known[key], str) else ast.literal_eval(text)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{key}={text!r} must be written as {type(known[key]).__name__} in Python") from error
    return overrides


def as_flags(overrides: Mapping[str, Any]) -> list[str]:
    """Return the arguments of jformer.main that set dotted keys."""
    return [f"--config.{key}={value}" for key, value in overrides.items()]
