"""Rank the candidates of a search by utility: by their similarity to each other, or the scores of a user's command."""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from jformer.config.options import Config
from jformer.decoding import mbr
from jformer.decoding.decode_config import UTILITIES
from jformer.inference.answers import Output, Piece, written_language
from jformer.tasks.metrics import tokenization
from jformer.tasks.scoring_command import Segment, segment_scores


def by_utility(
    config: Config, pieces: Sequence[Piece], candidates: Sequence[Sequence[Output]], texts: Sequence[Sequence[str]]
) -> list[list[Output]]:
    """Return the candidates for every piece with their utility, best first; of equal samples of mbr, the first.

    `texts` are those of the candidates. A command scores those of all pieces in one call.
    """
    if config.decode.rerank:
        both = [Segment(piece.text, text) for piece, each in zip(pieces, texts, strict=True) for text in each]
        scores = iter(segment_scores(config, config.decode.rerank, both))
        rated = [[output._replace(utility=next(scores)) for output in outputs] for outputs in candidates]
        return [sorted(outputs, key=lambda output: -(output.utility or 0.0)) for outputs in rated]
    tables = _utilities(config, pieces, [[*dict.fromkeys(each)] for each in texts])
    ranks = [mbr.rank(each, table) for each, table in zip(texts, tables, strict=True)]
    return [
        [outputs[i]._replace(utility=utility) for i, utility in zip(*ranked, strict=True)]
        for outputs, ranked in zip(candidates, ranks, strict=True)
    ]


def _utilities(config: Config, pieces: Sequence[Piece], texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return, for every piece, the utility of each of its texts (row) against each as a reference (column)."""
    if config.decode.mbr_utility in UTILITIES:
        return [_similarities(config, piece, each) for piece, each in zip(pieces, texts, strict=True)]
    segments = (
        Segment(piece.text, answer, (reference,))
        for piece, each in zip(pieces, texts, strict=True)
        for answer in each
        for reference in each
    )
    scores = iter(segment_scores(config, config.decode.ranked_by, [*segments]))
    return [np.array([*islice(scores, len(each) ** 2)]).reshape(len(each), len(each)) for each in texts]


def _similarities(config: Config, piece: Piece, texts: Sequence[str]) -> np.ndarray:
    """Return the similarity of every text for a piece (row) to each (column), tokenized by its language."""
    if not texts:
        return np.zeros((0, 0))
    if config.decode.mbr_utility == "chrf":
        return mbr.chrf(texts)
    return mbr.bleu(texts, tokenization(config, written_language(config, [piece])))
