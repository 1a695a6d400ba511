"""Turn the keys that a config file sets into one frozen, checked config, and save and load it as config.json.

A config file takes a locked ConfigDict from `default_config`, sets some keys and returns it. `resolve` checks it and
turns it into the dataclasses of `jformer.config.options`, which the rest of the package uses.
"""

import dataclasses
import json
import math
import os
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils.epath import Path
from ml_collections import ConfigDict

from jformer import plugins
from jformer.config.checks import check
from jformer.config.options import OF_IMAGES, Config, flatten, own_parts
from jformer.config.presets import PRESETS, RECIPES
from jformer.errors import UserError, nearest
from jformer.integrity import parse_object, refuse_newer, with_digest, without_digest
from jformer.storage import replace_content, run_path

SCHEMA = 1  # of config.json
LARGEST = 2**31  # exclusive limit of sizes and counts: JAX and sentencepiece use signed 32-bit integers
LARGEST_SEED = 2**32  # exclusive limit of seeds
LARGEST_FLOAT = 3.4e38  # what float32 can hold
SEEDS = ("seed", "decode.seed")
WANTED = {int: "a whole number", float: "a finite number", str: "a text", bool: "a bool, True or False"}

__all__ = ["as_config_dict", "build_section", "child_config", "default_config", "load_config", "resolve", "save_config"]


def default_config(preset: str = "transformer_base") -> ConfigDict:
    """Return every option with its default or the preset's value, locked against unknown keys."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; {nearest(preset, PRESETS)}")
    config = as_config_dict(Config())
    config.model.update(PRESETS[preset])
    config.update_from_flattened_dict(RECIPES.get(preset, {}))
    return config


def child_config(run: str) -> ConfigDict:
    """Return a config for a run that starts from another run's weights: the parent's, to be modified.

    Options that the parent's devices and text determined are reset. So are those of adapters and word vectors, which
    its parameters already include.
    """
    values = as_config_dict(load_config(run_path(run) / "config.json"))
    values.model.lora = default_config().model.lora
    values.data.update(row_multiple=0, length_multiple=0)
    values.train.update(init_from=run, source_vectors="", target_vectors="")
    if values.train.num_epochs:
        values.train.num_steps = default_config().train.num_steps
    return values


def resolve(config: ConfigDict | Config | Mapping[str, object]) -> Config:
    """Return the frozen, checked config; raise UserError naming the first key that cannot work."""
    if isinstance(config, Config):
        config = dataclasses.asdict(config)
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    resolved = _with_source(build_section(Config, values, ""))
    check(resolved)
    return resolved


def _with_source(config: Config) -> Config:
    """Return the config with model.vision.source set where the task implies it."""
    if config.task not in OF_IMAGES or config.model.family != "encdec":
        return config
    vision = dataclasses.replace(config.model.vision, source=True)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vision=vision))


def load_config(path: Path) -> Config:
    """Read a config saved by `save_config`; raise UserError if it is missing, damaged or of a newer schema.

    An option that the file lacks, because an older version wrote it, has its default.
    Does not import the parts that it names; if their code has changed since the run, their first use reports it.
    """
    try:
        values = parse_object(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(
            f"{path.parent} holds no run: name the directory of one, or train one there (it has no {path.name})"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a saved config ({error}); is this a run's directory?") from error
    values = dict(without_digest(values, str(path)))
    refuse_newer(values.pop("schema", None), SCHEMA, str(path))
    recorded = values.pop("parts", {})
    if not isinstance(recorded, dict) or not all(isinstance(each, str) for each in recorded.values()):
        raise UserError(f"{path}: parts={recorded!r:.80} is not a record of parts and their digests; restore the file")
    plugins.expect(recorded)
    return resolve(values)


def as_config_dict(config: Config) -> ConfigDict:
    """Return a resolved config as a locked ConfigDict, to set keys of a saved run."""
    return _as_options(dataclasses.asdict(config)).lock()


class _Options(ConfigDict):
    """A ConfigDict that accepts NumPy scalars and paths, but no bool for a float; ConfigDict converts True to 1.0."""

    def __setitem__(self, key: str, value: object) -> None:
        value = plain(value)
        if isinstance(value, bool) and isinstance(self.get(key), float):
            raise TypeError(f"{key}={value} must be {WANTED[float]}")
        super().__setitem__(key, value)


def _as_options(values: Mapping[str, Any]) -> _Options:
    options = _Options()
    for key, value in values.items():
        options[key] = _as_options(value) if isinstance(value, dict) else value
    return options


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config, from which the run can be rebuilt, unless the file already holds it.

    The key "parts" holds the digests of the `package.module:function` parts that the config names.
    """
    values = {"schema": SCHEMA, **dataclasses.asdict(config)}
    if names := own_parts(flatten(values)):
        values["parts"] = plugins.digests(names)
    content = (json.dumps(with_digest(values), indent=2) + "\n").encode()
    if not path.exists() or path.read_bytes() != content:
        replace_content(path, content)


def build_section(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """Make the dataclass `kind`; raise UserError for unknown keys and values of the wrong type."""
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"unknown config key {prefix}{key}; {nearest(key, hints)}")
    return kind(**{key: _typed(hints[key], value, prefix + key) for key, value in values.items()})


def plain(value: Any) -> Any:
    """Return a NumPy scalar, or a path, as the plain Python value that it stands for."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def _typed(kind: Any, value: Any, key: str) -> Any:
    value = plain(value)
    if dataclasses.is_dataclass(kind) and type(value) is kind:  # the types of its fields are checked, too
        value = dataclasses.asdict(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build_section(kind, value, key + ".")
    if typing.get_origin(kind) is tuple and isinstance(value, (tuple, list)):
        item = typing.get_args(kind)[0]
        return tuple(_typed(item, v, f"{key}[{i}]") for i, v in enumerate(value))
    limit = LARGEST_SEED if key in SEEDS else LARGEST
    is_huge = type(value) is int and abs(value) >= 10**40
    shown = f"about 10**{int(value.bit_length() * math.log10(2))}" if is_huge else value
    if kind is int and type(value) is int and not -limit < value < limit:
        raise UserError(f"{key}={shown} must be {f'below {limit}' if value > 0 else f'above {-limit}'}")
    if kind is float and type(value) in (int, float) and LARGEST_FLOAT < abs(value) < math.inf:
        raise UserError(f"{key}={shown} must be at most {LARGEST_FLOAT}, which float32 can hold")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        whole = kind is int and type(value) is float and value.is_integer() and abs(value) < limit
        wanted = WANTED.get(kind, "a section of options" if dataclasses.is_dataclass(kind) else "a list")
        raise UserError(f"{key}={value!r} must be {wanted}{f': {value:.0f}' if whole else ''}")
    return value
