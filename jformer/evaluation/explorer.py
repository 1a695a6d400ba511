"""One page that shows what a trained run attends to, how it searched, and how its tokens and positions lie.

The page holds all it shows and asks for nothing. Weights are stored in 256 steps and drawn when they come into view;
searches, embeddings and positions are drawn when somebody opens them.
"""

import base64
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils.epath import Path as RunPath

from jformer.config.options import Config
from jformer.data import progress
from jformer.data.progress import counted
from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.evaluation import heatmaps, page
from jformer.inference.answers import NODE_STATES, SearchTree
from jformer.inference.attended import Attended, Attention
from jformer.inference.embeddings import Plane, Positions, embedding_planes, position_tables
from jformer.inference.predict import Predictor, load
from jformer.inference.search_tree import has_beam

MOST_EXAMPLES = 50  # of one page; each takes up to layers × heads × tokens² bytes
PROGRAMS = ("explorer_drawing", "explorer_tree", "explorer_tables", "explorer")


class Shown(NamedTuple):
    """All that the page shows of one example."""

    attended: Attended
    trees: Sequence[SearchTree] = ()  # of the search for the run's own answer, one for each piece of the source
    planes: Sequence[Plane] = ()


def explore(config: Config, workdir: RunPath, source: str, output: str) -> str:
    """Write the page of the lines of a file (or of standard input, as "-"), and return what was written.

    A line is a source, or a source, a TAB and the target to look at instead of the run's own answer. An output whose
    name ends in one of `heatmaps.FORMS` is the figure of one line.

    Raises UserError for an output that cannot be written, for no lines or too many, and for what
    `Predictor.attend` refuses.
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
    predictor = load(workdir, config)
    attended = predictor.attend(pairs)
    if form in heatmaps.FORMS:
        page.write_page(output, heatmaps.draw(attended[0], form))
        return f"{output}: attention of one example"
    longest = max(
        (len(side) for each in attended for part in each.parts for side in (part.rows, part.columns)), default=0
    )
    shown, positions = show(predictor, pairs, attended), position_tables(predictor, longest)
    content = explorer_page(f"Attention of {workdir.name}", shown, positions)
    page.write_page(output, content.encode())
    return f"{output}: {counted(len(shown), 'examples')}, {len(content) / 1e3:,.0f} kB; open it in a browser"


def _read_pairs(path: Path) -> list[tuple[str, str | None]]:
    """Return the pairs of all lines that have text, read as --mode=predict reads its input."""

    def warn(line: int, reason: str) -> None:
        progress.show(f"{path}:{line}: {reason}, replaced by U+FFFD", "\n")

    return [_pair(line) for line in read_lines(path, Counter(), invalid="replace", warn=warn) if line.strip()]


def _pair(line: str) -> tuple[str, str | None]:
    source, tab, target = line.partition("\t")
    return source, target if tab else None


def show(predictor: Predictor, pairs: Sequence[tuple[str, str | None]], attended: Sequence[Attended]) -> list[Shown]:
    """Return what the page shows of each pair: the search where the target is the run's own answer, found by a beam."""
    planes = embedding_planes(predictor, [(each.source, each.target) for each in attended])
    answered = [i for i, (_, target) in enumerate(pairs) if target is None]
    trees: dict[int, list[SearchTree]] = {}
    if answered and has_beam(predictor.task.answer, predictor.config.decode):
        trees = dict(zip(answered, predictor.search_trees([pairs[i][0] for i in answered]), strict=True))
    return [Shown(each, trees.get(i, ()), planes[i]) for i, each in enumerate(attended)]


def explorer_page(title: str, shown: Sequence[Shown], positions: Sequence[Positions] = ()) -> str:
    """Return the whole page. Texts stand in it as data, and are never read as HTML or as a program."""
    data = {
        "examples": [_example(each) for each in shown],
        "positions": [_positions(each) for each in positions],
        "states": NODE_STATES,
    }
    return page.page(title, ['<div id="explorer"></div>'], PROGRAMS, data)


