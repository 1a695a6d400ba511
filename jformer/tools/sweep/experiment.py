"""Read and check an experiment file: a question as arms or as a search, its seeds, its metric. Runs nothing."""

import dataclasses
import functools
import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jformer.config import plain
from jformer.config.config_files import as_flags, blaming, load_module, parse_keys, run_config_file, with_keys
from jformer.config.options import LOWER_IS_BETTER, SCORES, TEST_SCORES, Config, final_scores
from jformer.errors import UserError, check_choice, nearest
from jformer.plugins import is_own
from jformer.tools.sweep.space import Overrides

if TYPE_CHECKING:
    import optuna

GOALS = {  # implied by a metric's name, unless the experiment file sets GOAL
    **dict.fromkeys(LOWER_IS_BETTER, "min"),
    **dict.fromkeys({*SCORES} - {*LOWER_IS_BETTER}, "max"),
}
MEASURED = ("loss", "nll", "perplexity", "accuracy")  # figures of a row
TRAINED = (  # and further ones of a training row
    "grad_norm", "learning_rate", "tokens_per_second", "source_tokens_per_second", "target_tokens_per_second",
    "padding_efficiency", "model_flops_per_second", "mfu", "peak_flops_per_second", "flops_efficiency", "data_wait",
    "seconds_per_update", "skipped",
)  # fmt: skip
NAMES = {  # of an experiment file → an example
    "BASE": "configs/quickstart.py", "METRIC": "valid/loss", "GOAL": "min", "SEEDS": (0, 1, 2), "BASELINE": "base",
    "FIXED": {"train.num_steps": 600}, "PLOTS": (("optim.learning_rate", "model.norm"),), "TRIALS": 20,
    "ENVIRONMENT": {"OMP_NUM_THREADS": 1}, "SAMPLER": "tpe", "PRUNER": "median",
}  # fmt: skip
KINDS: dict[type, type] = {str: str, int: int, tuple: Sequence, dict: Mapping}  # type of an example → of the value
SAMPLERS, PRUNERS = ("tpe", "random"), ("none", "median", "hyperband")
JOURNAL = "trials.journal"  # in the workdir, unless another storage holds the trials
RECORD = "sweep.json"  # in the workdir: the sweep that it belongs to
NAME_LENGTH = 80  # of a trial's directory, without its digest


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: an arm with a seed, and its outcome."""

    name: str  # its directory is WORKDIR/trials/NAME
    arm: str  # label, the same for all seeds
    overrides: Overrides  # dotted key → value; without the seed and the keys that all trials share
    seed: int
    state: str = "waiting"  # waiting | running | complete | pruned | failed
    value: float | None = None  # the experiment's metric
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # all final figures: "test/bleu", "run/updates"
    seconds: float = 0.0  # of all its processes
    attempts: int = 0  # how often a worker claimed it
    error: str = ""  # the last line of a failed trial


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A question, with either `arms` or `search`."""

    path: Path
    title: str  # the first line of the file
    base: str  # path of a config file
    metric: str  # SPLIT/NAME
    goal: str  # min | max
    seeds: tuple[int, ...]
    fixed: Overrides  # of all trials: the file's FIXED, then the command line's
    given: tuple[str, ...]  # the keys of the command line
    arms: dict[str, Overrides]  # label → overrides
    baseline: str  # the arm that others are compared with
    plots: tuple[tuple[str, str], ...]  # (key along x, key that lines are for, or "")
    environment: dict[str, str]  # of every trial's process
    search: "Callable[[optuna.Trial], Overrides] | None"  # an Optuna trial → overrides
    trials: int  # of a search
    sampler: str
    pruner: str
    conclude: Callable[[Sequence[Trial]], Iterable[str]] | None

    def planned(self) -> list[Trial]:
        """Return the trials of all arms for the first seed, then for the next; none for a search."""
        return [self.trial(label, arm, seed) for seed in self.seeds for label, arm in self.arms.items()]

    def trial(self, label: str, overrides: Overrides, seed: int, number: int | None = None) -> Trial:
        """Return a trial to run, named by its overrides, and by its number in a search, which may repeat itself."""
        given = {**overrides, "seed": seed} if number is None else {"trial": number, **overrides, "seed": seed}
        digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
        readable = re.sub(r"[^\w.,=+-]+", "_", label_of(given).replace(", ", ","))[:NAME_LENGTH]
        return Trial(name=f"{readable}-{digest}", arm=label, overrides=overrides, seed=seed)

    def config(self, overrides: Mapping[str, object]) -> Config:
        """Return the checked config of BASE with FIXED and then the overrides applied."""
        return with_keys(self._base, {**self.fixed, **overrides})

    def check(self, overrides: Mapping[str, object]) -> None:
        """Raise an error if a trial with these overrides could not run, or would not report the metric."""
        for key in overrides.keys() & {"seed", *self.given}:
            why = f"seeds are SEEDS={self.seeds}" if key == "seed" else f"--config.{key} is for all trials"
            raise UserError(f"{key}={overrides[key]!r}, but {why}")
        _check_metric(self.metric, self.config(overrides))

    @functools.cached_property
    def _base(self) -> Any:
        return run_config_file(Path(self.base))

    def flags(self, trial: Trial) -> list[str]:
        """Return the arguments of jformer.main that make BASE the trial's config."""
        return as_flags({**self.fixed, **trial.overrides, "seed": trial.seed})

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the metric; raise UserError if a finished trial does not report it."""
        if self.metric not in metrics:
            raise UserError(f"{self.path}: no trial reports METRIC={self.metric!r}; {nearest(self.metric, metrics)}")
        return metrics[self.metric]

    def reports_in_training(self) -> bool:
        """Return whether metrics.jsonl has the metric while a trial runs."""
        (split, _, name), config = self.metric.partition("/"), self.config({})
        if split in config.data.test_splits():  # scored only after training
            return name in _logged(config).get(split, ())
        return split in ("train", "valid") or split.startswith("valid_")


def load_experiment(path: Path, arguments: Sequence[str] = ()) -> Experiment:
    """Read an experiment file; `arguments` are --config.key=value of the command line, for all trials.

    Raises UserError for anything in keys, values, names or seeds that would stop a trial later.
    """
    module = load_module(path, "experiment")
    for name, example in NAMES.items():
        value = getattr(module, name, None)
        if value is None and name in ("BASE", "METRIC"):
            raise UserError(f"{path}: {name} is missing, a string such as {example!r}")
        if hasattr(module, name) and not isinstance(value, KINDS[type(example)]):
            raise UserError(f"{path}: {name}={value!r} must be like {name} = {example!r}")
    search, sweep = getattr(module, "search", None), getattr(module, "sweep", None)
    if (search is None) == (sweep is None):
        raise UserError(f"{path}: needs either sweep(), which returns lists of overrides, or search(trial)")
    for plot in getattr(module, "PLOTS", ()):
        if not isinstance(plot, tuple | list) or [*map(type, plot)] != [str, str]:
            raise UserError(f'{path}: PLOTS has {plot!r}, which must be a pair of keys, (X, LINES) or (X, "")')
    given = parse_keys(run_config_file(Path(module.BASE)), arguments)
    arms = {} if sweep is None else _labelled(sweep, path)
    experiment = Experiment(
        path=path,
        title=(inspect.getdoc(module) or path.stem).partition("\n")[0],
        base=module.BASE,
        metric=module.METRIC,
        goal=getattr(module, "GOAL", GOALS.get(_name(module.METRIC), "")),
        seeds=tuple(getattr(module, "SEEDS", (0,))),
        fixed=plain_values({**getattr(module, "FIXED", {}), **given}),
        given=tuple(given),
        arms=arms,
        baseline=getattr(module, "BASELINE", next(iter(arms), "")),
        plots=tuple(getattr(module, "PLOTS", ((key, "") for key in _varying(list(arms.values()))))),
        environment={key: str(value) for key, value in getattr(module, "ENVIRONMENT", {}).items()},
        search=search,
        trials=getattr(module, "TRIALS", 0),
        sampler=getattr(module, "SAMPLER", "tpe"),
        pruner=getattr(module, "PRUNER", "none"),
        conclude=getattr(module, "conclude", None),
    )
    _check(experiment)
    return experiment


def _name(metric: str) -> str:
    """Return the name of a score or figure, without its split and group."""
    return "".join(metric.split("/")[1:2])


def _check(experiment: Experiment) -> None:
    path = experiment.path
    if experiment.goal not in ("min", "max"):
        hint = nearest(_name(experiment.metric), GOALS, otherwise="add it")
        why = f": METRIC={experiment.metric!r} does not say which is better; {hint}" if not experiment.goal else ""
        raise UserError(f"{path}: GOAL={experiment.goal!r} must be 'min' or 'max'{why}")
    if "seed" in experiment.fixed:
        raise UserError(f"{path}: seeds are SEEDS=(0, 1, …), not an override")
    if len(set(experiment.seeds)) < len(experiment.seeds) or not experiment.seeds:
        raise UserError(f"{path}: SEEDS={experiment.seeds} must be one or more seeds, each once")
    try:
        for seed in experiment.seeds:
            experiment.config({"seed": seed})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if experiment.search is None:
        _check_arms(experiment)
    else:
        _check_search(experiment)


def _logged(config: Config) -> dict[str, tuple[str, ...]]:
    """Return split → the names of the figures that metrics.jsonl has for it."""
    number = config.task == "classify" and config.data.labels == "number"  # numbers are not right or wrong
    measured = ("loss",) if number else MEASURED
    validated = (*measured, *config.evaluate.during) if config.train.eval_every else ()
    averaged = measured if validated and config.train.ema_decay else ()
    sets = config.data.validation_sets()
    figures = {"train": (*measured, *TRAINED), "valid": validated, "valid_ema": averaged}
    return figures | {f"valid_{name}": validated for name in sets if len(sets) > 1}


def reported(config: Config) -> dict[str, tuple[str, ...]]:
    """Return split → the names of the figures that a trial reports for it."""
    figures, data, scores = _logged(config), config.data, final_scores(config)
    trained = [data.languages(part) for part in data.trained()]
    scored = [data.languages(part) for part, _ in data.test_sets().values() if data.language_symbols]
    means = Counter("mean" if languages in trained else "zero-shot" for languages in scored)
    for key in (*data.test_splits(), *(title for title, count in means.items() if count > 1)):
        figures[key] = (*figures.get(key, ()), *scores)
    return {split: names for split, names in figures.items() if names}


def _check_metric(metric: str, config: Config) -> None:
    """Raise UserError for a metric that a trial cannot report; groups of a score are not known before it runs."""
    (split, _, name), figures = metric.partition("/"), reported(config)
    if is_own(config.task) and split in config.data.test_splits():  # these scores are not known either
        return
    if split not in figures:
        raise UserError(f"METRIC={metric!r}, but the trial reports metrics of {', '.join(figures)}")
    if name.partition("/")[0] in figures[split]:
        return
    if name in TEST_SCORES.get(config.task, ()) and split in config.data.test_splits():
        raise UserError(f"METRIC={metric!r}, but evaluate.scores={config.evaluate.scores!r}")
    raise UserError(f"METRIC={metric!r}; of {split} {nearest(name, figures[split])}")


def _check_arms(experiment: Experiment) -> None:
    path, seen = experiment.path, dict[str, str]()
    if not experiment.arms:
        raise UserError(f"{path}: sweep() returned no overrides")
    for name, value, without in (
        ("TRIALS", experiment.trials, 0),
        ("SAMPLER", experiment.sampler, "tpe"),
        ("PRUNER", experiment.pruner, "none"),
    ):
        if value != without:
            raise UserError(f"{path}: {name}={value!r} is for search(trial), and this is a sweep(): leave it out")
    check_choice(f"{path}: BASELINE", experiment.baseline, experiment.arms)
    for label, overrides in experiment.arms.items():
        try:
            experiment.check(overrides)
        except UserError as error:
            raise UserError(f"{path}: arm {label!r}: {error}") from error
        same = seen.setdefault(json.dumps(overrides, sort_keys=True), label)
        if same != label:
            raise UserError(f"{path}: arms {same!r} and {label!r} are the same")
    for key in {key for plot in experiment.plots for key in plot if key}:
        if not any(key in overrides for overrides in experiment.arms.values()):
            raise UserError(f"{path}: PLOTS names {key}, which no arm sets")


def _check_search(experiment: Experiment) -> None:
    path = experiment.path
    if experiment.trials < 1:
        raise UserError(f"{path}: TRIALS={experiment.trials} must be the number of trials of search(trial)")
    if len(experiment.seeds) > 1:
        raise UserError(f"{path}: SEEDS={experiment.seeds}: a search has one seed; repeat its best trials with sweep()")
    check_choice(f"{path}: SAMPLER", experiment.sampler, SAMPLERS)
    check_choice(f"{path}: PRUNER", experiment.pruner, PRUNERS)
    if experiment.pruner == "hyperband" and experiment.config({}).train.num_epochs:
        raise UserError(f"{path}: PRUNER='hyperband' needs the length of a trial: set train.num_steps, not num_epochs")
    if experiment.pruner != "none" and not experiment.reports_in_training():
        raise UserError(
            f"{path}: PRUNER={experiment.pruner!r} needs a METRIC reported during training, such as valid/loss"
        )
    _check_metric(experiment.metric, experiment.config({}))


def _labelled(sweep: Callable[[], Any], path: Path) -> dict[str, Overrides]:
    """Return label → overrides of sweep()."""
    with blaming(path, "experiment"):
        found: Any = sweep()
        found = [*found] if inspect.isgenerator(found) else found
    named = isinstance(found, Mapping)
    try:
        arms = [plain_values(dict(arm)) for arm in (found.values() if named else found)]
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: sweep(): {error}; it returns dicts of keys") from error
    varying = [] if named else _varying(arms)
    own = [label_of({key: value for key, value in arm.items() if key in varying}) or "base" for arm in arms]
    labels = [*map(str, found)] if named else own
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise UserError(f"{path}: two arms are {label!r}: name them, with sweep() returning label → overrides")
    return dict(zip(labels, arms, strict=True))


def plain_values(overrides: Overrides) -> Overrides:
    """Return overrides with plain Python values in place of NumPy scalars and paths, which JSON cannot hold."""
    return {key: plain(value) for key, value in overrides.items()}


def _varying(arms: Sequence[Overrides]) -> list[str]:
    """Return the keys whose value differs between arms."""
    keys = dict.fromkeys(key for arm in arms for key in arm)
    return [key for key in keys if any(key not in arm or arm[key] != arms[0].get(key) for arm in arms)]


def label_of(overrides: Overrides) -> str:
    """Return a short form of overrides: the last part of each key, floats with four digits."""
    texts = {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in overrides.items()}
    return ", ".join(f"{key.rpartition('.')[2]}={text}" for key, text in texts.items())
