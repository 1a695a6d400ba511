"""The explorer: one page with a run's attention, its beam search, its embeddings and positions, and vectors in context.

The page is one file that loads nothing. Weights are stored in 256 steps, deflated, and drawn when they come into view;
the other sections are drawn when they are opened.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from etils.epath import Path as RunPath

from jformer.config.options import Config
from jformer.data import progress
from jformer.data.progress import counted
from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.inference.answers import NODE_STATES, Attended, AttentionWeights, Part, SearchTree
from jformer.inference.output_file import input_path, refuse_input
from jformer.inference.predict import Predictor, load
from jformer.inference.search_tree import has_beam
from jformer.tasks.task import MASKS
from jformer.tools.pages import heatmaps, page
from jformer.tools.pages.embedding_planes import (
    Plane,
    Positions,
    context_planes,
    embedding_planes,
    map_data,
    position_tables,
)

MOST_EXAMPLES = 50  # of one page; each takes up to layers × heads × tokens² bytes
WRITTEN = "What it wrote, and what else it might have"
GIVEN = "The target token by token, and what it might have written"
WENT_ON = "What it was given and how it went on, and what else it might have written"
CHOSEN = "What it chose, and what else it might have"
GIVEN_CHOICE = "What was given, and what it might have chosen"
HIDDEN = "What was hidden, and what it might be"
# A task's answer → the headings of the choices: for the run's own answer, for a given target.
HEADINGS = {"": (HIDDEN, HIDDEN), MASKS: (HIDDEN, HIDDEN), "text": (WRITTEN, GIVEN), "continuation": (WENT_ON, GIVEN)}
PROGRAMS = ("element", "explorer_drawing", "explorer_picture", "explorer_tree", "explorer_tables", "explorer")


class Shown(NamedTuple):
    """What the page shows of one example."""

    attended: Attended
    trees: Sequence[SearchTree] = ()  # of the search for the run's own answer, one for each piece of the source
    planes: Sequence[Plane] = ()
    choices: str = WRITTEN  # the heading of the probabilities of tokens


def explore(config: Config, workdir: RunPath, source: str, output: str, form: str | None = None) -> str:
    """Write the page, or a figure, for the lines of a file, and return a summary.

    A line is a source, or a source, a TAB and a target to look at instead of the run's own answer. A question and its
    context, or two texts of a classifier, separated by a TAB, are one source. For mlm and denoise the whole line is a
    text, parts of which are hidden.

    Args:
        config: overrides the run's own, for decoding.
        workdir: of the run.
        source: the file of lines; "-" = standard input.
        output: the file to write: a page, or the figure of one line, by its suffix.
        form: "html", or "png" or "svg" for the figure; None = by the suffix of the output.

    Raises:
        UserError: an output that cannot be written or is the input, no lines or too many, and what `Predictor.attend`
            refuses.
    """
    page.check_output("explore", output)
    path = input_path(source)
    refuse_input(path, Path(output))
    figure = _figure_form(form, output)
    most = 1 if figure else MOST_EXAMPLES
    lines = _read_lines(path)
    if not 1 <= len(lines) <= most:
        wanted = f"1 to {most} of them" if most > 1 else f"one, as {output} is a figure"
        raise UserError(f"--input={source} has {len(lines)} lines to explore: give {wanted}")
    predictor = load(workdir, config)
    pairs = [predictor.pair_of(line) for line in lines]
    attended = predictor.attend(pairs)
    if figure:
        page.write_page(output, heatmaps.draw(attended[0], figure))
        return f"{output}: attention of one example"
    longest = max(
        (len(side) for each in attended for part in each.parts for side in (part.rows, part.columns)), default=0
    )
    shown, positions = show(predictor, pairs, attended), position_tables(predictor, longest)
    answered = [(each.source, each.target) for each in attended] if not predictor.task.restores else pairs
    contexts = context_planes(predictor, answered)
    content = explorer_page(f"Attention of {workdir.name}", shown, positions, contexts)
    page.write_page(output, content.encode())
    return f"{output}: {counted(len(shown), 'examples')}, {len(content) / 1e3:,.0f} kB; open it in a browser"


def _figure_form(form: str | None, output: str) -> str:
    """Return which of heatmaps.FORMS to draw, or "" for a page; raise UserError for other or conflicting formats."""
    forms = {".html": "html", ".htm": "html", **{form: form.removeprefix(".") for form in heatmaps.FORMS}}
    suffix = Path(output).suffix.lower()
    named = forms.get(suffix)
    if form is None and suffix and named is None:
        raise UserError(f"--output={output}: a page ends in .html, a figure in {' or '.join(heatmaps.FORMS)}")
    if form and named and form != named:
        raise UserError(f"--output={output} does not match --format={form}: leave one of them out")
    chosen = f".{form or named or 'html'}"
    return chosen if chosen in heatmaps.FORMS else ""


def _read_lines(path: Path) -> list[str]:
    """Return all lines that are not blank, read as by --mode=predict."""

    def warn(line: int, reason: str) -> None:
        progress.show(f"{path}:{line}: {reason}, replaced by U+FFFD", "\n")

    return [line for line in read_lines(path, Counter(), invalid="replace", warn=warn) if line.strip()]


def show(predictor: Predictor, pairs: Sequence[tuple[str, str | None]], attended: Sequence[Attended]) -> list[Shown]:
    """Return what the page shows of each pair, with the search for the run's own answers if there is a beam."""
    texts = [(each.target if predictor.task.restores else each.source, each.target) for each in attended]
    planes = embedding_planes(predictor, texts)
    answered = [i for i, (_, target) in enumerate(pairs) if target is None]
    trees: dict[int, list[SearchTree]] = {}
    if answered and has_beam(predictor.task.answer, predictor.config.decode):
        trees = dict(zip(answered, predictor.search_trees([pairs[i][0] for i in answered]), strict=True))
    own, given = HEADINGS.get(predictor.task.answer, (CHOSEN, GIVEN_CHOICE))
    headings = [own if target is None else given for _, target in pairs]
    return [Shown(each, trees.get(i, ()), planes[i], headings[i]) for i, each in enumerate(attended)]


