"""Prune the vocabulary of a run to the tokens of some texts: fewer rows in every table of tokens.

The tokenizer cuts texts as before; tokens that were dropped become the unknown token, and are counted as such.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jformer.data.aligned import encode_words
from jformer.data.spans import words_of
from jformer.data.text import read_lines
from jformer.data.tokenizers import PiecesTokenizer, Tokenizer
from jformer.errors import UserError
from jformer.models.parts import count_params
from jformer.tools.hf.embedding_rows import Changeable, read_run, with_rows, write_changed

WORDS: dict[str, Callable[[str], list[str]]] = {
    "tag": str.split,
    "qa": words_of,
}  # tasks whose texts are cut into words before they are cut into tokens


def prune(workdir: str, new: str, texts: Sequence[Path], targets: Sequence[Path] = ()) -> str:
    """Write a run with only the special tokens and those of some texts, and return a summary.

    `texts` are files of what the run reads, `targets` of what it writes, one text a line. Raises UserError for a
    vocabulary that cannot be pruned, files that cannot be read, and a directory that is not empty.
    """
    run = read_run(workdir, new, "pruned")
    task, source, answer = run.config.task, run.source, run.answer
    if min(source.symbols.unk, answer.symbols.unk) < 0:
        raise UserError(f"{workdir}: has no unknown token to replace dropped tokens; it cannot be pruned")
    if task == "translate" and not targets:
        raise UserError("--target is missing: name files of texts like those that the run should still write")
    if task != "translate" and targets:
        raise UserError(f"--target is for task='translate', and {workdir} has task={task!r}: leave it out")
    used = {*_used(task, source, texts), *_used(task, answer, targets or texts)}
    kept = sorted({i for i in (*used, *_special(source), *_special(answer)) if 0 <= i < source.vocab_size})
    before = run.read_params()
    params = with_rows(before, lambda table, axis: np.take(table, kept, axis))
    written = {answer.tokens[i] for i in kept}
    decode = {key: [word for word in getattr(run.config.decode, key) if word in written] for key in ("forbid", "only")}
    write_changed(run, new, (source.pruned(kept), answer.pruned(kept)), len(kept), params, decode)
    return (
        f"{new}: keeps {len(kept):,} of {run.model.vocab_size:,} tokens, "
        f"{count_params(params):,} of {count_params(before):,} parameters"
    )


def _used(task: str, tokenizer: Tokenizer, paths: Sequence[Path]) -> Iterator[int]:
    """Yield the tokens of files of texts, whose parts are separated by TABs."""
    for path in paths:
        for line in read_lines(path, Counter()):
            parts = line.split("\t")
            if task in WORDS:
                for ids, _ in encode_words(tokenizer, [WORDS[task](part) for part in parts]):
                    yield from ids
            else:
                for ids in tokenizer.encode(parts):
                    yield from ids


def _special(tokenizer: Changeable) -> set[int]:
    """Return the ids of tokens that are not text."""
    listed = [tokenizer.ids[token] for token in tokenizer.specials] if isinstance(tokenizer, PiecesTokenizer) else (
        tokenizer.specials
    )  # fmt: skip
    symbols = [i for each in tokenizer.symbols for i in (each if isinstance(each, tuple) else (each,))]
    return {*listed, *symbols}
