"""A page of what runs did: curves of all figures in their rows, answers over updates, scores, settings. No JAX.

It reads files only, also of a run that is still training, and changes none. Like the explorer's, the page holds all it
shows and asks for nothing.
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
from jformer.evaluation.intervals import intervals
from jformer.evaluation.score_tables import formatted, scored_sets
from jformer.tasks.metrics import answer_scores, text_metric
from jformer.tools.pages import page

Rows = Sequence[Mapping[str, Any]]
MOST_POINTS = 1_000  # of a line; of longer ones every second, third, ... row is drawn, and the last
GRADES = {  # what an answer is graded by
    "text": "chrF",
    "one": "label",
    "several": "labels",
    "number": "off by",
    "tags": "right tags",
    "qa": "F1",
}
WORST = 20  # answers shown of each test set
ANSWERS = 12  # shown of a validation example, evenly over the updates at which its answer was another than before
TITLES = {  # of figures, in the order of their charts; the others follow under their own names
    "loss": "loss, nats a token",
    "perplexity": "perplexity",
    "accuracy": "share of tokens or labels that are right",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient",
    "tokens_per_second": "tokens a second",
    "padding_efficiency": "share of a batch that is no padding",
    "mfu": "share of the devices' peak that the model's FLOPs take",
    "nll": "loss without label smoothing, nats a token",
    "seconds_per_update": "seconds an update",
    "data_wait": "share of the time in which training waited for a batch",
    "flops_efficiency": "share of a batch's FLOPs that real tokens take",
    "model_flops_per_second": "FLOPs a second of the model's matrix products",
    "peak_flops_per_second": "FLOPs a second that the devices could do",
    "skipped": "updates so far that were not finite and changed nothing",
}
LONGEST_WATCH = 86_400  # seconds
CHARTS = '<div id="charts"></div>'  # where report.js draws
OF_A_RUN = ("parameters", "updates", "wall_seconds", "tokens_per_update", "hardware", "weights", "libraries", "data")


def write_report(config: Config, run: Path, output: str, watch: float = 0.0) -> Iterator[str]:
    """Write the page of a run to a file and yield what is to be said.

    If `watch` is not 0 it is written anew every so many seconds, and a browser loads it as often, until the run is
    scored after its last update. Raises UserError as `report` does, or for the file.
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
    """Raise UserError for a pause between two writings of a page that nobody would want."""
    if seconds and not 1 <= seconds <= LONGEST_WATCH:
        raise UserError(f"--watch={seconds:g} must be 0 or 1 to {LONGEST_WATCH} seconds")


def is_over(run: Path) -> bool:
    """Tell whether a run does not train any more, and was scored after its last update."""
    steps = [row["step"] for row in records.rows(run)]
    scored = records.results(run).get("run", {}).get("updates", -1)
    return bool(steps) and scored >= max(steps) and not records.is_training(run)


def report(config: Config, run: Path, refresh: float = 0.0) -> str:
    """Return the page of one run, whose config may name another place of the data.

    A browser loads it again every `refresh` seconds, if that is not 0. Raises UserError if there is no run, or one of
    its files cannot be read as what it is.
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
    return page.page(f"Run {name}", parts, ("run_report",), curves({name: rows}), refresh)


def state(config: Config, rows: Rows, results: Mapping[str, Any]) -> str:
    """Return in a sentence what was trained, how far it is, and after which update it was scored."""
    done = max((row["step"] for row in rows), default=0)
    until = f" of {config.train.num_steps:,}" if config.train.num_steps else ""
    updates = results.get("run", {}).get("updates")
    scored = "not scored yet" if updates is None else f"scored at update {updates:,}"
    data = ", ".join(filter(None, (config.data.source, config.data.name or config.data.dir)))
    return f"task {config.task}, data {data}: {done:,}{until} updates in the rows of metrics.jsonl, {scored}"


def scores(results: Mapping[str, Any], margins: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the table of all scores, with their groups, signatures and intervals; nothing for a run that has none."""
    rows = [["test set", "score", "value", "signature"]]
    for key, found in scored_sets(results).items():
        for name, score in found.items():
            label, value = name.replace("_", " "), formatted(name, score["score"])
            if (key, name) in margins:
                value += f" ± {formatted(name, margins[key, name])}"
            rows.append([key, label, value, score.get("signature", "")])
            groups = score.get("by_group", {}).items()
            rows += [[key, f"{label}: {group}", formatted(name, value), ""] for group, value in groups]
    told = [page.paragraph("± 95 %, by bootstrap over sentences: what other sentences would give, not other seeds")]
    return [page.heading("Scores"), page.table(rows, left=4), *(told if margins else [])] if rows[1:] else []


def write_own(config: Config, run: Path) -> str:
    """Write the page of a scored run beside its results, and return a line that names it, or says why there is none.

    Whatever goes wrong is told in that line alone: a page is no reason for a run to fail.
    """
    path = run / "report.html"
    try:
        page.write_page(str(path), report(config, run).encode())
    except Exception as error:
        return f"{path} is not written ({type(error).__name__}: {' '.join(str(error).split()):.200})"
    return f"its curves, scores and worst answers, as a page: {path}"


