"""The answers of two runs to one test set, line by line, where they differ most. No JAX."""

from collections.abc import Mapping

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.tools.pages import page
from jformer.tools.pages.run_report import WORST, kind_of_answers, line_score, read_answers

# Kind of answers → the score of a line; others are right (100) or wrong (0).
NAMES = {"text": "chrF", "qa": "F1", "number": "minus its error"}


def side_by_side(config: Config, runs: Mapping[str, Path], key: str) -> list[str]:
    """Return parts of a page: lines that the second of two named runs answers worse than the first, and better ones.

    The largest differences come first. Texts are scored by sentence chrF (Popović 2015), spans by F1, numbers by their
    error. Missing answers or data are reported in a line.
    """
    (first, other), paths = [*runs], [*runs.values()]
    title = page.heading(f"Answers to {key} side by side")
    try:
        pairs, answers = read_answers(config, paths, key)
    except UserError as error:
        return [title, page.paragraph(f"cannot be shown: {error}")]
    kind, found = kind_of_answers(config), []
    for number, (pair, ours, theirs) in enumerate(zip(pairs, *answers, strict=True), start=1):
        if ours != theirs:
            scores = [line_score(config, answer, pair) for answer in (ours, theirs)]
            found.append((scores[1] - scores[0], number, (pair.source, pair.target, ours, theirs), scores))
    form = ".3g" if kind == "number" else ".1f"
    head = ["line", "source", "reference", first, other, NAMES.get(kind, "right"), "", "difference"]
    parts = [title, page.paragraph(f"{len(found):,} of {len(pairs):,} lines are answered differently")]
    for judgement, sign in (("worse", 1), ("better", -1)):
        shown = sorted((each for each in found if each[0] * sign < 0), key=lambda each: (each[0] * sign, each[1]))[
            :WORST
        ]
        cells = [
            [str(n), *texts, *(f"{s:{form}}" for s in scores), f"{gap:+{form}}"] for gap, n, texts, scores in shown
        ]
        if cells:
            parts += [
                page.paragraph(f"{other} is {judgement} than {first}:"),
                page.table([head, *cells], left=5),
            ]
    return parts
