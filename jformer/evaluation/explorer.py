"""One page that shows what a trained run attends to: every layer and head, and what else it might have written.

The page holds all it shows and asks for nothing. Weights are stored in 256 steps and drawn when they come into view.
"""

import base64
import hashlib
import html
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from etils.epath import Path as RunPath

from jformer.config.options import Config
from jformer.data.progress import counted
from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.inference.attention import Attended, Weights, attention_maps
from jformer.inference.predict import load
from jformer.storage import in_bucket, replace_content

MOST_EXAMPLES = 50  # of one page; each takes up to layers × heads × tokens² bytes


def explore(config: Config, workdir: RunPath, source: str, output: str) -> str:
    """Write the page of the lines of a file (or of standard input, as "-"), and return what was written.

    A line is a source, or a source, a TAB and the target to look at instead of the run's own answer.

    Raises UserError for an output that cannot be written, for no lines or too many, and for what `attention_maps`
    refuses.
    """
    if output == "-":
        raise UserError("--mode=explore writes a page: name a file as --output, such as --output=attention.html")
    if not in_bucket(RunPath(output)) and (
        Path(output).is_dir() or not os.access(Path(output).parent, os.W_OK | os.X_OK)
    ):
        raise UserError(f"--output={output}: cannot be written; name a file in a folder that can")
    pairs = _read_pairs(Path("/dev/stdin" if source == "-" else source))
    if not 1 <= len(pairs) <= MOST_EXAMPLES:
        raise UserError(f"--input={source} has {len(pairs)} lines to explore: give 1 to {MOST_EXAMPLES} of them")
    attended = attention_maps(load(workdir, config), pairs)
    content = page(f"Attention of {workdir.name}", attended)
    try:
        replace_content(RunPath(output), content.encode())
    except OSError as error:
        raise UserError(f"--output={output}: cannot be written ({error.strerror or error})") from error
    return f"{output}: {counted(len(attended), 'examples')}, {len(content) / 1e3:,.0f} kB; open it in a browser"


def _read_pairs(path: Path) -> list[tuple[str, str | None]]:
    """Return the pairs of all lines that have text, read as --mode=predict reads its input."""

    def warn(line: int, reason: str) -> None:
        print(f"{path}:{line}: {reason}, replaced by U+FFFD", file=sys.stderr)

    return [_pair(line) for line in read_lines(path, Counter(), invalid="replace", warn=warn) if line.strip()]


def _pair(line: str) -> tuple[str, str | None]:
    source, tab, target = line.partition("\t")
    return source, target if tab else None


def page(title: str, attended: Sequence[Attended]) -> str:
    """Return the whole page. Texts stand in it as data, and are never read as HTML or as a program."""
    data = json.dumps([_example(each) for each in attended], ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that no text can end the script element that holds it
    script, style = (
        files("jformer.evaluation").joinpath(f"explorer.{kind}").read_text("utf-8") for kind in ("js", "css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)}</title><style>{style}</style></head>
<body><h1>{html.escape(title)}</h1>
<noscript><p>This page draws with JavaScript, which is switched off.</p></noscript>
<main id="explorer"></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body></html>
"""


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
