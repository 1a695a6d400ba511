"""Parts that a config names: built-in ones by a short name, user-defined ones as `package.module:function`.

A table maps short names to parts, or to import paths that are resolved on first use. A user-defined part is imported
only if its module was allowed in this process: by `allow`, which commands call for the parts named in their config file
and arguments, or by the environment (JFORMER_PARTS=my_package,other.module). A run's config.json may be untrusted, so
naming a part there is not enough to import it.

docs/parts.md shows one part of each kind; `jformer.testing` checks them.
"""

import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jformer.errors import UserError, check_choice, nearest

ENVIRONMENT = "JFORMER_PARTS"
PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
OWN = "package.module:function"
# The arguments of a part, where it is called with a fixed number of them.
ARGUMENTS = {
    "data.source": 2, "optim.loss": 3, "evaluate.scores": 2, "optim.schedule": 2, "optim.optimizer": 3,
    "model.norm_type": 1, "model.activation": 1, "model.positions": 2, "decode.search": 5,
}  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

_allowed: set[str] = set()
_recorded: dict[str, str] = {}
_found: dict[str, tuple[Any, str]] = {}  # user-defined part → its object, and the digest of its file when it was found
_forgetting: list[Callable[[], None]] = []  # empty the caches of `cached`
_one_at_a_time = threading.RLock()  # a server computes in two threads


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
    with _one_at_a_time:
        forget_changed()
        if name not in _found:
            _found[name] = part, _digest(name)
        _, digest = _found[name]
    _report_change(name, digest)
    return part


def cached(size: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return functools.lru_cache(size) for objects built from a config, which only names user-defined parts.

    A notebook may redefine a part under the same name, or reload its module: then everything cached is dropped, and so
    are JAX's programs. Results for arguments that are not hashable are not cached.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept = functools.lru_cache(size)(function)
        _forgetting.append(kept.cache_clear)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            forget_changed()
            try:
                hash((args, tuple(kwargs.values())))
            except TypeError:
                return function(*args, **kwargs)
            return kept(*args, **kwargs)  # type: ignore[arg-type]

        return call

    return decorate


def forget_changed() -> None:
    """Drop what was cached if a user-defined part has been replaced since it was found."""
    with _one_at_a_time:
        changed = [name for name, (part, _) in _found.items() if _present(name, part) is not part]
        for name in changed:
            del _found[name]
        for forget in _forgetting if changed else ():
            forget()
        if changed and (jax := sys.modules.get("jax")):
            jax.clear_caches()


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return part → SHA-256 of its module's file, without the modules that it imports; the module must be allowed."""
    return {name: _digest_found(name) for name in names if find("parts", name, {})}


def digests_of_imported(names: Iterable[str]) -> dict[str, str]:
    """Return part → SHA-256 of its module's file, for the parts whose modules this process has imported."""
    forget_changed()
    return {name: _digest_found(name) for name in names if name.partition(":")[0] in sys.modules}


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


def _present(name: str, found: Any) -> Any:
    """Return what a name stands for now: what was found if the module makes its attributes, None if it is gone."""
    place, _, attribute = name.partition(":")
    module = sys.modules.get(place)
    return vars(module).get(attribute, found) if module else None


def _digest_found(name: str) -> str:
    """Return the digest of a part's file when it was imported."""
    _, digest = _found.get(name, (None, None))
    return _digest(name) if digest is None else digest


def _digest(name: str) -> str:
    file = Path(getattr(sys.modules[name.partition(":")[0]], "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""  # a notebook has none


def _report_change(name: str, now: str) -> None:
    before = _recorded.pop(name, "")
    if before and before != now:
        print(f"{name} has changed since the run recorded it: SHA-256 {before[:12]}, now {now[:12]}", file=sys.stderr)
