"""Guards between a fault and its harm, each with what the code does without it: their cases must go red then.

As a plugin of pytest it takes one away: python -m pytest -p tests.faults.guards --without="one trainer of a run" …
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jformer.integrity import DIGEST


class Guard(NamedTuple):
    """A function of a module, or of a class in it, what takes its place, and the damage it is against, if it is."""

    place: str
    instead: Callable[..., Any]
    kinds: tuple[str, ...] = ()
    test: str = ""  # a file below tests/, and the name of a test in it that must fail without


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


def write_in_place(path: Path, content: bytes) -> None:
    """Write over a file, which a full disk or a kill leaves half-written."""
    path.write_bytes(content)


def count_rows(path: Path, step: int, *_: Any) -> int:
    """Leave all rows where they are."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest_only(checkpoints: Any) -> list[int]:
    """Let older steps go unseen."""
    return checkpoints._own_steps()[-1:]


def take_anything(progress: Any, value: float, best_by: str) -> None:
    """Take a value that is not finite for the best one, if it comes first."""
    if progress.best is None or value < progress.best or math.isnan(value):
        progress.best, progress.best_step, progress.since_best = value, progress.step, 0


def call_it_finite(tree: Any) -> Any:
    """Call everything finite."""
    import jax.numpy as jnp

    return jnp.bool_(True)


def let_in(workdir: Any) -> contextlib.AbstractContextManager[None]:
    """Let in as many trainers as come."""
    return contextlib.nullcontext()


def pytest_addoption(parser: Any) -> None:
    """Know the option of the plugin."""
    parser.addoption("--without", default="", help="a guard to do without")


def pytest_configure(config: Any) -> None:
    """Take the guard away, before any test is imported."""
    if name := config.getoption("--without"):
        taken = contextlib.ExitStack()
        taken.enter_context(without(name))
        config.add_cleanup(taken.close)


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
    "digests of rows": Guard("jformer.training.rows.without_digest", unchecked, ("metrics.jsonl",)),
    "digest of results": Guard("jformer.evaluation.records.without_digest", unchecked, ("results.json",)),
    "rows after the checkpoint are dropped": Guard(
        "jformer.training.record.JsonlWriter.truncate_after",
        staticmethod(count_rows),
        test="training/test_record.py::test_a_half_written_last_line_is_dropped",
    ),
    "the result of every save is looked at": Guard(
        f"{CHECKPOINT}.Checkpoints.wait",
        swallow,
        test="checkpoints/test_checkpoint.py::test_a_disk_that_is_full_is_one_line_and_old_steps_stay_valid",
    ),
    "half-written steps are removed": Guard(
        f"{CHECKPOINT}.remove_unfinished",
        nothing,
        test="checkpoints/test_checkpoint.py::test_half_written_checkpoints_are_removed_and_not_found",
    ),
    "a new step is read back before an older one is deleted": Guard(
        f"{CHECKPOINT}.prove",
        nothing,
        test="checkpoints/test_checkpoint.py::test_a_new_step_that_is_damaged_on_disk_pushes_out_none",
    ),
    "files are written beside and renamed": Guard(
        "jformer.storage.replace_content",
        write_in_place,
        test="test_storage.py::test_content_that_finds_no_room_leaves_what_was_there",
    ),
    "updates that are not finite are skipped": Guard(
        "jformer.training.step.all_finite",
        call_it_finite,
        test="training/test_step.py::test_update_that_is_not_finite_changes_nothing_and_is_counted",
    ),
    "the best validation is finite": Guard(
        "jformer.training.validation.note_best",
        take_anything,
        test="training/test_validation.py::test_validation_that_is_not_finite_is_never_the_best",
    ),
    "an output is not the input": Guard(
        "jformer.inference.output_file.refuse_input",
        nothing,
        test="inference/test_answer_files.py::test_an_output_that_is_the_input_is_refused",
    ),
    "one trainer of a run": Guard(
        "jformer.training.lock.sole_trainer",
        let_in,
        test="training/test_loop.py::test_second_trainer_of_a_workdir_is_refused",
    ),
    "places can be written, before the work": Guard(
        "jformer.storage.check_writable",
        nothing,
        test="test_main.py::test_a_place_that_cannot_be_written_is_named_before_the_work",
    ),
    "a process that stands still is ended": Guard(
        "jformer.parallel.processes.watchdog.Watchdog.stuck",
        nothing,
        test="parallel/processes/test_parts.py::"
        "test_a_process_alone_is_stuck_where_an_update_takes_long_and_nowhere_else",
    ),
    "no other text on resume": Guard(
        "jformer.trainer.refuse_other_text",
        nothing,
        test="training/test_loop.py::test_changed_validation_text_is_refused",
    ),
    "no ids that a model has not": Guard(
        "jformer.inference.inputs.refuse_foreign_ids",
        nothing,
        test="inference/test_inputs.py::test_a_token_that_the_model_has_not_is_refused_before_the_search",
    ),
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
