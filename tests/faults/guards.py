"""Guards between a fault and its harm, each with what the code does without it: their cases must go red then."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jformer.storage import DIGEST


class Guard(NamedTuple):
    """A function of a module, or of a class in it, what takes its place, and the damage it is against, if it is."""

    place: str
    instead: Callable[..., Any]
    kinds: tuple[str, ...] = ()


class Anything(str):
    """A digest that equals every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def nothing(*_: Any) -> None:
    """Do nothing."""


def unchecked(content: Any, where: str) -> Any:
    """Drop a digest unread."""
    return {key: value for key, value in content.items() if key != DIGEST} if isinstance(content, dict) else content


def swallow(checkpoints: Any) -> None:
    """Wait for a save, and do not look at what became of it."""
    saving, checkpoints._saving = checkpoints._saving, None
    if saving is not None:
        saving.exception()


def count_rows(path: Path, step: int) -> int:
    """Leave all rows where they are."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest_only(checkpoints: Any) -> list[int]:
    """Let older steps go unseen."""
    return checkpoints._own_steps()[-1:]


CHECKPOINT = "jformer.checkpoints.checkpoint"
GUARDS = {
    "digests of arrays": Guard(f"{CHECKPOINT}.refuse_damage", nothing, ("arrays",)),
    "digest of the manifest": Guard(
        "jformer.checkpoints.manifest.digest_of", lambda content: Anything(), ("manifest",)
    ),
    "an older step where the newest is damaged": Guard(f"{CHECKPOINT}.Checkpoints.steps", newest_only, ("arrays",)),
    "digests of the tokenizer": Guard("jformer.data.vocabularies.damaged", lambda folder: [], ("tokenizer",)),
    "digests of the token cache": Guard("jformer.data.corpus._damaged", lambda folder: [], ("token cache",)),
    "digest of config.json": Guard("jformer.config.without_digest", unchecked, ("config.json",)),
    "digests of rows and results": Guard(
        "jformer.evaluation.records.without_digest", unchecked, ("metrics.jsonl", "results.json")
    ),
    "rows after the checkpoint are dropped": Guard(
        "jformer.training.writers.JsonlWriter.truncate_after", staticmethod(count_rows)
    ),
    "the result of every save is looked at": Guard(f"{CHECKPOINT}.Checkpoints.wait", swallow),
    "half-written steps are removed": Guard(f"{CHECKPOINT}.Checkpoints._remove_unfinished", nothing),
}


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Do without a guard, in this process and in those that it forks."""
    owner, function, before = _found(name)
    setattr(owner, function, GUARDS[name].instead)
    try:
        yield
    finally:
        setattr(owner, function, before)


def _found(name: str) -> tuple[Any, str, Any]:
    """Return where a guard stands: the module or the class, its name there, and what stands there."""
    place, _, function = GUARDS[name].place.rpartition(".")
    module, _, owner = place.rpartition(".")
    holder = getattr(importlib.import_module(module), owner) if owner[:1].isupper() else importlib.import_module(place)
    return holder, function, vars(holder)[function]