def worst_answers(config: Config, run: Path, key: str) -> list[str]:
    """Return the answers to a test set that are furthest from their references, the worst first.

    Texts are ranked by sentence chrF (Popović 2015), tagged sentences by their share of right tags, spans of a context
    by F1, labels are right or wrong. A run without answers has no table.
    """
    if not (run / "outputs" / f"{key}.txt").exists():
        return []
    title = page.heading(f"Worst answers: {key}")
    try:
        answers, pairs = records.outputs(run, key), records.examples(run, key, config.data)
    except (UserError, OSError) as error:
        return [title, page.paragraph(f"cannot be shown: {error}")]
    if len(answers) != len(pairs):
        both = f"{counted(len(answers), 'answers')} to {counted(len(pairs), 'examples')}"
        return [title, page.paragraph(f"cannot be shown: {both}: score the run again with --mode=evaluate")]
    wrong = graded(config, answers, pairs)
    told = f"{len(wrong):,} of {len(answers):,} answers differ from their reference"
    rows = [[str(number), *texts, grade] for _, number, texts, grade in wrong[:WORST]]
    head = ["line", "source", "reference", "answer", GRADES[kind_of_answers(config)]]
    return [title, page.paragraph(told), *([page.table([head, *rows], left=4)] if rows else [])]


def answers_over_updates(samples: Rows) -> list[str]:
    """Return, for each validation example that was answered while training, what was made of it and when."""
    parts = []
    for example in dict.fromkeys((row["sample"], row["source"]) for row in samples):  # others after a change of options
        of_example = [row for row in samples if (row["sample"], row["source"]) == example]
        new = [row for i, row in enumerate(of_example) if i == 0 or row["answer"] != of_example[i - 1]["answer"]]
        cells = [[f"{row['step']:,}", row["answer"]] for row in thinned(new, ANSWERS)]
        texts = [text for text in (new[0]["source"], new[0]["reference"]) if text]
        parts += [page.paragraph("\n→ ".join(texts)), page.table([["update", "answer"], *cells], left=2)]
    return [page.heading("Answers to validation examples over updates"), *parts] if parts else []


def parameters(parts: Mapping[str, int]) -> list[str]:
    """Return the table of how many parameters each part of the model has, and its share."""
    total = sum(parts.values())
    rows = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in parts.items()]
    return [page.heading("Parameters"), page.table([["part", "parameters", "share"], *rows])] if rows else []


def facts(run: Mapping[str, Any]) -> list[list[str]]:
    """Return what results.json says of its run, a name and a text for each fact that is there."""

    def text(fact: object) -> str:
        if isinstance(fact, Mapping):
            return ", ".join(f"{name} {value}" for name, value in fact.items())
        if isinstance(fact, list):
            return ", ".join(map(str, fact))
        return f"{fact:,}" if isinstance(fact, int | float) else str(fact)

    return [[name.replace("_", " "), text(run[name])] for name in OF_A_RUN if name in run]


def kind_of_answers(config: Config) -> str:
    """Return what kind of answers a run gives: a key of GRADES."""
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
        grade, told = 0.0, "wrong"
        if kind in ("text", "qa"):
            grade = line_score(config, answer, pair)
            told = f"{grade:.1f}"
            if kind == "qa" and grade == 100:
                continue
        elif kind == "tags":
            tags = pair.target.split()
            right = sum(map(str.__eq__, answer.split(), tags))
            grade, told = right / len(tags), f"{right} of {len(tags)}"
        elif kind == "number":
            grade = line_score(config, answer, pair)
            told = f"{-grade:.3g}"
        found.append((grade, number, (pair.source, pair.target, answer), told))
    return sorted(found)


def is_right(config: Config, answer: str, pair: Pair) -> bool:
    """Tell whether an answer is a reference; labels are normalized as for their scores, and several have no order."""
    normalize = NORMALIZATIONS[config.data.normalization] if config.task == "classify" else str
    wanted = normalize(pair.target)
    several = kind_of_answers(config) == "several" and {*label_set(answer)} == {*label_set(wanted)}
    return several or answer in (wanted, *pair.others)


def line_score(config: Config, answer: str, pair: Pair) -> float:
    """Return how good an answer is, 0 to 100: sentence chrF of a text, F1 of a span, else right; of a number -error."""
    kind = kind_of_answers(config)
    if kind == "text":
        return float(_chrf().sentence_score(answer, [pair.target, *pair.others]).score)
    if kind == "number":
        return -abs(float(answer or "nan") - float(pair.target))
    return 100 * float(
        answer_scores([answer], [pair])["f1"]["score"] if kind == "qa" else is_right(config, answer, pair)
    )


@functools.cache
def _chrf() -> Any:
    return text_metric("chrf", "13a", lowercase=False)


def settings(config: Config) -> list[list[str]]:
    """Return the keys of a config that have another value than their default, after a head."""
    return [["key", "value", "default"], *([key, *map(str, values)] for key, values in changed(config).items())]


def curves(runs: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Return what is drawn of rows: for each figure its title and, for each run and split that has it, a line.

    A line has `run`, `split`, `steps` and `values`; what was not finite is None. A line of nothing else is left out.
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
    """Return the steps and values of a figure in rows that have it, MOST_POINTS of them at most."""
    shown = thinned(rows, MOST_POINTS)
    values = [None if row[name] is None else float(f"{row[name]:.5g}") for row in shown]
    return {"steps": [row["step"] for row in shown], "values": values}


def thinned(rows: Rows, most: int) -> Rows:
    """Return every second, third, ... row, so that there are `most` of them at most, with the last."""
    return rows[:: -math.ceil(len(rows) / most)][::-1]
