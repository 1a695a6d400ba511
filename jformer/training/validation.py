"""Validation during training: rows of losses and scores, sample answers, and the best update.

Losses, answers and scores are computed by functions passed in: training imports neither searches nor scores.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from jformer.config.options import LOWER_IS_BETTER, TrainConfig
from jformer.data.sources.split import Pair, Split
from jformer.errors import BrokenRunError
from jformer.models.parts import join
from jformer.parallel import processes
from jformer.tasks.metrics import Scores
from jformer.tasks.sums import Sums, add_up, summarize
from jformer.tasks.task import MASKS, VECTOR
from jformer.training.heartbeat import UPDATING
from jformer.training.log import TrainingLog
from jformer.training.rows import Sample
from jformer.training.state import Progress, TrainState

LABELLED = 1_000  # examples to search for the first ones of each label
PROMPT = 40  # characters of a validation text that a language model continues


class Validation(NamedTuple):
    """The functions and examples of a validation."""

    losses: Callable[[PyTree], Mapping[str, Sums]]  # parameters → sums over each validation text, by its name
    examples: Mapping[str, Sequence[Pair]]  # to answer, of each text; may be empty
    answer: Callable[[PyTree], Mapping[str, Sequence[str]]]  # parameters → an answer to each example
    score: Callable[[str, Sequence[str], Sums], Scores]  # name of a text, answers, sums → scores


def validate(
    validation: Validation, train: TrainConfig, state: TrainState, progress: Progress, log: TrainingLog
) -> float:
    """Write the rows of a validation and show some answers; return the selection cost of the parameters.

    The cost is the metric that train.best_by names, negated if higher is better, so lower costs are better. Losses are
    means over the tokens of all texts, scores means over texts. Each of several texts gets a row of its own, and so
    does a moving average of the parameters; these rows do not affect the cost.

    Args:
        validation: the functions and examples.
        train: the selection metric, the patience, and the number of answers to show.
        state: whose parameters are validated.
        progress: of the run; its best update is noted here.
        log: where rows and answers go.
    """
    step = progress.step
    log.heartbeat.enter(f"validating update {step}")
    processes.enter_phase(f"the validation after update {step}")
    each = validation.losses(state.params)
    rows: dict[str, dict[str, Any]] = {name: summarize(sums) for name, sums in each.items()}
    row: dict[str, Any] = {"step": step, "split": "valid", **summarize(add_up(each.values()))}
    if any(validation.examples.values()):
        processes.enter_phase(f"the answers after update {step}")
        answers = validation.answer(state.params)
        pairs = [zip(some, answers[name], strict=True) for name, some in validation.examples.items()]
        turns = [pair for turn in itertools.zip_longest(*pairs) for pair in turn if pair]
        log.show_samples(step, [Sample(pair.source, pair.target, text) for pair, text in turns[: train.samples]])
        scores = {name: validation.score(name, answers[name], sums) for name, sums in each.items()}
        for name, found in scores.items():
            rows[name] |= {key: entry["score"] for key, entry in found.items()}
            log.show_once(note for entry in found.values() for note in entry.get("notes", ()))
        row |= {key: sum(rows[name][key] for name in scores) / len(scores) for key in next(iter(scores.values()))}
    log.write(row)
    for name, found in rows.items() if len(rows) > 1 else ():
        log.write({"step": step, "split": f"valid_{name}", **found})
    if state.ema is not None:
        processes.enter_phase(f"the validation of the average after update {step}")
        averaged = validation.losses(join(state.ema, state.params))
        log.write({"step": step, "split": "valid_ema", **summarize(add_up(averaged.values()))})
    if train.best_by not in row:
        names = ", ".join(sorted(row.keys() - {"step", "split"}))
        raise BrokenRunError(f"train.best_by={train.best_by!r}: a validation of this task gives {names}")
    value = row[train.best_by]
    note_best(progress, value, train.best_by)
    if 0 < train.patience <= progress.since_best:
        best = "none was finite" if progress.best is None else f"{progress.best:.4f} of update {progress.best_step}"
        log.show(f"validation {train.best_by} no longer improves (best: {best}): stopping")
    log.heartbeat.enter(UPDATING)
    return value if train.best_by in LOWER_IS_BETTER else -value


def note_best(progress: Progress, value: float, best_by: str) -> None:
    """Record a validation's value as the best if it is; a non-finite value never is."""
    best = progress.best
    if math.isfinite(value) and (best is None or (value < best if best_by in LOWER_IS_BETTER else value > best)):
        progress.best, progress.best_step, progress.since_best = value, progress.step, 0
    else:
        progress.since_best += 1


def forget_best(progress: Progress, now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Forget a best value measured with other options, record the current options, and return a line about it if so.

    Args:
        progress: of the run, which may hold the options of its best.
        now: the current options that values of train.best_by depend on.
        before: those of the saved run; used where the progress lacks them, as that of older versions does.
    """
    before = {**before, **progress.measured}
    changes = [f"{key}={value!r} (was {before.get(key)!r})" for key, value in now.items() if before.get(key) != value]
    progress.measured = dict(now)
    if not changes or not (progress.best_step or progress.since_best):
        return []
    best = "none" if progress.best is None else f"{progress.best:.4f} of update {progress.best_step}"
    progress.best, progress.best_step, progress.since_best = None, 0, 0
    return [f"{', '.join(changes)}: this changes train.best_by; its best ({best}) and train.patience are reset"]


def answered_examples(kind: str, shown: int, scored: int, valid: Split) -> list[Pair]:
    """Return the first examples of the validation text to answer: those to show, or those to score if more.

    If labels are only shown, the examples alternate between labels, because a text may be sorted by them.

    Args:
        kind: what the task answers, as `Task.answer` has it; "" = nothing.
        shown: how many answers are shown.
        scored: how many are scored; 0 = none.
        valid: the validation text.
    """
    count = max(shown, scored)
    if kind in ("", MASKS) or not count:  # texts have no masks yet
        return []
    if kind == VECTOR and not scored:  # retrieval searches the scored ones
        return []
    read = valid.read(Counter())
    if kind in ("label", "labels") and not scored:
        return of_each_label(list(itertools.islice(read, max(count, LABELLED))))[:count]
    examples = list(itertools.islice(read, count))
    return [Pair(prompt(pair.target), "") for pair in examples] if kind == "continuation" else examples


def of_each_label(examples: Sequence[Pair]) -> list[Pair]:
    """Return the examples in turns: the first one of each label, then the second ones, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for pair in examples:
        turns.append(seen[pair.target])
        seen[pair.target] += 1
    return [examples[i] for i in sorted(range(len(examples)), key=turns.__getitem__)]


def prompt(text: str) -> str:
    """Return the first PROMPT characters of a text, without a word cut off at the end.

    >>> prompt("It was the best of times, it was the worst of times")
    'It was the best of times, it was the'
    """
    begin = text[:PROMPT]
    cut = len(text) > PROMPT and not text[PROMPT].isspace()
    return begin.rsplit(maxsplit=1)[0] if cut and len(begin.split()) > 1 else begin
