"""The report of a run as a page: curves of all logged values, scores, answers over updates, settings. No JAX.

It only reads files, also of a run that is still training. Like the explorer's, the page is one file that loads nothing.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils.epath import Path

from jformer.config.options import Config, changed
from jformer.data.progress import counted
from jformer.data.sources.split import Pair
from jformer.data.tokenizers.lists import NORMALIZATIONS, label_set
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.evaluation.resampling import intervals
from jformer.evaluation.score_tables import formatted, scored_sets
from jformer.tasks.metrics import answer_scores, text_metric
from jformer.tools.pages import page

Rows = Sequence[Mapping[str, Any]]
MOST_POINTS = 1_000  # of a line; of longer ones, every second, third, ... row is drawn, and the last
GRADES = {  # kind of answers → the heading of their grades
    "text": "chrF",
    "one": "label",
    "several": "labels",
    "number": "off by",
    "tags": "right tags",
    "qa": "F1",
}
WORST = 20  # answers shown of each test set
ANSWERS = 12  # shown of a validation example, evenly over the updates at which its answer changed
TITLES = {  # of charts, in this order; others follow under their own names
    "loss": "loss, nats a token",
    "perplexity": "perplexity",
    "accuracy": "share of tokens or labels that are right",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient",
    "tokens_per_second": "tokens a second",
    "padding_efficiency": "share of a batch that is not padding",
    "mfu": "model FLOPs utilization, of the devices' peak",
    "nll": "loss without label smoothing, nats a token",
    "seconds_per_update": "seconds an update",
    "data_wait": "share of the time spent waiting for data",
    "flops_efficiency": "share of a batch's FLOPs spent on real tokens",
    "model_flops_per_second": "FLOPs a second of the model's matrix products",
    "peak_flops_per_second": "peak FLOPs a second of the devices",
    "skipped": "updates skipped so far, as they were not finite",
}
LONGEST_WATCH = 86_400  # seconds
CHARTS = '<div id="charts"></div>'  # where run_report.js draws
PROGRAMS = ("element", "charts", "run_report")
OF_A_RUN = ("parameters", "updates", "wall_seconds", "tokens_per_update", "hardware", "weights", "libraries", "data")


def write_report(config: Config, run: Path, output: str, watch: float = 0.0) -> Iterator[str]:
    """Write the page of a run to a file and yield messages.

    Unless `watch` is 0, rewrite the page every `watch` seconds, and let browsers reload it, until the run is scored
    after its last update. Raises UserError as `report` does, or if the file cannot be written.
    """
    page.check_output("report", output)
    check_watch(watch)
    for times in itertools.count():
        over = not watch or is_over(run)
        content = report(config, run, 0.0 if over else watch)
        page.write_page(output, content.encode())
        if over:
            yield f"{output}: {len(content) / 1e3:,.0f} kB; open it in a browser"
            return
        if times == 0:
            yield f"{output}: open it in a browser; it is written every {watch:g} s until the run is scored"
        time.sleep(watch)


def check_watch(seconds: float) -> None:
    """Raise UserError for an invalid interval of watching."""
    if seconds and not 1 <= seconds <= LONGEST_WATCH:
        raise UserError(f"--watch={seconds:g} must be 0 or 1 to {LONGEST_WATCH} seconds")


def is_over(run: Path) -> bool:
    """Return whether a run has ended and was scored after its last update."""
    steps = [row["step"] for row in records.rows(run)]
    scored = records.results(run).get("run", {}).get("updates", -1)
    return bool(steps) and scored >= max(steps) and not records.is_training(run)


def report(config: Config, run: Path, refresh: float = 0.0) -> str:
    """Return the page of one run; browsers reload it every `refresh` seconds unless that is 0.

    `config` may name another location of the data. Raises UserError for a missing run or an invalid file of it.
    """
    results, rows, name = records.results(run), records.rows(run), run.name or str(run)
    parts = [page.paragraph(state(config, rows, results)), CHARTS, *scores(results, intervals(config, run, results))]
    for key in scored_sets(results):
        parts += worst_answers(config, run, key)
    parts += answers_over_updates(records.samples(run))
    parts += [page.heading("Settings that are not the default"), page.table(settings(config), left=3)]
    if "run" in results:
        parts += [page.heading("Where the scores come from"), page.table([["", ""], *facts(results["run"])], left=2)]
        parts += parameters(results["run"].get("parameters_by_part", {}))
    return page.page(f"Run {name}", parts, PROGRAMS, curves({name: rows}), refresh)


def state(config: Config, rows: Rows, results: Mapping[str, Any]) -> str:
    """Return a sentence with the task, the data, the number of updates, and when the run was scored."""
    done = max((row["step"] for row in rows), default=0)
    until = f" of {config.train.num_steps:,}" if config.train.num_steps else ""
    updates = results.get("run", {}).get("updates")
    scored = "not scored yet" if updates is None else f"scored at update {updates:,}"
    data = ", ".join(filter(None, (config.data.source, config.data.name or config.data.dir)))
    return f"task {config.task}, data {data}: {done:,}{until} updates in the rows of metrics.jsonl, {scored}"


def scores(results: Mapping[str, Any], margins: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the table of all scores with groups, signatures and intervals; nothing if there are none."""
    rows = [["test set", "score", "value", "signature"]]
    for key, found in scored_sets(results).items():
        for name, score in found.items():
            label, value = name.replace("_", " "), formatted(name, score["score"])
            if (key, name) in margins:
                value += f" ± {formatted(name, margins[key, name])}"
            rows.append([key, label, value, score.get("signature", "")])
            groups = score.get("by_group", {}).items()
            rows += [[key, f"{label}: {group}", formatted(name, value), ""] for group, value in groups]
    note = [page.paragraph("± 95 %, by bootstrap over sentences: what other sentences would give, not other seeds")]
    return [page.heading("Scores"), page.table(rows, left=4), *(note if margins else [])] if rows[1:] else []


