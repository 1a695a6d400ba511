"""Parts that a config names: built-in ones by a short name, user-defined ones as `package.module:function`.

A table maps short names to parts, or to import paths that are resolved on first use. A user-defined part is imported
only if its module was allowed in this process: by `allow`, which commands call for the parts named in their config file
and arguments, or by the environment (JFORMER_PARTS=my_package,other.module). The config.json of a run may be
untrusted, so naming a part there is not enough to import it.

docs/parts.md shows one part of each kind; `jformer.testing` checks them.
"""

import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jformer.errors import UserError, check_choice, nearest

ENVIRONMENT = "JFORMER_PARTS"
PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
OWN = "package.module:function"
# The arguments of a part, where it is called with a fixed number of them.
ARGUMENTS = {
    "data.source": 2, "optim.loss": 3, "evaluate.scores": 2, "optim.schedule": 2, "optim.optimizer": 3,
    "model.norm_type": 1, "model.activation": 1, "model.positions": 2, "decode.search": 5,
}  # fmt: skip

_allowed: set[str] = set()
_recorded: dict[str, str] = {}


def is_own(name: str) -> bool:
    """Return whether a name is that of a user-defined part, `package.module:function`."""
    return PLACE.fullmatch(name) is not None


def check_part(key: str, name: str, choices: Collection[str]) -> None:
    """Raise UserError unless a name is one of the choices, or has the form of a user-defined part."""
    if not (isinstance(name, str) and is_own(name)):
        check_choice(key, name, choices, f", or name {OWN}")


def allow(*names: str) -> None:
    """Allow the import of parts, modules or packages with all modules in them, and commands to be run."""
    _allowed.update(name.partition(":")[0] if is_own(name) else name for name in names)


def check_command(key: str, command: str) -> None:
    """Raise UserError for a command that was not allowed in this process."""
    if command not in _allowed:
        raise UserError(
            f"{key}={command!r} comes from a saved config, so it is not run: if you trust it, name it again by "
            f"--config.{key}, or in jformer.plugins.allow"
        )


def find(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return the part that a config names.

    Args:
        key: the config key, for errors.
        name: a key of `table`, or `package.module:function`.
        table: short name → the part, or its place as "package.module:function".

    Raises:
        UserError: there is no such part, its module was not allowed, or it does not take the ARGUMENTS of its kind.
    """
    check_part(key, name, table)
    found = table.get(name, name)
    if not isinstance(found, str):
        return found
    module_name, _, attribute = found.partition(":")
    if name in table:
        return getattr(importlib.import_module(module_name), attribute)
    _check_allowed(key, name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{key}={name!r}: cannot import {module_name} ({error}); is its folder on PYTHONPATH?"
        ) from error
    if not callable(part := getattr(module, attribute, None)):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(f"{key}={name!r}: {module_name} has no function {attribute}; {nearest(attribute, known)}")
    if key in ARGUMENTS:
        _check_arguments(key, name, part)
    _report_change(name)
    return part


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return part → SHA-256 of its module's file, without the modules that it imports; the module must be allowed."""
    return {name: _digest(name) for name in names if find("parts", name, {})}


def digests_of_imported(names: Iterable[str]) -> dict[str, str]:
    """Return part → SHA-256 of its module's file, for the parts whose modules this process has imported."""
    return {name: _digest(name) for name in names if name.partition(":")[0] in sys.modules}


def expect(recorded: Mapping[str, str]) -> None:
    """Compare each part, when it is imported, with the digest that a run recorded; report changes on standard error."""
    _recorded.update(recorded)


def _check_allowed(key: str, name: str) -> None:
    module = name.partition(":")[0]
    allowed = {*_allowed, *filter(None, os.environ.get(ENVIRONMENT, "").replace(" ", "").split(","))}
    if not any(module == each or module.startswith(f"{each}.") for each in allowed):
        raise UserError(
            f"{key}={name!r} is not imported, as the config may be a stranger's: read its code, then set "
            f"{ENVIRONMENT}={module}, name the part again by --config.{key}, or call jformer.plugins.allow({module!r})"
        )


def _check_arguments(key: str, name: str, part: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # a part written in C may have none
        return
    try:
        signature.bind(*range(ARGUMENTS[key]))
    except TypeError as error:
        raise UserError(
            f"{key}={name!r} takes {signature}, and is called with {ARGUMENTS[key]} arguments: docs/parts.md lists them"
        ) from error


def _digest(name: str) -> str:
    file = Path(getattr(sys.modules[name.partition(":")[0]], "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""  # a notebook has none


def _report_change(name: str) -> None:
    before, now = _recorded.pop(name, ""), _digest(name)
    if before and before != now:
        print(f"{name} has changed since the run recorded it: SHA-256 {before[:12]}, now {now[:12]}", file=sys.stderr)
