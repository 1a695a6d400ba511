"""A page of what runs did: curves of all that their rows hold, scores, the worst answers, the settings. No JAX.

It reads files only, also of a run that is still training, and changes none. Like the explorer's, the page holds all it
shows and asks for nothing.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from etils.epath import Path

from jformer.config.options import Config, flatten
from jformer.errors import UserError
from jformer.evaluation import page, records
from jformer.evaluation.tables import FRACTIONS, scored_sets
from jformer.tasks.metrics import text_metric

MOST_POINTS = 1_000  # of a line; of longer ones every second, third, ... row is drawn, and the last
WORST = 20  # answers shown of each test set
CURVES = (  # figure → what it is and in which unit; in this order, others after them
    ("loss", "loss, nats a token"),
    ("perplexity", "perplexity"),
    ("accuracy", "share of tokens or labels that are right"),
    ("learning_rate", "learning rate"),
    ("grad_norm", "norm of the gradient"),
    ("tokens_per_second", "tokens a second"),
    ("padding_efficiency", "share of a batch that is no padding"),
    ("mfu", "share of the devices' peak that the model's FLOPs take"),
)
CHARTS = '<div id="charts"></div>'  # where report.js draws
OF_A_RUN = ("parameters", "updates", "wall_seconds", "tokens_per_update", "hardware", "weights", "libraries", "data")


def write_report(run: Path, output: str) -> str:
    """Write the page of a run to a file and say so; raise UserError as `report` does, or for the file."""
    page.check_output("report", output)
    content = report(run)
    page.write_page(output, content)
    return f"{output}: {len(content) / 1e3:,.0f} kB; open it in a browser"


def report(run: Path) -> str:
    """Return the page of one run; raise UserError if there is none, or none of its rows can be read."""
    config, results = records.saved_config(run), records.results(run)
    parts = [page.paragraph(state(run, config, results)), CHARTS, *scores(results)]
    for key in scored_sets(results):
        parts += worst_answers(run, key)
    parts += [page.heading("Settings that are not the default"), page.table(settings(config), left=2)]
    if "run" in results:
        facts = [[name, str(results["run"][name])] for name in OF_A_RUN if name in results["run"]]
        parts += [page.heading("Where the scores come from"), page.table([["", ""], *facts], left=2)]
    return page.drawn(f"Run {run.name}", parts, "report", curves({run.name: run}), page.STYLE)


def state(run: Path, config: Config, results: Mapping[str, Any]) -> str:
    """Return in a sentence what was trained, and how far it is."""
    rows = records.rows(run)
    done = max((row["step"] for row in rows), default=0)
    until = f" of {config.train.num_steps:,}" if config.train.num_steps else ""
    scored = "scored" if results else "not scored yet"
    data = ", ".join(filter(None, (config.data.source, config.data.name or config.data.dir)))
    return f"task {config.task}, data {data}: {done:,}{until} updates in the rows of metrics.jsonl, {scored}"


def scores(results: Mapping[str, Any]) -> list[str]:
    """Return the table of all scores, with their groups and signatures; nothing for a run that has none."""
    rows = [["test set", "score", "", "signature"]]
    for key, found in scored_sets(results).items():
        for name, score in found.items():
            form = "{:.2%}" if name in FRACTIONS else "{:.2f}"
            rows.append([key, name.replace("_", " "), form.format(score["score"]), score.get("signature", "")])
            rows += [[key, f"… {group}", form.format(value), ""] for group, value in score.get("by_group", {}).items()]
    return [page.heading("Scores"), page.table(rows, left=4)] if rows[1:] else []


def worst_answers(run: Path, key: str) -> list[str]:
    """Return the answers to a test set that are furthest from their references, the worst first.

    Texts are ranked by sentence chrF (Popović 2015), labels are right or wrong; a task without answers has no table.
    """
    try:
        answers, pairs = records.outputs(run, key), records.examples(run, key)
    except (UserError, OSError) as error:
        return [page.heading(f"Worst answers: {key}"), page.paragraph(f"cannot be shown: {error}")]
    labels = "accuracy" in records.results(run)[key]
    chrf = text_metric("chrf", "13a", lowercase=False)
    graded = []
    for number, (answer, pair) in enumerate(zip(answers, pairs, strict=True), start=1):
        right = answer == pair.target
        grade = 100.0 * right if right or labels else chrf.sentence_score(answer, [pair.target]).score
        graded.append((grade, number, pair, answer))
    wrong = [each for each in sorted(graded, key=lambda each: each[:2]) if each[3] != each[2].target]
    head = ["line", "source", "reference", "answer", *([] if labels else ["chrF"])]
    rows = [
        [str(number), pair.source, pair.target, answer, *([] if labels else [f"{grade:.1f}"])]
        for grade, number, pair, answer in wrong[:WORST]
    ]
    told = f"{len(wrong):,} of {len(graded):,} answers differ from their reference"
    table = [page.table([head, *rows], left=4)] if rows else []
    return [page.heading(f"Worst answers: {key}"), page.paragraph(told), *table]


def settings(config: Config) -> list[list[str]]:
    """Return the keys of a config that have another value than their default, after a head."""
    own, default = (flatten(dataclasses.asdict(each)) for each in (config, Config()))
    changed = [[key, str(value), str(default.get(key, ""))] for key, value in own.items() if value != default.get(key)]
    return [["key", "value", "default"], *changed]


def curves(runs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return what is drawn: for each figure its title and, for each run and split that has it, a line.

    A line has `run`, `split`, `steps` and `values`; what was not finite is None.
    """
    rows = {label: records.rows(run) for label, run in runs.items()}
    splits = list(dict.fromkeys(row["split"] for found in rows.values() for row in found))
    charts = []
    for name, title in CURVES:
        lines = [
            line
            for label, found in rows.items()
            for split in splits
            if (line := _line(label, split, [row for row in found if row["split"] == split and name in row], name))
        ]
        if lines:
            charts.append({"title": title, "lines": lines})
    return charts


def _line(label: str, split: str, rows: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    if not rows:
        return None
    every = math.ceil(len(rows) / MOST_POINTS)
    shown = rows[len(rows) - 1 :: -every][::-1]
    return {
        "run": label,
        "split": split,
        "steps": [row["step"] for row in shown],
        "values": [None if row[name] is None else float(f"{row[name]:.5g}") for row in shown],
    }
