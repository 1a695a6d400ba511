"""Beam searches as trees: what every step kept, ended and dropped, read from a recorded search.

Letters in shapes: t steps, n beams, k continuations of a beam that are considered; no b, since it is one sentence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.hypotheses import length_penalty
from jformer.decoding.search import Trace
from jformer.errors import UserError
from jformer.inference.answers import Piece, SearchTree
from jformer.inference.batching import NBest, batch_rows, read_row, sorted_batches
from jformer.inference.generation import KEPT, SearchSetup, begin_search, compile_over_rows
from jformer.inference.inputs import Inputs
from jformer.inference.one_pass import HEADS
from jformer.plugins import cached


@cached(KEPT)
def make_recorder(setup: SearchSetup) -> jax.stages.Wrapped:
    """Return the compiled (parameters of every model, batch, room) → (Decoded, Trace): a search and all its candidates.

    It finds what the program of `make_answer` finds.
    """

    return compile_over_rows(
        lambda params, batch, room: begin_search(setup, params, batch, room).record(room), setup.mesh
    )


def search_trees(
    setup: SearchSetup, inputs: Inputs, params: Sequence[PyTree], pieces: Sequence[Piece]
) -> list[SearchTree]:
    """Return the tree of every piece, in order; raise UserError for NaN scores.

    Batches have as many rows as those of answers, so that their numbers agree to the bit.
    """
    search, options, found = make_recorder(setup), inputs.options, dict[int, SearchTree]()
    names, eos = inputs.tokenizers[1].tokens, inputs.symbols.eos
    rows = batch_rows(len(pieces), options.batch_size, setup.mesh, options.hypotheses)
    for indices in sorted_batches([len(piece.ids) for piece in pieces], rows):
        arrays, room = inputs.arrays([pieces[i] for i in indices], rows)
        decoded, trace = jax.device_get(search(params, arrays, room))
        for row, i in enumerate(indices):
            limit, outputs = int(arrays["limit"][row]), read_row(decoded, row)
            assert isinstance(outputs, NBest)
            penalty = float(length_penalty(jnp.array(limit), options))
            found[i] = read_tree(Trace(*(x[row] for x in trace)), outputs, eos, names, limit, penalty)
    return [found[i] for i in range(len(pieces))]


def refuse_without_beam(answer: str, options: DecodeConfig) -> None:
    """Raise UserError if answers of this kind are searched for with fewer than two beams."""
    if not answer or answer in HEADS:
        raise UserError("this run writes no text, so it has no search to show: name a translator or a language model")
    if options.rerank:
        raise UserError(f"decode.rerank={options.rerank!r} chooses among the outputs of a beam: leave it out")
    if not has_beam(answer, options):
        asked = f"search={options.search!r}" if options.search != "beam" else f"beam_size={options.beam_size}"
        raise UserError(f"decode.{asked} searches without a beam: set decode.search='beam' and beam_size of 2 or more")


def has_beam(answer: str, options: DecodeConfig) -> bool:
    """Return whether answers of this kind are the best of two beams or more."""
    beam = options.search == "beam" and options.beam_size > 1 and not options.rerank
    return bool(answer) and answer not in HEADS and beam


class _Node(NamedTuple):
    parent: int
    token: int
    sum: float  # of log-probabilities
    score: float
    state: str
    rank: int = 0


def read_tree(trace: Trace, outputs: NBest, eos: int, names: Sequence[str], limit: int, penalty: float) -> SearchTree:
    """Return the tree of one sentence.

    Args:
        trace: of this sentence: arrays [t …].
        outputs: what the search returned, best first.
        eos: the end symbol.
        names: how the vocabulary writes every id.
        limit: the most tokens of the sentence.
        penalty: the length penalty there.
    """
    nodes = [_Node(parent=-1, token=-1, sum=0.0, score=0.0, state="kept")]
    beams = np.zeros(trace.live_tokens.shape[1], int)
    steps = np.flatnonzero(trace.searched)
    for t in steps:
        beams = _add_step(nodes, beams, Trace(*(x[t] for x in trace)), eos)
    if len(steps):
        live = beams[trace.live_sums[steps[-1]] > -np.inf]
        for i in live:
            score, state = (nodes[i].sum / penalty, "cut") if len(steps) >= limit else (nodes[i].score, "left")
            nodes[i] = nodes[i]._replace(score=score, state=state)
    _rank(nodes, outputs)
    return SearchTree(
        tokens=("", *(names[node.token] if node.token < len(names) else f"<{node.token}>" for node in nodes[1:])),
        parents=np.array([node.parent for node in nodes], np.int32),
        log_probs=np.array([0.0, *(node.sum - nodes[node.parent].sum for node in nodes[1:])], np.float32),
        scores=np.array([node.score for node in nodes], np.float32),
        states=tuple(node.state for node in nodes),
        ranks=np.array([node.rank for node in nodes], np.int32),
    )


def _add_step(nodes: list[_Node], beams: np.ndarray, step: Trace, eos: int) -> np.ndarray:
    """Add a node for every candidate of a step; return the node of each beam [n] after it."""
    live = zip(step.live_parents.tolist(), step.live_tokens.tolist(), step.live_sums.tolist(), strict=True)
    beam_of = {(parent, token): beam for beam, (parent, token, total) in enumerate(live) if total > -np.inf}
    ends = zip(step.end_parents.tolist(), step.end_scores.tolist(), strict=True)
    score_of_end = {parent: score for parent, score in ends if score > -np.inf}
    after = beams.copy()
    for (parent, k), token in np.ndenumerate(step.tokens):
        total = float(step.sums[parent, k])
        if total == -np.inf:
            continue
        score, state = total, "dropped"
        if (parent, token) in beam_of:
            state = "kept"
            after[beam_of[parent, token]] = len(nodes)
        elif token == eos and parent in score_of_end:
            score, state = score_of_end[parent], "ended"
        nodes.append(_Node(parent=int(beams[parent]), token=int(token), sum=total, score=score, state=state))
    return after


def _rank(nodes: list[_Node], outputs: NBest) -> None:
    """Number the nodes where outputs end, from 1; if several groups have the same output, the first gets the number."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for i, node in enumerate(nodes):
        if node.state in ("ended", "cut"):
            ends.setdefault(_ids(nodes, i), []).append(i)
    for rank, (ids, score) in enumerate(zip(outputs.tokens, outputs.scores, strict=True), start=1):
        if ids:
            i = ends[tuple(ids)].pop(0)
            nodes[i] = nodes[i]._replace(rank=rank, score=score)


def _ids(nodes: Sequence[_Node], i: int) -> tuple[int, ...]:
    ids = []
    while i > 0:
        ids.append(nodes[i].token)
        i = nodes[i].parent
    return tuple(reversed(ids))
