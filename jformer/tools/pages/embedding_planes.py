"""Embeddings of tokens, their vectors in context, encodings of positions and biases of attention, as arrays to plot.

Letters in shapes: v entries of a vocabulary, d features, n distinct tokens, t positions, h heads, s distances.
"""

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jformer.inference.answers import EncodedPair
from jformer.inference.predict import Predictor
from jformer.models.layers.positions import alibi_slopes, relative_buckets, sinusoids
from jformer.models.model_config import RelativeConfig
from jformer.tools.pages.page import visible

NEAREST = 5  # neighbours shown for every token
MOST_IN_CONTEXT = 150  # tokens whose vectors in context are shown
MOST_POSITIONS, MOST_FEATURES = 64, 128  # of a table that are shown
FAR = 32  # positions to either side whose biases are shown


class Plane(NamedTuple):
    """Tokens as points, on the two axes along which their vectors differ most."""

    name: str
    tokens: tuple[str, ...]  # of embeddings each once, as the vocabulary writes them
    points: np.ndarray  # f32 [n 2]
    shares: tuple[float, float]  # of the vectors' variance that each axis shows
    neighbours: tuple[tuple[tuple[str, float], ...], ...]  # the nearest of the vocabulary, or of these, by cosine


class Positions(NamedTuple):
    """A table of a model's encodings or biases of positions."""

    name: str
    axes: tuple[str, str]  # what rows and columns are: positions and features, or heads and distances
    values: np.ndarray  # f32: [t d] added to embeddings, or [h s] added to the scores of attention
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    masked: bool = False  # whether it is a mask: zeros are pairs without attention


def embedding_planes(predictor: Predictor, pairs: Sequence[tuple[str, str]]) -> list[list[Plane]]:
    """Return for each source and target the planes of their tokens, one for each table that they are read from.

    The axes are principal components of the tokens of the example (Pearson 1901). Images and labels have no table. In
    a task that restores a text, source and target are that text.
    """
    found = []
    for pair in predictor.inputs.encode_pairs(pairs):
        found.append([_of_table(predictor, name, ids) for name, ids in _read(predictor, pair).items() if ids])
    return found


def _read(predictor: Predictor, pair: EncodedPair) -> dict[str, list[int]]:
    """Return the distinct tokens, in order, that a model reads from each of its tables."""
    inputs, tables = predictor.inputs, predictor.params
    source = () if inputs.of_images or inputs.continues else pair.source
    target = pair.target if predictor.task.answer in ("text", "continuation", "") else ()
    sides = {"source_embedding": source, "target_embedding": target}
    if "target_embedding" not in tables:  # one table for both, under any name
        sides = dict.fromkeys(("source_embedding", "embedding"), (*source, *target))
    return {name: list(dict.fromkeys(map(int, ids))) for name, ids in sides.items() if name in tables}


def _of_table(predictor: Predictor, name: str, ids: Sequence[int]) -> Plane:
    side = 1 if name == "target_embedding" or predictor.inputs.continues else 0
    tokens = predictor.tokenizers[side].tokens
    table = np.asarray(predictor.params[name]["embedding"], np.float32)[: len(tokens)]
    kind = name.removesuffix("embedding").strip("_") if "target_embedding" in predictor.params else ""
    return _plane(f"embeddings{kind and f' of the {kind}'}", tokens, table, ids)


def _plane(name: str, tokens: Sequence[str], table: np.ndarray, ids: Sequence[int]) -> Plane:
    """Return the plane of some rows of a table [v d], whose tokens these are."""
    points, shares = principal_components(table[ids])
    near = nearest(table, ids, tokens, NEAREST)
    return Plane(name=name, tokens=tuple(tokens[i] for i in ids), points=points, shares=shares, neighbours=near)


def context_planes(predictor: Predictor, pairs: Sequence[tuple[str, str | None]]) -> dict[str, list[Plane]]:
    """Return stack → a plane for its input and after each of its layers, with the tokens of all pairs in context.

    A token is followed by the number of its pair. Up to MOST_IN_CONTEXT tokens of whole pairs are taken. Images and
    recurrent models have no planes.
    """
    config = predictor.model.config
    if config.recurrent.cell or predictor.inputs.of_images:
        return {}
    found = [*predictor.activations(pairs, ("*input/output", "*/block/output"))]
    planes = {}
    for stack, side in {"encoder": "source", "decoder": "target"}.items():
        if f"{stack}/block/output" not in found[0].arrays:
            continue
        names = f"{side}_input/output" if config.family == "encdec" else "input/output", f"{stack}/block/output"
        tokens, vectors = list[str](), list[np.ndarray]()
        for number, each in enumerate(found, start=1):
            read = each.source if side == "source" else each.target
            if len(tokens) + len(read) <= MOST_IN_CONTEXT:
                tokens += [f"{visible(token)} [{number}]" if len(found) > 1 else token for token in read]
                vectors.append(np.concatenate([each.arrays[names[0]][None], each.arrays[names[1]]]))
        if tokens:
            layers, rows = np.concatenate(vectors, axis=1), range(len(tokens))  # [l n d]
            planes[stack] = [_plane(f"layer {i}" if i else "input", tokens, x, rows) for i, x in enumerate(layers)]
    return planes


