"""Set keys of a config from the command line, as --config.section.key=value."""

import re

from absl import flags
from ml_collections import ConfigDict, config_flags

from jformer import plugins
from jformer.config.config_files import check_keys
from jformer.config.options import flatten, own_parts
from jformer.errors import UserError


def override(config: ConfigDict, arguments: list[str]) -> ConfigDict:
    """Set the keys of --config.section.key=value arguments, and allow the import of the parts that they name.

    Each value is converted to the type of the default it replaces.
    """
    keys = [argument.partition("config.")[2].partition("=")[0] for argument in arguments]
    known = flatten(config.to_dict())
    check_keys(keys, known)
    for key, argument in zip(keys, arguments, strict=True):
        if type(known[key]) is int:
            check_whole(key, argument.partition("=")[2])
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", *arguments])
    try:
        values(["", *arguments])
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    given = flatten(values.config.to_dict())
    plugins.allow(*own_parts({key: given[key] for key in keys}))
    return values.config


def check_whole(key: str, text: str) -> None:
    """Raise UserError for an argument that is not a whole number, suggesting one for values such as 1e5."""
    if not re.fullmatch(r"\s*[+-]?\d(_?\d)*\s*", text):
        stands_for = re.fullmatch(r"\d+(\.\d*)?[eE]\+?\d", text) and float(text)
        hint = f": {int(stands_for)}" if stands_for and stands_for == int(stands_for) else ""
        raise UserError(f"--config.{key}={text} must be a whole number{hint}")