def _example(shown: Shown) -> dict[str, Any]:
    attended = shown.attended
    return {
        "trees": [_tree(tree) for tree in shown.trees],
        "planes": [_plane(plane) for plane in shown.planes],
        "source": attended.source,
        "target": attended.target,
        "attention": [_maps(part) for part in sorted(attended.parts, key=heatmaps.order)],
        "choices": [
            [choice.token, round(choice.probability, 4), [[token, round(p, 4)] for token, p in choice.likeliest]]
            for choice in attended.choices
        ],
    }


def _maps(part: Attention) -> dict[str, Any]:
    """Return one part's weights: a string for each layer and head, row by row, and for each layer the mean of heads."""
    rollout = part.rollout()
    return {
        "name": part.part.title,
        "rows": part.rows,
        "columns": part.columns,
        "heads": [[_bytes(head) for head in layer] for layer in part.weights],
        "means": [_bytes(layer.mean(axis=0)) for layer in part.weights],
        "rollout": None if rollout is None else _bytes(rollout),
        "entropy": np.round(part.entropy().astype(float), 3).tolist(),
    }


def _bytes(weights: np.ndarray) -> str:
    """Return weights [t s] from 0 to 1 as a byte each, in base64."""
    return base64.b64encode(np.round(weights * 255).astype(np.uint8).tobytes()).decode()


def _tree(tree: SearchTree) -> dict[str, Any]:
    """Return a tree as a list for each field, in thousandths of nats; of what was dropped, the best of each step."""
    nodes = sorted([i for i, state in enumerate(tree.states) if state != "dropped"] + _best_dropped(tree))
    number = {node: i for i, node in enumerate(nodes)}
    tokens = list(dict.fromkeys(tree.tokens[i] for i in nodes))
    states = list(NODE_STATES)
    return {
        "tokens": tokens,
        "token": [tokens.index(tree.tokens[i]) for i in nodes],
        "parent": [number.get(int(tree.parents[i]), -1) for i in nodes],
        "logProb": [round(1000 * float(tree.log_probs[i])) for i in nodes],
        "score": [round(1000 * float(tree.scores[i])) for i in nodes],
        "state": [states.index(tree.states[i]) for i in nodes],
        "rank": tree.ranks[nodes].tolist(),
        "dropped": tree.states.count("dropped"),
    }


def _best_dropped(tree: SearchTree) -> list[int]:
    """Return, of each step, as many of the best dropped nodes as the widest step kept."""
    depths = np.zeros(len(tree.parents), int)
    for i, parent in enumerate(tree.parents[1:], start=1):
        depths[i] = depths[parent] + 1
    dropped = np.array([state == "dropped" for state in tree.states])
    kept = np.array([state in ("kept", "left", "cut") for state in tree.states])
    most, found = int(np.max(np.bincount(depths[kept]))), []
    for depth in range(1, int(depths.max()) + 1):
        of_step = np.flatnonzero(dropped & (depths == depth))
        found += of_step[np.argsort(-tree.scores[of_step], kind="stable")[:most]].tolist()
    return found


def _plane(plane: Plane) -> dict[str, Any]:
    return {
        "name": plane.name,
        "tokens": plane.tokens,
        "points": np.round(plane.points.astype(float), 3).tolist(),
        "shares": [round(share, 3) for share in plane.shares],
        "neighbours": [[[token, round(cosine, 3)] for token, cosine in each] for each in plane.neighbours],
    }


def _positions(positions: Positions) -> dict[str, Any]:
    """Return a table of positions, a byte for each number: 128 is nothing, 1 and 255 are the largest there is."""
    most = float(np.abs(positions.values).max(initial=0)) or 1.0
    steps = np.round(positions.values / most * 127) + 128
    return {
        **positions._asdict(),
        "most": most,
        "values": base64.b64encode(steps.astype(np.uint8).tobytes()).decode(),
    }
