"""Answers of two runs to one test set, line by line, where they differ most. No JAX."""

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.tools.pages import page
from jformer.tools.pages.run_report import WORST, kind_of_answers, line_score

# Kind of answers → the score of a line; others are right, 100, or wrong, 0.
NAMES = {"text": "chrF", "qa": "F1", "number": "minus its error"}


def side_by_side(config: Config, first: Path, other: Path, key: str) -> list[str]:
    """Return parts of a page: the lines that the other run answers worse than the first, and those it answers better.

    The largest difference comes first. Texts are scored by sentence chrF (Popović 2015), spans by F1, numbers by how
    far off they are. Where answers or data are not there, a line says so.
    """
    title = page.heading(f"Answers to {key} side by side")
    try:
        pairs, answers = (
            records.examples(first, key, config.data),
            [records.outputs(run, key) for run in (first, other)],
        )
    except (UserError, OSError) as error:
        return [title, page.paragraph(f"cannot be shown: {error}")]
    if any(len(each) != len(pairs) for each in answers):
        return [title, page.paragraph("cannot be shown: not as many answers as examples; score the runs again")]
    kind, found = kind_of_answers(config), []
    for number, (pair, ours, theirs) in enumerate(zip(pairs, *answers, strict=True), start=1):
        if ours != theirs:
            scores = [line_score(config, answer, pair) for answer in (ours, theirs)]
            found.append((scores[1] - scores[0], number, (pair.source, pair.target, ours, theirs), scores))
    form = ".3g" if kind == "number" else ".1f"
    head = ["line", "source", "reference", first.name, other.name, NAMES.get(kind, "right"), "", "difference"]
    parts = [title, page.paragraph(f"{len(found):,} of {len(pairs):,} lines are answered differently")]
    for told, sign in (("worse", 1), ("better", -1)):
        shown = sorted((each for each in found if each[0] * sign < 0), key=lambda each: (each[0] * sign, each[1]))[
            :WORST
        ]
        cells = [
            [str(n), *texts, *(f"{s:{form}}" for s in scores), f"{gap:+{form}}"] for gap, n, texts, scores in shown
        ]
        if cells:
            parts += [page.paragraph(f"{other.name} is {told} than {first.name}:"), page.table([head, *cells], left=5)]
    return parts
