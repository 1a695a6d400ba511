"""One page that shows what a trained run attends to: every layer and head, and what else it might have written.

The page holds all it shows and asks for nothing. Weights are stored in 256 steps and drawn when they come into view.
"""

import base64
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils.epath import Path as RunPath

from jformer.config.options import Config
from jformer.data.progress import counted
from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.evaluation import heatmaps, page
from jformer.inference.attention import Attended, Weights, attention_maps
from jformer.inference.predict import load

MOST_EXAMPLES = 50  # of one page; each takes up to layers × heads × tokens² bytes


def explore(config: Config, workdir: RunPath, source: str, output: str) -> str:
    """Write the page of the lines of a file (or of standard input, as "-"), and return what was written.

    A line is a source, or a source, a TAB and the target to look at instead of the run's own answer. An output whose
    name ends in one of `heatmaps.FORMS` is the figure of one line.

    Raises UserError for an output that cannot be written, for no lines or too many, and for what `attention_maps`
    refuses.
    """
    page.check_output("explore", output)
    form = Path(output).suffix.lower()
    if form not in ("", ".html", ".htm", *heatmaps.FORMS):
        raise UserError(f"--output={output}: a page ends in .html, a figure in {' or '.join(heatmaps.FORMS)}")
    most = 1 if form in heatmaps.FORMS else MOST_EXAMPLES
    pairs = _read_pairs(Path("/dev/stdin" if source == "-" else source))
    if not 1 <= len(pairs) <= most:
        wanted = f"1 to {most} of them" if most > 1 else f"one, as {output} is a figure"
        raise UserError(f"--input={source} has {len(pairs)} lines to explore: give {wanted}")
    attended = attention_maps(load(workdir, config), pairs)
    if form in heatmaps.FORMS:
        page.write_page(output, heatmaps.draw(attended[0], form))
        return f"{output}: attention of one example"
    content = explorer_page(f"Attention of {workdir.name}", attended)
    page.write_page(output, content.encode())
    return f"{output}: {counted(len(attended), 'examples')}, {len(content) / 1e3:,.0f} kB; open it in a browser"


def _read_pairs(path: Path) -> list[tuple[str, str | None]]:
    """Return the pairs of all lines that have text, read as --mode=predict reads its input."""

    def warn(line: int, reason: str) -> None:
        print(f"{path}:{line}: {reason}, replaced by U+FFFD", file=sys.stderr)

    return [_pair(line) for line in read_lines(path, Counter(), invalid="replace", warn=warn) if line.strip()]


def _pair(line: str) -> tuple[str, str | None]:
    source, tab, target = line.partition("\t")
    return source, target if tab else None


def explorer_page(title: str, attended: Sequence[Attended]) -> str:
    """Return the whole page. Texts stand in it as data, and are never read as HTML or as a program."""
    return page.page(title, ['<div id="explorer"></div>'], "explorer", [_example(each) for each in attended])


def _example(attended: Attended) -> dict[str, Any]:
    return {
        "source": attended.source,
        "target": attended.target,
        "attention": [_maps(weights) for weights in attended.weights],
        "choices": [
            [choice.token, round(choice.probability, 4), [[token, round(p, 4)] for token, p in choice.likeliest]]
            for choice in attended.choices
        ],
    }


def _maps(weights: Weights) -> dict[str, Any]:
    """Return one part's weights: a string for each layer and head, row by row, and for each layer the mean of heads."""
    rollout = weights.rollout()
    return {
        "name": weights.part.title,
        "rows": weights.rows,
        "columns": weights.columns,
        "heads": [[_bytes(head) for head in layer] for layer in weights.values],
        "means": [_bytes(layer.mean(axis=0)) for layer in weights.values],
        "rollout": None if rollout is None else _bytes(rollout),
        "entropy": np.round(weights.entropy().astype(float), 3).tolist(),
    }


def _bytes(weights: np.ndarray) -> str:
    """Return weights [t s] from 0 to 1 as a byte each, in base64."""
    return base64.b64encode(np.round(weights * 255).astype(np.uint8).tobytes()).decode()