def explorer_page(
    title: str,
    shown: Sequence[Shown],
    positions: Sequence[Positions] = (),
    contexts: Mapping[str, Sequence[Plane]] = MappingProxyType({}),
) -> str:
    """Return the whole page. Texts are data, never read as HTML or code."""
    packed: list[str] = []
    data = {
        "examples": [_example(each, packed) for each in shown],
        "positions": [map_data(each) for each in positions],
        "contexts": _packed_json(
            [{"name": stack, "layers": [*map(_plane, planes)]} for stack, planes in contexts.items()], packed
        ),
        "states": NODE_STATES,
    }
    return page.page(title, ['<div id="explorer"></div>'], PROGRAMS, data, packed=packed)


def _example(shown: Shown, packed: list[str]) -> dict[str, Any]:
    attended = shown.attended
    return {
        "planes": [_plane(plane) for plane in shown.planes],
        "source": attended.source,
        "target": attended.target,
        "image": None if attended.image is None else _image(attended.image, packed),
        "attention": [
            _maps(part, heatmaps.patches_of(attended, part), packed)
            for part in sorted(attended.parts, key=heatmaps.order)
        ],
        "trees": _packed_json([_tree(tree) for tree in shown.trees], packed),
        "heading": shown.choices,
        "choices": [
            [
                page.visible(each.token),
                round(each.probability, 4),
                [[page.visible(token), round(p, 4)] for token, p in each.likeliest],
                page.visible(each.read),
            ]
            for each in attended.choices
        ],
    }


def _image(image: np.ndarray, packed: list[str]) -> dict[str, Any]:
    """Return an image [height width channels] whose bytes are packed."""
    return {"width": image.shape[1], "height": image.shape[0], "bytes": _packed(image, packed)}


def _maps(part: AttentionWeights, side: int, packed: list[str]) -> dict[str, Any]:
    """Return the weights of one part: the numbers of packed texts for each layer and head, and for means of heads.

    `side` is the number of patches along a side of the image, 0 for texts.
    """
    rollout = part.rollout()
    mask = None if part.mask.all() else _packed(part.mask, packed)  # what is shown first is packed first
    means = [_packed(_steps(layer.mean(axis=0)), packed) for layer in part.weights]
    return {
        "name": part.part.value,
        "rows": [*map(page.visible, part.rows)],
        "columns": [*map(page.visible, part.columns)],
        "side": side,
        "firstPatch": len(part.rows) - side**2 if part.part is Part.ENCODER_SELF else len(part.rows),
        "mask": mask,
        "masked": int(part.mask.size - part.mask.sum()),
        "means": means,
        "rollout": None if rollout is None else _packed(_steps(rollout), packed),
        "heads": [[_packed(_steps(head), packed) for head in layer] for layer in part.weights],
        "entropy": np.round(part.entropy().astype(float), 3).tolist(),
    }


def _steps(weights: np.ndarray) -> np.ndarray:
    """Return weights from 0 to 1 as 256 steps of their square roots, which keeps small ones apart: 0.002 is step 11."""
    return np.round(np.sqrt(weights) * 255)


def _packed(values: np.ndarray, packed: list[str]) -> int:
    """Append a packed array of bytes, and return its number."""
    packed.append(page.pack(values))
    return len(packed) - 1


def _packed_json(values: Sequence[Any], packed: list[str]) -> int | None:
    """Append as packed JSON what a section draws once it is opened, and return its number; None if there is nothing."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _packed(np.frombuffer(text.encode(), np.uint8), packed) if values else None


def _tree(tree: SearchTree) -> dict[str, Any]:
    """Return a tree as lists of fields, in thousandths of nats; of the dropped nodes, only the best of each step."""
    nodes = sorted([i for i, state in enumerate(tree.states) if state != "dropped"] + _best_dropped(tree))
    number = {node: i for i, node in enumerate(nodes)}
    tokens = list(dict.fromkeys(tree.tokens[i] for i in nodes))
    states = list(NODE_STATES)
    return {
        "tokens": [*map(page.visible, tokens)],
        "token": [tokens.index(tree.tokens[i]) for i in nodes],
        "parent": [number.get(int(tree.parents[i]), -1) for i in nodes],
        "logProb": [round(1000 * float(tree.log_probs[i])) for i in nodes],
        "score": [round(1000 * float(tree.scores[i])) for i in nodes],
        "state": [states.index(tree.states[i]) for i in nodes],
        "rank": tree.ranks[nodes].tolist(),
        "dropped": tree.states.count("dropped"),
    }


def _best_dropped(tree: SearchTree) -> list[int]:
    """Return the best dropped nodes of each step, as many as the widest step kept."""
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
        "tokens": [*map(page.visible, plane.tokens)],
        "points": np.round(plane.points.astype(float), 3).tolist(),
        "shares": [round(share, 3) for share in plane.shares],
        "neighbours": [
            [[page.visible(token), round(cosine, 3)] for token, cosine in each] for each in plane.neighbours
        ],
    }
