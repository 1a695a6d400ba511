"""Do relative positions let a Transformer write longer outputs than it was trained on?

Claim:    Csordás et al. 2021: trained on SCAN's commands of up to 26 actions, a Transformer with the relative positions
          of Dai et al. 2019 has 100 % of the longer ones right, one with absolute positions few or none. At 22 actions,
          the split of Lake and Baroni 2018, one with absolute positions has none, and of the commands that combine
          "jump", which is trained on alone, about 1 %. Newman et al. 2020: what such models get wrong is mostly where
          to end; given the length of the right answer, they get more of it right.
Design:   positions, both scales of absolute ones (embeddings times sqrt(d_model), or positions over it), three splits;
          the share of test commands right from end to end. Unlike in configs/scan_transformer.py, layers have
          parameters of their own, attention and the inside of the feed-forward have no dropout, the last checkpoint
          is scored, and there are fewer updates of fewer tokens, so that it fits two cores.
Command:  python -m jformer.sweep --experiment=experiments/papers/scan.py --workdir=runs/scan --workers=2
          python -m experiments.papers.scan --workdir=runs/scan --output=lengths.png [--smoke]
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags, logging

import jformer
from experiments.measure import smoke_sizes
from experiments.papers.contrasts import means, versus
from experiments.runs import results_of, small_training
from jformer import plugins
from jformer.config.options import flatten
from jformer.evaluation import records
from jformer.evaluation.statistics import estimate
from jformer.tasks.metrics import exact_match
from jformer.tools.pages import plots
from jformer.tools.sweep import Trial
from jformer.tools.sweep.space import Overrides

BASE = "configs/scan_transformer.py"
METRIC = "test/exact_match"
SEEDS = (0, 1, 2)
FIXED = {
    "model.shared_layers": False,
    "model.tied_output": False,
    "model.dropout": 0.1,
    "model.attention_dropout": 0.0,
    "model.activation_dropout": 0.0,
    "model.embedding_dropout": True,
    "model.execution.unroll": 1,
    "data.tokens_per_update": 1_024,
    "train.num_steps": 1_500,
    "train.log_every": 50,
    "evaluate.weights": "last",
}
SPLITS = {"22": "length", "26": "length26", "jump": "jump"}  # of experiments.sources.scan; numbers are actions at most
KINDS = {
    "relative": {"model.positions": "transformer_xl"},
    "absolute": {"model.positions": "sinusoidal", "model.embedding_scale": "positions"},
    "absolute, embeddings scaled": {"model.positions": "sinusoidal", "model.embedding_scale": "input"},
}


def sweep() -> dict[str, Overrides]:
    """Return kinds of positions, for each split."""
    return {
        f"{kind}, {name}": {**options, "data.train": f"{split}_train", "data.test": (f"test={split}_test",)}
        for name, split in SPLITS.items()
        for kind, options in KINDS.items()
    }


def conclude(trials: Sequence[Trial]) -> Iterator[str]:
    """Report the accuracies, and how each kind compares with relative positions."""
    for arm, accuracy in means(trials, METRIC).items():
        yield f"{arm}: {accuracy:.1%} of the test commands"
    for split in SPLITS:
        for kind in list(KINDS)[1:]:
            yield from versus(trials, f"relative, {split}", f"{kind}, {split}", METRIC)


def scored_runs(workdir: Path) -> dict[str, list[Path]]:
    """Return arm → its scored trials, for the splits by length; for a single run, its folder's name → the run."""
    if (workdir / "results.json").is_file():
        return {workdir.name: [workdir]}
    found = defaultdict[str, list[Path]](list)
    for results in sorted(workdir.glob("trials/*/results.json")):
        options = flatten(dataclasses.asdict(records.saved_config(results.parent)))
        arm = next(arm for arm, keys in sweep().items() if all(options[key] == keys[key] for key in keys))
        found[arm].append(results.parent)
    return {arm: found[arm] for arm in sweep() if arm in found and not arm.endswith("jump")}


def answers(run: Path) -> list[tuple[str, str]]:
    """Return (answer, right answer) of each longer command."""
    right = [pair.target for pair in records.examples(run, "test")]
    return list(zip(records.outputs(run, "test"), right, strict=True))


def ending_right(run: Path) -> list[tuple[str, str]]:
    """Return (answer, right answer) of each test command where no end is written, and what is too long is cut off.

    The weights are those of the scores, which may have been computed with others than the run's config names.
    """
    weights = records.results(run)["test"]["settings"]["evaluate"]["weights"]
    pairs = records.examples(run, "test")
    longest = max(len(pair.target.split()) for pair in pairs)
    predictor = jformer.load(run, {"evaluate.weights": weights}, min_length=longest, max_length=longest)
    written = predictor.predict([pair.source for pair in pairs])
    return [(cut(given, pair.target), pair.target) for given, pair in zip(written, pairs, strict=True)]


def cut(given: str, right: str) -> str:
    """Return as many actions of an answer as the right one has."""
    return " ".join(given.split()[: len(right.split())])


def by_length(arm: str, trials: Sequence[Sequence[tuple[str, str]]]) -> plots.PlottedLine:
    """Return the share of right answers over the number of actions of the right one, mean of the trials."""
    shares = defaultdict[int, list[float]](list)
    for pairs in trials:
        of_length = defaultdict[int, list[bool]](list)
        for given, right in pairs:
            of_length[len(right.split())].append(given == right)
        for length, found in of_length.items():
            shares[length].append(sum(found) / len(found))
    lengths = sorted(shares)
    return plots.PlottedLine(arm, lengths, [estimate(shares[length]).mean for length in lengths], [None] * len(lengths))


def mistakes(trials: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Return of the wrong answers the share that only ends too soon, and that only goes on too long."""
    wrong = [(given.split(), right.split()) for pairs in trials for given, right in pairs if given != right]
    soon = sum(right[: len(given)] == given for given, right in wrong)
    late = sum(given[: len(right)] == right for given, right in wrong)
    each = max(len(wrong), 1)
    return f"of {len(wrong):,} wrong ones {soon / each:.0%} only end too soon, {late / each:.0%} only go on too long"


def main(_: Sequence[str]) -> None:
    """Print and draw the share of right answers of each arm by length; print what is wrong with the others."""
    logging.set_verbosity(logging.WARNING)
    plugins.allow("experiments.sources.scan")  # which saved configs name
    if smoke_sizes():
        from configs import scan_transformer

        options = {
            **small_training(),
            **next(iter(sweep().values())),
            "train.num_steps": 1,
            "decode.max_extra_length": 1,
        }
        results_of(scan_transformer, Path(WORKDIR.value) / "trials" / "smoke", options)
    drawn = []
    for arm, runs in scored_runs(Path(WORKDIR.value)).items():
        found = [answers(run) for run in runs]
        line = by_length(arm, found)
        shares = ", ".join(f"{length:.0f}: {share:.1%}" for length, share in zip(line.x, line.y, strict=True))
        print(f"{arm}, {len(runs)} trials, right by number of actions: {shares}; {mistakes(found)}")
        told = [exact_match(*zip(*ending_right(run), strict=True))["score"] for run in runs]
        print(
            f"  given the length: {', '.join(f'{share:.1%}' for share in told)} right, mean {estimate(told).mean:.1%}"
        )
        drawn.append(line)
    Path(OUTPUT.value).write_bytes(plots.lines(drawn, "actions of the right answer", "share of right answers"))


if __name__ == "__main__":
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the sweep, or of one run.", required=True)
    OUTPUT = flags.DEFINE_string("output", "lengths.png", "The picture to write.")
    app.run(main)
