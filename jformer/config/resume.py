"""Which options may change on resuming, because they do not affect results, and which the saved run determines."""

import dataclasses
import math
from typing import Any

from jformer.config.options import OPEN_SCHEDULES, Config, TrainConfig, flatten
from jformer.data.data_config import OF_VOCABULARY
from jformer.errors import UserError
from jformer.storage import run_path

# A resumed run may change these: what it computes for a given step stays the same.
MAY_CHANGE = (
    *(f"train.{key}" for key in ("num_steps", "num_epochs", "max_minutes", "checkpoint_every", "checkpoint_minutes")),
    *(f"train.{key}" for key in ("log_every", "eval_every", "keep_last", "patience")),
    *(f"train.{key}" for key in ("accumulation", "max_skipped", "samples", "trackers", "profile_steps", "peak_flops")),
    *("train.stall_seconds", "data.dir", "data.cache_dir", "data.test"),
    *("evaluate.", "decode.", "mesh.", "model.execution."),
)
# After training, texts may be longer or shorter than those it was trained on.
LENGTHS = ("data.max_source_length", "data.max_target_length")


def differences(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """Return dotted key → (old, new) where two configs differ."""
    before, after = flatten(dataclasses.asdict(old)), flatten(dataclasses.asdict(new))
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def with_saved_config(given: Config, saved: Config) -> Config:
    """Return a config with the values that the saved run resolved, where the given config leaves them open.

    These are data.row_multiple, data.length_multiple, the dtype for model.dtype=auto, train.num_steps for the same
    train.num_epochs; with train.init_from also its absolute path, if it is only read when the run begins, and the
    options of the vocabulary, which is inherited.
    """
    data, train, model = given.data, given.train, given.model
    data = dataclasses.replace(
        data,
        row_multiple=data.row_multiple or saved.data.row_multiple,
        length_multiple=data.length_multiple or saved.data.length_multiple,
    )
    if saved.train.init_from:
        data = dataclasses.replace(data, **{key: getattr(saved.data, key) for key in OF_VOCABULARY})
    model = dataclasses.replace(model, dtype=saved.model.dtype if model.dtype == "auto" else model.dtype)
    if train.init_from and not saved.model.lora.rank and _is_same_run(train.init_from, saved.train.init_from):
        train = dataclasses.replace(train, init_from=saved.train.init_from)
    if train.num_epochs and train.num_epochs == saved.train.num_epochs and train.num_steps > saved.train.num_steps:
        train = dataclasses.replace(train, num_steps=saved.train.num_steps)
    counted = bool(saved.train.num_epochs) and train.num_steps == saved.train.num_steps
    if counted and train.num_epochs > saved.train.num_epochs and not _has_planned_end(saved):
        limit = math.ceil(2 * saved.train.num_steps * train.num_epochs / saved.train.num_epochs)
        train = dataclasses.replace(train, num_steps=max(TrainConfig.num_steps, limit))  # to be counted again
    return dataclasses.replace(given, data=data, train=train, model=model)


def _has_planned_end(config: Config) -> bool:
    """Return whether learning rates depend on the number of updates of the whole run."""
    return config.optim.schedule not in OPEN_SCHEDULES or 0 < config.optim.warmup < 1


def _is_same_run(given: str, saved: str) -> bool:
    """Return whether a path names a saved one, whose folder may have moved since the path was made absolute."""
    if "://" in given + saved or not saved:
        return given == saved
    parts = run_path(given).parts
    return run_path(given).absolute() == run_path(saved).absolute() or run_path(saved).parts[-len(parts) :] == parts


def resume_config(saved: Config, given: Config, training: bool = True) -> Config:
    """Return the config to resume a run with: the given one, with the values that the saved run resolved.

    Without `training`, texts may have other lengths. Raises UserError for a change that would affect results.
    """
    given = with_saved_config(given, saved)
    fixed = ["train.num_steps", "train.num_epochs"] * _has_planned_end(saved)
    fixed += ["train.accumulation"] * (saved.task == "embed")  # its negatives come from the same microbatch
    may_change = MAY_CHANGE if training else (*MAY_CHANGE, *LENGTHS)
    for key, (old, new) in differences(saved, given).items():
        moved = key == "data.mixture" and _learned_from(old) == _learned_from(new)
        moved |= key == "train.init_from" and bool(saved.model.lora.rank)  # its digest is checked instead
        if key in fixed or not (moved or key.startswith(may_change)):
            remedy = "set it back or use a new --workdir" if training else "it cannot change after training"
            raise UserError(f"{key}={new!r} but this workdir was trained with {old!r}: {remedy}")
    return given


def _learned_from(mixture: Any) -> list[dict[str, Any]]:
    """Return what training depends on, without folders and test sets."""
    used = [corpus for corpus in mixture if corpus.get("train", "train") or corpus.get("valid")]
    return [{key: value for key, value in corpus.items() if key not in ("dir", "test")} for corpus in used]