def write_own(config: Config, run: Path) -> str:
    """Write the page of a scored run next to its results, and return a line that names it.

    An error is only reported in that line: a page must not make a run fail.
    """
    path = run / "report.html"
    try:
        page.write_page(str(path), report(config, run).encode())
    except Exception as error:
        return f"{path} is not written ({type(error).__name__}: {' '.join(str(error).split()):.200})"
    return f"its curves, scores and worst answers, as a page: {path}"


def worst_answers(config: Config, run: Path, key: str) -> list[str]:
    """Return a table of the worst answers to a test set, the worst first; nothing for a run without answers.

    Texts are ranked by sentence chrF (Popović 2015), tagged sentences by their share of right tags, spans by F1; labels
    are right or wrong.
    """
    if not (run / "outputs" / f"{key}.txt").exists():
        return []
    title = page.heading(f"Worst answers: {key}")
    try:
        pairs, (answers,) = read_answers(config, [run], key)
    except UserError as error:
        return [title, page.paragraph(f"cannot be shown: {error}")]
    wrong = graded(config, answers, pairs)
    summary = f"{len(wrong):,} of {len(answers):,} answers differ from their reference"
    rows = [[str(number), *texts, grade] for _, number, texts, grade in wrong[:WORST]]
    head = ["line", "source", "reference", "answer", GRADES[kind_of_answers(config)]]
    return [title, page.paragraph(summary), *([page.table([head, *rows], left=4)] if rows else [])]


def read_answers(config: Config, runs: Sequence[Path], key: str) -> tuple[Sequence[Pair], list[Sequence[str]]]:
    """Return the examples of a test set and the answers of each run; raise UserError if they are missing or differ."""
    try:
        pairs, answers = records.examples(runs[0], key, config.data), [records.outputs(run, key) for run in runs]
    except OSError as error:
        raise UserError(str(error)) from error
    for each in answers:
        if len(each) != len(pairs):
            both = f"{counted(len(each), 'answers')} to {counted(len(pairs), 'examples')}"
            raise UserError(f"{both}: score the run again with --mode=evaluate")
    return pairs, [*answers]


def answers_over_updates(samples: Rows) -> list[str]:
    """Return a table for each validation example answered during training: its answers and their updates."""
    parts = []
    for example in dict.fromkeys((row["sample"], row["source"]) for row in samples):  # several if options changed
        of_example = [row for row in samples if (row["sample"], row["source"]) == example]
        new = [row for i, row in enumerate(of_example) if i == 0 or row["answer"] != of_example[i - 1]["answer"]]
        cells = [[f"{row['step']:,}", row["answer"]] for row in thinned(new, ANSWERS)]
        texts = [text for text in (new[0]["source"], new[0]["reference"]) if text]
        parts += [page.paragraph(f"→ {text}" if i else text) for i, text in enumerate(texts)]
        parts.append(page.table([["update", "answer"], *cells], left=2))
    return [page.heading("Answers to validation examples over updates"), *parts] if parts else []


def parameters(parts: Mapping[str, int]) -> list[str]:
    """Return the table of the parameters of each part of the model."""
    total = sum(parts.values())
    rows = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in parts.items()]
    return [page.heading("Parameters"), page.table([["part", "parameters", "share"], *rows])] if rows else []