def principal_components(vectors: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return vectors [n d] on their first two principal components, f32 [n 2], and the shares of variance on them.

    The largest coordinate on each axis is made positive, so that pictures are reproducible.
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    points, variance = np.zeros((len(vectors), 2)), np.zeros(2)
    kept = min(2, len(sizes))
    points[:, :kept], variance[:kept] = (left * sizes)[:, :kept], sizes[:kept] ** 2
    largest = points[np.abs(points).argmax(axis=0), [0, 1]]
    points *= np.where(largest < 0, -1, 1)
    first, second = (variance / max((sizes**2).sum(), 1e-30)).tolist()
    return points.astype(np.float32), (first, second)


def nearest(
    table: np.ndarray, ids: Sequence[int], tokens: Sequence[str], count: int
) -> tuple[tuple[tuple[str, float], ...], ...]:
    """Return the `count` entries of a table [v d] nearest to each of `ids`, itself excluded, with their cosines."""
    lengths = np.maximum(np.linalg.norm(table, axis=1), 1e-12)
    found = []
    for i in ids:
        cosines = table @ table[i] / (lengths * lengths[i])
        cosines[i] = -np.inf
        best = np.argsort(-cosines, kind="stable")[: min(count, len(table) - 1)]
        found.append(tuple((tokens[j], float(cosines[j])) for j in best))
    return tuple(found)


def position_tables(predictor: Predictor, length: int) -> list[Positions]:
    """Return the tables of positions of a model, up to `length` tokens; rotary and absent positions have none.

    Learned positions of an image are those of its patches.
    """
    config = predictor.model.config
    shown = min(length, MOST_POSITIONS)
    if config.recurrent.cell:
        return []
    if config.positions == "sinusoidal":
        return [_encodings("sinusoids", np.asarray(sinusoids(shown, config.d_model)))]
    if config.positions == "learned":
        return _learned(predictor.params, shown)
    if config.positions == "alibi":
        slopes, distances = alibi_slopes(config.num_heads), distances_of(shown, causal=True)
        return [biases("ALiBi: slope times distance", slopes[:, None] * distances, distances, slopes.tolist())]
    tables = {stack: predictor.params.get(stack, {}).get("position_bias") for stack in ("encoder", "decoder")}
    return [_relative(config.relative, stack, table, shown) for stack, table in tables.items() if table]


def _learned(params: PyTree, shown: int) -> list[Positions]:
    sides = {"input": "", "source_input": " of the source", "target_input": " of the target"}
    tables = {side: params[name]["positions"]["embedding"] for name, side in sides.items() if name in params}
    return [_encodings(f"learned positions{side}", np.asarray(table)[:shown]) for side, table in tables.items()]


def _encodings(name: str, table: np.ndarray) -> Positions:
    table = table[:, :MOST_FEATURES].astype(np.float32)
    rows, columns = (tuple(str(i + 1) for i in range(size)) for size in table.shape)
    return Positions(name=name, axes=("position", "feature"), values=table, rows=rows, columns=columns)


def _relative(options: RelativeConfig, stack: str, table: Any, shown: int) -> Positions:
    """Return the biases of a stack's heads by distance, read from their buckets."""
    distances = distances_of(shown, causal=stack == "decoder")
    buckets = relative_buckets(jnp.asarray(distances), options.num_buckets, options.max_distance, stack == "decoder")
    values = np.asarray(table["embedding"])[np.asarray(buckets)].T
    return biases(f"relative biases of the {stack}", values, distances)


def distances_of(shown: int, causal: bool) -> np.ndarray:
    """Return the distances from a token to those it may attend to, near ones only."""
    far = min(shown - 1, FAR)
    return np.arange(-far, 1 if causal else far + 1)


def biases(name: str, values: np.ndarray, distances: np.ndarray, slopes: Sequence[float] = ()) -> Positions:
    """Return the biases f32 [h s] of heads by distance, ALiBi's with their slopes."""
    heads = tuple(f"{i + 1}" + (f", slope {slopes[i]:.4g}" if slopes else "") for i in range(len(values)))
    columns = tuple(f"{i:+d}" if i else "0" for i in distances)
    return Positions(
        name=name, axes=("head", "distance"), values=values.astype(np.float32), rows=heads, columns=columns
    )


def map_data(positions: Positions) -> dict[str, Any]:
    """Return a table for the page, a byte for each number: 128 is zero, 1 and 255 are the largest magnitudes."""
    most = float(np.abs(positions.values).max(initial=0)) or 1.0
    steps = np.round(positions.values / most * 127) + 128
    return {**positions._asdict(), "most": most, "values": base64.b64encode(steps.astype(np.uint8).tobytes()).decode()}
