"""Extend the vocabulary of a run: a further row for each new token in every table of tokens.

A new row starts as the mean of the rows of the tokens that its text was cut into.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jformer.data.text import read_lines
from jformer.errors import UserError
from jformer.models.parts import count_params
from jformer.tools.hf.embedding_rows import Changeable, read_run, with_rows, write_changed


def extend(workdir: str, new: str, files: Sequence[Path]) -> str:
    """Write a run with further tokens, listed one a line in files, and return a summary.

    Raises UserError for a vocabulary that cannot be extended, a token that it has already, files that cannot be read,
    and a directory that is not empty.
    """
    run = read_run(workdir, new, "extended")
    tokens = _read(files, run.answer)
    size, held = run.answer.vocab_size, run.model.vocab_size
    rows = max(held, size + len(tokens))  # published tables may have spare rows
    cuts = zip(run.source.cut(tokens), run.answer.cut(tokens), strict=True)
    known = [[i for i in (*read, *written) if i != run.answer.symbols.unk] for read, written in cuts]

    def extended(table: np.ndarray, axis: int) -> np.ndarray:
        old = np.moveaxis(table, axis, 0)
        # Text of unknown tokens alone starts as the mean of all rows (Hewitt 2021).
        means = [old[ids or slice(size)].mean(axis=0, dtype=np.float32).astype(old.dtype) for ids in known]
        return np.moveaxis(np.concatenate([old[:size], np.stack(means), old[size + len(tokens) :]]), 0, axis)

    before = run.read_params()
    params = with_rows(before, extended)
    sides = (run.source.extended(tokens, held, rows), run.answer.extended(tokens, held, rows))
    write_changed(run, new, sides, rows, params, {})
    grown = count_params(params) - count_params(before)
    return f"{new}: {len(tokens):,} tokens more than {size:,}, {grown:,} parameters more; train it before it knows them"


def _read(files: Sequence[Path], tokenizer: Changeable) -> list[str]:
    """Return the tokens listed in files; raise UserError for one that is not new."""
    found: dict[str, None] = {}
    old = {*tokenizer.tokens}
    for file in files:
        for number, token in enumerate(read_lines(file, Counter()), start=1):
            if not token or token != token.strip():
                raise UserError(
                    f"{file}:{number}: {token!r} is not a token: write one a line, without spaces around it"
                )
            (ids,) = tokenizer.cut([token])
            if token in old or token in found or (len(ids) == 1 and ids[0] != tokenizer.symbols.unk):
                raise UserError(f"{file}:{number}: {token!r} is a token already: leave it out")
            found[token] = None
    if not found:
        raise UserError(f"--tokens={' '.join(map(str, files))}: has no tokens; write one a line")
    return list(found)
