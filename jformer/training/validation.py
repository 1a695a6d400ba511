"""A validation in the course of training: a loss, scores of answers, and which update is the best.

How the loss of a split is computed is said in evaluation/validation.
"""

import math
from typing import Any

from jaxtyping import PyTree

from jformer.config.options import LOWER_IS_BETTER
from jformer.evaluation.split_loss import split_sums
from jformer.parallel import processes
from jformer.tasks.sums import Sums, summarize
from jformer.training.heartbeat import UPDATING
from jformer.training.log import TrainingLog
from jformer.training.run import Run
from jformer.training.state import Progress


def validate(run: Run, log: TrainingLog) -> float:
    """Write the rows of a validation and show some answers; return the selection cost of the parameters.

    That is what train.best_by names, negated where higher is better: of two costs the lower one is the better. Where
    there is a moving average of the parameters, its loss is a row as well; it decides nothing.
    """
    progress = run.progress
    log.heartbeat.enter(f"validating update {progress.step}")
    processes.enter_phase(f"the validation after update {progress.step}")
    sums = sums_of(run, run.state.params)
    row: dict[str, Any] = {"step": progress.step, "split": "valid", **summarize(sums)}
    row |= answer(run, log, sums)
    log.write(row)
    if run.state.ema is not None:
        processes.enter_phase(f"the validation of the average after update {progress.step}")
        log.write({"step": progress.step, "split": "valid_ema", **summarize(sums_of(run, run.state.ema))})
    best_by = run.config.train.best_by
    note_best(progress, row[best_by], best_by)
    if 0 < run.config.train.patience <= progress.since_best:
        best = "none was finite" if progress.best is None else f"{progress.best:.4f} of update {progress.best_step}"
        log.say(f"no better validation {best_by} than before ({best}): stopping")
    log.heartbeat.enter(UPDATING)
    return row[best_by] if best_by in LOWER_IS_BETTER else -row[best_by]


def sums_of(run: Run, params: PyTree) -> Sums:
    """Return the sums of some parameters over the validation text."""
    assert run.data.valid is not None
    model = run.sampler.model.config
    return split_sums(run.eval_step, params, run.data.valid, run.mesh, model, run.config.train.accumulation)


def note_best(progress: Progress, value: float, best_by: str) -> None:
    """Note a validation's value and whether it is the best so far; one that is not finite never is."""
    best = progress.best
    if math.isfinite(value) and (best is None or (value < best if best_by in LOWER_IS_BETTER else value > best)):
        progress.best, progress.best_step, progress.since_best = value, progress.step, 0
    else:
        progress.since_best += 1


def answer(run: Run, log: TrainingLog, sums: Sums) -> dict[str, float]:
    """Answer the first examples of the validation text, show some of them, and return the scores of evaluate.during."""
    examples, during = run.data.answered, run.config.evaluate.during
    if not examples:
        return {}
    processes.enter_phase(f"the answers after update {run.progress.step}")
    run.sampler.params = run.state.params
    outputs = run.sampler.predict([pair.source for pair in examples])
    shown = run.config.train.samples
    log.show_samples(run.progress.step, examples[:shown], outputs[:shown])
    if not during:
        return {}
    scored = run.config.evaluate.during_examples
    scores = run.scoring(outputs[:scored], examples[:scored], sums)
    return {name: scores[name]["score"] for name in during}