def facts(run: Mapping[str, Any]) -> list[list[str]]:
    """Return the facts about its run in results.json, as pairs of name and text."""

    def text(fact: object) -> str:
        if isinstance(fact, Mapping):
            return ", ".join(f"{name} {value}" for name, value in fact.items())
        if isinstance(fact, list):
            return ", ".join(map(str, fact))
        return f"{fact:,}" if isinstance(fact, int | float) else str(fact)

    return [[name.replace("_", " "), text(run[name])] for name in OF_A_RUN if name in run]


def kind_of_answers(config: Config) -> str:
    """Return the kind of a run's answers: a key of GRADES."""
    return {"classify": config.data.labels, "tag": "tags", "qa": "qa"}.get(config.task, "text")


def graded(
    config: Config, answers: Sequence[str], pairs: Sequence[Pair]
) -> list[tuple[float, int, tuple[str, str, str], str]]:
    """Return (grade, line, (source, reference, answer), grade as text) of the wrong answers, the worst first."""
    kind = kind_of_answers(config)
    found = []
    for number, (answer, pair) in enumerate(zip(answers, pairs, strict=True), start=1):
        if is_right(config, answer, pair):
            continue
        grade, text = line_score(config, answer, pair), "wrong"
        if (kind, grade) in (("qa", 100), ("number", 0)):  # still right, such as 5 for 5.0
            continue
        if kind == "tags":
            tags = pair.target.split()
            right = sum(map(str.__eq__, answer.split(), tags))
            grade, text = right / len(tags), f"{right} of {len(tags)}"
        elif kind in ("text", "qa", "number"):
            text = f"{abs(grade):{'.3g' if kind == 'number' else '.1f'}}"
        found.append((grade, number, (pair.source, pair.target, answer), text))
    return sorted(found, key=lambda each: (not math.isnan(each[0]), each))  # an empty text has no number


def is_right(config: Config, answer: str, pair: Pair) -> bool:
    """Return whether an answer equals a reference; labels are normalized as for scores, and sets have no order."""
    normalize = NORMALIZATIONS[config.data.normalization] if config.task == "classify" else str
    wanted = normalize(pair.target)
    several = kind_of_answers(config) == "several" and {*label_set(answer)} == {*label_set(wanted)}
    return several or answer in (wanted, *pair.references)


def line_score(config: Config, answer: str, pair: Pair) -> float:
    """Return the score of an answer: chrF of a text, F1 of a span, minus the error of a number, or 0 or 100."""
    kind = kind_of_answers(config)
    if kind == "text":
        return float(_chrf().sentence_score(answer, pair.references).score)
    if kind == "number":
        return -abs(float(answer or "nan") - float(pair.target))
    return 100 * float(
        answer_scores([answer], [pair])["f1"]["score"] if kind == "qa" else is_right(config, answer, pair)
    )


@functools.cache
def _chrf() -> Any:
    return text_metric("chrf", "13a", lowercase=False)


def settings(config: Config) -> list[list[str]]:
    """Return a header, and a row for each value of the config that is not the default."""
    return [["key", "value", "default"], *([key, *map(str, values)] for key, values in changed(config).items())]


def curves(runs: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Return the charts for the rows of runs: a title and the lines of each run and split.

    A line has `run`, `split`, `steps` and `values`, None for values that were not finite; a line of None is left out.
    """
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in TITLES}
    for label, rows in runs.items():
        for split in dict.fromkeys(row["split"] for row in rows):
            of_split = [row for row in rows if row["split"] == split]
            for name in dict.fromkeys(name for row in of_split for name in row if name not in ("step", "split")):
                having = [row for row in of_split if name in row]
                if any(row[name] is not None for row in having):
                    lines.setdefault(name, []).append({"run": label, "split": split, **_points(having, name)})
    return [
        {"title": TITLES.get(name, name.replace("_", " ")), "lines": found} for name, found in lines.items() if found
    ]


def _points(rows: Rows, name: str) -> dict[str, list[Any]]:
    """Return the steps and values of a chart, at most MOST_POINTS."""
    shown = thinned(rows, MOST_POINTS)
    values = [None if row[name] is None else float(f"{row[name]:.5g}") for row in shown]
    return {"steps": [row["step"] for row in shown], "values": values}


def thinned(rows: Rows, most: int) -> Rows:
    """Return every second, third, … row, so that there are at most `most`, including the last."""
    return rows[:: -math.ceil(len(rows) / most)][::-1]
